"""Bulk writes: one operation, several commands. Each command has its own attempts, limit and right to a retry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_retry.pymongo.seam.private import INSERT

if TYPE_CHECKING:
    from collections.abc import Callable

_DONE = "_otel_retry_command_done"


class ObservedBulks:
    """Lets a bulk write tell when one of its commands is done.

    PyMongo's bulk sets `retrying = False` after each command that succeeded, and nowhere else while it runs; a
    subclass with a property of that name hears it. The object changes its class only for the run of the operation.
    """

    def __init__(self) -> None:
        self._classes: dict[type[Any], type[Any]] = {}

    def observe(self, bulk: Any, done: Callable[[], None]) -> None:
        cls = type(bulk)
        observed = self._classes.get(cls)
        if observed is None:
            observed = self._classes[cls] = _observed(cls)
        bulk.__dict__[_DONE] = done
        bulk.__class__ = observed

    def release(self, bulk: Any) -> None:
        if bulk.__dict__.pop(_DONE, None) is not None:
            bulk.__class__ = type(bulk).__bases__[0]


def _observed(cls: type[Any]) -> type[Any]:
    def get(bulk: Any) -> bool:
        return bulk.__dict__["retrying"]  # type: ignore[no-any-return]

    def set_(bulk: Any, value: bool) -> None:
        bulk.__dict__["retrying"] = value
        if not value:
            bulk.__dict__[_DONE]()

    return type(cls.__name__, (cls,), {"retrying": property(get, set_), "__module__": cls.__module__})


class PerCommand:
    """Stands in for PyMongo's one `retryable` flag of a bulk write that has multi-document operations in it.

    True while the command at hand has none of them left before it (seed 003, "Supported Write Operations": each
    command by itself, after order and batch splitting). A run that is split for its size counts as a whole, which
    errs on the side of not repeating.
    """

    __slots__ = ("_bulk",)

    def __init__(self, bulk: Any) -> None:
        self._bulk = bulk

    def __bool__(self) -> bool:
        bulk = self._bulk
        if not hasattr(bulk, "current_run"):  # a client's bulk write: (name, command) pairs
            return not any(command.get("multi") for _, command in bulk.ops[bulk.idx_offset :])
        run = bulk.current_run
        if run is None:
            return False
        if run.op_type == INSERT:
            return True  # and its operations are the user's own documents: not to be asked for options
        return not any(_is_multi(operation) for operation in run.ops[run.idx_offset :])


def _is_multi(operation: Any) -> bool:
    """An update of many says `multi: True`, a delete of many `limit: 0`."""
    return bool(operation.get("multi")) or operation.get("limit") == 0
