"""The state machine: rule by rule, and against an oracle that was written from the texts alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_retry.events import Failure, Kind, OperationKind, Phase, Reason
from otel_retry.logs import forget_warnings
from otel_retry.machine import Ignore, OperationFacts, Raise, Retry, RetryMachine, Situation
from otel_retry.pacing import TokenBucket
from otel_retry.policies import POLICIES, BackpressurePolicy
from otel_retry.policy import CURRENT, RetryContext, RetryDecision, RetryPolicy, Rules

OVERLOADED = frozenset({"SystemOverloadedError", "RetryableError"})
WRITE_LABEL = frozenset({"RetryableWriteError"})


def failure(kind: Kind = Kind.NETWORK, **facts: Any) -> Failure:
    return Failure(error=OSError(kind), kind=kind, **facts)


def overload(**facts: Any) -> Failure:
    return failure(Kind.SERVER_ERROR, code=462, labels=OVERLOADED, **facts)


class Bench:
    """A machine on the bench, with its time and its luck in our hands."""

    def __init__(
        self,
        policy: RetryPolicy | str = "backpressure",
        kind: OperationKind = OperationKind.READ,
        *,
        capacity: int = 1000,
        jitter: float = 1.0,
        retry_reads: bool = True,
        retry_writes: bool = True,
        overload_retries: int = 2,
        **situation: Any,
    ) -> None:
        self.policy = POLICIES[policy]() if isinstance(policy, str) else policy
        rules = self.policy.rules
        if rules.overload_retries is None:
            rules = Rules(
                name=rules.name,
                bucket=False,
                overload_retries=overload_retries,
                backoff=rules.backoff,
                honours_server_backoff=True,
                deprioritises_overloaded=False,
                labels_without_overload=False,
            )
        self.budget = TokenBucket(capacity=capacity) if rules.bucket else None
        self.situation = {"retryable": True, **situation}
        self.now = 100.0
        self.machine = RetryMachine(
            facts=OperationFacts(
                name="op", kind=kind, started=self.now, retry_reads=retry_reads, retry_writes=retry_writes
            ),
            policy=self.policy,
            rules=rules,
            budget=self.budget,
            jitter=lambda: jitter,
        )

    def fail(self, with_: Failure, **situation: Any) -> Any:
        self.now += 0.25
        return self.machine.attempt_failed(
            with_, Situation(**{"now": self.now, **self.situation, **situation})
        )

    @property
    def tokens(self) -> float:
        assert self.budget is not None
        return self.budget.tokens


def reason_of(step: Any) -> Reason:
    assert isinstance(step, Raise), step
    return step.reason


# The overload rules of seed 001.


def test_five_retries_so_six_attempts_in_all() -> None:
    bench = Bench()
    steps = [bench.fail(overload()) for _ in range(6)]
    assert [type(step) for step in steps] == [Retry] * 5 + [Raise]
    assert reason_of(steps[-1]) is Reason.LIMIT


def test_the_wait_doubles_from_a_tenth_of_a_second() -> None:
    bench = Bench()
    assert [bench.fail(overload()).delay for _ in range(5)] == [0.1, 0.2, 0.4, 0.8, 1.6]


def test_jitter_scales_the_wait() -> None:
    assert Bench(jitter=0.5).fail(overload()).delay == 0.05


@pytest.mark.parametrize("policy", ["backpressure", "current"])
def test_only_an_overload_makes_it_wait(policy: str) -> None:
    assert Bench(policy).fail(failure()).delay == 0
    after_an_overload = Bench(policy)
    after_an_overload.fail(overload())
    assert after_an_overload.fail(failure()).delay == 0


def test_an_overload_after_another_failure_waits_as_the_second_retry() -> None:
    bench = Bench()
    bench.fail(failure())
    assert bench.fail(overload()).delay == 0.2


def test_every_retry_costs_a_token() -> None:
    bench = Bench()
    bench.fail(failure())
    assert bench.tokens == 999
    bench.fail(overload())
    assert bench.tokens == 998


def test_success_at_once_returns_a_tenth_and_after_a_retry_one_more() -> None:
    bench = Bench()
    for _ in range(5):
        bench.fail(overload())
    assert bench.tokens == 995
    bench.machine.attempt_succeeded()
    assert bench.tokens == 996.1
    fresh = Bench()
    assert fresh.budget is not None
    fresh.budget.try_withdraw()
    fresh.machine.attempt_succeeded()
    assert fresh.tokens == 999.1


def test_a_retry_that_fails_otherwise_returns_its_token() -> None:
    bench = Bench()
    bench.fail(overload())
    bench.fail(failure(Kind.REJECTED))
    assert bench.tokens == 1000


def test_a_retry_that_fails_by_overload_returns_nothing() -> None:
    bench = Bench()
    for _ in range(6):
        bench.fail(overload())
    assert bench.tokens == 995


def test_the_first_failure_returns_nothing() -> None:
    bench = Bench()
    assert bench.budget is not None
    bench.budget.try_withdraw()
    bench.fail(failure(Kind.REJECTED))
    assert bench.tokens == 999


def test_an_empty_bucket_refuses_and_the_error_is_the_one_at_hand() -> None:
    bench = Bench(capacity=2)
    bench.fail(overload())
    bench.fail(overload())
    last = overload()
    step = bench.fail(last)
    assert reason_of(step) is Reason.BUDGET
    assert step.error is last.error


@pytest.mark.parametrize("remaining", [0.0, -1.0, 0.05, 0.1])
def test_a_wait_beyond_the_deadline_is_not_made_and_costs_nothing(remaining: float) -> None:
    bench = Bench()
    assert reason_of(bench.fail(overload(), remaining=remaining)) is Reason.DEADLINE
    assert bench.tokens == 1000


def test_a_wait_within_the_deadline_is_made() -> None:
    assert isinstance(Bench().fail(overload(), remaining=0.11), Retry)


def test_an_overload_limits_the_rest_of_the_operation_also_under_a_deadline() -> None:
    bench = Bench(remaining=60.0)
    bench.fail(overload())
    steps = [bench.fail(failure()) for _ in range(5)]
    assert [type(step) for step in steps] == [Retry] * 4 + [Raise]
    assert reason_of(steps[-1]) is Reason.LIMIT


def test_without_overload_a_deadline_allows_any_number() -> None:
    bench = Bench(remaining=60.0)
    assert all(isinstance(bench.fail(failure()), Retry) for _ in range(50))


def test_without_a_deadline_one_retry() -> None:
    bench = Bench()
    assert isinstance(bench.fail(failure()), Retry)
    assert reason_of(bench.fail(failure())) is Reason.LIMIT


def test_every_operation_is_repeated_after_an_overload() -> None:
    for kind in OperationKind:
        assert isinstance(Bench(kind=kind, retryable=False).fail(overload()), Retry)


def test_an_overload_that_is_not_retryable_is_raised() -> None:
    labels = frozenset({"SystemOverloadedError"})
    step = Bench(retryable=False).fail(failure(Kind.SERVER_ERROR, labels=labels))
    assert reason_of(step) is Reason.NOT_RETRYABLE


def test_a_retryable_label_alone_is_repeated_without_waiting() -> None:
    step = Bench(retryable=False).fail(failure(Kind.SERVER_ERROR, labels=frozenset({"RetryableError"})))
    assert isinstance(step, Retry)
    assert step.delay == 0


def test_an_overloaded_server_is_deprioritised_and_another_is_not() -> None:
    assert Bench().fail(overload()).deprioritise
    assert not Bench().fail(failure()).deprioritise
    assert Bench().fail(failure(), sharded=True).deprioritise


# Gates.


@pytest.mark.parametrize(
    ("kind", "reads", "writes", "allowed"),
    [
        (OperationKind.READ, True, False, True),
        (OperationKind.READ, False, True, False),
        (OperationKind.WRITE, False, True, True),
        (OperationKind.WRITE, True, False, False),
        (OperationKind.RUN_COMMAND, True, True, True),
        (OperationKind.RUN_COMMAND, True, False, False),
        (OperationKind.RUN_COMMAND, False, True, False),
        (OperationKind.TRANSACTION_END, False, False, True),
    ],
)
def test_the_clients_options_gate_the_retries(
    kind: OperationKind, reads: bool, writes: bool, allowed: bool
) -> None:
    step = Bench(kind=kind, retry_reads=reads, retry_writes=writes).fail(overload())
    assert isinstance(step, Retry) == allowed


def test_nothing_in_a_transaction_is_repeated_but_what_an_overload_rejected() -> None:
    bench = Bench(kind=OperationKind.WRITE, in_transaction=True)
    assert reason_of(bench.fail(failure(labels=WRITE_LABEL))) is Reason.NOT_RETRYABLE
    assert isinstance(Bench(kind=OperationKind.WRITE, in_transaction=True).fail(overload()), Retry)


def test_commit_and_abort_are_repeated_in_a_transaction() -> None:
    bench = Bench(kind=OperationKind.TRANSACTION_END, in_transaction=True)
    assert isinstance(bench.fail(failure(labels=WRITE_LABEL)), Retry)


def test_an_unacknowledged_write_is_never_repeated() -> None:
    step = Bench(kind=OperationKind.WRITE).fail(overload(), acknowledged=False)
    assert reason_of(step) is Reason.NOT_RETRYABLE


# Which error is raised.


def test_the_error_raised_is_the_last_that_may_have_written() -> None:
    bench = Bench(kind=OperationKind.WRITE)
    first = failure(labels=WRITE_LABEL)
    second = failure(Kind.SERVER_ERROR, labels=frozenset({"NoWritesPerformed", *WRITE_LABEL}))
    bench.fail(first)
    step = bench.fail(second)
    assert step.error is first.error
    assert step.cause is second.error


def test_if_nothing_was_written_at_all_the_first_error_is_raised() -> None:
    bench = Bench(kind=OperationKind.WRITE, remaining=60.0)
    nothing = frozenset({"NoWritesPerformed", *WRITE_LABEL})
    failures = [failure(labels=nothing) for _ in range(3)]
    for each in failures:
        bench.fail(each)
    step = bench.fail(failure(Kind.SERVER_ERROR, labels=frozenset({"NoWritesPerformed"})))
    assert step.error is failures[0].error


def test_a_later_error_that_may_have_written_replaces_one_that_did_not() -> None:
    bench = Bench(kind=OperationKind.WRITE)
    bench.fail(failure(labels=frozenset({"NoWritesPerformed", *WRITE_LABEL})))
    later = failure(labels=WRITE_LABEL)
    assert bench.fail(later).error is later.error


@pytest.mark.parametrize("kind", [Kind.NO_SERVER, Kind.POOL_EXHAUSTED, Kind.CLIENT_ERROR])
def test_an_error_that_hides_the_attempt_gives_way_to_the_one_before(kind: Kind) -> None:
    bench = Bench(kind=OperationKind.WRITE)
    first = failure(labels=WRITE_LABEL)
    bench.fail(first)
    assert bench.fail(failure(kind)).error is first.error
    assert Bench(kind=OperationKind.WRITE).fail(failure(kind)).error.args == (kind,)


def test_no_server_at_first_is_raised_and_on_a_retry_ends_it() -> None:
    assert reason_of(Bench().fail(failure(Kind.NO_SERVER, phase=Phase.SELECTION))) is Reason.NO_SERVER
    bench = Bench(remaining=60.0)
    bench.fail(failure())
    assert reason_of(bench.fail(failure(Kind.NO_SERVER, phase=Phase.SELECTION))) is Reason.NO_SERVER


def test_the_error_before_handed_back_by_the_driver_ends_it() -> None:
    bench = Bench(kind=OperationKind.WRITE, remaining=60.0)
    first = failure(labels=WRITE_LABEL)
    bench.fail(first)
    step = bench.fail(first)
    assert (step.error, step.cause) == (first.error, None)
    assert len(bench.machine.history) == 1


# Bulk writes.


def test_each_command_of_a_bulk_write_has_its_own_limit() -> None:
    bench = Bench()
    for _ in range(3):
        for _ in range(5):
            assert isinstance(bench.fail(overload()), Retry)
        bench.machine.command_succeeded(bench.now)
    assert bench.machine.total_retries == 15
    assert bench.tokens == pytest.approx(1000 - 15 + 3 * 1.1)


def test_each_command_of_a_bulk_write_has_its_own_errors() -> None:
    bench = Bench(kind=OperationKind.WRITE)
    bench.fail(failure(labels=WRITE_LABEL))
    bench.machine.command_succeeded(bench.now)
    second = failure(Kind.SERVER_ERROR, labels=frozenset({"NoWritesPerformed"}))
    assert bench.fail(second).error is second.error


# What a policy can and cannot do.


class Always(RetryPolicy):
    """Says one thing, whatever happens."""

    def __init__(self, decision: Any) -> None:
        self.decision = decision

    def answer(self, context: RetryContext) -> Any:
        if isinstance(self.decision, Exception):
            raise self.decision
        return self.decision

    on_unavailable = on_read_timeout = on_write_timeout = on_request_error = answer


def test_a_policy_cannot_send_a_write_twice_that_may_have_been_applied() -> None:
    bench = Bench(Always(RetryDecision.retry()), OperationKind.WRITE, retryable=False)
    assert reason_of(bench.fail(failure())) is Reason.NOT_RETRYABLE


@pytest.mark.parametrize("phase", [Phase.SELECTION, Phase.CONNECTION])
def test_what_was_never_sent_may_always_be_tried_again(phase: Phase) -> None:
    bench = Bench(Always(RetryDecision.try_next_host()), OperationKind.WRITE, retryable=False)
    assert isinstance(bench.fail(failure(phase=phase)), Retry)


def test_what_is_idempotent_may_be_sent_again() -> None:
    bench = Bench(Always(RetryDecision.try_next_host()), OperationKind.WRITE, retryable=False)
    assert isinstance(bench.fail(failure(), idempotent=True), Retry)


@pytest.mark.parametrize("kind", [Kind.REJECTED, Kind.CLIENT_ERROR])
def test_no_policy_is_asked_about_an_error_that_no_retry_can_mend(kind: Kind) -> None:
    assert reason_of(Bench(Always(RetryDecision.retry())).fail(failure(kind))) is Reason.NOT_RETRYABLE


def test_a_policy_cannot_overrule_limit_deadline_budget_or_backoff() -> None:
    always = Always(RetryDecision.retry(delay=0.01))
    bench = Bench(always)
    delays = [bench.fail(overload()).delay for _ in range(5)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert reason_of(bench.fail(overload())) is Reason.LIMIT
    assert reason_of(Bench(always).fail(failure(), remaining=0.005)) is Reason.DEADLINE
    empty = Bench(always, capacity=1)
    empty.fail(failure(), remaining=9.0)
    assert reason_of(empty.fail(overload(), remaining=9.0)) is Reason.BUDGET


def test_a_policys_delay_may_be_longer_than_the_backoff() -> None:
    assert Bench(Always(RetryDecision.retry(delay=3.0))).fail(overload()).delay == 3.0


@pytest.mark.parametrize("answer", [None, 7, "retry", RuntimeError("oops")])
def test_a_policy_that_fails_is_reported_once_and_counts_as_rethrow(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    forget_warnings()
    original = failure()
    with caplog.at_level(logging.WARNING, "otel_retry"):
        for _ in range(3):
            step = Bench(Always(answer)).fail(original)
            assert step.error is original.error
            assert step.reason is Reason.POLICY
    assert len(caplog.records) == 1


def test_ignore_is_passed_on() -> None:
    assert isinstance(Bench(Always(RetryDecision.ignore())).fail(failure()), Ignore)


class Recorder(RetryPolicy):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.contexts: list[RetryContext] = []

    def _note(self, method: str, context: RetryContext) -> RetryDecision:
        self.heard.append(method)
        self.contexts.append(context)
        return RetryDecision.try_next_host()

    def on_unavailable(self, context: RetryContext) -> RetryDecision:
        return self._note("unavailable", context)

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:
        return self._note("read_timeout", context)

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:
        return self._note("write_timeout", context)

    def on_request_error(self, context: RetryContext) -> RetryDecision:
        return self._note("request_error", context)


@pytest.mark.parametrize(
    ("of", "kind", "method"),
    [
        (failure(Kind.NO_SERVER, phase=Phase.SELECTION), OperationKind.READ, "unavailable"),
        (failure(Kind.POOL_CLEARED, phase=Phase.CONNECTION), OperationKind.WRITE, "unavailable"),
        (failure(Kind.NETWORK, phase=Phase.CONNECTION), OperationKind.READ, "unavailable"),
        (failure(Kind.NOT_PRIMARY, code=10107), OperationKind.WRITE, "unavailable"),
        (failure(Kind.NOT_PRIMARY, code=189), OperationKind.WRITE, "request_error"),
        (failure(Kind.NETWORK_TIMEOUT), OperationKind.READ, "read_timeout"),
        (failure(Kind.SERVER_TIMEOUT, code=50), OperationKind.READ, "read_timeout"),
        (failure(Kind.NETWORK_TIMEOUT), OperationKind.WRITE, "write_timeout"),
        (failure(Kind.NETWORK), OperationKind.READ, "request_error"),
        (overload(), OperationKind.READ, "request_error"),
        (failure(Kind.SERVER_ERROR, code=8), OperationKind.WRITE, "request_error"),
    ],
)
def test_each_failure_goes_to_its_method(of: Failure, kind: OperationKind, method: str) -> None:
    recorder = Recorder()
    Bench(recorder, kind).fail(of)
    assert recorder.heard == [method]


def test_a_policy_sees_the_history_and_the_time() -> None:
    recorder = Recorder()
    bench = Bench(recorder, remaining=30.0)
    first = overload(server="a:1")
    bench.fail(first)
    bench.fail(failure(server="b:2"))
    context = recorder.contexts[-1]
    assert (context.attempt, context.retries, context.server, context.elapsed) == (2, 1, "b:2", 0.5)
    assert (context.remaining, context.tokens, context.overload_seen) == (30.0, 1000.0, True)
    (before,) = context.history
    assert (before.number, before.server, before.duration, before.delay) == (1, "a:1", 0.25, 0.0)
    assert before.decision == "retry"


def test_the_history_has_an_entry_for_each_failed_attempt() -> None:
    bench = Bench()
    for _ in range(6):
        bench.fail(overload())
    assert [attempt.number for attempt in bench.machine.history] == [1, 2, 3, 4, 5, 6]
    assert [attempt.decision for attempt in bench.machine.history] == ["retry"] * 5 + ["limit"]
    assert [attempt.delay for attempt in bench.machine.history] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6]


# Policies after older and newer texts.


def test_current_retries_an_overload_twice_and_starts_at_two_tenths() -> None:
    bench = Bench("current")
    steps = [bench.fail(overload()) for _ in range(3)]
    assert [getattr(step, "delay", None) for step in steps] == [0.2, 0.4, None]
    assert reason_of(steps[-1]) is Reason.LIMIT
    assert bench.budget is None


def test_current_honours_the_servers_hint_and_backpressure_does_not() -> None:
    assert Bench("current").fail(overload(base_backoff=0.5)).delay == 1.0
    assert Bench("backpressure").fail(overload(base_backoff=0.5)).delay == 0.1


def test_current_wants_both_labels() -> None:
    step = Bench("current", retryable=False).fail(
        failure(Kind.SERVER_ERROR, labels=frozenset({"RetryableError"}))
    )
    assert reason_of(step) is Reason.NOT_RETRYABLE


def test_once_means_once_also_under_a_deadline() -> None:
    bench = Bench("once", remaining=60.0)
    assert isinstance(bench.fail(failure()), Retry)
    assert reason_of(bench.fail(failure())) is Reason.LIMIT


@pytest.mark.parametrize("policy", ["once", "persistent"])
def test_older_texts_do_not_know_overload(policy: str) -> None:
    assert reason_of(Bench(policy).fail(overload())) is Reason.NOT_RETRYABLE


@pytest.mark.parametrize("code", [262, 134])
def test_older_texts_have_the_shorter_list_of_codes(code: int) -> None:
    assert reason_of(Bench("persistent").fail(failure(Kind.SERVER_ERROR, code=code))) is Reason.NOT_RETRYABLE
    assert isinstance(Bench("backpressure").fail(failure(Kind.SERVER_ERROR, code=code)), Retry)


def test_persistent_goes_on_and_slows_down() -> None:
    bench = Bench("persistent")
    delays = [bench.fail(failure()).delay for _ in range(30)]
    assert delays[:5] == [0.0] * 5
    assert delays[5:8] == [0.01, 0.02, 0.04]
    assert max(delays) == 1.0


def test_the_second_socket_timeout_ends_a_persistent_read() -> None:
    bench = Bench("persistent")
    assert isinstance(bench.fail(failure(Kind.NETWORK_TIMEOUT)), Retry)
    assert isinstance(bench.fail(failure()), Retry)
    second = failure(Kind.NETWORK_TIMEOUT)
    step = bench.fail(second)
    assert reason_of(step) is Reason.LIMIT
    assert step.error is second.error


def test_a_timeout_while_connecting_is_no_socket_timeout() -> None:
    bench = Bench("persistent")
    for _ in range(3):
        assert isinstance(bench.fail(failure(Kind.NETWORK_TIMEOUT, phase=Phase.CONNECTION)), Retry)


# The oracle: the four texts, written down once more as a plain function over a whole story.


@dataclass
class Story:
    policy: str
    kind: OperationKind
    retryable: bool
    in_transaction: bool
    deadline: float | None
    tenths: int
    failures: list[Failure]


LABELS = st.sets(
    st.sampled_from(["SystemOverloadedError", "RetryableError", "RetryableWriteError", "NoWritesPerformed"])
)
FAILURES = st.builds(
    Failure,
    error=st.builds(OSError, st.integers()),
    kind=st.sampled_from(list(Kind)),
    phase=st.sampled_from(list(Phase)),
    code=st.sampled_from([None, 6, 89, 91, 134, 262, 10107, 189, 8, 462]),
    labels=LABELS.map(frozenset),
)
STORIES = st.builds(
    Story,
    policy=st.sampled_from(["backpressure", "current", "once", "persistent"]),
    kind=st.sampled_from(list(OperationKind)),
    retryable=st.booleans(),
    in_transaction=st.booleans(),
    deadline=st.one_of(st.none(), st.floats(0.1, 20)),
    tenths=st.integers(0, 60),
    failures=st.lists(FAILURES, min_size=1, max_size=9),
)

OLD_CODES = {11600, 11602, 10107, 13435, 13436, 189, 91, 7, 6, 89, 9001}


def oracle_allows(story: Story, index: int) -> bool:
    """Does the text allow a retry after `failures[index]`, budget apart?"""
    now = story.failures[index]
    seen = story.failures[: index + 1]
    if now.kind in {Kind.REJECTED, Kind.CLIENT_ERROR, Kind.NO_SERVER}:
        return False
    modern = story.policy in {"backpressure", "current"}
    overloaded = "SystemOverloadedError" in now.labels
    by_label = "RetryableError" in now.labels and (overloaded or story.policy != "current")
    ending = story.kind is OperationKind.TRANSACTION_END
    if story.in_transaction and not ending and not by_label:
        return False
    if modern and by_label:
        allowed = True
    elif not story.retryable:
        allowed = False
    elif story.kind is OperationKind.READ:
        kinds = {Kind.NETWORK, Kind.NETWORK_TIMEOUT, Kind.POOL_CLEARED, Kind.NOT_PRIMARY}
        if story.policy == "current":
            kinds.add(Kind.POOL_EXHAUSTED)
        allowed = now.kind in kinds or now.code in (OLD_CODES | ({262, 134, 10058} if modern else set()))
    else:
        allowed = "RetryableWriteError" in now.labels
    if not allowed:
        return False
    overload_seen = any("SystemOverloadedError" in each.labels for each in seen)
    if overload_seen and index >= (2 if story.policy == "current" else 5):
        return False
    if story.policy == "once":
        return index == 0
    if story.policy == "persistent":
        timeouts = [f for f in seen if f.kind is Kind.NETWORK_TIMEOUT and f.phase is Phase.SENT]
        return story.deadline is not None or len(timeouts) < 2
    return overload_seen or index == 0 or story.deadline is not None


def oracle_delay(story: Story, index: int) -> float:
    delay = 0.0
    if story.policy == "persistent" and index >= 5:
        delay = min(1.0, 0.01 * 2 ** (index - 5))
    if "SystemOverloadedError" in story.failures[index].labels:
        base = 0.2 if story.policy == "current" else 0.1
        delay = max(delay, min(10.0, base * 2**index))
    return delay


@settings(max_examples=600)
@given(STORIES)
def test_the_machine_and_an_oracle_tell_the_same_story(story: Story) -> None:
    bench = Bench(
        story.policy, story.kind, retryable=story.retryable, in_transaction=story.in_transaction, capacity=6
    )
    if bench.budget is not None:
        bench.budget._tenths = story.tenths
    tokens, elapsed = story.tenths, 0.0
    to_raise: BaseException | None = None
    for index, each in enumerate(story.failures):
        remaining = None if story.deadline is None else story.deadline - elapsed
        step = bench.fail(each, remaining=remaining)
        if index and "SystemOverloadedError" not in each.labels:
            tokens = min(60, tokens + 10)
        hides = each.kind in {Kind.NO_SERVER, Kind.POOL_EXHAUSTED, Kind.CLIENT_ERROR}
        if to_raise is None or not (hides or "NoWritesPerformed" in each.labels):
            to_raise = each.error
        delay = oracle_delay(story, index)
        expected = oracle_allows(story, index) and (remaining is None or delay < remaining)
        has_bucket = story.policy != "current"
        if expected and has_bucket:
            if tokens < 10:
                expected = False
            else:
                tokens -= 10
        assert isinstance(step, Retry) == expected, (index, step)
        if has_bucket:
            assert bench.tokens == tokens / 10
        if not expected:
            assert step.error is to_raise
            return
        assert step.delay == pytest.approx(delay)
        elapsed += delay


def test_the_default_rules_of_a_policy_are_those_of_backpressure() -> None:
    assert RetryPolicy.rules is BackpressurePolicy.rules
    assert CURRENT.overload_retries is None
