"""What Prometheus holds of the application, and the way from a point on a graph to its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Traffic
    from tests.e2e.stack import Backends

JOB = 'job="e2e/traffic"'
DURATION = "db_client_operation_duration_seconds"


def test_the_metrics_count_what_the_application_did(backends: Backends, traffic: Traffic):
    retries = sum(len(request.commands) for request in traffic.kept) - len(traffic.kept)
    operations = sum(len({each["operation_id"] for each in request.commands}) for request in traffic.all)
    # A client that is closed says goodbye to the server; no request asked for that.
    counted = f'sum({DURATION}_count{{{JOB},db_operation_name!="endSessions"}})'
    for expression, expected in (
        (counted, operations),
        (f"sum(mongodb_retry_attempts_total{{{JOB}}})", retries),
        (f"sum(mongodb_retry_gave_up_total{{{JOB}}})", len(traffic.gave_up)),
        (f"sum(mongodb_retry_budget_consumed_total{{{JOB}}})", retries),
    ):
        backends.wait_until(
            lambda expression=expression, expected=expected: (
                backends.prometheus.value(expression) >= expected
            ),
            f"{expression} does not reach {expected}",
        )
        assert backends.prometheus.value(expression) == expected


def test_the_labels_name_the_service_and_its_instance(backends: Backends, traffic: Traffic):
    [series, *_] = backends.prometheus.query(f"{DURATION}_count{{{JOB}}}")
    labels = series["metric"]
    assert (labels["job"], labels["instance"]) == ("e2e/traffic", "traffic-1")
    assert (labels["service_name"], labels["service_namespace"]) == ("traffic", "e2e")
    assert not [name for name in labels if name.startswith("otel_scope")]


def test_exemplars_of_what_was_retried_slow_or_failed_lead_to_a_trace_that_jaeger_has(
    backends: Backends, traffic: Traffic
):
    kept = {request.trace_id for request in traffic.kept}
    # What people click on.
    slow = {request.trace_id for request in traffic.slow}

    def interesting() -> set[str]:
        exemplars = backends.prometheus.exemplars(f"{DURATION}_bucket{{{JOB}}}")
        found = {each["labels"]["trace_id"] for each in exemplars} & kept
        return found if found & slow else set()

    for trace_id in backends.wait_until(interesting, "no exemplar of a slow operation"):
        assert backends.jaeger.trace(trace_id) is not None


def test_every_exemplar_points_at_a_span_of_the_application(backends: Backends, traffic: Traffic):
    exemplars = backends.prometheus.exemplars(f"{DURATION}_bucket{{{JOB}}}")
    assert exemplars
    traces = backends.jaeger.search(traffic.service)
    for each in exemplars:
        trace = traces.get(each["labels"]["trace_id"])
        # Of calm traces most are sampled away, with the exemplars that point at them.
        if trace is not None:
            assert each["labels"]["span_id"] in {span["spanID"] for span in trace["spans"]}


def test_the_collector_and_its_sampler_report_about_themselves(backends: Backends, traffic: Traffic):
    backends.wait_until(
        lambda: backends.prometheus.query(
            'otelcol_processor_tail_sampling_global_count_traces_sampled_total{job="collector"}'
        ),
        "the Collector's own metrics are not in Prometheus",
    )
    refused = 'sum(otelcol_receiver_refused_spans_total{job="collector"})'
    assert backends.prometheus.value(refused) == 0
