"""The package's one logger, and warnings that are given once: a fault that repeats must not flood anybody's log."""

from __future__ import annotations

import logging

logger = logging.getLogger("otel_retry")

_said: dict[str, object] = {}


def warn_once(key: str, message: str, *args: object, exc_info: bool = False) -> None:
    """`key` names the fault, not the occasion, so the set of keys stays small."""
    mine = object()
    if _said.setdefault(key, mine) is not mine:  # one step: of many threads at once, one speaks
        return
    logger.warning(message, *args, exc_info=exc_info)


def forget_warnings() -> None:
    """A new `instrument()` may say again what an earlier one said."""
    _said.clear()
