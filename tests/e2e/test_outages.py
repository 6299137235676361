"""Telemetry that has nowhere to go costs the application nothing, and arrives when there is somewhere again."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import OVERLOAD
from tests.e2e.stack import DECISION_SECONDS

if TYPE_CHECKING:
    from otel_retry.mongod import Deployment
    from tests.e2e.conftest import Traffic
    from tests.e2e.stack import Backends
    from tests.e2e.workload import Request, Workload

# The shortest that a call would take if it waited for an exporter even once: the first of its waits is a second.
ONE_WAIT_SECONDS = 0.7


def _retried(workload: Workload, deployment: Deployment, count: int) -> list[Request]:
    done: list[Request] = []
    for _ in range(count):
        with deployment.fail_command(commands=["insert"], times=1, **OVERLOAD):
            done.extend(workload.run("insert"))
    return done


def _whole(found: dict[str, dict], requests: list[Request]) -> bool:
    return all(len(found[request.trace_id]["spans"]) == 2 + request.attempts for request in requests)


@pytest.mark.parametrize("name", ["collector", "jaeger"])
def test_one_that_is_killed_and_comes_back_costs_no_call_anything_and_gets_what_was_buffered(
    backends: Backends, workload: Workload, deployment: Deployment, traffic: Traffic, name: str
):
    before = workload.run("find", count=300)
    workload.flush()
    with backends.away(name):
        during = workload.run("find", count=150)
        retried = _retried(workload, deployment, 10)
        # Long enough for the SDK, or the Collector behind its decision, to try and fail more than once.
        time.sleep(4.0 if name == "collector" else DECISION_SECONDS + 2.0)
        retried.extend(_retried(workload, deployment, 10))
        during.extend(workload.run("find", count=150))
    assert [request.error for request in (*during, *retried)] == [None] * 320
    assert max(request.seconds for request in during) < ONE_WAIT_SECONDS
    usual = statistics.median(request.seconds for request in before)
    assert statistics.median(request.seconds for request in during) < 2 * usual + 0.002
    found = backends.wait_for_traces(
        workload.service, [request.trace_id for request in retried], timeout=60.0
    )
    assert _whole(found, retried)


def test_the_counts_are_right_after_the_outages(backends: Backends, workload: Workload, traffic: Traffic):
    """Counters are cumulative: what could not be sent in time is in what is sent next."""
    count = (
        'sum(db_client_operation_duration_seconds_count{job="e2e/workload",db_operation_name="aggregate"})'
    )
    had = backends.prometheus.value(count)
    with backends.away("collector"):
        workload.run("aggregate", count=25)
        time.sleep(2.0)
    backends.wait_until(
        lambda: backends.prometheus.value(count) == had + 25, "the operations of the outage are not counted"
    )
