"""Somebody switches instrumentation on and off, or shuts the SDK down, while the application is at work: no operation
fails, every result is right, and at the end everything is as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import threading
import time
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pymongo import MongoClient, monitoring

import otel_retry
from otel_retry import instrumentor
from otel_retry.pymongo import seam
from otel_retry.pymongo.seam.operation import RetriedOperation
from tests.flavours import OVERLOAD, resolve
from tests.host.conftest import our_lines
from tests.host.load import Load
from tests.integration.telemetry_rig import is_operation
from tests.integration.test_lifecycle import differences, driver

try:
    from opentelemetry.instrumentation.pymongo import PymongoInstrumentor
except ImportError:
    PymongoInstrumentor = None

POLICIES = ("backpressure", "driver", "current", "persistent")


@pytest.fixture
def many_switches():
    """Threads take turns as often as they can: what can come in between does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def listeners(client: Any) -> list[Any]:
    events = client._event_listeners
    return [
        *events._EventListeners__command_listeners,
        *events._EventListeners__cmap_listeners,
    ]


async def test_switched_off_and_on_again_under_load(
    mongo, deployment, database_name, rig, caplog, many_switches
):
    before = driver()
    client = mongo.client(deployment.uri)
    with caplog.at_level(logging.WARNING):
        async with Load(mongo, client, database_name) as load:
            for policy in itertools.islice(itertools.cycle(POLICIES), 8):
                # In a thread, so that for tasks as well it comes at any moment.
                await asyncio.to_thread(otel_retry.instrument, policy, **rig.providers)
                await load.progress(3)
                if policy == "current":
                    await asyncio.to_thread(otel_retry.instrument_client, client, "once", **rig.providers)
                    await load.progress(3)
                await asyncio.to_thread(otel_retry.uninstrument)
                await load.progress(1)
        await load.check()

    assert our_lines(caplog) == []
    assert differences(before, driver()) == []
    assert instrumentor._registry.empty
    assert listeners(client) == []
    assert rig.operations
    assert not rig.open
    rig.clear()
    await resolve(client[database_name].load.find_one({}))
    assert rig.spans == []


async def test_settings_replaced_under_load_hold_for_every_client_at_once(
    mongo, deployment, database_name, rig, many_switches
):
    client = mongo.client(deployment.uri)
    async with Load(mongo, client, database_name) as load:
        for policy in itertools.islice(itertools.cycle(POLICIES), 8):
            await asyncio.to_thread(otel_retry.instrument, policy, **rig.providers)
            assert str(instrumentor.state_of(client).policy) == policy
            await load.progress(3)
            assert str(instrumentor.state_of(client).policy) == policy
    await load.check()

    assert len(instrumentor._registry.states()) <= 2  # this client, and perhaps the one that sets failpoints
    assert not rig.open
    # One listener of each kind, however often somebody came meanwhile.
    assert len(listeners(client)) == 2


def test_two_threads_that_instrument_at_once_install_it_once(monkeypatch, caplog):
    """The first is held where it has found nothing installed, so that the second comes meanwhile."""
    before = driver()
    inside = threading.Barrier(2)
    look = seam.check

    def look_when_both_are_here() -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):  # the second waits for its turn instead
            if inside.wait(0.5):
                while not instrumentor._seam.installed:
                    time.sleep(0.001)
                time.sleep(0.05)  # now the other's patches are there, to be taken for PyMongo's own
        return look()

    monkeypatch.setattr(seam, "check", look_when_both_are_here)
    threads = [threading.Thread(target=otel_retry.instrument) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    for module in ("pymongo.synchronous.mongo_client", "pymongo.asynchronous.mongo_client"):
        cls = sys.modules[module]._ClientConnectionRetryable
        assert sum(RetriedOperation in each.__bases__ for each in cls.__mro__) == 1
    assert our_lines(caplog) == []  # "could not be installed", since it was there already
    otel_retry.uninstrument()
    assert differences(before, driver()) == []


def test_many_threads_that_instrument_at_once_install_it_once(deployment, database_name, rig, many_switches):
    before = driver()
    gate = threading.Barrier(16)
    errors: list[BaseException] = []

    def switch(number: int) -> None:
        try:
            gate.wait(60)
            for _ in range(3):
                otel_retry.instrument(POLICIES[number % 2], **rig.providers)
                if number % 4 == 3:
                    otel_retry.uninstrument()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=switch, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []

    otel_retry.instrument(**rig.providers)
    cls = sys.modules["pymongo.synchronous.mongo_client"]._ClientConnectionRetryable
    assert sum(RetriedOperation in each.__bases__ for each in cls.__mro__) == 1
    with MongoClient(deployment.uri) as client:
        client[database_name].c.insert_one({})
        assert [span.name for span in rig.spans if is_operation(span)] == [f"insert {database_name}.c"]
    otel_retry.uninstrument()
    assert differences(before, driver()) == []


@pytest.mark.skipif(PymongoInstrumentor is None, reason="pip install opentelemetry-instrumentation-pymongo")
async def test_the_peer_switched_on_and_off_beside_us_under_load(
    mongo, deployment, database_name, rig, caplog
):
    """contrib's instrumentor, which we switch off wherever we meet it."""
    listening = list(monitoring._LISTENERS.command_listeners)
    peer = PymongoInstrumentor()
    client = mongo.client(deployment.uri)

    def switch(policy: str) -> None:
        peer.instrument(tracer_provider=rig.tracer_provider)
        otel_retry.instrument(policy, **rig.providers)
        with MongoClient(deployment.uri) as other:
            other.admin.command("ping")
        peer.instrument(tracer_provider=rig.tracer_provider)
        with MongoClient(deployment.uri) as other:
            other.admin.command("ping")
        otel_retry.uninstrument()

    try:
        async with Load(mongo, client, database_name) as load:
            for policy in POLICIES:
                await asyncio.to_thread(switch, policy)
                await load.progress(3)
        await load.check()
    finally:
        if peer.is_instrumented_by_opentelemetry:
            peer.uninstrument()
        monitoring._LISTENERS.command_listeners[:] = listening
        PymongoInstrumentor._commandtracer_instance = peer._commandtracer_instance = None

    # Once for each instrument(), however often the peer came back.
    assert len(our_lines(caplog)) == len(POLICIES)
    assert not rig.open


class Discarded:
    """A metric exporter of the kind that costs nothing."""

    _preferred_temporality = _preferred_aggregation = None

    def export(self, *_: Any, **__: Any) -> None:
        pass

    def force_flush(self, *_: Any, **__: Any) -> bool:
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize("policy", ["backpressure", "driver"])
async def test_the_sdk_shut_down_under_load(
    mongo, deployment, database_name, instrument, delays, caplog, policy
):
    """As a program does it that ends in good order: first the telemetry, and the last requests are still answered."""
    exporter = InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=5))
    periodic = PeriodicExportingMetricReader(Discarded(), export_interval_millis=5)
    meters = MeterProvider([periodic, InMemoryMetricReader()], shutdown_on_exit=False)
    instrument(policy, tracer_provider=tracers, meter_provider=meters)
    client = mongo.client(deployment.uri)
    name = client.options.pool_options.appname
    faults = (
        deployment.fail_command(commands=["find", "update"], probability=0.05, appName=name, **OVERLOAD)
        if policy == "backpressure"
        else contextlib.nullcontext()
    )

    with faults:
        async with Load(mongo, client, database_name) as load:
            await load.progress(10)
            await asyncio.gather(asyncio.to_thread(tracers.shutdown), asyncio.to_thread(meters.shutdown))
            await load.progress(10)
            # A client that is first met now finds providers that are shut down already.
            other = mongo.client(deployment.uri)
            assert (await resolve(other.admin.command("ping")))["ok"] == 1
    await load.check()

    assert exporter.get_finished_spans()
    assert our_lines(caplog) == []
