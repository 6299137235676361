"""What would be decided, step by step: the machine that runs, on the bench, with a witness."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from otel_retry.machine import Ignore, OperationFacts, Raise, Retry, RetryMachine, Situation, method_for
from otel_retry.pacing import TokenBucket
from otel_retry.policy import RetryContext

if TYPE_CHECKING:
    from otel_retry.cli.catalogue import ErrorShape, Operation
    from otel_retry.machine import Step
    from otel_retry.policy import RetryPolicy, Rules
    from otel_retry.rules import Rule

MOST_ATTEMPTS = 12
"""After so many the story is clear; `persistent` would go on."""

_DEFAULT_ADAPTIVE_RETRIES = 2


@dataclass(slots=True)
class Round:
    """One attempt that failed, the questions that followed, and the answer."""

    attempt: int
    method: str
    questions: list[tuple[Rule, bool, str]] = field(default_factory=list)
    step: Step | None = None
    tokens: float | None = None

    @property
    def outcome(self) -> str:
        if isinstance(self.step, Retry):
            return "retry"
        if isinstance(self.step, Ignore):
            return "ignore"
        return self.step.reason.value if isinstance(self.step, Raise) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is asked: a policy, an operation, an error that comes again and again."""

    policy: RetryPolicy
    operation: Operation
    error: ErrorShape
    timeout: float | None = None
    retry_reads: bool = True
    retry_writes: bool = True
    idempotent: bool | None = None
    tokens: int = 1000


def explain(case: Case) -> list[Round]:
    """Every attempt fails in the same way, until the machine gives up or the story is clear."""
    rules = _resolved(case.policy.rules)
    budget = TokenBucket(capacity=1000) if rules.bucket else None
    if budget is not None:
        for _ in range(1000 - case.tokens):
            budget.try_withdraw()
    rounds: list[Round] = []
    machine = RetryMachine(
        facts=OperationFacts(
            name=case.operation.name,
            kind=case.operation.kind,
            started=0.0,
            retry_reads=case.retry_reads,
            retry_writes=case.retry_writes,
        ),
        policy=case.policy,
        rules=rules,
        budget=budget,
        jitter=lambda: 1.0,  # the longest wait there can be
        witness=lambda rule, holds, note: rounds[-1].questions.append((rule, holds, note)),
    )
    now = 0.0
    while len(rounds) < MOST_ATTEMPTS:
        failure = case.error.failure(case.operation)
        situation = Situation(
            now=now,
            remaining=None if case.timeout is None else case.timeout - now,
            retryable=case.operation.retryable,
            in_transaction=case.operation.in_transaction,
            acknowledged=case.operation.acknowledged,
            idempotent=case.idempotent,
        )
        asked = RetryContext(
            operation=case.operation.name,
            kind=case.operation.kind,
            attempt=machine.retries + 1,
            failure=failure,
            retryable=case.operation.retryable,
        )
        rounds.append(Round(machine.retries + 1, method_for(case.policy, asked).__name__))
        step = rounds[-1].step = machine.attempt_failed(failure, situation)
        rounds[-1].tokens = None if budget is None else budget.tokens
        if not isinstance(step, Retry):
            break
        now += step.delay
    return rounds


def summary(rounds: list[Round]) -> str:
    """A cell of the matrix: how often, how paced, why it ends."""
    retries = [each.step for each in rounds if isinstance(each.step, Retry)]
    if not retries:
        return "no"
    times = (
        "until it works"
        if len(retries) >= MOST_ATTEMPTS
        else "once"
        if len(retries) == 1
        else f"{len(retries)} times"
    )
    longest = max(step.delay for step in retries)
    return (
        f"{times}, with backoff" if longest and rounds[0].step is retries[0] and retries[0].delay else times
    )


def _resolved(rules: Rules) -> Rules:
    """As a client with default options resolves them."""
    if rules.overload_retries is not None:
        return rules
    return replace(rules, overload_retries=_DEFAULT_ADAPTIVE_RETRIES)
