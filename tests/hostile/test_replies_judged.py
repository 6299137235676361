"""Exceptions as a hostile server makes PyMongo raise them, judged by classification and machine alone."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DuplicateKeyError,
    ExecutionTimeout,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    WriteConcernError,
    WriteError,
    WTimeoutError,
)

from otel_retry.events import Kind, OperationKind, Phase, Reason
from otel_retry.history import attach, attempts, describe
from otel_retry.machine import OperationFacts, Raise, Retry, RetryMachine, Situation
from otel_retry.pacing import TokenBucket
from otel_retry.policies import POLICIES
from otel_retry.pymongo.classify import LABELS, classify
from otel_retry.telemetry.errors import LONGEST_MESSAGE, LONGEST_STACK, code_of, exception_attributes
from tests.hostile.bench import LONGEST_WAIT, hostile
from tests.hostile.replies import anything, codes, overloads, replies

SERVER_ERRORS = (
    OperationFailure,
    WriteError,
    WriteConcernError,
    WTimeoutError,
    DuplicateKeyError,
    ExecutionTimeout,
)
CONNECTION_ERRORS = (AutoReconnect, NetworkTimeout, NotPrimaryError)
huge = st.sampled_from([10**400, -(10**400), 10**5000, float("nan"), float("inf")])


def _made(cls: type[Any], *arguments: Any) -> Exception:
    """PyMongo itself refuses labels that cannot be in a set: then that refusal is the error."""
    try:
        error: Exception = cls(*arguments)
    except Exception as refusal:
        return refusal
    return error


errors = st.one_of(
    st.builds(
        _made,
        st.sampled_from(SERVER_ERRORS),
        st.text(max_size=20),
        st.one_of(codes, huge),
        st.one_of(overloads, replies, anything),
    ),
    st.builds(
        _made,
        st.sampled_from(CONNECTION_ERRORS),
        st.text(max_size=20),
        st.one_of(overloads, replies, anything),
    ),
    st.builds(
        _made, st.just(BulkWriteError), replies.map(lambda reply: {**reply, "writeConcernErrors": [reply]})
    ),
    st.builds(
        _made,
        st.just(BulkWriteError),
        st.dictionaries(st.sampled_from(["writeErrors", "writeConcernErrors", "code"]), anything),
    ),
)


@settings(hostile, max_examples=150)
@given(errors, st.sampled_from(list(Phase)))
@example(
    OperationFailure("", 10**5000, {"code": 10**4000, "codeName": "x" * 10**6, "errmsg": "y" * 10**6}),
    Phase.SENT,
)
def test_an_error_of_any_shape_is_facts_of_known_types(error, phase):
    failure = classify(error, phase=phase, server="h:1")

    assert isinstance(failure.kind, Kind)
    assert failure.code is None or (type(failure.code) is int and abs(failure.code) <= 2**31)
    assert failure.labels <= set(LABELS)
    assert failure.base_backoff is None or 0 < failure.base_backoff <= 3600


@settings(hostile, max_examples=100)
@given(
    st.lists(errors, min_size=1, max_size=8),
    st.sampled_from([name for name in POLICIES if name != "driver"]),
    st.sampled_from(list(OperationKind)),
    st.sampled_from([None, 0.0, 1.0, float("inf")]),
    st.booleans(),
)
def test_no_error_makes_the_machine_fail_or_wait_beyond_the_cap(
    found, policy_name, kind, remaining, retryable
):
    policy = POLICIES[policy_name]()
    budget = TokenBucket(capacity=3) if policy.rules.bucket else None
    machine = RetryMachine(
        facts=OperationFacts(name="op", kind=kind, started=0.0),
        policy=policy,
        rules=policy.rules,
        budget=budget,
        jitter=lambda: 1.0,
    )
    for error in found:
        step = machine.attempt_failed(
            classify(error), Situation(now=1.0, remaining=remaining, retryable=retryable)
        )
        if isinstance(step, Retry):
            assert 0 <= step.delay <= LONGEST_WAIT
            continue
        assert isinstance(step, Raise)
        assert isinstance(step.reason, Reason)
        attach(step.error, machine.history)
        assert len(attempts(step.error)) == len(machine.history)
        break
    assert budget is None or 0 <= budget.tokens <= 3
    assert all(len(describe(attempt)) < 300 for attempt in machine.history)


@settings(hostile, max_examples=150)
@given(errors, st.booleans())
@example(
    OperationFailure("", 10**5000, {"code": 10**4000, "codeName": "x" * 10**6, "errmsg": "y" * 10**6}), False
)
def test_what_a_span_says_of_an_error_is_bounded(error, raw):
    said = exception_attributes(error, raw=raw)

    assert len(said["exception.message"]) <= LONGEST_MESSAGE
    assert len(said["exception.stacktrace"]) <= LONGEST_STACK
    assert len(str(code_of(getattr(error, "details", None)))) <= 11
