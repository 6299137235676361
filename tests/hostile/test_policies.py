"""Policies that answer nonsense: it counts as rethrow, is said once in the log, and never reaches the application."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from bson import Int64
from hypothesis import example, given
from hypothesis import strategies as st
from pymongo.errors import AutoReconnect, OperationFailure

import otel_retry
from otel_retry import IdempotenceAware, Logging, RetryDecision, RetryPolicy
from otel_retry.events import Failure, Kind, OperationKind, Reason
from otel_retry.logs import forget_warnings
from otel_retry.machine import Ignore, OperationFacts, Raise, Retry, RetryMachine, Situation
from otel_retry.pacing import TokenBucket
from otel_retry.policy import LONGEST_DELAY
from tests.fakes.wire_server import DROP, error
from tests.flavours import resolve
from tests.hostile.bench import Logged, examples_of, hostile, outcome

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.just(object()),
    st.sampled_from(list(Reason)),
)
nonsense_delays = st.one_of(
    st.floats(max_value=0, exclude_max=True),
    st.floats(min_value=LONGEST_DELAY, exclude_min=True),
    st.sampled_from([math.nan, math.inf, -math.inf, -1, 10**400, True, None, "1", b"1", [1], 1j]),
)
preferences = st.one_of(
    st.sampled_from(["primary", "secondaryPreferred", "nearest", "SECONDARY", "", "nonsense"]), anything
)
decisions = st.one_of(
    anything,
    st.builds(RetryDecision, anything, st.one_of(st.floats(), anything), preferences, anything, st.just("")),
    st.builds(RetryDecision.retry, delay=st.one_of(st.floats(), anything)),
    st.builds(RetryDecision.try_next_host, read_preference=preferences),
    st.builds(RetryDecision.rethrow, anything),
    st.just(RetryDecision.ignore()),
)


class Answering(RetryPolicy):
    """Says one thing, once for each operation: then it gives up."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def on_request_error(self, context: Any) -> Any:
        return self.answer if context.attempt == 1 else RetryDecision.rethrow()

    on_unavailable = on_read_timeout = on_write_timeout = on_request_error


class Unreadable(RetryDecision):
    """Not even its action can be read."""

    @property
    def action(self) -> str:
        raise RuntimeError("no")

    @action.setter
    def action(self, value: str) -> None:
        pass


def ask(policy: RetryPolicy, *, overloaded: bool = False) -> tuple[Any, TokenBucket]:
    budget = TokenBucket()
    machine = RetryMachine(
        facts=OperationFacts(name="find", kind=OperationKind.READ, started=0.0),
        policy=policy,
        rules=policy.rules,
        budget=budget,
        jitter=lambda: 1.0,
    )
    labels = frozenset({"SystemOverloadedError", "RetryableError"}) if overloaded else frozenset()
    failure = Failure(error=OSError("lost"), kind=Kind.NETWORK, labels=labels)
    return machine.attempt_failed(failure, Situation(now=1.0, retryable=True)), budget


@pytest.fixture(autouse=True)
def _said_nothing_yet():
    forget_warnings()


@hostile
@given(decisions, st.booleans())
@example(RetryDecision.retry(delay=math.nan), False)
@example(RetryDecision.retry(delay=math.nan), True)
def test_whatever_a_policy_answers_the_step_makes_sense(answer, overloaded):
    step, _ = ask(Answering(answer), overloaded=overloaded)

    assert isinstance(step, (Retry, Raise, Ignore))
    if isinstance(step, Retry):
        assert 0 <= step.delay <= LONGEST_DELAY
    if isinstance(step, Raise):
        assert isinstance(step.reason, Reason)


@hostile
@given(nonsense_delays, st.sampled_from([RetryDecision.retry, RetryDecision.try_next_host]), st.booleans())
def test_a_delay_that_makes_no_sense_is_a_rethrow_that_costs_no_token(delay, decide, overloaded):
    step, budget = ask(Answering(decide(delay=delay)), overloaded=overloaded)

    assert isinstance(step, Raise)
    assert step.reason is Reason.POLICY
    assert budget.tokens == budget.capacity


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "retry",
        RetryDecision("again"),
        RetryDecision(None),
        RetryDecision(["retry"]),
        RetryDecision("retry", math.inf),
        RetryDecision("retry", "1"),
        RetryDecision("retry", 0, "nonsense"),
        RetryDecision("retry", 0, 17),
        RetryDecision("rethrow", reason="because"),
        Unreadable("retry"),
    ],
    ids=[
        "none",
        "text",
        "unknown",
        "no-action",
        "list",
        "inf",
        "text-delay",
        "mode",
        "number",
        "reason",
        "unreadable",
    ],
)
@pytest.mark.parametrize("wrap", [lambda policy: policy, Logging, IdempotenceAware])
def test_nonsense_is_said_once_and_not_what_it_was(caplog, wrap, answer):
    policy = wrap(Answering(answer))
    with caplog.at_level(logging.WARNING, "otel_retry"):
        for _ in range(3):
            assert isinstance(ask(policy)[0], Raise)

    [record] = caplog.records
    assert type(policy).__name__ in record.getMessage()


@pytest.mark.parametrize("delay", [0, 0.5, 7, LONGEST_DELAY, Int64(2)])
def test_a_delay_that_makes_sense_is_kept(delay):
    step, _ = ask(Answering(RetryDecision.retry(delay=delay)))

    assert isinstance(step, Retry)
    assert step.delay == delay


OPERATIONS = {
    "find": lambda c: c.db.things.find_one(),
    "insert": lambda c: c.db.things.insert_one({"_id": 1}),
    "update": lambda c: c.db.things.update_many({}, {"$set": {"a": 1}}),
    "aggregate": lambda c: c.db.things.aggregate([]),
    "create": lambda c: c.db.create_collection("things", check_exists=False),
    "ping": lambda c: c.db.command("ping"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_through_a_client_nonsense_never_reaches_the_application(
    watched, server, rig, delays, logged: Logged, operation
):
    """`ignore` where no empty result means something is nonsense as well."""
    policy = Answering(None)
    client = watched(policy=policy)
    server.always[operation] = error(462, labels=["SystemOverloadedError", "RetryableError"])

    for answer in [
        RetryDecision.retry(delay=math.nan),
        RetryDecision.retry(delay=1e300),
        RetryDecision.try_next_host(read_preference="nonsense"),
        RetryDecision.try_next_host(read_preference=17),
        RetryDecision.ignore(),
        *examples_of(decisions, 60),
    ]:
        delays.clear()
        rig.clear()
        policy.answer = answer
        raised = await outcome(lambda: OPERATIONS[operation](client), resolve)
        assert type(raised) is OperationFailure or (raised is None and answer == RetryDecision.ignore())
        assert all(0 <= delay <= LONGEST_DELAY for delay in delays)
        assert rig.open == []
        assert len(rig.operations) == 1
    assert len(logged.complaints) <= 2  # nonsense, and ignore() where it is none


async def test_after_a_lost_connection_nonsense_never_reaches_the_application(watched, server, rig, logged):
    client = watched(policy=Answering(RetryDecision.retry(delay=math.nan)))
    server.always["find"] = DROP

    for _ in range(3):
        raised = await outcome(client.db.things.find_one, resolve)
        assert type(raised) is AutoReconnect
        assert len(otel_retry.attempts(raised)) == 1
    assert len(logged.complaints) == 1
    assert rig.open == []
