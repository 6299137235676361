"""The Collector keeps what somebody will ask for, and a share of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.conftest import OVERLOAD
from tests.e2e.stack import FILES, references
from tests.e2e.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from otel_retry.mongod import Deployment
    from tests.e2e.conftest import Traffic
    from tests.e2e.stack import Backends
    from tests.e2e.workload import Request

SHARE = float(references(FILES / "collector.yaml")["KEEP_PERCENT"]) / 100
# The Collector calls a trace slow at 500 ms; a request that a busy machine held up may count as slow there, and its
# own figure leaves out the application's span around it.
SURELY_FAST_SECONDS = 0.3


def _fast(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.seconds < SURELY_FAST_SECONDS]


def _within_the_share(kept: int, of: int) -> bool:
    """Five standard deviations: once in two million runs by chance."""
    expected = of * SHARE
    return abs(kept - expected) <= 5 * (of * SHARE * (1 - SHARE)) ** 0.5


def test_every_trace_with_a_retry_an_error_or_a_slow_operation_is_kept(backends: Backends, traffic: Traffic):
    found = backends.jaeger.search(traffic.service)
    missing = {request.trace_id for request in traffic.kept} - found.keys()
    assert not missing
    assert len(traffic.kept) >= 20


def test_of_the_calm_traces_the_configured_share_is_kept(backends: Backends, traffic: Traffic):
    calm = _fast(traffic.calm)
    assert len(calm) > 900
    found = backends.jaeger.search(traffic.service)
    kept = sum(request.trace_id in found for request in calm)
    assert _within_the_share(kept, len(calm)), f"{kept} of {len(calm)}"


def test_what_is_kept_is_kept_whole(backends: Backends, traffic: Traffic):
    found = backends.jaeger.search(traffic.service)
    for request in traffic.all:
        if request.trace_id in found:
            operations = len({command["operation_id"] for command in request.commands})
            assert len(found[request.trace_id]["spans"]) == 1 + operations + request.attempts


def test_agents_and_gateways_keep_the_same_traces_and_keep_them_whole(
    backends: Backends, deployment: Deployment, logs: Path
):
    with (
        backends.collector("gateway-1", "collector-gateway.yaml") as first,
        backends.collector("gateway-2", "collector-gateway.yaml") as second,
        backends.collector("agent", "collector-agent.yaml", GATEWAY_1=first, GATEWAY_2=second) as agent,
        Workload(
            uri=deployment.uri, endpoint=f"http://{agent}", service="scaled", log=logs / "scaled.log"
        ) as application,
    ):
        application.run("update")
        calm = application.run("find", count=400, threads=2)
        retried = []
        for _ in range(20):
            with deployment.fail_command(commands=["find"], times=1, **OVERLOAD):
                retried.extend(application.run("find"))
        application.flush()
        backends.wait_for_traces("scaled", [request.trace_id for request in retried])
        backends.wait_until_settled("scaled")
        # Both gateways had work, and what the agent sent to one it did not send to the other.
        spans = 'sum by (instance) (otelcol_receiver_accepted_spans_total{job="collector-gateway"})'
        backends.wait_until(
            lambda: (
                len([1 for series in backends.prometheus.query(spans) if float(series["value"][1]) > 0]) == 2
            ),
            "one of two gateways got nothing",
        )
    found = backends.jaeger.search("scaled")
    for request in (*calm, *retried):
        if request.trace_id in found:
            assert len(found[request.trace_id]["spans"]) == 2 + request.attempts
    kept = sum(request.trace_id in found for request in _fast(calm))
    assert _within_the_share(kept, len(_fast(calm))), f"{kept} of {len(_fast(calm))}"
