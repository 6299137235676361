"""The retry state machine: told what happened, it answers with the next step.

The protocol between it and whoever drives it:

- it is made when the first attempt of an operation has failed (an operation that succeeds at once needs none);
- `attempt_failed(failure, situation)` answers `Retry` (wait `delay`, then make the next attempt), `Raise` (this
  error, chained to that cause), or `Ignore` (report success with an empty result);
- `attempt_succeeded()` ends the operation; `command_succeeded()` ends one command of several, as in a bulk write,
  and the next command begins with a clean slate.

It never sleeps, reads a clock, draws a random number, or imports PyMongo or OpenTelemetry: time, jitter and the
facts are handed in. The order of the questions is the design:

    exception -> classify -> hard rules -> policy -> at-most-once -> overload limit -> deadline -> budget

The budget is asked last because asking changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_retry.events import (
    NO_WRITES_PERFORMED,
    RETRYABLE_ERROR,
    Attempt,
    Failure,
    Kind,
    OperationKind,
    Phase,
    Reason,
)
from otel_retry.logs import warn_once
from otel_retry.policy import RetryContext, RetryDecision, RetryPolicy, Rules, nonsense_in
from otel_retry.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.pacing import TokenBucket

# Kinds that say nothing about an attempt having been made (seeds 000 3c, 002, 003: "an error would not allow the
# caller to infer that an attempt was made"): on a retry the error before them is the one to raise.
_TELLS_OF_NO_ATTEMPT = frozenset({Kind.NO_SERVER, Kind.POOL_EXHAUSTED, Kind.CLIENT_ERROR})

# Errors that no retry can mend are raised whatever the policy says (seed 004, "Hard-coded rules").
_NEVER_RETRIED = frozenset({Kind.REJECTED, Kind.CLIENT_ERROR})

_SERVER_SAYS_UNAVAILABLE = frozenset({10107, 13435, 13436, 10058})


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFacts:
    """What is known of an operation from the start and does not change."""

    name: str
    kind: OperationKind
    started: float
    namespace: str | None = None
    retry_reads: bool = True
    retry_writes: bool = True

    @property
    def enabled(self) -> bool:
        """The gates: reads need retryReads, writes retryWrites, runCommand both; commit and abort need none."""
        if self.kind is OperationKind.READ:
            return self.retry_reads
        if self.kind is OperationKind.WRITE:
            return self.retry_writes
        if self.kind is OperationKind.RUN_COMMAND:
            return self.retry_reads and self.retry_writes
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What held when an attempt failed. `now` is a monotonic instant, `remaining` the seconds to the deadline."""

    now: float
    remaining: float | None = None
    retryable: bool = False
    in_transaction: bool = False
    acknowledged: bool = True
    idempotent: bool | None = None
    sharded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Wait `delay` seconds, then make the next attempt."""

    delay: float
    failure: Failure
    same_host: bool = False
    deprioritise: bool = False
    read_preference: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise:
    """Raise `error`; `cause`, if any, is the later error that it stands for."""

    error: BaseException
    reason: Reason
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignore:
    """Report success with an empty result instead of `failure`.

    `applied`: it is a success indeed, of the attempt before, whose answer was lost.
    """

    failure: Failure
    applied: bool = False


Step = Retry | Raise | Ignore


class RetryMachine:
    """One operation's retries. Invariant: each `Retry` it answers was paid for, if there is a budget."""

    __slots__ = (
        "_budget",
        "_delay",
        "_error",
        "_facts",
        "_history",
        "_jitter",
        "_overloaded",
        "_policy",
        "_rules",
        "_started",
        "_witness",
        "retries",
        "total_retries",
    )

    def __init__(
        self,
        *,
        facts: OperationFacts,
        policy: RetryPolicy,
        rules: Rules,
        budget: TokenBucket | None,
        jitter: Callable[[], float],
        attempt_started: float | None = None,
        witness: Callable[[Rule, bool, str], None] | None = None,
    ) -> None:
        self._facts = facts
        self._policy = policy
        self._rules = rules
        self._budget = budget
        self._jitter = jitter
        self._witness = witness
        self._history: list[Attempt] = []
        self._error: BaseException | None = None
        self._overloaded = False
        self._started = facts.started if attempt_started is None else attempt_started
        self._delay = 0.0
        self.retries = 0
        """Retries of the command at hand."""
        self.total_retries = 0
        """Retries of the whole operation: more than `retries` only in a bulk write of several commands."""

    @property
    def history(self) -> tuple[Attempt, ...]:
        """All failed attempts of the operation, oldest first."""
        return tuple(self._history)

    @property
    def may_have_been_applied(self) -> bool:
        """Whether an attempt before left it open if the server did something."""
        before = self._history[len(self._history) - self.retries :]
        return any(not attempt.failure.nothing_executed for attempt in before)

    def found_applied(self, failure: Failure, now: float) -> Ignore:
        """The retry shows that an attempt before it had been applied: this is the success of it."""
        self.attempt_succeeded()
        verdict = Ignore(failure=failure, applied=True)
        self._record(failure, now, verdict)
        return verdict

    @property
    def error(self) -> BaseException | None:
        """What would be raised if the next attempt could not be made."""
        return self._error

    def attempt_succeeded(self) -> None:
        self._deposit_for_success()

    def command_succeeded(self, now: float) -> None:
        """One command of several is done: the next has its own attempts, its own errors, its own limit."""
        self._deposit_for_success()
        self._started = now
        self._delay = 0.0
        self.retries = 0
        self._error = None
        self._overloaded = False

    def _deposit_for_success(self) -> None:
        if self._budget is None:
            return
        if self.retries:
            self._budget.deposit_retried_success()  # seed 001, rule 2
        else:
            self._budget.deposit_first_success()  # seed 001, rule 1

    def attempt_failed(self, failure: Failure, situation: Situation) -> Step:
        """The one place where it is decided what follows an error."""
        if self._budget is not None and self.retries and not failure.overloaded:
            self._budget.deposit_other_failure()  # seed 001, rule 3
        if failure.error is self._error:
            # The driver could not make the attempt (the server it found does not support retryable writes) and
            # handed back the error before: seeds 000 3a, 002, 003.
            return Raise(error=self._error, reason=Reason.NOT_RETRYABLE)
        self._overloaded = self._overloaded or failure.overloaded
        self._error = self._error_to_raise(failure)
        verdict = self._verdict(failure, situation)
        self._record(failure, situation.now, verdict)
        if isinstance(verdict, Reason):
            cause = None if self._error is failure.error else failure.error
            return Raise(error=self._error, reason=verdict, cause=cause)
        if isinstance(verdict, Retry):
            self.retries += 1
            self.total_retries += 1
            self._delay = verdict.delay
            self._started = situation.now + verdict.delay
        return verdict

    def _error_to_raise(self, failure: Failure) -> BaseException:
        """Seed 003, "Executing Retryable Write Commands": the last error that may have written; seed 000 3a and 3c:
        never one that hides that an attempt was made.
        """
        if self._error is not None and (
            failure.kind in _TELLS_OF_NO_ATTEMPT or NO_WRITES_PERFORMED in failure.labels
        ):
            return self._error
        return failure.error

    def _breaks(self, rule: Rule, broken: bool, note: str = "") -> bool:
        """Each question passes through here, so that whoever wants to can watch the machine think."""
        if self._witness is not None:
            self._witness(rule, not broken, note)
        return broken

    def _refusal(self, failure: Failure, situation: Situation) -> Reason | None:
        """What is settled before any policy is asked."""
        if self._breaks(Rule.MENDABLE, failure.kind in _NEVER_RETRIED):
            return Reason.NOT_RETRYABLE
        if self._breaks(Rule.SERVER_FOUND, failure.kind is Kind.NO_SERVER and self.retries > 0):
            return Reason.NO_SERVER
        if self._breaks(Rule.ENABLED, not self._facts.enabled):
            return Reason.NOT_RETRYABLE
        if self._breaks(Rule.ACKNOWLEDGED, not situation.acknowledged):
            return Reason.NOT_RETRYABLE
        if self._breaks(
            Rule.OUTSIDE_TRANSACTION,
            situation.in_transaction
            and self._facts.kind is not OperationKind.TRANSACTION_END
            and not self._may_repeat_by_label(failure),
        ):
            return Reason.NOT_RETRYABLE
        return None

    def _verdict(self, failure: Failure, situation: Situation) -> Retry | Ignore | Reason:
        refusal = self._refusal(failure, situation)
        if refusal is not None:
            return refusal
        decision = self._ask(failure, situation)
        if self._breaks(Rule.POLICY, decision.action == "rethrow", decision.because):
            return decision.reason
        if decision.action == "ignore":
            return Ignore(failure=failure)
        if self._breaks(Rule.AT_MOST_ONCE, not self._may_be_sent_again(failure, situation)):
            return Reason.NOT_RETRYABLE
        limit = self._rules.overload_retries
        if self._breaks(
            Rule.OVERLOAD_LIMIT, self._overloaded and limit is not None and self.retries >= limit
        ):
            return Reason.LIMIT
        delay = self._delay_before_retry(failure, decision)
        if self._breaks(Rule.DEADLINE, situation.remaining is not None and delay >= situation.remaining):
            return Reason.DEADLINE
        # Last of all, because asking changes the bucket.
        if self._breaks(Rule.BUDGET, self._budget is not None and not self._budget.try_withdraw()):
            return Reason.BUDGET
        return Retry(
            delay=delay,
            failure=failure,
            same_host=decision.action == "retry",
            # Seed 001, rule 6; seed 003: on a sharded cluster the server that failed.
            deprioritise=situation.sharded or (failure.overloaded and self._rules.deprioritises_overloaded),
            read_preference=decision.read_preference,
        )

    def _may_be_sent_again(self, failure: Failure, situation: Situation) -> bool:
        return (
            failure.nothing_executed
            or situation.retryable
            or bool(situation.idempotent)
            or self._facts.kind is OperationKind.TRANSACTION_END
        )

    def _delay_before_retry(self, failure: Failure, decision: RetryDecision) -> float:
        """Seed 001, rule 5: an overload makes it wait, whatever the policy would like."""
        if not failure.overloaded:
            return decision.delay
        hint = failure.base_backoff if self._rules.honours_server_backoff else None
        return max(decision.delay, self._rules.backoff.delay(self.retries, self._jitter(), hint))

    def _may_repeat_by_label(self, failure: Failure) -> bool:
        return RETRYABLE_ERROR in failure.labels and (
            failure.overloaded or self._rules.labels_without_overload
        )

    def _ask(self, failure: Failure, situation: Situation) -> RetryDecision:
        context = RetryContext(
            operation=self._facts.name,
            kind=self._facts.kind,
            namespace=self._facts.namespace,
            attempt=self.retries + 1,
            failure=failure,
            retryable=situation.retryable,
            in_transaction=situation.in_transaction,
            idempotent=situation.idempotent,
            history=tuple(self._history[len(self._history) - self.retries :]),
            elapsed=situation.now - self._facts.started,
            remaining=situation.remaining,
            tokens=None if self._budget is None else self._budget.tokens,
        )
        policy = type(self._policy).__qualname__
        try:
            decision = method_for(self._policy, context)(context)
            nonsense = nonsense_in(decision)
        except Exception:
            warn_once(
                f"policy raised: {policy}",
                "retry policy %s raised; the error at hand goes to the application as it is",
                policy,
                exc_info=True,
            )
            return RetryDecision.rethrow()
        if nonsense:
            warn_once(
                f"policy answered: {policy}",
                "retry policy %s answered with %s; it counts as rethrow",
                policy,
                nonsense,
            )
            return RetryDecision.rethrow()
        return decision

    def _record(self, failure: Failure, now: float, verdict: Retry | Ignore | Reason) -> None:
        self._history.append(
            Attempt(
                number=self.retries + 1,
                started=self._started,
                duration=max(0.0, now - self._started),
                delay=self._delay,
                failure=failure,
                decision=verdict.value if isinstance(verdict, Reason) else type(verdict).__name__.lower(),
            )
        )


def method_for(policy: RetryPolicy, context: RetryContext) -> Callable[[RetryContext], RetryDecision]:
    """Which method hears of which failure: the table in docs/policies.md."""
    failure = context.failure
    if failure.phase is not Phase.SENT or failure.code in _SERVER_SAYS_UNAVAILABLE:
        return policy.on_unavailable
    if not failure.overloaded and failure.kind in {Kind.NETWORK_TIMEOUT, Kind.SERVER_TIMEOUT}:
        return policy.on_read_timeout if context.is_read else policy.on_write_timeout
    return policy.on_request_error
