"""Switching it on and off, and all that can happen to a process meanwhile: threads, forks, interrupts, its end.

The driver must be found as it was, errors must be PyMongo's own, and results the same as without the plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gridfs
import pymongo
import pymongo.asynchronous.client_bulk
import pymongo.asynchronous.database
import pymongo.asynchronous.mongo_client
import pymongo.asynchronous.pool
import pymongo.common
import pymongo.monitoring
import pymongo.synchronous.client_bulk
import pymongo.synchronous.database
import pymongo.synchronous.mongo_client
import pymongo.synchronous.pool
import pytest
from bson import ObjectId
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pymongo import AsyncMongoClient, DeleteOne, InsertOne, MongoClient, ReturnDocument, UpdateMany, UpdateOne
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)
from pymongo.operations import IndexModel
from pymongo.write_concern import WriteConcern

import otel_retry
from otel_retry import instrumentor
from otel_retry.pymongo.seam import waiting
from tests.flavours import OVERLOAD, Commands, listed, resolve

ROOT = Path(__file__).parents[2]
OWN_OVERLOAD_RETRY = pymongo.version_tuple[:2] >= (4, 17)

registry = instrumentor._registry


@pytest.fixture(autouse=True)
def _off():
    """Whatever a test did, it leaves the driver alone."""
    yield
    otel_retry.uninstrument()


@pytest.fixture
def quick_heartbeats(monkeypatch):
    """After a network error PyMongo looks at a server again at once, instead of half a second later."""
    monkeypatch.setattr(pymongo.common, "MIN_HEARTBEAT_INTERVAL", 0.02)


def appname(client: Any) -> str:
    return client.options.pool_options.appname


def overloaded(deployment, client, commands=("find",), **options):
    return deployment.fail_command(commands=list(commands), appName=appname(client), **OVERLOAD, **options)


async def find_one(client: Any, database: str) -> Any:
    return await resolve(client[database].c.find_one({}))


# The driver as it was


def driver() -> dict[tuple[str, ...], object]:
    """Every name in every module of the driver, and every attribute of its classes."""
    snapshot: dict[tuple[str, ...], object] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in {"pymongo", "gridfs"} or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            snapshot[name, attribute] = value
            if inspect.isclass(value) and value.__module__ == name:
                for inner, one in list(vars(value).items()):
                    snapshot[name, attribute, inner] = one
    return snapshot


def differences(before: dict[tuple[str, ...], object], after: dict[tuple[str, ...], object]) -> list[str]:
    return sorted(
        ".".join(key)
        for key in before.keys() | after.keys()
        if key not in before or key not in after or before[key] is not after[key]
    )


PATCHED_EVERYWHERE = {
    "pymongo.asynchronous.mongo_client._ClientConnectionRetryable",
    "pymongo.synchronous.mongo_client._ClientConnectionRetryable",
}


def test_the_snapshot_covers_the_places_that_are_patched():
    snapshot = {".".join(key) for key in driver()}

    assert snapshot >= PATCHED_EVERYWHERE
    for half, prefix in (("synchronous", ""), ("asynchronous", "Async")):
        for place in (
            f"mongo_client.{prefix}MongoClient._select_server",
            f"database.{prefix}Database.command",
            f"collection.{prefix}Collection._create_indexes",
            f"pool.{prefix}Connection.hello_cmd",
        ):
            assert f"pymongo.{half}.{place}" in snapshot
    assert "pymongo.monitoring._EventListeners.publish_command_start" in snapshot


async def test_uninstrument_puts_back_the_very_objects_that_were_there(
    deployment, mongo, database_name, delays
):
    client = mongo.client(deployment.uri)
    await find_one(client, database_name)
    before = driver()

    otel_retry.instrument()
    patched = differences(before, driver())
    with overloaded(deployment, client, ["find", "ping"], times=2):
        await find_one(client, database_name)
        await resolve(client[database_name].command("ping"))
    otel_retry.uninstrument()

    assert set(patched) >= PATCHED_EVERYWHERE
    if not OWN_OVERLOAD_RETRY:
        assert "pymongo.synchronous.database.Database.command" in patched
    assert differences(before, driver()) == []


def listeners(client: Any) -> Any:
    """Who listens to a client, and whether its pools think that somebody does."""
    pools = [server.pool for server in client._topology._servers.values()]
    telemetry = [getattr(pool, "_telemetry", None) for pool in pools]
    return (
        dict(vars(client._event_listeners)),
        [getattr(pool, "enabled_for_cmap", None) for pool in pools],
        [getattr(one, "_should_publish", None) for one in telemetry],
        [getattr(connection, "enabled_for_cmap", None) for pool in pools for connection in pool.conns],
    )


@pytest.mark.parametrize("listened", [False, True], ids=["silent", "with a listener of its own"])
async def test_uninstrument_leaves_a_client_that_was_traced_as_it_was_built(
    deployment, mongo, database_name, listened
):
    commands = Commands()
    client = mongo.client(deployment.uri, event_listeners=[commands] if listened else [])
    await find_one(client, database_name)
    before = listeners(client)
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))

    otel_retry.instrument(
        tracer_provider=provider, meter_provider=MeterProvider(metric_readers=[InMemoryMetricReader()])
    )
    await find_one(client, database_name)
    heard = listeners(client)
    otel_retry.uninstrument()

    assert spans.get_finished_spans()
    assert heard != before
    assert listeners(client) == before
    spans.clear()
    commands.clear()
    await find_one(client, database_name)
    assert spans.get_finished_spans() == ()
    assert commands.count("find") == listened


def test_instrument_and_uninstrument_any_number_of_times_in_any_order():
    before = driver()
    otel_retry.uninstrument()
    assert differences(before, driver()) == []

    for _ in range(3):
        otel_retry.instrument()
        once = driver()
        otel_retry.instrument("current")
        assert differences(once, driver()) == []  # a second layer would run the loop within the loop
    otel_retry.uninstrument()
    assert differences(before, driver()) == []
    otel_retry.uninstrument()
    assert differences(before, driver()) == []


async def test_instrument_twice_retries_once_and_by_the_latter_policy(
    deployment, mongo, instrument, database_name, delays
):
    commands = Commands()
    client = mongo.client(deployment.uri, event_listeners=[commands])
    instrument("persistent")
    instrument("backpressure")

    with overloaded(deployment, client), pytest.raises(OperationFailure) as caught:
        await find_one(client, database_name)

    assert commands.count("find") == 6
    assert len(otel_retry.attempts(caught.value)) == 6
    assert len(delays) == 5


async def test_a_second_instrument_fills_the_bucket_again(
    deployment, mongo, instrument, database_name, delays
):
    client = mongo.client(deployment.uri)
    instrument()
    with overloaded(deployment, client), pytest.raises(OperationFailure):
        await find_one(client, database_name)
    assert otel_retry.budget(client).tokens == 995

    instrument()

    assert otel_retry.budget(client).tokens == 1000


async def test_after_uninstrument_an_error_has_no_attempts_and_costs_no_token(
    deployment, mongo, instrument, database_name
):
    client = mongo.client(deployment.uri)
    await find_one(client, database_name)
    instrument()
    bucket = otel_retry.budget(client)
    otel_retry.uninstrument()

    with overloaded(deployment, client), pytest.raises(OperationFailure) as caught:
        await find_one(client, database_name)

    assert otel_retry.attempts(caught.value) == ()
    assert not hasattr(caught.value, "__notes__")
    assert bucket.tokens == 1000
    assert otel_retry.budget(client) is None


# Which clients


async def test_a_client_built_and_used_before_instrument_is_covered(
    deployment, mongo, instrument, database_name, delays
):
    client = mongo.client(deployment.uri)
    collection = client[database_name].c
    await resolve(collection.insert_one({"_id": 1}))

    instrument()

    with overloaded(deployment, client, ["find", "insert", "ping"], times=3):
        assert await resolve(collection.find_one({})) == {"_id": 1}
    with overloaded(deployment, client, ["find", "insert", "ping"], times=3):
        await resolve(collection.insert_one({"_id": 2}))
    with overloaded(deployment, client, ["find", "insert", "ping"], times=3):
        assert (await resolve(client[database_name].command("ping")))["ok"] == 1
    assert len(delays) == 9


async def test_a_subclass_of_the_client_is_covered_and_its_overrides_work(
    deployment, mongo, instrument, database_name, delays, monkeypatch
):
    class Mine(mongo.client_class):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.asked: list[str] = []

        def get_database(self, name: Any = None, *args: Any, **options: Any) -> Any:
            self.asked.append(name)
            return super().get_database(name, *args, **options)

    monkeypatch.setattr(type(mongo), "client_class", Mine)
    early = mongo.client(deployment.uri)
    instrument()
    late = mongo.client(deployment.uri)

    for client in (early, late):
        assert type(client) is Mine
        with overloaded(deployment, client, times=3):
            assert await resolve(client.get_database(database_name).c.find_one({})) is None
        assert client.asked == [database_name]
        assert otel_retry.budget(client).consumed == 3


async def test_one_client_can_be_instrumented_alone(deployment, mongo, database_name, delays):
    chosen, other = mongo.client(deployment.uri), mongo.client(deployment.uri)

    otel_retry.instrument_client(chosen)

    with overloaded(deployment, chosen, times=4):
        await find_one(chosen, database_name)
    assert otel_retry.budget(chosen).consumed == 4
    with overloaded(deployment, other), pytest.raises(OperationFailure) as caught:
        await find_one(other, database_name)
    assert otel_retry.attempts(caught.value) == ()
    assert otel_retry.budget(other) is None
    assert len(delays) == 4


async def test_a_client_of_its_own_keeps_its_policy_beside_the_others(
    deployment, mongo, instrument, database_name, delays
):
    instrument("backpressure")
    chosen, other = mongo.client(deployment.uri), mongo.client(deployment.uri)
    otel_retry.instrument_client(chosen, policy=otel_retry.RetryPolicy())

    with overloaded(deployment, chosen), pytest.raises(OperationFailure) as caught:
        await find_one(chosen, database_name)
    assert [attempt.decision for attempt in otel_retry.attempts(caught.value)] == ["policy"]
    with overloaded(deployment, other), pytest.raises(OperationFailure) as caught:
        await find_one(other, database_name)
    assert len(otel_retry.attempts(caught.value)) == 6


async def test_clients_that_compare_equal_have_buckets_of_their_own(
    deployment, mongo, instrument, database_name, delays
):
    instrument()
    one, two = mongo.client(deployment.uri, appname="equal"), mongo.client(deployment.uri, appname="equal")
    await find_one(one, database_name)
    await find_one(two, database_name)
    assert one == two

    with overloaded(deployment, one, times=3):
        await find_one(one, database_name)

    assert otel_retry.budget(one).consumed == 3
    assert otel_retry.budget(two).consumed == 0


@pytest.mark.parametrize("cls", [MongoClient, AsyncMongoClient])
def test_a_thousand_clients_come_and_go_and_leave_nothing(cls, instrument):
    instrument()
    held = len(registry)
    for _ in range(10):
        clients = [cls("localhost:1", connect=False) for _ in range(100)]
        assert all(otel_retry.budget(client) is not None for client in clients)
        assert len(registry) == held + 100
        del clients
        gc.collect()
    assert len(registry) == held
    assert len(registry._references) == held


# Threads, forks, the end of the process


def test_eight_threads_on_one_client_all_succeed_and_no_token_is_lost(
    deployment, instrument, database_name, delays
):
    commands = Commands()
    instrument()
    with MongoClient(
        deployment.uri, appname="threads", event_listeners=[commands], heartbeatFrequencyMS=500
    ) as client:
        collection = client[database_name].c
        collection.insert_one({"_id": "first"})
        commands.clear()
        errors: list[BaseException] = []
        gate = threading.Barrier(8)

        def work(number: int) -> None:
            gate.wait(30)
            try:
                for turn in range(25):
                    collection.insert_one({"_id": (number * 1000) + turn})
                    assert collection.find_one({"_id": (number * 1000) + turn})
                collection.bulk_write([InsertOne({"_id": (number * 1000) + 500 + one}) for one in range(5)])
            except BaseException as error:
                errors.append(error)

        # Six failures in a row end an operation: at one in ten that happens once in a million operations.
        with deployment.fail_command(
            commands=["insert", "find"], probability=0.1, appName="threads", **OVERLOAD
        ):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)

        assert errors == []
        assert collection.count_documents({}) == 1 + 8 * 30
        bucket = otel_retry.budget(client)
        failed = sum(hasattr(event, "failure") for event in commands.ended_events)
        assert failed > 0
        assert bucket.consumed == failed == len(delays)
        assert bucket.denied == 0
        tenths = [round(10 * n) for n in (bucket.capacity, bucket.deposited, bucket.consumed, bucket.tokens)]
        assert tenths[0] + tenths[1] - tenths[2] == tenths[3]
        assert 0 <= bucket.tokens <= bucket.capacity


async def test_many_tasks_on_one_client_all_succeed_and_no_token_is_lost(
    deployment, instrument, database_name, delays
):
    instrument()
    commands = Commands()
    client = AsyncMongoClient(deployment.uri, appname="tasks", event_listeners=[commands])
    try:
        collection = client[database_name].c

        async def work(number: int) -> None:
            await collection.insert_one({"_id": number})
            assert await collection.find_one({"_id": number}) == {"_id": number}

        with deployment.fail_command(
            commands=["insert", "find"], probability=0.1, appName="tasks", **OVERLOAD
        ):
            await asyncio.gather(*(work(number) for number in range(100)))

        bucket = otel_retry.budget(client)
        failed = sum(hasattr(event, "failure") for event in commands.ended_events)
        assert bucket.consumed == failed == len(delays)
        tenths = [round(10 * n) for n in (bucket.capacity, bucket.deposited, bucket.consumed, bucket.tokens)]
        assert tenths[0] + tenths[1] - tenths[2] == tenths[3]
    finally:
        await client.close()


def python(script: str, *arguments: str, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_can_retry_though_a_thread_held_the_bucket_s_lock(deployment, database_name):
    script = """
    import json, os, sys, threading, time, traceback, warnings
    import otel_retry
    from otel_retry.pymongo.seam import waiting
    from pymongo import MongoClient

    uri, database = sys.argv[1:]
    waiting.sleep = lambda seconds: None
    otel_retry.instrument()
    client = MongoClient(uri, appname="forked", heartbeatFrequencyMS=500)
    client[database].c.insert_one({"_id": 1})
    bucket = otel_retry.budget(client)
    held = threading.Event()

    def hold():
        with bucket._lock:
            held.set()
            time.sleep(60)

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    warnings.simplefilter("ignore")  # PyMongo, and Python 3.12, warn of forks with threads
    child = os.fork()
    if not child:
        try:
            assert bucket._lock.acquire(timeout=0) and not bucket._lock.release()
            found = client[database].c.find_one({})
            os.write(1, json.dumps([found, bucket.consumed, otel_retry.budget(client) is bucket]).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    client.close()
    sys.exit(os.waitstatus_to_exitcode(status))
    """
    with deployment.fail_command(commands=["find"], times=3, appName="forked", **OVERLOAD):
        answer = python(script, deployment.uri, database_name)

    assert (answer.returncode, answer.stderr) == (0, "")
    assert json.loads(answer.stdout) == [{"_id": 1}, 3, True]


def test_the_interpreter_ends_at_once_while_a_daemon_thread_is_in_backoff(deployment, database_name):
    script = """
    import sys, threading, time
    import otel_retry
    from otel_retry.pymongo.seam import waiting
    from pymongo import MongoClient

    uri, database = sys.argv[1:]
    asleep = threading.Event()

    def sleep(seconds):
        asleep.set()
        time.sleep(60)

    waiting.sleep = sleep
    otel_retry.instrument()
    client = MongoClient(uri, appname="ending")
    threading.Thread(target=lambda: client[database].c.find_one({}), daemon=True).start()
    assert asleep.wait(60)
    print("asleep")
    """
    with deployment.fail_command(commands=["find"], appName="ending", **OVERLOAD):
        began = time.monotonic()
        answer = python(script, deployment.uri, database_name)

    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "asleep\n", "")
    assert time.monotonic() - began < 20


def test_the_interpreter_ends_at_once_while_a_task_is_in_backoff(deployment, database_name):
    script = """
    import asyncio, sys
    import otel_retry
    from otel_retry.pymongo.seam import waiting
    from pymongo import AsyncMongoClient

    async def main(uri, database):
        asleep = asyncio.Event()

        async def sleep(seconds):
            asleep.set()
            await asyncio.sleep(60)

        waiting.sleep_async = sleep
        otel_retry.instrument()
        async with AsyncMongoClient(uri, appname="ending-task") as client:
            task = asyncio.create_task(client[database].c.find_one({}))
            await asyncio.wait_for(asleep.wait(), 20)
            print("asleep")

    asyncio.run(main(*sys.argv[1:]))
    """
    with deployment.fail_command(commands=["find"], appName="ending-task", **OVERLOAD):
        answer = python(script, deployment.uri, database_name)

    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "asleep\n", "")


@pytest.mark.parametrize("afterwards", [otel_retry.uninstrument, lambda: otel_retry.instrument("current")])
@pytest.mark.parametrize("command", ["find", "insert", "ping"])
async def test_an_operation_in_backoff_ends_well_when_the_plugin_goes(
    deployment, mongo, instrument, database_name, monkeypatch, afterwards, command
):
    asleep, awake = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        asleep.set()
        assert awake.wait(60)

    async def sleep_async(seconds: float) -> None:
        await asyncio.to_thread(sleep, seconds)

    monkeypatch.setattr(waiting, "sleep", sleep)
    monkeypatch.setattr(waiting, "sleep_async", sleep_async)
    client = mongo.client(deployment.uri)
    collection = client[database_name].c
    await resolve(collection.insert_one({"_id": 1}))
    operations = {
        "find": lambda: collection.find_one({}),
        "insert": lambda: collection.insert_many([{"_id": 2}]),
        "ping": lambda: client[database_name].command("ping"),
    }
    before = driver()
    instrument()
    bucket = otel_retry.budget(client)

    with overloaded(deployment, client, [command], times=2):
        if mongo.is_async:
            under_way = asyncio.ensure_future(operations[command]())
        else:
            under_way = asyncio.ensure_future(asyncio.to_thread(operations[command]))
        assert await asyncio.to_thread(asleep.wait, 60)
        afterwards()
        awake.set()
        result = await asyncio.wait_for(under_way, 60)

    assert (
        result["_id" if command == "find" else "ok"] == 1
        if command != "insert"
        else result.inserted_ids == [2]
    )
    assert bucket.consumed == 2
    otel_retry.uninstrument()
    assert differences(before, driver()) == []
    assert await resolve(collection.find_one({"_id": 1})) == {"_id": 1}


# Interrupts and cancellation: as they are, and the one connection of the pool is there again


OPERATIONS = {
    "find": lambda database: database.c.find_one({}),
    "getMore": lambda database: database.c.find({}, batch_size=2).sort("_id", 1),
    "insert": lambda database: database.c.insert_one({}),
    "update": lambda database: database.c.bulk_write([UpdateOne({"_id": 1}, {"$set": {"x": 1}})]),
    "ping": lambda database: database.command("ping"),
    "createIndexes": lambda database: database.c.create_index("x"),
}


async def perform(command: str, database: Any) -> Any:
    answer = OPERATIONS[command](database)
    return await (listed(answer) if command == "getMore" else resolve(answer))


async def small_client(deployment, mongo, database: str, **options: Any) -> Any:
    """With one connection: if that is lost, the next operation fails for want of one."""
    client = mongo.client(deployment.uri, maxPoolSize=1, waitQueueTimeoutMS=2000, **options)
    await resolve(client[database].c.insert_many([{"_id": number} for number in range(5)]))
    return client


async def is_usable(client: Any, database: str) -> bool:
    for _ in range(3):
        await resolve(client[database].c.find_one({"_id": 1}))
        await resolve(client[database].command("ping"))
        await resolve(client[database].c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
    return True


@pytest.mark.parametrize("command", OPERATIONS)
async def test_an_interrupt_in_the_backoff_reaches_the_caller_as_it_is(
    deployment, mongo, instrument, database_name, monkeypatch, command
):
    interrupt = asyncio.CancelledError("mine") if mongo.is_async else KeyboardInterrupt("mine")
    client = await small_client(deployment, mongo, database_name)
    instrument()

    def sleep(seconds: float) -> None:
        raise interrupt

    async def sleep_async(seconds: float) -> None:
        raise interrupt

    monkeypatch.setattr(waiting, "sleep", sleep)
    monkeypatch.setattr(waiting, "sleep_async", sleep_async)
    caught = None
    with overloaded(deployment, client, [command], times=1):
        # Not pytest.raises: for it these two mean the end of the run.
        try:
            await perform(command, client[database_name])
        except BaseException as error:
            caught = error

    assert caught is interrupt
    assert caught.args == ("mine",)
    assert await is_usable(client, database_name)
    assert otel_retry.budget(client).consumed == 1


class Interrupting(Commands):
    """Raises in the driver's own frames, between checkout and reply."""

    interrupt: BaseException | None = None
    command = ""

    def started(self, event: Any) -> None:
        if self.interrupt is not None and event.command_name == self.command:
            interrupt, self.interrupt = self.interrupt, None
            raise interrupt


@pytest.mark.parametrize("command", OPERATIONS)
async def test_an_interrupt_in_an_attempt_reaches_the_caller_as_it_is(
    deployment, mongo, instrument, database_name, command
):
    listener = Interrupting()
    client = await small_client(deployment, mongo, database_name, event_listeners=[listener])
    instrument()
    interrupt = asyncio.CancelledError("mine") if mongo.is_async else KeyboardInterrupt("mine")
    listener.interrupt, listener.command = interrupt, command
    caught = None

    try:
        await perform(command, client[database_name])
    except BaseException as error:
        caught = error

    assert caught is interrupt
    assert otel_retry.attempts(caught) == ()
    assert await is_usable(client, database_name)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_ctrl_c_while_waiting_for_the_server_reaches_the_caller_and_the_client_lives_on(
    deployment, instrument, database_name
):
    commands = Commands()
    instrument()
    with MongoClient(
        deployment.uri, appname="ctrl-c", maxPoolSize=1, waitQueueTimeoutMS=60_000, event_listeners=[commands]
    ) as client:
        collection = client[database_name].c
        collection.insert_one({"_id": 1})
        inside = threading.Event()
        inside.set()

        def press() -> None:
            while not commands.count("find"):
                time.sleep(0.01)
            time.sleep(0.1)
            if inside.is_set():
                os.kill(os.getpid(), signal.SIGINT)

        caught = None
        with deployment.fail_command(
            commands=["find"], appName="ctrl-c", blockConnection=True, blockTimeMS=3000, times=1
        ):
            thread = threading.Thread(target=press)
            thread.start()
            try:
                collection.find_one({})
            except KeyboardInterrupt as error:
                caught = error
            finally:
                inside.clear()
                thread.join(60)

        assert type(caught) is KeyboardInterrupt
        assert otel_retry.attempts(caught) == ()
        assert collection.find_one({}) == {"_id": 1}
        assert commands.count("find") == 2  # the interrupted one was not repeated


@pytest.fixture
async def asynchronous(deployment, database_name):
    client = AsyncMongoClient(deployment.uri, appname="cancelled", maxPoolSize=1, waitQueueTimeoutMS=2000)
    await client[database_name].c.insert_many([{"_id": number} for number in range(5)])
    yield client
    await client.close()


@pytest.fixture
def endless(monkeypatch) -> asyncio.Event:
    """Every backoff lasts until it is cancelled; set when one has begun."""
    begun = asyncio.Event()

    async def sleep_async(seconds: float) -> None:
        begun.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(waiting, "sleep_async", sleep_async)
    return begun


@pytest.mark.parametrize("command", OPERATIONS)
async def test_a_task_cancelled_in_its_backoff_ends_and_gives_its_connection_back(
    deployment, instrument, database_name, asynchronous, endless, command
):
    instrument()
    with overloaded(deployment, asynchronous, [command]):
        task = asyncio.ensure_future(perform(command, asynchronous[database_name]))
        await asyncio.wait_for(endless.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert task.cancelled()
    assert await is_usable(asynchronous, database_name)


async def test_the_connection_is_back_in_the_pool_during_the_backoff(
    deployment, instrument, database_name, asynchronous, endless
):
    """Seed 001: a backoff holds back one operation, not those that need the same connection."""
    instrument()
    with overloaded(deployment, asynchronous, times=1):
        task = asyncio.ensure_future(asynchronous[database_name].c.find_one({}))
        await asyncio.wait_for(endless.wait(), 60)
        assert await is_usable(asynchronous, database_name)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def cancelled_in_an_attempt(deployment, client: Any, database: str) -> bool:
    """Whether an operation that waits for the server lets itself be cancelled."""
    with deployment.fail_command(
        commands=["find"], appName="cancelled", blockConnection=True, blockTimeMS=700, times=1
    ):
        task = asyncio.ensure_future(client[database].c.find_one({}))
        await asyncio.sleep(0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return task.cancelled()


async def test_a_task_cancelled_in_an_attempt_ends_and_gives_its_connection_back(
    deployment, instrument, database_name, asynchronous
):
    if not await cancelled_in_an_attempt(deployment, asynchronous, database_name):
        pytest.skip(f"PyMongo {pymongo.version} itself holds the event loop while it waits for a server")
    instrument()

    assert await cancelled_in_an_attempt(deployment, asynchronous, database_name)

    assert await is_usable(asynchronous, database_name)
    assert otel_retry.budget(asynchronous).consumed == 0


async def test_asyncio_timeout_ends_a_backoff(deployment, instrument, database_name, asynchronous, endless):
    instrument()
    began = time.monotonic()
    with overloaded(deployment, asynchronous):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asynchronous[database_name].c.find_one({})

    assert time.monotonic() - began < 10
    assert endless.is_set()
    assert asyncio.current_task().cancelling() == 0
    assert await is_usable(asynchronous, database_name)


async def test_asyncio_timeout_ends_an_attempt(deployment, instrument, database_name, asynchronous):
    if not await cancelled_in_an_attempt(deployment, asynchronous, database_name):
        pytest.skip(f"PyMongo {pymongo.version} itself holds the event loop while it waits for a server")
    instrument()
    with deployment.fail_command(
        commands=["find"], appName="cancelled", blockConnection=True, blockTimeMS=1000, times=1
    ):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asynchronous[database_name].c.find_one({})

    assert asyncio.current_task().cancelling() == 0
    assert await is_usable(asynchronous, database_name)


# Errors are PyMongo's own


def chain(error: BaseException | None) -> list[BaseException]:
    """The error, and all that it refers to as cause or context."""
    seen: dict[int, BaseException] = {}
    waiting_ = [error]
    while waiting_:
        one = waiting_.pop()
        if one is not None and id(one) not in seen:
            seen[id(one)] = one
            waiting_ += [one.__cause__, one.__context__]
    return list(seen.values())


def described(error: BaseException | None) -> Any:
    """All that an application can tell an error by, without what differs between two runs."""
    if error is None:
        return None
    details = getattr(error, "details", None)
    return {
        "type": type(error),
        "code": getattr(error, "code", None),
        "details": without_times(details) if isinstance(details, dict) else details,
        "cause": described(error.__cause__),
        "context": described(error.__context__),
        "suppressed": error.__suppress_context__,
    }


VOLATILE = {
    "$clusterTime",
    "operationTime",
    "electionId",
    "opTime",
    "lsid",
    "uuid",
    "topologyVersion",
    "$configTime",
}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in VOLATILE}
    return [without_times(one) for one in value] if isinstance(value, list) else value


async def caught_from(operation: Any) -> BaseException:
    try:
        await resolve(operation())
    except PyMongoError as error:
        return error
    pytest.fail("it did not fail")


FAILURES = {
    "duplicate": (DuplicateKeyError, None, lambda database: database.c.insert_one({"_id": 1})),
    "bulk": (BulkWriteError, None, lambda database: database.c.insert_many([{"_id": 9}, {"_id": 1}])),
    "bad command": (OperationFailure, None, lambda database: database.command("nonsense")),
    "bad query": (OperationFailure, None, lambda database: database.c.find_one({"$nonsense": 1})),
    "bad index": (OperationFailure, None, lambda database: database.c.create_index([("x", "nonsense")])),
    "network": (AutoReconnect, {"closeConnection": True}, lambda database: database.c.find_one({})),
    "network of a write": (
        AutoReconnect,
        {"closeConnection": True},
        lambda database: database.c.insert_one({}),
    ),
    "network of a multi": (
        AutoReconnect,
        {"closeConnection": True},
        lambda database: database.c.delete_many({"x": 1}),
    ),
    "server error": (OperationFailure, {"errorCode": 8}, lambda database: database.c.find_one({})),
    "not primary": (AutoReconnect, {"errorCode": 10107}, lambda database: database.c.insert_one({})),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_an_error_is_the_one_that_pymongo_would_raise_with_its_own_chain(
    deployment, mongo, database_name, delays, quick_heartbeats, case
):
    cls, failpoint, operation = FAILURES[case]
    client = mongo.client(deployment.uri)
    database = client[database_name]
    await resolve(database.c.insert_one({"_id": 1}))

    async def fail() -> BaseException:
        await resolve(database.c.delete_many({"_id": 9}))
        with contextlib.ExitStack() as stack:
            if failpoint is not None:
                commands = ["find", "insert", "delete"]
                stack.enter_context(
                    deployment.fail_command(commands=commands, appName=appname(client), **failpoint)
                )
            return await caught_from(lambda: operation(database))

    plain = await fail()
    otel_retry.instrument()
    ours = await fail()

    assert isinstance(ours, cls)
    assert described(ours) == described(plain)
    assert [type(one).__name__ for one in chain(ours) if type(one).__module__.startswith("otel_retry")] == []
    if getattr(plain, "details", None):
        assert ours.details.get("errmsg") == plain.details.get("errmsg")
    else:
        assert str(ours) == str(plain)


async def test_the_error_after_retries_has_no_envelope_in_its_chain(
    deployment, mongo, instrument, database_name, delays
):
    client = mongo.client(deployment.uri)
    instrument()
    for commands, operation in (
        (["find"], lambda: client[database_name].c.find_one({})),
        (["insert"], lambda: client[database_name].c.insert_one({})),
        (["insert"], lambda: client[database_name].c.insert_many([{}])),
        (["ping"], lambda: client[database_name].command("ping")),
        (["createIndexes"], lambda: client[database_name].c.create_index("x")),
    ):
        with overloaded(deployment, client, commands):
            error = await caught_from(operation)

        assert type(error) is OperationFailure
        assert error.code == 462
        assert len(otel_retry.attempts(error)) == 6
        for one in (error, *(attempt.error for attempt in otel_retry.attempts(error))):
            assert [
                type(other) for other in chain(one) if type(other).__module__.startswith("otel_retry")
            ] == []
        assert error.__cause__ is None
        assert error.__context__ is None


async def test_an_error_raised_while_another_is_handled_has_that_one_as_its_context(
    deployment, mongo, instrument, database_name, delays
):
    """As Python does it for everybody; the application's own error must not be lost, nor one of ours come between."""
    client = mongo.client(deployment.uri)
    instrument()
    own = ValueError("the application's")
    with overloaded(deployment, client):
        try:
            raise own
        except ValueError:
            error = await caught_from(lambda: client[database_name].c.find_one({}))

    assert chain(error) == [error, own]
    assert error.__context__ is own


def alive(*types: type[BaseException]) -> Counter[str]:
    """What the garbage collector knows of: our values, and errors of the types."""
    return Counter(
        type(one).__qualname__
        for one in gc.get_objects()
        if issubclass(type(one), types) or type(one).__module__ in {"otel_retry.events", "otel_retry.machine"}
    )


@contextlib.contextmanager
def without_collector():
    """What dies now dies because nothing refers to it any more."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


UNSERVED = {
    "find": lambda database: database.c.find_one({}),
    "insert": lambda database: database.c.insert_one({}),
    "bulk": lambda database: database.c.insert_many([{}]),
    "command": lambda database: database.command("ping"),
}


@pytest.mark.parametrize(
    "plugin",
    [
        False,
        True,
    ],
    ids=["plain", "with the plugin"],
)
async def test_a_failed_operation_leaves_nothing_to_the_garbage_collector(
    deployment, mongo, quick_heartbeats, plugin
):
    """Where plain PyMongo leaves nothing. After an error in a server's reply it does, by itself."""
    client = mongo.client(deployment.uri, server_selector=lambda servers: [], serverSelectionTimeoutMS=20)
    if plugin:
        otel_retry.instrument()
    left = {}
    for name, operation in UNSERVED.items():
        with without_collector():
            before = alive(ServerSelectionTimeoutError)
            with contextlib.suppress(ServerSelectionTimeoutError):
                await resolve(operation(client.db))
            left[name] = alive(ServerSelectionTimeoutError) - before

    assert left == {name: {} for name in UNSERVED}


@pytest.mark.parametrize("command", ["find", "insert", "ping"])
async def test_an_operation_that_succeeds_after_a_retry_leaves_no_history_to_the_garbage_collector(
    deployment, mongo, instrument, database_name, delays, command
):
    client = mongo.client(deployment.uri)
    instrument()
    await perform(command, client[database_name])
    with overloaded(deployment, client, [command], times=2), without_collector():
        before = alive()
        await perform(command, client[database_name])
        left = alive() - before

    assert left == {}


# The same results


def plain(value: Any) -> Any:
    """A result as comparable data, without what differs between two runs."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in VOLATILE}
    if isinstance(value, (list, tuple, set)):
        return [plain(one) for one in value]
    if isinstance(value, ObjectId):
        return ObjectId
    if hasattr(value, "acknowledged"):
        known = {"acknowledged": value.acknowledged}
        if value.acknowledged:
            names = (
                "inserted_id",
                "inserted_ids",
                "matched_count",
                "modified_count",
                "deleted_count",
                "upserted_id",
            )
            counts = ("inserted_count", "upserted_count", "upserted_ids", "bulk_api_result", "raw_result")
            known |= {name: plain(getattr(value, name)) for name in names + counts if hasattr(value, name)}
        return type(value).__name__, known
    return value


class Script:
    """Runs varied operations against one database and notes what came of each."""

    def __init__(self, client: Any, database: str, *, is_async: bool) -> None:
        self.client = client
        self.database = client[database]
        self.is_async = is_async
        self.notes: list[tuple[str, Any]] = []

    async def note(self, name: str, operation: Any) -> Any:
        try:
            result = await resolve(operation())
            if hasattr(result, "next") or hasattr(result, "__anext__"):
                result = await listed(result)
        except PyMongoError as error:
            self.notes.append((name, described(error)))
            return None
        self.notes.append((name, plain(result)))
        return result

    async def run(self) -> list[tuple[str, Any]]:
        for part in (
            self.crud,
            self.cursors,
            self.bulks,
            self.transactions,
            self.files,
            self.changes,
            self.definitions,
            self.commands,
            self.unacknowledged,
            self.errors,
        ):
            await part()
        return self.notes

    async def crud(self) -> None:
        c = self.database.crud
        await self.note("insert_one", lambda: c.insert_one({"_id": 1, "x": 1}))
        await self.note("insert_many", lambda: c.insert_many([{"_id": n, "x": n % 7} for n in range(2, 60)]))
        await self.note("find_one", lambda: c.find_one({"_id": 3}))
        await self.note("count", lambda: c.count_documents({"x": {"$gt": 2}}))
        await self.note("estimate", c.estimated_document_count)
        await self.note("distinct", lambda: c.distinct("x"))
        await self.note("update_one", lambda: c.update_one({"_id": 1}, {"$set": {"y": 1}}))
        await self.note("update_many", lambda: c.update_many({"x": 2}, {"$inc": {"y": 1}}))
        await self.note("upsert", lambda: c.update_one({"_id": 100}, {"$set": {"y": 1}}, upsert=True))
        await self.note("replace", lambda: c.replace_one({"_id": 4}, {"z": 1}))
        await self.note("find_and_update", lambda: c.find_one_and_update({"_id": 5}, {"$set": {"q": 1}}))
        after = ReturnDocument.AFTER
        await self.note(
            "find_and_replace", lambda: c.find_one_and_replace({"_id": 6}, {"r": 1}, return_document=after)
        )
        await self.note("find_and_delete", lambda: c.find_one_and_delete({"_id": 7}))
        await self.note("delete_one", lambda: c.delete_one({"_id": 8}))
        await self.note("delete_many", lambda: c.delete_many({"x": 3}))
        await self.note("all", lambda: c.find({}).sort("_id", 1))

    async def cursors(self) -> None:
        c = self.database.crud
        await self.note("batches", lambda: c.find({}, batch_size=7).sort("_id", 1))
        await self.note("limit", lambda: c.find({}).sort("_id", -1).skip(3).limit(5))
        cursor = c.find({}, batch_size=2).sort("_id", 1)
        await self.note("first", cursor.next)
        await self.note("closed early", cursor.close)
        group = [{"$group": {"_id": "$x", "n": {"$sum": 1}}}, {"$sort": {"_id": 1}}]
        await self.note("aggregate", lambda: c.aggregate(group, batchSize=2))
        await self.note("out", lambda: c.aggregate([{"$match": {"x": 1}}, {"$out": "copied"}]))
        await self.note("copied", lambda: self.database.copied.find({}).sort("_id", 1))
        await self.note("documents", lambda: self.database.aggregate([{"$documents": [{"a": 1}, {"a": 2}]}]))
        await self.note(
            "cursor_command",
            lambda: self.database.cursor_command({"find": "crud", "sort": {"_id": 1}, "batchSize": 3}),
        )

    async def bulks(self) -> None:
        c = self.database.bulk
        mixed = [
            InsertOne({"_id": 1}),
            InsertOne({"_id": 2}),
            UpdateOne({"_id": 1}, {"$set": {"x": 1}}),
            DeleteOne({"_id": 2}),
            UpdateOne({"_id": 3}, {"$set": {"x": 3}}, upsert=True),
        ]
        await self.note("ordered", lambda: c.bulk_write(mixed))
        # By itself: beside single writes it would keep PyMongo from numbering those, and us it does not (seed 003).
        await self.note("multi", lambda: c.bulk_write([UpdateMany({}, {"$set": {"y": 1}})]))
        await self.note(
            "unordered", lambda: c.bulk_write([InsertOne({"_id": n}) for n in (10, 1, 11, 3)], ordered=False)
        )
        await self.note(
            "ordered with an error", lambda: c.bulk_write([InsertOne({"_id": n}) for n in (20, 1, 21)])
        )
        await self.note("all", lambda: c.find({}).sort("_id", 1))
        namespace = f"{self.database.name}.bulk"
        await self.note(
            "of the client", lambda: self.client.bulk_write([InsertOne({"_id": 30}, namespace=namespace)])
        )

    async def transactions(self) -> None:
        c = self.database.crud
        session = self.client.start_session()
        await resolve(session.start_transaction())
        await self.note("in it", lambda: c.insert_one({"_id": 200}, session=session))
        await self.note("sees it", lambda: c.find_one({"_id": 200}, session=session))
        await self.note("outside", lambda: c.find_one({"_id": 200}))
        await self.note("commit", session.commit_transaction)
        await self.note("commit again", session.commit_transaction)
        await resolve(session.start_transaction())
        await self.note("to be undone", lambda: c.delete_many({"_id": 200}, session=session))
        await self.note("abort", session.abort_transaction)
        await self.note("still there", lambda: c.find_one({"_id": 200}))

        def write(session: Any) -> Any:
            return c.update_one({"_id": 200}, {"$inc": {"n": 1}}, session=session)

        async def write_async(session: Any) -> Any:
            return await c.update_one({"_id": 200}, {"$inc": {"n": 1}}, session=session)

        await self.note(
            "with_transaction", lambda: session.with_transaction(write_async if self.is_async else write)
        )
        await resolve(session.end_session())

    async def files(self) -> None:
        bucket = (gridfs.AsyncGridFSBucket if self.is_async else gridfs.GridFSBucket)(self.database)
        content = bytes(range(256)) * 40
        await self.note(
            "upload", lambda: bucket.upload_from_stream_with_id(1, "file", content, chunk_size_bytes=1024)
        )
        stream = await resolve(bucket.open_download_stream_by_name("file"))
        await self.note("length", stream.read)
        await self.note("delete", lambda: bucket.delete(1))

    async def changes(self) -> None:
        stream = await resolve(self.database.crud.watch(max_await_time_ms=1000))
        await self.note("seen", lambda: self.database.crud.insert_one({"_id": 300}))
        change = await resolve(stream.next())
        self.notes.append(("change", (change["operationType"], change["fullDocument"])))
        await resolve(stream.close())

    async def definitions(self) -> None:
        database = self.database
        created = await resolve(database.create_collection("made", capped=True, size=4096))
        await self.note("options", created.options)
        await self.note("create again", lambda: database.create_collection("made", check_exists=False))
        await self.note("index", lambda: database.crud.create_index([("x", 1)]))
        await self.note(
            "indexes", lambda: database.crud.create_indexes([IndexModel("y"), IndexModel("z", unique=False)])
        )
        await self.note("list", database.crud.list_indexes)
        await self.note("information", database.crud.index_information)
        await self.note("drop index", lambda: database.crud.drop_index("y_1"))
        await self.note("drop missing index", lambda: database.crud.drop_index("y_1"))
        await self.note("rename", lambda: database.made.rename("renamed"))
        names = await resolve(database.list_collection_names())
        self.notes.append(("names", sorted(names)))
        await self.note("drop", lambda: database.drop_collection("renamed"))
        await self.note("drop missing", lambda: database.drop_collection("renamed"))
        await self.note("validate", lambda: database.validate_collection("bulk"))

    async def commands(self) -> None:
        await self.note("ping", lambda: self.database.command("ping"))
        await self.note("count", lambda: self.database.command({"count": "crud", "query": {"x": 1}}))
        await self.note("nonsense", lambda: self.database.command("nonsense"))
        info = await resolve(self.client.server_info())
        self.notes.append(("server", info["version"]))

    async def unacknowledged(self) -> None:
        c = self.database.silent.with_options(write_concern=WriteConcern(w=0))
        await self.note("insert", lambda: c.insert_one({"_id": 1}))
        await self.note("update", lambda: c.update_one({"_id": 1}, {"$set": {"x": 1}}))
        await self.note("bulk", lambda: c.bulk_write([InsertOne({"_id": 2}), InsertOne({"_id": 3})]))
        await self.note("delete", lambda: c.delete_one({"_id": 3}))
        deadline = time.monotonic() + 60
        found: list[Any] = []
        while found != [{"_id": 1, "x": 1}, {"_id": 2}] and time.monotonic() < deadline:
            found = await listed(self.database.silent.find({}).sort("_id", 1).comment("polling"))
        self.notes.append(("arrived", found))

    async def errors(self) -> None:
        c = self.database.crud
        await self.note("duplicate", lambda: c.insert_one({"_id": 1}))
        await self.note(
            "duplicates", lambda: c.insert_many([{"_id": 1}, {"_id": 400}, {"_id": 2}], ordered=False)
        )
        await self.note("operator", lambda: c.find({"$nonsense": 1}))
        await self.note("update", lambda: c.update_one({"_id": 1}, {"$inc": {"_id": 1}}))
        await self.note("stage", lambda: c.aggregate([{"$nonsense": 1}]))


def sent(commands: Commands) -> list[Any]:
    """What was published: names, fields, transaction numbers; not how often an unacknowledged write was looked for."""
    return [
        (
            event.command_name,
            [key for key in event.command if key not in VOLATILE],
            event.command.get("txnNumber"),
        )
        for event in commands.started_events
        if event.command.get("comment") != "polling"
    ]


async def test_a_varied_script_gives_the_same_results_and_sends_the_same_commands(
    deployment, mongo, database_name
):
    async def run() -> tuple[Any, Any, Any]:
        commands = Commands()
        client = mongo.client(deployment.uri, event_listeners=[commands], retryWrites=True)
        notes = await Script(client, database_name, is_async=mongo.is_async).run()
        ended = Counter(type(event).__name__ for event in commands.ended_events)
        published = sent(commands)
        await resolve(client.drop_database(database_name))
        await mongo.close()
        return notes, published, ended["CommandFailedEvent"]

    expected = await run()
    assert len(expected[0]) > 70
    assert len({name for name, *_ in expected[1]}) > 15
    for policy in ("backpressure", "once", "driver"):
        otel_retry.instrument(policy)
        notes, published, failed = await run()
        for ours, theirs in zip(notes, expected[0], strict=True):
            assert ours == theirs, policy
        for ours, theirs in zip(published, expected[1], strict=True):
            assert ours == theirs, policy
        assert failed == expected[2]
    otel_retry.uninstrument()
