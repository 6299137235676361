"""Telemetry that has nowhere to go costs the application nothing, and arrives when there is somewhere again."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import pytest

from scripts import backends as installed
from tests.e2e.conftest import OVERLOAD, need
from tests.e2e.stack import DECISION_SECONDS, Backends
from tests.e2e.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from otel_retry.mongod import Deployment
    from tests.e2e.workload import Request

# A call that waited for an exporter would wait for a second at least: so long is the first pause between its tries. One
# that waited for the end of its tries would wait for a minute. In between there is room for a busy machine.
ONE_PAUSE_SECONDS = 0.5
ALL_TRIES_SECONDS = 20.0


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backends]:
    """Backends of their own: a Jaeger that was killed has forgotten what other tests look for."""
    need(installed.JAEGER, installed.PROMETHEUS, installed.COLLECTOR)
    with Backends(tmp_path_factory.mktemp("outages")) as started:
        yield started


@pytest.fixture(scope="module")
def application(fragile: Backends, deployment: Deployment, logs: Path) -> Iterator[Workload]:
    with Workload(
        uri=deployment.uri, endpoint=fragile.endpoint, service="outages", log=logs / "outages.log"
    ) as started:
        started.run("update")
        yield started


def _retried(application: Workload, deployment: Deployment, count: int) -> list[Request]:
    done: list[Request] = []
    for _ in range(count):
        with deployment.fail_command(commands=["insert"], times=1, **OVERLOAD):
            done.extend(application.run("insert"))
    return done


def _whole(found: dict[str, dict], requests: list[Request]) -> bool:
    return all(
        len(found.get(request.trace_id, {"spans": []})["spans"]) == 2 + request.attempts
        for request in requests
    )


@pytest.mark.parametrize("name", ["collector", "jaeger"])
def test_one_that_is_killed_and_comes_back_costs_no_call_anything_and_gets_what_was_buffered(
    fragile: Backends, application: Workload, deployment: Deployment, name: str
):
    application.run("find", count=300)
    application.flush()
    with fragile.away(name):
        during = application.run("find", count=150)
        retried = _retried(application, deployment, 10)
        # Long enough for the SDK, or the Collector behind its decision, to try and fail more than once.
        time.sleep(4.0 if name == "collector" else DECISION_SECONDS + 2.0)
        retried.extend(_retried(application, deployment, 10))
        during.extend(application.run("find", count=150))
    assert [request.error for request in (*during, *retried)] == [None] * 320
    assert max(request.seconds for request in during) < ALL_TRIES_SECONDS
    assert statistics.median(request.seconds for request in during) < ONE_PAUSE_SECONDS
    fragile.wait_for_traces(application.service, [request.trace_id for request in retried], timeout=120.0)
    fragile.wait_until(
        lambda: _whole(fragile.jaeger.search(application.service), retried), "some of their spans are missing"
    )


def test_the_counts_are_right_after_the_outages(fragile: Backends, application: Workload):
    """Counters are cumulative: what could not be sent in time is in what is sent next."""
    count = 'sum(db_client_operation_duration_seconds_count{job="e2e/outages",db_operation_name="aggregate"})'
    had = fragile.prometheus.value(count)
    with fragile.away("collector"):
        application.run("aggregate", count=25)
        time.sleep(2.0)
    fragile.wait_until(
        lambda: fragile.prometheus.value(count) == had + 25, "the operations of the outage are not counted"
    )
