"""The only user of PyMongo's private names: puts our operation in the place of PyMongo's, and takes it out again.

It is checked at install (`shape.py`). Where the driver's shape is unknown nothing is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_retry.clients import ClientOptions
from otel_retry.pymongo.seam import older, transactions
from otel_retry.pymongo.seam.listening import listen_before_unacknowledged, stop_listening
from otel_retry.pymongo.seam.operation import operation_class
from otel_retry.pymongo.seam.shape import Shape, UnknownShape, check
from otel_retry.pymongo.seam.transactions import end_open_transactions

if TYPE_CHECKING:
    from otel_retry.clients import ClientRegistry

__all__ = [
    "Seam",
    "Shape",
    "UnknownShape",
    "check",
    "end_open_transactions",
    "options_of",
    "stop_listening",
]

_DEFAULT_ADAPTIVE_RETRIES = 2


class Seam:
    """Invariant: what `remove` puts back are the very objects that `install` found."""

    def __init__(self, registry: ClientRegistry) -> None:
        self._registry = registry
        self._found: list[tuple[Any, str, Any]] = []

    @property
    def installed(self) -> bool:
        return bool(self._found)

    def install(self) -> None:
        """Raises `UnknownShape`, and then nothing was changed."""
        if self._found:
            return
        shape = check()
        replacements: list[tuple[Any, str, Any]] = list(older.patches(shape, self._registry))
        for half in shape.halves:
            replacements.extend(transactions.patches(half, self._registry))
            replacements.append(
                (half.client, "_conn_for_writes", listen_before_unacknowledged(half, self._registry))
            )
            cls = operation_class(half, self._registry)
            if not shape.shared_operation_id:
                cls = older.identified(cls, is_async=half.is_async)
            replacements.append((half.mongo_client, half.operation.__name__, cls))
        for owner, name, replacement in replacements:
            self._found.append((owner, name, vars(owner)[name]))
            setattr(owner, name, replacement)

    def remove(self) -> None:
        while self._found:
            owner, name, original = self._found.pop()
            setattr(owner, name, original)


def options_of(client: Any) -> ClientOptions:
    options = client.options
    given = options._options
    return ClientOptions(
        retry_reads=options.retry_reads,
        retry_writes=options.retry_writes,
        retry_writes_explicit=bool(given.get("retrywrites", given.get("retryWrites", False))),
        max_adaptive_retries=getattr(options, "max_adaptive_retries", _DEFAULT_ADAPTIVE_RETRIES),
        overload_retargeting=bool(getattr(options, "enable_overload_retargeting", False)),
        name=options.pool_options.appname or "client",
        traces_itself=_traces_itself(options),
    )


def _traces_itself(options: Any) -> bool:
    """No released PyMongo has tracing of its own yet; the one that comes has a client option of this name."""
    tracing = getattr(options, "tracing", None)
    if isinstance(tracing, dict):
        return bool(tracing.get("enabled"))
    return bool(getattr(tracing, "enabled", tracing))
