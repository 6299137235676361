"""Which settings hold for which client, and each client's budget.

Keyed by identity: a MongoClient compares equal to another one with the same seeds, and two clients must not share
a bucket by accident. Nothing here keeps a client alive.
"""

from __future__ import annotations

import os
import random
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from otel_retry.pacing import TokenBucket
from otel_retry.policies import DriverPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.config import Settings
    from otel_retry.policy import RetryPolicy, Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The client's own options that rules look at."""

    retry_reads: bool
    retry_writes: bool
    retry_writes_explicit: bool
    max_adaptive_retries: int
    overload_retargeting: bool


class ClientState:
    """What one client's operations need, resolved once."""

    __slots__ = ("budget", "decides", "jitter", "policy", "retry_reads", "retry_writes", "rules", "settings")

    def __init__(self, *, settings: Settings, options: ClientOptions) -> None:
        self.settings = settings
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

    def __init__(self, options_of: Callable[[Any], ClientOptions]) -> None:
        self._options_of = options_of
        self._states: dict[int, ClientState] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._default: Settings | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    @property
    def empty(self) -> bool:
        return self._default is None and not self._states

    def __len__(self) -> int:
        return len(self._states)

    def use(self, settings: Settings | None) -> None:
        """For clients that have no settings of their own, those that exist already included."""
        self._default = settings

    def of(self, client: Any) -> ClientState | None:
        state = self._states.get(id(client))
        if state is None and self._default is not None:
            state = self.adopt(client, self._default)
        return state

    def adopt(self, client: Any, settings: Settings) -> ClientState:
        key = id(client)
        state = ClientState(settings=settings, options=self._options_of(client))
        self._references[key] = weakref.ref(client, lambda _: self._forget(key))
        # Two threads may adopt one client at once: the first one's bucket is everybody's.
        return self._states.setdefault(key, state)

    def replace(self, client: Any, settings: Settings) -> ClientState:
        self._forget(id(client))
        return self.adopt(client, settings)

    def clear(self) -> None:
        self._default = None
        self._states.clear()
        self._references.clear()

    def _forget(self, key: int) -> None:
        self._states.pop(key, None)
        self._references.pop(key, None)

    def _after_fork(self) -> None:
        for state in list(self._states.values()):
            if state.budget is not None:
                state.budget.renew_lock()
