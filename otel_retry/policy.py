"""The interface that every retry policy is written on, built-in or not: what it is told, what it may answer.

A policy advises. What it cannot overrule (deadline, budget, overload limit, at-most-once writes) is in
`machine.py`, outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from otel_retry.events import Attempt, Failure, Kind, OperationKind, Phase, Reason
from otel_retry.pacing import Backoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What holds around a policy, by which specification. A policy names one of `RULES`; it cannot write its own.

    `overload_retries` None means the client's `maxAdaptiveRetries`.
    """

    name: str
    bucket: bool
    overload_retries: int | None
    backoff: Backoff = field(default_factory=Backoff)
    honours_server_backoff: bool = False
    deprioritises_overloaded: bool = True
    """False: only when the client sets `enableOverloadRetargeting`."""
    labels_without_overload: bool = True
    """Whether `RetryableError` alone, without `SystemOverloadedError`, makes a command repeatable."""
    needs_explicit_retry_writes: bool = False


# Seed 001: five retries, a bucket, 100 ms doubled up to 10 s.
BACKPRESSURE = Rules(name="backpressure", bucket=True, overload_retries=5)
# MongoDB's specification as of 2026: the bucket is gone, two retries, the server may name the base.
# PyMongo 4.19 begins to count at 2 ** 1, and this must behave as it does.
CURRENT = Rules(
    name="current",
    bucket=False,
    overload_retries=None,
    backoff=Backoff(first_exponent=1),
    honours_server_backoff=True,
    deprioritises_overloaded=False,
    labels_without_overload=False,
)
# Seed 002: in 2018 retryWrites defaulted to false, so only an explicit true counts.
ONCE = Rules(name="once", bucket=True, overload_retries=5, needs_explicit_retry_writes=True)
PERSISTENT = Rules(name="persistent", bucket=True, overload_retries=5)

RULES = {rules.name: rules for rules in (BACKPRESSURE, CURRENT, ONCE, PERSISTENT)}

LONGEST_DELAY = 3600.0
"""Seconds that a policy may ask for: who wants to wait longer has mistaken the unit, and a sleep cannot be taken back."""

_ACTIONS = frozenset({"retry", "try_next_host", "rethrow", "ignore"})
_READ_PREFERENCES = frozenset({"primary", "primaryPreferred", "secondary", "secondaryPreferred", "nearest"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryContext:
    """Everything a policy may know about the failure at hand. More fields may come; none will go."""

    operation: str
    """PyMongo's name of the operation, such as `find`."""
    kind: OperationKind
    attempt: int
    """The attempt that failed, from 1."""
    failure: Failure
    retryable: bool
    """MongoDB itself supports repeating it: a supported read, or a write that carries a txnNumber."""
    namespace: str | None = None
    in_transaction: bool = False
    idempotent: bool | None = None
    """Whether sending it twice equals sending it once; None: not known."""
    history: tuple[Attempt, ...] = ()
    """The failed attempts before this one, oldest first."""
    elapsed: float = 0.0
    """Seconds since the operation began."""
    remaining: float | None = None
    """Seconds until the client-side deadline (`timeoutMS`); None: there is none."""
    tokens: float | None = None
    """Tokens left in the client's bucket; None: no bucket under these rules."""

    @property
    def is_read(self) -> bool:
        return self.kind is OperationKind.READ

    @property
    def server(self) -> str | None:
        """The server that raised the failure, as host:port."""
        return self.failure.server

    @property
    def retries(self) -> int:
        """Retries made so far."""
        return self.attempt - 1

    @property
    def overload_seen(self) -> bool:
        """Whether this failure or an earlier one of the same operation was an overload."""
        return self.failure.overloaded or any(attempt.failure.overloaded for attempt in self.history)

    @property
    def network_timeouts(self) -> int:
        """How many attempts, this one included, ended in a socket timeout after the command was sent."""
        failures = [self.failure, *(attempt.failure for attempt in self.history)]
        return sum(is_socket_timeout(failure) for failure in failures)


def is_socket_timeout(failure: Failure) -> bool:
    return failure.kind is Kind.NETWORK_TIMEOUT and failure.phase is Phase.SENT


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """A policy's answer. Made by the class methods below."""

    action: str
    delay: float = 0.0
    read_preference: Any = None
    reason: Reason = Reason.POLICY
    because: str = ""
    """A sentence for `otel-retry explain`: which rule of which text, or what the policy has in mind."""

    @classmethod
    def retry(cls, *, delay: float = 0.0, read_preference: Any = None, because: str = "") -> RetryDecision:
        """Try again on the same host. `delay` in seconds; overload backoff may make it longer, never shorter."""
        return cls("retry", delay, read_preference, because=because)

    @classmethod
    def try_next_host(
        cls, *, delay: float = 0.0, read_preference: Any = None, because: str = ""
    ) -> RetryDecision:
        """Try again on whatever host the driver now selects."""
        return cls("try_next_host", delay, read_preference, because=because)

    @classmethod
    def rethrow(cls, reason: Reason = Reason.POLICY, *, because: str = "") -> RetryDecision:
        """Raise. `reason` is what spans and metrics will say."""
        return cls("rethrow", reason=reason, because=because)

    @classmethod
    def ignore(cls) -> RetryDecision:
        """Report success with an empty result."""
        return cls("ignore")


def nonsense_in(decision: object) -> str:
    """What is wrong with a policy's answer, as a sentence without its values; empty: nothing."""
    if not isinstance(decision, RetryDecision):
        return f"a {type(decision).__name__}, not a RetryDecision"
    action: object = decision.action
    if not isinstance(action, str) or action not in _ACTIONS:
        return "an action that does not exist"
    reason: object = decision.reason
    if not isinstance(reason, Reason):
        return "a reason that is none of otel_retry.Reason"
    delay: object = decision.delay
    if isinstance(delay, bool) or not isinstance(delay, (int, float)):
        return "a delay that is no number"
    if not 0 <= delay <= LONGEST_DELAY:  # a NaN is neither
        return f"a delay that is not between 0 and {LONGEST_DELAY:g} seconds"
    preference = decision.read_preference
    named = isinstance(preference, str) and preference in _READ_PREFERENCES
    if not (preference is None or named or (callable(preference) and hasattr(preference, "mode"))):
        return "a read preference that is neither one of PyMongo's nor the name of one"
    return ""


class RetryPolicy:
    """One method per kind of failure, after the DataStax drivers. As it stands it raises everything."""

    name: str = ""
    """What spans and metrics call it; the class's name if left empty."""
    rules: Rules = BACKPRESSURE
    """Which specification's limits hold around this policy: one of `RULES`."""

    def on_unavailable(self, context: RetryContext) -> RetryDecision:  # noqa: ARG002
        """No suitable server, no connection, or the server says that it cannot serve: nothing was executed.

        Trying again can help because the topology changes: an election ends, a pool opens.
        """
        return RetryDecision.rethrow()

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:  # noqa: ARG002
        """A read was sent and no answer came in time. Another host may be faster; the data is untouched."""
        return RetryDecision.rethrow()

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:  # noqa: ARG002
        """A write was sent and no answer came in time. It may have been applied."""
        return RetryDecision.rethrow()

    def on_request_error(self, context: RetryContext) -> RetryDecision:  # noqa: ARG002
        """Anything else after the request was sent: network, overload, an error of the server."""
        return RetryDecision.rethrow()

    def __str__(self) -> str:
        return self.name or type(self).__name__
