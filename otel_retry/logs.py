"""The package's one logger, and warnings that are given once: a fault that repeats must not flood anybody's log."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("otel_retry")

_said: dict[str, object] = {}


def warn_once(key: str, message: str, *args: object, exc_info: bool = False) -> None:
    """`key` names the fault, not the occasion, so the set of keys stays small.

    With `exc_info` the fault at hand is shown, and nothing of what it happened upon: most faults happen while an error
    of the application is handled, and the words of a server quote documents.
    """
    mine = object()
    if _said.setdefault(key, mine) is not mine:  # one step: of many threads at once, one speaks
        return
    fault = sys.exception() if exc_info else None
    if fault is None:
        logger.warning(message, *args)
    elif _speaks_for_a_server(fault):
        named = f"{message} (%s)"
        logger.warning(named, *args, type(fault).__name__)
    else:
        fault.__context__ = fault.__cause__ = None  # it ends here: nobody else will look at it
        logger.warning(message, *args, exc_info=fault)


def _speaks_for_a_server(fault: BaseException) -> bool:
    """A policy or a hook may raise the very error that it was told of."""
    return any(cls.__module__.partition(".")[0] in {"pymongo", "bson"} for cls in type(fault).__mro__)


def forget_warnings() -> None:
    """A new `instrument()` may say again what an earlier one said."""
    _said.clear()
