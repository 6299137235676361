"""What belongs to somebody else and raises: a policy, a tracer, a span, a meter, a hook, an exporter. The operation is
what it would have been, and each fault is one line in the log, whatever the number of threads.

Hooks, samplers, span processors, span exporters and exemplar filters one by one: tests/integration/test_hooks.py and
test_no_leaks.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from opentelemetry.metrics import MeterProvider, NoOpMeter
from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.trace import NoOpTracer, Span, SpanContext, TracerProvider
from pymongo.errors import OperationFailure

import otel_retry
from tests.flavours import OVERLOAD, resolve
from tests.host.conftest import our_lines

OPERATIONS = 12


class Fault(Exception):  # noqa: N818 - a fault of somebody else
    pass


class Faulty:
    """Raises whatever is called on it, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def fail(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        raise Fault("not ours")


async def at_once(mongo: Any, operate: Any) -> list[Any]:
    """The operation many times, from tasks or threads; results and errors."""

    async def one() -> Any:
        try:
            return await (operate() if mongo.is_async else asyncio.to_thread(operate))
        except Exception as error:
            return error

    return await asyncio.gather(*(one() for _ in range(OPERATIONS)))


# Policies


class Raising(otel_retry.RetryPolicy):
    """In every method."""

    def __init__(self) -> None:
        self.faulty = Faulty()

    def on_unavailable(self, context: Any) -> Any:
        return self.faulty.fail()

    on_read_timeout = on_write_timeout = on_request_error = on_unavailable


class Babbling(Raising):
    def on_unavailable(self, context: Any) -> Any:
        self.faulty.calls += 1
        return "again, please"

    on_read_timeout = on_write_timeout = on_request_error = on_unavailable


@pytest.mark.parametrize("kind", [Raising, Babbling])
async def test_a_policy_that_raises_leaves_the_server_s_own_error(
    mongo, deployment, database_name, rig, instrument, caplog, kind
):
    policy = kind()
    instrument(policy, **rig.providers)
    client = mongo.client(deployment.uri)
    collection = client[database_name].c
    await resolve(collection.insert_one({"_id": 1}))
    with (
        caplog.at_level(logging.WARNING, "otel_retry"),
        deployment.fail_command(commands=["find"], appName=client.options.pool_options.appname, **OVERLOAD),
    ):
        errors = await at_once(mongo, lambda: collection.find_one({}))

    assert [type(error) for error in errors] == [OperationFailure] * OPERATIONS
    assert {error.code for error in errors} == {462}
    assert all(isinstance(error.__context__, Fault) is False for error in errors)
    assert policy.faulty.calls == OPERATIONS
    lines = our_lines(caplog)
    assert lines
    assert len(lines) == len(set(lines)), lines
    assert await resolve(collection.find_one({})) == {"_id": 1}
    assert not rig.open


# Telemetry


class FaultySpan(Span):
    def __init__(self, faulty: Faulty) -> None:
        self._faulty = faulty

    def is_recording(self) -> bool:
        return True

    def get_span_context(self) -> SpanContext:
        return self._faulty.fail()

    def end(self, end_time: int | None = None) -> None:
        self._faulty.fail()

    set_attribute = set_attributes = add_event = add_link = update_name = set_status = record_exception = end


class FaultyTracer(NoOpTracer):
    def __init__(self, faulty: Faulty, *, at: str) -> None:
        self._faulty, self._at = faulty, at

    def start_span(self, *_: Any, **__: Any) -> Span:
        return self._faulty.fail() if self._at == "start" else FaultySpan(self._faulty)


class FaultyTracers(TracerProvider):
    def __init__(self, faulty: Faulty, *, at: str) -> None:
        self._faulty, self._at = faulty, at

    def get_tracer(self, *_: Any, **__: Any) -> Any:
        return self._faulty.fail() if self._at == "provider" else FaultyTracer(self._faulty, at=self._at)


class FaultyInstrument:
    def __init__(self, faulty: Faulty) -> None:
        self.record = self.add = self.set = faulty.fail


class FaultyMeter(NoOpMeter):
    def __init__(self, faulty: Faulty, *, at: str) -> None:
        super().__init__("faulty")
        self._faulty, self._at = faulty, at

    def create_histogram(self, *_: Any, **__: Any) -> Any:
        return self._faulty.fail() if self._at == "meter" else FaultyInstrument(self._faulty)

    create_counter = create_up_down_counter = create_histogram


class FaultyMeters(MeterProvider):
    def __init__(self, faulty: Faulty, *, at: str) -> None:
        self._faulty, self._at = faulty, at

    def get_meter(self, *_: Any, **__: Any) -> Any:
        return self._faulty.fail() if self._at == "provider" else FaultyMeter(self._faulty, at=self._at)


class FaultyExporter:
    _preferred_temporality = _preferred_aggregation = None

    def __init__(self, faulty: Faulty) -> None:
        self.export = faulty.fail

    def force_flush(self, *_: Any, **__: Any) -> bool:
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass


def faulty_reader(faulty: Faulty) -> dict[str, Any]:
    reader = PeriodicExportingMetricReader(FaultyExporter(faulty), export_interval_millis=5)
    return {"meter_provider": SdkMeterProvider([reader], shutdown_on_exit=False)}


def all_hooks(faulty: Faulty) -> dict[str, Any]:
    return {
        "tracer_provider": SdkTracerProvider(shutdown_on_exit=False),
        **dict.fromkeys(("request_hook", "response_hook", "failed_hook"), faulty.fail),
    }


BREAKAGES = {
    "get_tracer": lambda faulty: {"tracer_provider": FaultyTracers(faulty, at="provider")},
    "start_span": lambda faulty: {"tracer_provider": FaultyTracers(faulty, at="start")},
    "every method of a span": lambda faulty: {"tracer_provider": FaultyTracers(faulty, at="span")},
    "get_meter": lambda faulty: {"meter_provider": FaultyMeters(faulty, at="provider")},
    "create_histogram": lambda faulty: {"meter_provider": FaultyMeters(faulty, at="meter")},
    "every instrument": lambda faulty: {"meter_provider": FaultyMeters(faulty, at="instrument")},
    "the exporter of metrics": faulty_reader,
    "every hook": all_hooks,
}


@pytest.mark.parametrize("policy", ["backpressure", "driver"])
@pytest.mark.parametrize("breakage", BREAKAGES)
async def test_telemetry_that_raises_changes_no_result_and_is_logged_once(
    mongo, deployment, database_name, instrument, delays, caplog, capfd, breakage, policy
):
    faulty = Faulty()
    options = BREAKAGES[breakage](faulty)
    with caplog.at_level(logging.WARNING, "otel_retry"):
        instrument(policy, **options)
        client = mongo.client(deployment.uri)
        collection = client[database_name].c
        await resolve(collection.insert_one({"_id": 1}))
        # One that PyMongo itself repeats in every version, so that both policies have a retry to report.
        with deployment.fail_command(
            commands=["find"], times=1, appName=client.options.pool_options.appname, errorCode=6
        ):
            assert await resolve(collection.find_one({})) == {"_id": 1}
        found = await at_once(mongo, lambda: collection.find_one({"_id": 1}))
        errors = await at_once(mongo, lambda: collection.insert_one({"_id": 1}))
        while breakage == "the exporter of metrics" and not faulty.calls:
            await asyncio.sleep(0.01)
    for provider in options.values():
        if hasattr(provider, "shutdown"):
            provider.shutdown()

    assert found == [{"_id": 1}] * OPERATIONS
    assert {type(error).__name__ for error in errors} == {"DuplicateKeyError"}
    assert faulty.calls
    lines = our_lines(caplog)
    assert bool(lines) is (breakage != "the exporter of metrics")  # which the SDK's own thread calls
    assert len(lines) <= 8, lines  # once for each place that met it, not once for each operation
    assert "Traceback" not in capfd.readouterr().err  # PyMongo prints what a listener raises


async def test_a_fault_that_many_threads_meet_at_once_is_told_once(caplog):
    from otel_retry.logs import forget_warnings, warn_once

    forget_warnings()
    with caplog.at_level(logging.WARNING, "otel_retry"):
        await asyncio.gather(*(asyncio.to_thread(warn_once, "it", "it broke") for _ in range(1000)))
    assert our_lines(caplog) == ["it broke"]


async def test_without_a_reader_that_works_the_next_one_still_gets_everything(
    mongo, deployment, database_name, instrument
):
    faulty, sound = Faulty(), InMemoryMetricReader()
    broken = PeriodicExportingMetricReader(FaultyExporter(faulty), export_interval_millis=5)
    provider = SdkMeterProvider([broken, sound], shutdown_on_exit=False)
    instrument(meter_provider=provider)
    client = mongo.client(deployment.uri)
    await resolve(client[database_name].c.insert_one({}))
    data = sound.get_metrics_data()
    provider.shutdown()

    names = {metric.name for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert "db.client.operation.duration" in names
