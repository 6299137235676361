"""Connection pools as PyMongo's events describe them: plain collections, changed by events, counted at collection."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from pymongo.monitoring import ConnectionCheckOutFailedReason, ConnectionPoolListener

from otel_retry import semconv
from otel_retry.logs import warn_once
from otel_retry.telemetry.spans import inherited_trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_retry.telemetry.metrics import Instruments

_MOST_POOLS = 1000


class Pool:
    """One client's pool for one server. Events come from many threads: what they change on the way of every operation
    are collections, which need no lock for adding and removing one thing, where a number would.
    """

    __slots__ = (
        "attributes",
        "borrowed",
        "connections",
        "created",
        "maximum",
        "minimum",
        "name",
        "timeouts",
        "waiting",
    )

    def __init__(self, name: str, *, minimum: int, maximum: int | None) -> None:
        self.name = name
        self.minimum = minimum
        self.maximum = maximum
        self.connections: set[int] = set()
        """The numbers of those that are open."""
        self.created: dict[int, float] = {}
        """When those were created that are not ready yet."""
        self.borrowed: dict[int, float] = {}
        """Since when those are borrowed that are."""
        self.waiting: list[None] = []
        """As long as there are requests for a connection under way."""
        self.timeouts = 0
        self.attributes = {semconv.POOL_NAME: name}

    @property
    def used(self) -> int:
        return len(self.borrowed)

    @property
    def idle(self) -> int:
        return max(0, len(self.connections) - len(self.borrowed))

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def waits_no_more(self) -> None:
        try:
            self.waiting.pop()
        except IndexError:
            return  # it began to wait before anybody listened


class PoolListener(ConnectionPoolListener):
    """Hears one client's pool events. It may be attached late: what it did not see being opened, it learns of when
    it is used.
    """

    def __init__(
        self, *, client: str, instruments: Instruments | None, minimum: int, maximum: int | None
    ) -> None:
        self._client = client
        self._instruments = instruments
        self._minimum = minimum
        self._maximum = maximum
        self._pools: dict[Any, Pool] = {}
        self._lock = threading.Lock()

    def pools(self) -> Iterable[Pool]:
        return list(self._pools.values())

    def renew_lock(self) -> None:
        self._lock = threading.Lock()

    def _pool(self, address: Any) -> Pool:
        pool = self._pools.get(address)
        if pool is None:
            host, port = address
            server = host if port is None else f"{host}:{port}"
            with self._lock:
                if len(self._pools) >= _MOST_POOLS:
                    self._pools.clear()
                pool = self._pools.setdefault(
                    address, Pool(f"{self._client}@{server}", minimum=self._minimum, maximum=self._maximum)
                )
        return pool

    def pool_created(self, event: Any) -> None:
        self._pool(event.address)

    def pool_ready(self, event: Any) -> None:
        pass

    def pool_cleared(self, event: Any) -> None:
        pass

    def pool_closed(self, event: Any) -> None:
        self._pools.pop(event.address, None)

    def connection_created(self, event: Any) -> None:
        pool = self._pool(event.address)
        pool.connections.add(event.connection_id)
        pool.created[event.connection_id] = monotonic()

    def connection_ready(self, event: Any) -> None:
        pool = self._pool(event.address)
        created = pool.created.pop(event.connection_id, None)
        if created is not None and self._instruments is not None:
            try:
                self._instruments.create_time.record(monotonic() - created, pool.attributes)
            except Exception:
                _complain()

    def connection_closed(self, event: Any) -> None:
        pool, number = self._pool(event.address), event.connection_id
        pool.connections.discard(number)
        pool.created.pop(number, None)
        pool.borrowed.pop(number, None)

    # From here on each operation passes by.

    def connection_check_out_started(self, event: Any) -> None:
        address = event.address
        (self._pools.get(address) or self._pool(address)).waiting.append(None)

    def connection_check_out_failed(self, event: Any) -> None:
        pool = self._pool(event.address)
        pool.waits_no_more()
        if event.reason == ConnectionCheckOutFailedReason.TIMEOUT:
            with self._lock:
                pool.timeouts += 1

    def connection_checked_out(self, event: Any) -> None:
        address, number = event.address, event.connection_id
        pool = self._pools.get(address) or self._pool(address)
        pool.waits_no_more()
        pool.connections.add(number)
        pool.borrowed[number] = monotonic()
        trace, context = inherited_trace.get(), None
        if trace is not None and trace.open:
            trace.connection_id = number
            context = trace.context
        if self._instruments is not None:
            try:
                waited = event.duration
                if waited is not None:
                    self._instruments.wait_time.record(waited, pool.attributes, context)
            except Exception:
                _complain()

    def connection_checked_in(self, event: Any) -> None:
        address = event.address
        pool = self._pools.get(address) or self._pool(address)
        borrowed = pool.borrowed.pop(event.connection_id, None)
        if borrowed is not None and self._instruments is not None:
            used = monotonic() - borrowed
            trace = inherited_trace.get()
            context = trace.context if trace is not None and trace.open else None
            try:
                self._instruments.use_time.record(used, pool.attributes, context)
            except Exception:
                _complain()


def _complain() -> None:
    """Called where something was raised; PyMongo would print what a listener raises."""
    warn_once("pools", "otel_retry failed to measure a connection pool", exc_info=True)
