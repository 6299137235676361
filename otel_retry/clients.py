"""Which settings hold for which client, and each client's budget.

Keyed by identity: a MongoClient compares equal to another one with the same seeds, and two clients must not share
a bucket by accident. Nothing here keeps a client alive.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from otel_retry.logs import warn_once
from otel_retry.pacing import TokenBucket
from otel_retry.policies import DriverPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.config import Settings
    from otel_retry.policy import RetryPolicy, Rules
    from otel_retry.pymongo.listener import CommandEvents
    from otel_retry.telemetry import Telemetry
    from otel_retry.telemetry.pools import PoolListener
    from otel_retry.testing import Faults

_REPORTED_AFTER_DEATH = 120.0
"""Seconds: twice the usual interval between two collections."""

_MOST_DEPARTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The client's own options that rules look at."""

    retry_reads: bool
    retry_writes: bool
    retry_writes_explicit: bool
    max_adaptive_retries: int
    overload_retargeting: bool
    name: str
    traces_itself: bool
    """PyMongo's own tracing is on for this client: ours steps back."""


class ClientState:
    """What one client's operations need, resolved once."""

    __slots__ = (
        "budget",
        "commands",
        "decides",
        "faults",
        "jitter",
        "name",
        "number",
        "own",
        "policy",
        "pools",
        "retired",
        "retried_under_way",
        "retry_reads",
        "retry_writes",
        "rules",
        "settings",
        "telemetry",
    )

    def __init__(self, *, settings: Settings, options: ClientOptions, number: int, own: bool = False) -> None:
        self.settings = settings
        self.own = own
        """The settings were given for this client, and outlive a new `instrument()`."""
        self.number = number
        self.name = f"{options.name}-{number}"
        """Tells clients apart in metrics; numbers are used again, so there are never more names than clients."""
        self.policy: RetryPolicy = settings.policy
        self.decides = not isinstance(self.policy, DriverPolicy)
        """False: PyMongo's own loop decides and otel_retry only watches."""
        self.rules = _resolve(self.policy.rules, options)
        self.budget = TokenBucket() if self.rules.bucket and self.decides else None
        self.retry_reads = options.retry_reads
        self.retry_writes = options.retry_writes and (
            options.retry_writes_explicit or not self.rules.needs_explicit_retry_writes
        )
        self.jitter: Callable[[], float] = _jitter
        self.retired = False
        self.telemetry: Telemetry | None = None
        self.commands: CommandEvents | None = None
        """The listener, once there was something to listen for."""
        self.pools: PoolListener | None = None
        self.retried_under_way = 0
        """Operations for whose sake the listener is attached, where it is not all the time; guarded by `lock`."""
        self.faults: Faults | None = None
        """Errors to raise in the place of attempts: `otel_retry.testing` puts them here."""

    def retire(self) -> None:
        """Switched off, or replaced: operations that still hold it go on with it, but listen for nothing new."""
        self.retired = True
        if self.telemetry is not None:
            self.telemetry.retired = True


def _jitter() -> float:
    return random.random()  # noqa: S311 - spreads clients out, guards no secret


def _resolve(rules: Rules, options: ClientOptions) -> Rules:
    if rules.overload_retries is not None:
        return rules
    return replace(
        rules,
        overload_retries=options.max_adaptive_retries,
        deprioritises_overloaded=options.overload_retargeting,
    )


class ClientRegistry:
    """All instrumented clients. Invariant: an entry lives exactly as long as its client."""

    def __init__(
        self,
        options_of: Callable[[Any], ClientOptions],
        equip: Callable[[Any, ClientState, ClientOptions], None],
    ) -> None:
        self._options_of = options_of
        self._equip = equip
        self._states: dict[int, ClientState] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._default: Settings | None = None
        self._departed: deque[tuple[float, ClientState]] = deque()
        self._numbers = 0
        """How many were ever needed at once."""
        self._free: list[int] = []
        """A heap of those among them that nobody has. The garbage collector may return one at any moment: a push or
        a pop of whole numbers cannot be interrupted.
        """
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    @property
    def empty(self) -> bool:
        return self._default is None and not self._states

    @property
    def decides(self) -> bool:
        """Whether any client's retries are ours; False: all are PyMongo's own, or nothing is instrumented."""
        if self._default is not None and not isinstance(self._default.policy, DriverPolicy):
            return True
        return any(state.decides for state in list(self._states.values()))

    def __len__(self) -> int:
        return len(self._states)

    def use(self, settings: Settings) -> list[tuple[Any, ClientState]]:
        """For all clients that have no settings of their own; those that exist already will be seen anew. Answers
        with these and the states that they had.
        """
        with self._lock:  # or an operation in between would adopt its client with the old settings
            self._default = settings
            left = [(client, state) for client, state in self.clients() if not state.own]
            for client, _ in left:
                self._forget(id(client))
            return left

    def of(self, client: Any) -> ClientState | None:
        state = self._states.get(id(client))
        if state is None and self._default is not None:
            try:
                with self._lock:
                    settings = self._default  # it may be gone by now: `clear` has the lock too
                    return None if settings is None else self.adopt(client, settings)
            except Exception:
                warn_once("adopt", "otel_retry cannot instrument a client; it goes without", exc_info=True)
        return state

    def states(self) -> list[ClientState]:
        return list(self._states.values())

    def adopt(self, client: Any, settings: Settings, *, own: bool = False) -> ClientState:
        key = id(client)
        with self._lock:
            # Two threads may come with one client at once: the first one's bucket is everybody's.
            state = self._states.get(key)
            if state is None:
                options = self._options_of(client)
                state = ClientState(settings=settings, options=options, number=self._free_number(), own=own)
                self._equip(client, state, options)
                self._references[key] = weakref.ref(client, lambda _: self._died(key))
                self._states[key] = state
            return state

    def _free_number(self) -> int:
        """The lowest; called with the lock."""
        self._retire()
        if self._free:
            return heapq.heappop(self._free)
        self._numbers += 1
        return self._numbers

    def replace(self, client: Any, settings: Settings) -> ClientState | None:
        """Settings of its own for one client. Answers with the state that it had."""
        with self._lock:  # or an operation in between would adopt it with the default
            before = self._states.get(id(client))
            self._forget(id(client))
            self.adopt(client, settings, own=True)
            return before

    def clients(self) -> list[tuple[Any, ClientState]]:
        """Those that are still there."""
        found = [(reference(), self._states.get(key)) for key, reference in list(self._references.items())]
        return [(client, state) for client, state in found if client is not None and state is not None]

    def clear(self) -> list[tuple[Any, ClientState]]:
        """Nothing is instrumented any more. Answers with the clients that were, and their states."""
        with self._lock:
            left = self.clients()
            self._default = None
            for _, state in left:
                state.retire()
            self._states.clear()
            self._references.clear()
            self._departed.clear()
            self._free.clear()
            self._numbers = 0
            return left

    def _died(self, key: int) -> None:
        self._references.pop(key, None)
        state = self._states.pop(key, None)
        if state is not None:
            self._departed.append((time.monotonic(), state))
            self._retire()

    def reporting(self) -> list[ClientState]:
        """The clients that metrics speak of: those that are there, and for a while those that are gone, or what a
        short-lived client did since the last collection would never be seen.
        """
        since = time.monotonic() - _REPORTED_AFTER_DEATH
        return [*self.states(), *(state for died, state in list(self._departed) if died >= since)]

    def _retire(self) -> None:
        """The departed that nobody speaks of any more give their numbers back."""
        since = time.monotonic() - _REPORTED_AFTER_DEATH
        with contextlib.suppress(IndexError):  # another thread, or the garbage collector, may be at it too
            while self._departed[0][0] < since or len(self._departed) > _MOST_DEPARTED:
                _, state = self._departed.popleft()
                heapq.heappush(self._free, state.number)

    def _forget(self, key: int) -> None:
        self._references.pop(key, None)
        state = self._states.pop(key, None)
        if state is not None:
            state.retire()
            heapq.heappush(self._free, state.number)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        for state in list(self._states.values()):
            state.retried_under_way = 0  # those were other threads' operations
            if state.budget is not None:
                state.budget.renew_lock()
            if state.commands is not None:
                state.commands.renew_lock()
            if state.pools is not None:
                state.pools.renew_lock()
