"""How many bytes the spans and metrics of otel_retry are on the wire: the figures under docs/scale.md.

python -m tests.e2e.sizes
"""

from __future__ import annotations

import gzip
import sys
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pymongo import MongoClient

import otel_retry
from otel_retry import mongod

if TYPE_CHECKING:
    from collections.abc import Callable

# What an operator sets, and what the SDK adds.
_RESOURCE = {
    "service.name": "order-service",
    "service.namespace": "shop-backend",
    "service.version": "2026.11.3",
    "service.instance.id": "0f8fad5b-d9cb-469f-a165-70867728950e",
    "deployment.environment.name": "production",
    "telemetry.auto.version": "0.66b1",
}
_OVERLOAD = {"errorCode": 462, "errorLabels": ["RetryableError", "SystemOverloadedError"], "appName": "sizes"}


def measure(deployment: mongod.Deployment) -> dict[str, float]:
    """Bytes per span in one batch, per kind of operation; and of one export of the metrics."""
    spans = InMemorySpanExporter()
    tracers = TracerProvider(resource=Resource.create(_RESOURCE))
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], resource=Resource.create(_RESOURCE))
    with MongoClient(deployment.uri, appname="sizes") as client:
        otel_retry.instrument_client(client, tracer_provider=tracers, meter_provider=meters)
        orders = client["shop"]["orders"]
        orders.insert_one({"_id": 0})
        figures: dict[str, float] = {}

        def record(name: str, operation: Callable[[], Any], *, repeat: int, times: int = 0) -> None:
            """`times` overloads before each of `repeat` operations; a batch is filled with what they left."""
            spans.clear()
            for _ in range(repeat):
                if times:
                    deployment.fail_command(commands=["find"], times=times, **_OVERLOAD)
                operation()
            made = list(spans.get_finished_spans())
            encoded = encode_spans(made).SerializeToString()
            figures[f"{name}: spans per operation"] = len(made) / repeat
            figures[f"{name}: bytes per span"] = len(encoded) / len(made)
            figures[f"{name}: bytes per span, gzip"] = len(gzip.compress(encoded)) / len(made)

        record("find", lambda: orders.find_one({"_id": 0}), repeat=256)
        record("insert", lambda: orders.insert_one({}), repeat=256)
        record("retried once", lambda: orders.find_one({"_id": 0}), repeat=40, times=1)
        record("retried three times", lambda: orders.find_one({"_id": 0}), repeat=10, times=3)
        data = reader.get_metrics_data()
        assert data is not None
        encoded = encode_metrics(data).SerializeToString()
        figures["metrics: bytes per export"] = len(encoded)
        figures["metrics: data points"] = sum(
            len(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        )
        otel_retry.uninstrument()
    return figures


if __name__ == "__main__":
    with mongod.deployment() as _deployment:
        for _name, _value in measure(_deployment).items():
            sys.stdout.write(f"{_name:45} {_value:8.1f}\n")
