"""The floor: the OpenTelemetry calls that an operation cannot do without, and nothing else, with as many attributes.

tests/unit/test_benchmarks.py compares these numbers with what an operation really reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.variants import _sdk

if TYPE_CHECKING:
    from collections.abc import Callable

# What insert_one on a replica set reports: see `test_the_floor_has_as_many_attributes_as_an_operation`.
OPERATION_ATTRIBUTES: dict[str, Any] = {
    "db.system.name": "mongodb",
    "db.namespace": "bench",
    "db.collection.name": "coll",
    "db.operation.name": "insert",
    "db.operation.summary": "insert bench.coll",
    "mongodb.retry.policy": "backpressure",
    "mongodb.retry.attempts": 1,
    "mongodb.retry.outcome": "first_try",
    "mongodb.operation_id": 1234567890,
}
COMMAND_ATTRIBUTES: dict[str, Any] = {
    "db.system.name": "mongodb",
    "db.command.name": "insert",
    "db.namespace": "bench",
    "db.collection.name": "coll",
    "db.query.summary": "insert bench.coll",
    "server.address": "127.0.0.1",
    "server.port": 27017,
    "network.transport": "tcp",
    "mongodb.retry.attempt": 1,
    "mongodb.operation_id": 1234567890,
    "mongodb.request_id": 1234567890,
    "db.mongodb.server_connection_id": 21,
    "db.mongodb.driver_connection_id": 1,
    "db.mongodb.lsid": "0f0e0d0c-0b0a-4908-8706-050403020100",
    "db.mongodb.txn_number": 1,
}
DURATION_ATTRIBUTES: dict[str, Any] = {
    "db.system.name": "mongodb",
    "db.operation.name": "insert",
    "db.namespace": "bench",
    "db.collection.name": "coll",
    "server.address": "127.0.0.1",
    "server.port": 27017,
}
POOL_ATTRIBUTES: dict[str, Any] = {"db.client.connection.pool.name": "client-1@127.0.0.1:27017"}


def _instruments() -> tuple[Any, Any, Any]:
    from opentelemetry.metrics import get_meter

    meter = get_meter("floor")
    boundaries = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0]
    duration, wait, use = (
        meter.create_histogram(name, unit="s", explicit_bucket_boundaries_advisory=boundaries)
        for name in ("duration", "wait", "use")
    )
    return duration, wait, use


def _recording(*, spans: int = 2, metrics: bool = True) -> Callable[[], Callable[[int], None]]:
    def prepare() -> Callable[[int], None]:
        _sdk(metrics=metrics)
        from opentelemetry import context as otel_context
        from opentelemetry.trace import SpanKind, get_tracer, set_span_in_context

        tracer = get_tracer("floor")
        if metrics:
            duration, wait, use = _instruments()

        def block(count: int) -> None:
            for _ in range(count):
                operation = tracer.start_span(
                    "insert bench.coll", None, SpanKind.CLIENT, OPERATION_ATTRIBUTES
                )
                context = set_span_in_context(operation)
                token = otel_context.attach(context)
                if metrics:
                    wait.record(0.0001, POOL_ATTRIBUTES, context)
                if spans == 2:
                    tracer.start_span("insert", context, SpanKind.CLIENT, COMMAND_ATTRIBUTES).end()
                if metrics:
                    use.record(0.0001, POOL_ATTRIBUTES, context)
                    duration.record(0.0002, DURATION_ATTRIBUTES, context)
                otel_context.detach(token)
                operation.end()

        return block

    return prepare


def _not_sampled(*, metrics: bool) -> Callable[[], Callable[[int], None]]:
    def prepare() -> Callable[[int], None]:
        _sdk(sampled=False, metrics=metrics)
        from opentelemetry.context import get_current
        from opentelemetry.trace import SpanKind, get_tracer

        tracer = get_tracer("floor")
        if metrics:
            duration, wait, use = _instruments()

        def block(count: int) -> None:
            for _ in range(count):
                tracer.start_span("insert bench.coll", None, SpanKind.CLIENT, OPERATION_ATTRIBUTES)
                if metrics:
                    context = get_current()
                    wait.record(0.0001, POOL_ATTRIBUTES, context)
                    use.record(0.0001, POOL_ATTRIBUTES, context)
                    duration.record(0.0002, DURATION_ATTRIBUTES, context)

        return block

    return prepare


FLOORS: dict[str, Callable[[], Callable[[int], None]]] = {
    "floor_off": _not_sampled(metrics=False),
    "floor_off_metrics": _not_sampled(metrics=True),
    "floor_recording": _recording(),
    "floor_recording_no_metrics": _recording(metrics=False),
    "floor_retried": _recording(spans=1),
}
FLOOR_OF = {name.removeprefix("floor_"): name for name in FLOORS}
