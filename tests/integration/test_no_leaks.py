"""Nothing is left behind by operations that end badly, nothing of the application gets out, and nobody who collects
telemetry can slow an operation down or make it fail.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import statistics
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.metrics import ExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import Sampler
from pymongo import InsertOne, MongoClient
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DuplicateKeyError,
    InvalidDocument,
    OperationFailure,
    PyMongoError,
)
from pymongo.monitoring import CommandListener

import otel_retry
from otel_retry import instrumentor
from otel_retry.logs import _said
from otel_retry.pymongo import listener as listener_module
from otel_retry.telemetry import spans as spans_module
from tests.fakes.wire_server import FakeServer
from tests.flavours import OVERLOAD, resolve
from tests.integration.telemetry_rig import Rig, eventually, first_of, outcome

MANY = 1_000


class Cancelling(CommandListener):
    """Cancels in mid-command: what a listener raises that is no Exception goes through PyMongo to the caller."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.armed = False

    def started(self, event: Any) -> None:
        pass

    def succeeded(self, event: Any) -> None:
        if self.armed and event.command_name == "find":
            raise self.error

    def failed(self, event: Any) -> None:
        pass


def sizes(client: Any) -> dict[str, int]:
    """Everything of ours that could grow."""
    gc.collect()  # the instruments of earlier tests' providers are on their way out
    state = instrumentor._registry.of(client)
    return {
        "states": len(instrumentor._registry),
        "instruments": len(instrumentor._hub._instruments),
        "names": len(state.telemetry.naming._known),
        "collections": len(state.telemetry.naming._namespaces),
        # A driver makes a new session for one that was cancelled, so there may be more of them, up to a limit.
        "too many sessions": len(state.telemetry.sessions) > 1000,
        "connections": sum(len(pool.connections) for pool in state.pools.pools()),
        "borrowed": sum(pool.used + pool.pending + len(pool.created) for pool in state.pools.pools()),
        "pools": len(list(state.pools.pools())),
        "warnings": len(_said),
    }


class Subject:
    """A client of a fake server, whose operations can be made to end in three bad ways."""

    def __init__(self, mongo: Any, server: FakeServer) -> None:
        self.error = asyncio.CancelledError if mongo.is_async else KeyboardInterrupt
        self.cancelling = Cancelling(self.error)
        self.client = mongo.client(server.uri, event_listeners=[self.cancelling])
        self.server = server
        self.collection = self.client.db.c

    async def cancelled(self) -> None:
        self.cancelling.armed = True
        with pytest.raises(self.error):
            await resolve(self.collection.find_one({}))
        self.cancelling.armed = False

    async def failed(self) -> None:
        with pytest.raises(InvalidDocument):
            await resolve(self.collection.insert_one({"it": object()}))

    async def suppressed(self) -> None:
        with suppress_instrumentation():
            await resolve(self.collection.find_one({}))


@pytest.fixture
def subject(mongo):
    with FakeServer("mongos") as server:
        made: list[Subject] = []

        def make() -> Subject:
            made.append(Subject(mongo, server))
            return made[-1]

        yield make


@pytest.mark.parametrize("way", ["cancelled", "failed", "suppressed"])
async def test_thousands_of_operations_that_end_badly_leave_nothing(mongo, subject, watch, rig, way):
    watch()
    one = subject()
    end = getattr(one, way)
    await resolve(one.collection.find_one({}))
    for _ in range(10):
        await end()
    before, here = sizes(one.client), context.get_current()
    rig.clear()
    for number in range(MANY):
        await end()
        if not number % 500:
            assert not rig.open
    assert context.get_current() is here
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert spans_module.inherited_trace.get() is None
    assert listener_module._orphan.get() is None
    assert sizes(one.client) == before
    assert not rig.open
    operations = rig.operations
    assert len(operations) == (0 if way == "suppressed" else MANY)
    assert {outcome(span) for span in operations} <= {"cancelled", "not_retryable"}
    await mongo.close()


async def test_memory_is_flat_over_blocks_of_all_sorts_of_operations(mongo, subject, watch, rig):
    watch(query_text_max_length=200)
    one = subject()

    async def block() -> None:
        for _ in range(12):
            await resolve(one.collection.find_one({}))
            await one.cancelled()
            await one.failed()
            await one.suppressed()
        one.server.clear()
        rig.clear()
        rig.metrics()
        gc.collect()

    await block()
    tracemalloc.start()
    try:
        held = []
        for _ in range(8):
            await block()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    await mongo.close()

    # 144 operations, and a span that stays is some 2,000 bytes.
    # Tasks that were cancelled last are still on their way out: the lowest of a few blocks is what stays.
    assert min(held[-3:]) - min(held[:3]) < 60_000, held


async def test_a_client_that_is_dropped_is_forgotten(mongo, watch, rig, deployment):
    watch()
    before = len(instrumentor._registry)
    for _ in range(5):
        client = mongo.client(deployment.uri)
        await resolve(client.db.c.find_one({}))
        await mongo.close()
        del client
    gc.collect()

    assert len(instrumentor._registry) <= before + 1


# Switched off in mid-flight


async def in_background(mongo: Any, operate: Any) -> Any:
    if mongo.is_async:
        return asyncio.ensure_future(operate())
    return asyncio.ensure_future(asyncio.to_thread(operate))


@pytest.fixture
def held_back():
    """A fake server that keeps the answer to the next find until told."""
    with FakeServer("mongos") as server:
        arrived, go = threading.Event(), threading.Event()

        def answer(_: Any) -> dict[str, Any]:
            arrived.set()
            go.wait(60)
            return {"cursor": {"id": 0, "ns": "db.c", "firstBatch": []}}

        server.reply("find", answer)
        yield server, arrived, go
        go.set()


async def test_uninstrument_in_mid_flight_ends_what_is_open(mongo, watch, rig, held_back):
    server, arrived, go = held_back
    watch()
    client = mongo.client(server.uri)
    running = await in_background(mongo, lambda: client.db.c.find_one({}))
    await eventually(arrived.is_set)
    otel_retry.uninstrument()
    go.set()
    assert await running is None

    assert not rig.open
    assert rig.attempts(rig.operation()) == [("find", 1)]
    assert outcome(rig.operation()) == "first_try"
    rig.clear()
    await resolve(client.db.c.find_one({}))
    assert not rig.spans
    await mongo.close()


async def test_a_command_under_way_while_it_is_switched_off_is_no_error(mongo, watch, rig, held_back):
    server, arrived, go = held_back
    watch()
    client = mongo.client(server.uri)
    running = await in_background(mongo, lambda: client.db.c.find_one({}))
    await eventually(arrived.is_set)
    otel_retry.uninstrument()
    go.set()
    await running
    await mongo.close()

    assert rig.command().status.is_ok


async def test_uninstrument_ends_the_span_of_a_transaction(connect, things, watch, rig):
    watch()
    client = connect()
    await resolve(things(client).insert_one({}))
    session = await resolve(client.start_session())
    await resolve(session.start_transaction())
    await resolve(things(client).insert_one({}, session=session))
    otel_retry.uninstrument()
    await resolve(session.commit_transaction())
    await resolve(session.end_session())

    assert not rig.open


async def test_a_transaction_that_begins_while_it_is_switched_off_leaves_no_span(
    connect, things, instrument, rig, monkeypatch
):
    tracer = rig.tracer_provider.get_tracer("otel_retry")
    start = type(tracer).start_span

    def start_and_switch_off(self, name: str, *args: Any, **options: Any) -> Any:
        span = start(self, name, *args, **options)
        if name == "transaction":
            otel_retry.uninstrument()
        return span

    monkeypatch.setattr(type(tracer), "start_span", start_and_switch_off)
    instrument(**rig.providers)
    client = connect()
    session = await resolve(client.start_session())
    await resolve(session.start_transaction())
    await resolve(things(client).insert_one({}, session=session))
    await resolve(session.commit_transaction())
    await resolve(session.end_session())

    assert [span.name for span in rig.spans] == ["transaction"]
    assert not rig.open


async def test_settings_replaced_between_two_attempts_leave_one_tree(
    mongo, connect, things, watch, rig, fail, monkeypatch
):
    watch()
    client = connect()

    async def switch(_: float) -> None:
        watch(policy="current")
        await resolve(client.admin.command("ping"))  # from here on another listener is there

    monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep_async", switch)
    monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep", lambda seconds: asyncio.run(switch(seconds)))
    fail(client, "find", times=1, **OVERLOAD)
    await (await in_background(mongo, lambda: things(client).find_one({})))

    found = [child for child in rig.children(rig.operation("find")) if child.name == "find"]
    assert [each.attributes["mongodb.retry.attempt"] for each in found] == [1, 2]
    assert not rig.open


async def test_uninstrument_ends_a_command_outside_of_any_operation(mongo, watch, rig):
    with FakeServer("mongos") as server:
        arrived, go = threading.Event(), threading.Event()

        def answer(_: Any) -> dict[str, Any]:
            arrived.set()
            go.wait(10)
            return {}

        server.reply("find", {"cursor": {"id": 5, "ns": "db.c", "firstBatch": [{"_id": 1}]}})
        server.reply("killCursors", answer)
        watch()
        client = mongo.client(server.uri)
        cursor = client.db.c.find({})
        await first_of(cursor)
        running = await in_background(mongo, cursor.close)
        await eventually(arrived.is_set)
        assert rig.open
        otel_retry.uninstrument()
        assert not rig.open
        go.set()
        await running
        await mongo.close()

    assert [span.name for span in rig.operations] == ["find db.c", "killCursors db.c"]
    assert not rig.open


# Collectors that are slow or broken


class Hanging(SpanExporter):
    """A backend that takes the connection and never answers."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.entered.set()
        self.go.wait(60)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.go.set()


async def test_an_exporter_that_hangs_slows_no_operation(mongo, instrument, caplog):
    caplog.set_level(logging.CRITICAL, "opentelemetry.sdk")  # it says that it drops spans, which is right
    hanging = Hanging()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(hanging, max_queue_size=64, max_export_batch_size=32, schedule_delay_millis=10)
    )

    async def median(client: Any) -> float:
        taken = []
        for _ in range(150):
            started = time.perf_counter()
            await resolve(client.db.c.find_one({}))
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    with FakeServer("mongos") as server:
        client = mongo.client(server.uri)
        instrument(tracer_provider=TracerProvider(shutdown_on_exit=False))
        await median(client)
        usual = await median(client)
        instrument(tracer_provider=provider)
        await resolve(client.db.c.find_one({}))
        await eventually(hanging.entered.is_set)
        hung = await median(client)
        otel_retry.uninstrument()
        await mongo.close()
    hanging.go.set()
    provider.shutdown()

    assert hung < usual * 3 + 0.05  # and not the minute that the exporter takes


class Broken(SpanProcessor, SpanExporter, Sampler, ExemplarFilter):
    """Raises wherever it is called."""

    def __init__(self) -> None:
        self.raised = 0

    def _fail(self, *_: Any, **__: Any) -> Any:
        self.raised += 1
        raise RuntimeError("the collector's own fault")

    on_start = on_end = export = should_sample = _fail

    def get_description(self) -> str:
        return "Broken"

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


class BrokenAtEnd(Broken):
    def on_start(self, *_: Any, **__: Any) -> None:
        pass


def with_sampler(broken: Broken) -> dict[str, Any]:
    return {"tracer_provider": TracerProvider(sampler=broken, shutdown_on_exit=False)}


def with_processor(broken: Broken) -> dict[str, Any]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(broken)
    return {"tracer_provider": provider}


def with_exporter(broken: Broken) -> dict[str, Any]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(broken))
    return {"tracer_provider": provider}


def with_exemplars(broken: Broken) -> dict[str, Any]:
    return {
        "meter_provider": MeterProvider(
            [InMemoryMetricReader()], exemplar_filter=broken, shutdown_on_exit=False
        )
    }


BREAKAGES = {
    "sampler": (with_sampler, Broken),
    "processor at start": (with_processor, Broken),
    "processor at end": (with_processor, BrokenAtEnd),
    "exporter": (with_exporter, Broken),
    "exemplar filter": (with_exemplars, Broken),
}


async def everything(client: Any, collection: Any, fail: Any) -> list[str]:
    """Operations that succeed, are retried, fail; the errors that came out, by name."""
    raised = []

    async def attempt(operation: Any) -> None:
        try:
            await resolve(operation())
        except Exception as error:
            raised.append(type(error).__name__)

    await attempt(lambda: collection.insert_one({"_id": 1}))
    await attempt(lambda: collection.insert_one({"_id": 1}))
    await attempt(lambda: collection.insert_one({"it": object()}))
    fail(client, "find", times=1, errorCode=6)
    await attempt(lambda: collection.find_one({}))
    fail(client, "insert", times=1, errorCode=6, errorLabels=["RetryableWriteError"])
    await attempt(lambda: collection.bulk_write([InsertOne({})]))
    fail(client, "find", errorCode=6)
    await attempt(lambda: collection.find_one({}))
    fail(client, "find", errorCode=2, times=1)
    await attempt(lambda: collection.find_one({}))
    await attempt(lambda: collection.database.command("nonsense"))
    session = await resolve(client.start_session())
    await attempt(session.start_transaction)
    await attempt(lambda: collection.insert_one({}, session=session))
    await attempt(session.commit_transaction)
    await attempt(session.end_session)
    return raised


@pytest.mark.parametrize("policy", ["backpressure", "driver"])
@pytest.mark.parametrize("breakage", BREAKAGES)
async def test_a_collector_that_raises_never_reaches_the_application(
    request, connect, things, instrument, fail, delays, caplog, capfd, breakage, policy
):
    make, kind = BREAKAGES[breakage]
    broken = kind()
    instrument(policy=policy, **make(broken))
    client = connect()
    here = context.get_current()
    raised = await everything(client, things(client), fail)

    assert raised == [
        "DuplicateKeyError",
        "InvalidDocument",
        "OperationFailure",
        "OperationFailure",
        "OperationFailure",
    ]
    assert context.get_current() is here
    assert spans_module.inherited_trace.get() is None
    assert broken.raised
    said = [
        record for record in caplog.records if record.name == "otel_retry" and record.levelname == "WARNING"
    ]
    assert len(said) <= 5  # once for each place, not once for each operation
    assert "Traceback" not in capfd.readouterr().err


async def test_a_metric_that_raises_keeps_no_span_open(connect, things, instrument):
    rig = Rig()
    broken = Broken()
    try:
        instrument(tracer_provider=rig.tracer_provider, **with_exemplars(broken))
        client = connect()
        await resolve(things(client).find_one({}))
        assert not rig.open
        assert len(rig.spans) == 2
    finally:
        rig.shutdown()


LATE = """
    import asyncio, json, sys
    from opentelemetry import metrics, trace
    import otel_retry
    from otel_retry import telemetry
    from pymongo import AsyncMongoClient, MongoClient

    otel_retry.instrument()
    uri, is_async, signals = sys.argv[1], sys.argv[2] == "async", sys.argv[3]
    OperationTrace = telemetry.OperationTrace
    telemetry.OperationTrace = None  # nothing is built before an SDK is there, or this would be said in a warning

    async def main():
        client = (AsyncMongoClient if is_async else MongoClient)(uri)

        async def find():
            found = client.db.c.find_one({})
            if is_async:
                await found

        await find()
        assert not client._event_listeners.enabled_for_commands
        from tests.integration.telemetry_rig import Rig
        rig = Rig()
        telemetry.OperationTrace = OperationTrace
        if "spans" in signals:
            trace.set_tracer_provider(rig.tracer_provider)
        if "metrics" in signals:
            metrics.set_meter_provider(rig.meter_provider)
        await find()
        print(json.dumps({"tree": rig.names(), "metrics": sorted(rig.metrics())}))
        closed = client.close()
        if is_async:
            await closed
        rig.shutdown()

    asyncio.run(main())
"""


@pytest.mark.parametrize("signals", ["spans", "metrics", "spans metrics"])
async def test_providers_that_are_set_after_instrument_are_used(mongo, deployment, signals):
    """In a process of its own: a global provider can be set but once."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", textwrap.dedent(LATE), deployment.uri, mongo.name, signals],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    found = json.loads(done.stdout)
    assert found["tree"] == ([["find db.c", ["find"]]] if "spans" in signals else [])
    expected = {"db.client.operation.duration", "mongodb.retry.budget.tokens", "db.client.connection.count"}
    assert expected & set(found["metrics"]) == (expected if "metrics" in signals else set())


# What the application keeps to itself

PLANTED = "planted4711"


async def plant_everywhere(client: Any, collection: Any, fail: Any) -> list[BaseException]:
    """Values in documents, filters, updates, pipelines, commands, sessions and in all errors that quote them."""
    raised: list[BaseException] = []

    async def attempt(operation: Any) -> None:
        try:
            found = await resolve(operation())
            if hasattr(found, "close"):
                await resolve(found.close())
        except PyMongoError as error:
            raised.append(error)
        except InvalidDocument as error:
            raised.append(error)

    await attempt(lambda: collection.create_index("key", unique=True))
    await attempt(lambda: collection.insert_one({"key": PLANTED, "deep": [{"a": PLANTED.encode()}]}))
    await attempt(lambda: collection.insert_one({"key": PLANTED}))
    await attempt(lambda: collection.insert_many([{"key": 1}, {"key": PLANTED}]))
    await attempt(lambda: collection.bulk_write([InsertOne({"key": PLANTED})]))
    await attempt(lambda: collection.find_one({"key": PLANTED}))
    await attempt(lambda: collection.find_one({"key": {"$bad": PLANTED}}))
    await attempt(lambda: collection.update_one({"key": PLANTED}, {"$set": {"other": PLANTED}}))
    await attempt(lambda: collection.update_one({"key": PLANTED}, {"$bad": {"other": PLANTED}}))
    await attempt(lambda: collection.find_one_and_update({"key": PLANTED}, {"$inc": {"key": 1}}))
    await attempt(lambda: collection.aggregate([{"$match": {"key": PLANTED}}, {"$bad": PLANTED}]))
    await attempt(lambda: collection.distinct("key", {"key": PLANTED}))
    await attempt(lambda: collection.insert_one({"key": type(PLANTED, (), {})()}))
    await attempt(lambda: collection.database.command("find", collection.name, filter={"key": PLANTED}))
    await attempt(lambda: collection.database.command("ping", comment=PLANTED))
    await attempt(lambda: collection.database.command("nonsense", PLANTED, more=PLANTED))
    await attempt(lambda: collection.database.command("usersInfo", PLANTED))
    fail(client, "find", times=2, **OVERLOAD)
    await attempt(lambda: collection.find_one({"key": PLANTED}, comment=PLANTED))
    fail(client, "find", **OVERLOAD)
    await attempt(lambda: collection.find_one({"key": PLANTED}))
    fail(client, "insert", times=1, closeConnection=True)
    await attempt(lambda: collection.insert_one({"key": PLANTED}))
    return raised


def exported(rig: Rig) -> dict[str, str]:
    """Everything that leaves the process, by where it stands."""
    found = {f"span {span.name}": span.to_json() for span in rig.spans}
    for name, metric in rig.metrics().items():
        found[f"metric {name}"] = metric.to_json()
    return found


@pytest.mark.parametrize("policy", ["backpressure", "driver"])
@pytest.mark.parametrize("length", [0, 2000], ids=["without text", "with text"])
async def test_no_value_of_the_application_is_in_anything_that_is_exported_or_logged(
    connect, things, watch, rig, fail, delays, caplog, policy, length, monkeypatch
):
    monkeypatch.setattr("random.random", lambda: 0.0)
    caplog.set_level(logging.DEBUG, "otel_retry")
    watch(policy=policy, query_text_max_length=length)
    client = connect()
    raised = await plant_everywhere(client, things(client), fail)

    kinds = {type(error) for error in raised}
    assert {DuplicateKeyError, BulkWriteError, OperationFailure, InvalidDocument} <= kinds
    assert sum(PLANTED in str(error) for error in raised) >= 4  # the errors themselves do say it
    everything_out = exported(rig)
    if length:
        assert sum('"db.query.text"' in text for text in everything_out.values()) >= 5
    for record in caplog.records:
        if record.name == "otel_retry":
            everything_out[f"log {record.msg}"] = record.getMessage() + str(record.exc_text)
    for error in raised:
        everything_out[f"notes of {type(error).__name__}"] = "\n".join(getattr(error, "__notes__", ()))
    leaks = {where for where, text in everything_out.items() if PLANTED in text}
    assert leaks - USERS_INFO == set(), leaks


USERS_INFO = {"span usersInfo", "span nonsense"}
"""Known, and tested below: a command that takes no collection."""


async def test_the_argument_of_a_command_that_takes_no_collection_is_not_exported(
    connect, things, watch, rig
):
    watch(query_text_max_length=2000)
    await resolve(things(connect()).database.command("usersInfo", PLANTED))

    assert PLANTED not in "".join(exported(rig).values())


async def test_with_raw_text_the_values_are_there(connect, things, watch, rig):
    """What the tests above look for would be found."""
    watch(query_text_max_length=2000, query_text_raw=True)
    collection = things(connect())
    await resolve(collection.create_index("key", unique=True))
    await resolve(collection.insert_one({"key": PLANTED}))
    with pytest.raises(DuplicateKeyError):
        await resolve(collection.insert_one({"key": PLANTED}))

    found = "".join(span.to_json() for span in rig.spans)
    assert found.count(PLANTED) >= 3
    assert "E11000" in rig.operations[-1].attributes["exception.message"]


def test_a_server_that_is_gone_says_where_it_was_and_nothing_else(watch, rig):
    watch()
    with FakeServer("mongos") as server:
        uri = server.uri.replace("mongodb://", f"mongodb://user:{PLANTED}@")
    with MongoClient(uri, serverSelectionTimeoutMS=50) as client:
        with pytest.raises(AutoReconnect):
            client.db.c.find_one({"key": PLANTED})

    found = "".join(exported(rig).values())
    assert f"127.0.0.1:{server.port}" in found
    assert PLANTED not in found
