"""PyMongo's private functions and constants. One that is missing is None here, so that importing otel_retry never
fails; `shape.check()` then names it, and nothing is patched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = {
    "pymongo._csot": ("remaining", "apply"),
    "pymongo.message": ("_INSERT", "_UPDATE", "_DELETE", "_randint"),
}


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


remaining: Callable[[], float | None] = _find("pymongo._csot", "remaining")
apply_timeout: Callable[[Any], Any] = _find("pymongo._csot", "apply")
INSERT, UPDATE, DELETE, randint = (_find("pymongo.message", name) for name in NAMES["pymongo.message"])
