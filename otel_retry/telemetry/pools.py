"""Connection pools as PyMongo's events describe them: plain numbers, changed by events, read at collection."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from pymongo.monitoring import ConnectionCheckOutFailedReason, ConnectionPoolListener

from otel_retry import semconv
from otel_retry.logs import warn_once
from otel_retry.telemetry.spans import current_trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_retry.telemetry.metrics import Instruments

_MOST_POOLS = 1000


class Pool:
    """One client's pool for one server. Numbers are kept under a lock: events come from many threads."""

    __slots__ = ("attributes", "lock", "maximum", "minimum", "name", "open", "pending", "timeouts", "used")

    def __init__(self, name: str, *, minimum: int, maximum: int | None) -> None:
        self.name = name
        self.minimum = minimum
        self.maximum = maximum
        self.open = self.used = self.pending = self.timeouts = 0
        self.attributes = {semconv.POOL_NAME: name}
        self.lock = threading.Lock()

    @property
    def idle(self) -> int:
        return max(0, self.open - self.used)


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
        self._seen: dict[tuple[Any, int], float] = {}
        """Connections that are open, by address and number; the value is when it was borrowed or made."""
        self._lock = threading.Lock()

    def pools(self) -> Iterable[Pool]:
        return list(self._pools.values())

    def renew_lock(self) -> None:
        self._lock = threading.Lock()
        for pool in self._pools.values():
            pool.lock = threading.Lock()

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
        for key in [key for key in list(self._seen) if key[0] == event.address]:
            self._seen.pop(key, None)

    def connection_created(self, event: Any) -> None:
        pool = self._pool(event.address)
        with pool.lock:
            pool.open += 1
            self._seen[event.address, event.connection_id] = time.monotonic()

    def connection_ready(self, event: Any) -> None:
        made = self._seen.get((event.address, event.connection_id))
        if made is not None and self._instruments is not None:
            _record(
                self._instruments.create_time,
                max(0.0, time.monotonic() - made),
                self._pool(event.address).attributes,
            )

    def connection_closed(self, event: Any) -> None:
        pool = self._pool(event.address)
        with pool.lock:
            if self._seen.pop((event.address, event.connection_id), None) is not None:
                pool.open -= 1

    def connection_check_out_started(self, event: Any) -> None:
        pool = self._pool(event.address)
        with pool.lock:
            pool.pending += 1

    def connection_check_out_failed(self, event: Any) -> None:
        pool = self._pool(event.address)
        with pool.lock:
            pool.pending = max(0, pool.pending - 1)
            if event.reason == ConnectionCheckOutFailedReason.TIMEOUT:
                pool.timeouts += 1

    def connection_checked_out(self, event: Any) -> None:
        pool = self._pool(event.address)
        now = time.monotonic()
        with pool.lock:
            pool.pending = max(0, pool.pending - 1)
            pool.used += 1
            if (event.address, event.connection_id) not in self._seen:
                pool.open += 1
            self._seen[event.address, event.connection_id] = now
        trace = current_trace()
        if trace is not None:
            trace.connection_id = event.connection_id
        waited = getattr(event, "duration", None)
        if waited is not None and self._instruments is not None:
            _record(self._instruments.wait_time, waited, pool.attributes)

    def connection_checked_in(self, event: Any) -> None:
        pool = self._pool(event.address)
        now = time.monotonic()
        with pool.lock:
            pool.used = max(0, pool.used - 1)
            borrowed = self._seen.get((event.address, event.connection_id))
        if borrowed is not None and self._instruments is not None:
            _record(self._instruments.use_time, max(0.0, now - borrowed), pool.attributes)


def _record(histogram: Any, seconds: float, attributes: dict[str, Any]) -> None:
    """PyMongo prints what a listener raises."""
    try:
        histogram.record(seconds, attributes)
    except Exception:
        warn_once("pools", "otel_retry failed to measure a connection pool", exc_info=True)
