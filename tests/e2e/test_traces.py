"""What a person finds in Jaeger about an operation that was retried."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from otel_retry import semconv
from otel_retry.dashboards.plot import TRACE
from tests.e2e import pictures
from tests.e2e.workload import APP_NAME

if TYPE_CHECKING:
    from tests.e2e.conftest import Traffic
    from tests.e2e.stack import Backends, Span, Trace
    from tests.e2e.workload import Request

ATTEMPT = semconv.RETRY_ATTEMPT


def _trace(backends: Backends, request: Request) -> Trace:
    trace = backends.jaeger.trace(request.trace_id)
    assert trace is not None
    return trace


def _operation(trace: Trace) -> Span:
    [operation] = trace.children(trace.root)
    return operation


@pytest.fixture(scope="module")
def thrice_overloaded(traffic: Traffic) -> Request:
    [request] = [each for each in traffic.retried if each.attempts == 4]
    return request


def test_a_retried_trace_is_a_tree_of_request_operation_and_one_span_for_each_attempt(
    backends: Backends, thrice_overloaded: Request
):
    trace = _trace(backends, thrice_overloaded)
    assert trace.root.name == "request find"
    operation = _operation(trace)
    assert operation.name == "find e2e.items"
    attempts = trace.children(operation)
    assert [(span.name, span.attributes[ATTEMPT]) for span in attempts] == [
        ("find", number) for number in (1, 2, 3, 4)
    ]
    assert len(trace.spans) == 2 + 4
    assert {span.service for span in trace.spans} == {"traffic"}
    pictures.keep(TRACE, pictures.draw(trace))


def test_each_attempt_links_to_the_one_before_it(backends: Backends, thrice_overloaded: Request):
    trace = _trace(backends, thrice_overloaded)
    attempts = trace.children(_operation(trace))
    assert attempts[0].links == []
    for previous, span in itertools.pairwise(attempts):
        assert span.links == [
            (trace.root.trace_id, previous.span_id, {semconv.RETRY_LINK: semconv.PREVIOUS_ATTEMPT})
        ]


def test_the_failed_attempts_are_errors_and_the_last_one_and_the_operation_are_not(
    backends: Backends, thrice_overloaded: Request
):
    trace = _trace(backends, thrice_overloaded)
    operation = _operation(trace)
    *failed, last = trace.children(operation)
    assert [span.failed for span in failed] == [True, True, True]
    assert {span.attributes[semconv.DB_STATUS_CODE] for span in failed} == {"462"}
    assert all(semconv.ERROR_TYPE in span.attributes for span in failed)
    assert all(name == "exception" for span in failed for name, _ in span.events)
    assert not last.failed
    assert not operation.failed
    assert semconv.ERROR_TYPE not in operation.attributes


def test_the_operation_tells_of_each_retry_with_its_reason_wait_and_tokens(
    backends: Backends, thrice_overloaded: Request
):
    trace = _trace(backends, thrice_overloaded)
    operation = _operation(trace)
    assert operation.attributes[semconv.RETRY_OUTCOME] == semconv.RETRIED
    assert operation.attributes[semconv.RETRY_ATTEMPTS] == 4
    events = [attributes for name, attributes in operation.events if name == semconv.RETRY_EVENT]
    assert [event[ATTEMPT] for event in events] == [1, 2, 3]
    assert {event[semconv.RETRY_REASON] for event in events} == {"overload"}
    tokens = [event[semconv.RETRY_TOKENS] for event in events]
    assert tokens == sorted(tokens, reverse=True)
    waits = [span.attributes.get(semconv.RETRY_DELAY, 0) for span in trace.children(operation)[1:]]
    assert waits == pytest.approx([event[semconv.RETRY_DELAY] for event in events])
    assert operation.seconds >= sum(waits)


def test_the_spans_carry_the_ids_that_the_applications_own_listener_saw(
    backends: Backends, thrice_overloaded: Request
):
    trace = _trace(backends, thrice_overloaded)
    operation = _operation(trace)
    seen = thrice_overloaded.commands
    assert operation.attributes[semconv.OPERATION_ID] == seen[0]["operation_id"]
    assert [
        (span.attributes[semconv.OPERATION_ID], span.attributes[semconv.REQUEST_ID])
        for span in trace.children(operation)
    ] == [(command["operation_id"], command["request_id"]) for command in seen]


def test_searching_for_the_outcome_finds_the_retried_traces_and_no_other(
    backends: Backends, traffic: Traffic
):
    found = backends.jaeger.search(traffic.service, tags={semconv.RETRY_OUTCOME: semconv.RETRIED})
    known = {request.trace_id for request in traffic.all}
    assert found.keys() & known == {request.trace_id for request in traffic.retried}


def test_searching_for_the_reason_it_gave_up_finds_those_that_failed(backends: Backends, traffic: Traffic):
    known = {request.trace_id for request in traffic.all}
    refused = {request.trace_id for request in traffic.gave_up if request.attempts == 1}
    exhausted = {request.trace_id for request in traffic.gave_up if request.attempts > 1}
    for reason, expected in (("not_retryable", refused), ("limit", exhausted)):
        found = backends.jaeger.search(traffic.service, tags={semconv.RETRY_OUTCOME: reason})
        assert found.keys() & known == expected


def test_searching_for_an_operation_id_finds_its_trace(backends: Backends, traffic: Traffic):
    for request in traffic.retried[:5]:
        [operation_id] = {command["operation_id"] for command in request.commands}
        found = backends.jaeger.search(traffic.service, tags={semconv.OPERATION_ID: operation_id})
        assert list(found) == [request.trace_id]


def test_searching_for_second_attempts_finds_the_retried_traces(backends: Backends, traffic: Traffic):
    found = backends.jaeger.search(traffic.service, tags={ATTEMPT: 2})
    assert {request.trace_id for request in traffic.retried} <= found.keys()
    assert not found.keys() & {request.trace_id for request in traffic.calm}


def test_a_lost_connection_is_seen_with_its_error_and_the_attempt_that_came_after(
    backends: Backends, traffic: Traffic
):
    for request in traffic.retried[-2:]:
        trace = _trace(backends, request)
        first, second = trace.children(_operation(trace))
        assert first.failed
        assert first.attributes[semconv.ERROR_TYPE].endswith("AutoReconnect")
        assert (second.failed, second.attributes[ATTEMPT]) == (False, 2)


def test_an_operation_that_gave_up_is_an_error_with_the_reason(backends: Backends, traffic: Traffic):
    for request in traffic.gave_up:
        assert request.error is not None
        operation = _operation(_trace(backends, request))
        assert operation.failed
        assert operation.attributes[semconv.RETRY_ATTEMPTS] == request.attempts
        assert operation.attributes[semconv.ERROR_TYPE]
    assert [request.attempts for request in traffic.gave_up] == [1, 1, 1, 6]


def test_nothing_of_the_data_is_in_the_trace(backends: Backends, thrice_overloaded: Request):
    trace = _trace(backends, thrice_overloaded)
    assert all(semconv.DB_QUERY_TEXT not in span.attributes for span in trace.spans)
    assert APP_NAME not in {value for span in trace.spans for value in span.attributes.values()}
