"""PyMongo's private functions and constants. One that is missing is None here, so that importing otel_retry never
fails; `shape.check()` then names it, and nothing is patched.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = {
    "pymongo._csot": ("remaining", "apply", "get_timeout"),
    "pymongo.message": ("_INSERT", "_UPDATE", "_DELETE", "_randint"),
}


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


_remaining: Callable[[], float | None] = _find("pymongo._csot", "remaining")
_get_timeout: Callable[[], float | None] = _find("pymongo._csot", "get_timeout")
apply_timeout: Callable[[Any], Any] = _find("pymongo._csot", "apply")
INSERT, UPDATE, DELETE, randint = (_find("pymongo.message", name) for name in NAMES["pymongo.message"])


def remaining() -> float | None:
    """Seconds to the deadline of timeoutMS; None: there is none. timeoutMS=0 is a deadline that never comes: retries
    are as free as under any other.
    """
    timeout = _get_timeout()
    if timeout is None:
        return None
    found = _remaining() if timeout else None
    return math.inf if found is None else found
