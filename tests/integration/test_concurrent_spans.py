"""Many operations at once on one client, with faults: every command has its span, and every span its own parent."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.instrumentation.utils import suppress_instrumentation
from pymongo import InsertOne, MongoClient, UpdateOne, network_layer
from pymongo.errors import PyMongoError

from otel_retry.pymongo.seam import listening
from tests.flavours import OVERLOAD, Commands, Flavour
from tests.integration.telemetry_rig import forget_sockets

THREADS, OPERATIONS_OF_A_THREAD = 8, 30
TASKS, OPERATIONS_OF_A_TASK = 200, 2

FAILING = ("find", "insert", "update", "aggregate", "getMore", "ping")


@pytest.fixture
def faulty(deployment):
    """Every fifth command is rejected; what the clean-up of the fixtures sends is not."""

    def arm(client: Any) -> None:
        with suppress_instrumentation():
            deployment.fail_command(
                commands=list(FAILING),
                probability=0.2,
                appName=client.options.pool_options.appname,
                **OVERLOAD,
            )

    return arm


@pytest.fixture
async def mongo_async():
    """Closes its clients whatever happens."""
    flavour = Flavour("async")
    yield flavour
    await flavour.close()
    forget_sockets()


def work(choice: int, collection: Any) -> Any:
    """One operation; for a cursor, the operation that starts it."""
    match choice % 5:
        case 0:
            return collection.find_one({"n": choice})
        case 1:
            return collection.insert_one({"n": choice})
        case 2:
            return collection.update_one({"n": choice}, {"$set": {"seen": True}})
        case 3:
            return collection.bulk_write([InsertOne({"n": choice}), UpdateOne({}, {"$inc": {"count": 1}})])
        case _:
            return collection.database.command("ping")


def check(rig: Any, heard: Commands, *, requests: int) -> None:
    """Each command event is one span, whose parent is the operation with the same operation id."""
    spans = rig.spans
    by_id = {span.context.span_id: span for span in spans}
    commands = [span for span in spans if "db.command.name" in span.attributes]
    started = [event for event in heard.started_events if event.command_name in FAILING]
    assert Counter((event.operation_id, event.request_id) for event in started) == Counter(
        (span.attributes["mongodb.operation_id"], span.attributes["mongodb.request_id"]) for span in commands
    )
    children: dict[int, list[Any]] = defaultdict(list)
    for span in commands:
        parent = by_id[span.parent.span_id]
        assert parent.attributes["mongodb.operation_id"] == span.attributes["mongodb.operation_id"]
        assert parent.context.trace_id == span.context.trace_id
        assert parent.start_time <= span.start_time
        assert span.end_time <= parent.end_time
        children[parent.context.span_id].append(span)
    operations = [span for span in spans if "db.operation.name" in span.attributes]
    assert len(operations) == requests
    assert {*children} == {span.context.span_id for span in operations}
    for operation in operations:
        request = by_id[operation.parent.span_id]
        assert request.name == "request"
        assert len([each for each in operations if each.parent.span_id == request.context.span_id]) == 1
        attempts = [span.attributes["mongodb.retry.attempt"] for span in children[operation.context.span_id]]
        retries = len([event for event in operation.events if event.name == "mongodb.retry"])
        assert attempts.count(1) == len(attempts) - retries
        assert operation.attributes["mongodb.retry.attempts"] == retries + 1
        assert len([span for span in children[operation.context.span_id] if span.links]) == retries
    failed = len([event for event in heard.ended_events if hasattr(event, "failure")])
    assert failed == len([span for span in commands if not span.status.is_ok])
    assert failed > 0
    assert not rig.open


def test_eight_threads_on_one_client(deployment, watch, rig, things, faulty, delays):
    heard = Commands()
    watch()
    tracer = rig.tracer_provider.get_tracer("test")
    ready = threading.Barrier(THREADS)

    def run(thread: int) -> None:
        ready.wait()  # the first operations of the client come all at once
        for index in range(OPERATIONS_OF_A_THREAD):
            with tracer.start_as_current_span("request"):
                here = context.get_current()
                try:
                    work(thread * OPERATIONS_OF_A_THREAD + index, collection)
                except PyMongoError:
                    given_up.append(thread)
                assert context.get_current() is here
        assert trace.get_current_span() is trace.INVALID_SPAN

    given_up: list[int] = []
    with MongoClient(deployment.uri, appname="threads", event_listeners=[heard]) as client:
        collection = things(client)
        faulty(client)
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(run, thread) for thread in range(THREADS)]:
                done.result()
        check(rig, heard, requests=THREADS * OPERATIONS_OF_A_THREAD)
    assert len(given_up) < THREADS * OPERATIONS_OF_A_THREAD / 10


async def test_two_hundred_tasks_on_one_client(deployment, mongo_async, watch, rig, things, faulty, delays):
    heard = Commands()
    watch()
    tracer = rig.tracer_provider.get_tracer("test")
    client = mongo_async.client(deployment.uri, appname="tasks", maxPoolSize=50, event_listeners=[heard])
    collection = things(client)
    faulty(client)

    async def run(task: int) -> None:
        for index in range(OPERATIONS_OF_A_TASK):
            with tracer.start_as_current_span("request"):
                here = context.get_current()
                try:
                    await work(task * OPERATIONS_OF_A_TASK + index, collection)
                except PyMongoError:
                    given_up.append(task)
                assert context.get_current() is here

    given_up: list[int] = []
    await asyncio.gather(*(run(task) for task in range(TASKS)))
    check(rig, heard, requests=TASKS * OPERATIONS_OF_A_TASK)
    assert len(given_up) < TASKS * OPERATIONS_OF_A_TASK / 10


@pytest.mark.skipif(
    not hasattr(network_layer, "async_receive_message"),
    reason="this PyMongo's asynchronous client blocks the loop while it reads",
)
async def test_tasks_that_are_cancelled_among_others_take_nothing_with_them(
    deployment, mongo_async, watch, rig, things
):
    watch()
    client = mongo_async.client(deployment.uri, appname="cancelled", maxPoolSize=20)
    collection = things(client)
    await collection.insert_one({})
    rig.clear()
    chosen = random.Random(3)

    async def run(number: int) -> None:
        await collection.find_one({"n": number})

    tasks = [asyncio.create_task(run(number)) for number in range(100)]
    doomed = chosen.sample(range(100), 40)
    await asyncio.sleep(0)
    for number in doomed:
        tasks[number].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = sum(isinstance(each, asyncio.CancelledError) for each in results)
    outcomes = Counter(span.attributes["mongodb.retry.outcome"] for span in rig.operations)

    assert cancelled
    assert outcomes == {"first_try": 100 - cancelled, "cancelled": cancelled}
    assert not rig.open


def test_the_first_operations_of_a_client_add_one_listener(deployment, watch, rig, monkeypatch):
    class Slow(listening.CommandEvents):
        def __init__(self, telemetry: Any) -> None:
            time.sleep(0.1)
            super().__init__(telemetry)

    monkeypatch.setattr(listening, "CommandEvents", Slow)
    watch()
    ready = threading.Barrier(4)

    def run(_: int) -> None:
        ready.wait()
        client.db.c.find_one({})

    with MongoClient(deployment.uri) as client:
        with suppress_instrumentation():
            client.admin.command("ping")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run, range(4)))
        listeners = client._event_listeners._EventListeners__command_listeners
        assert len([each for each in listeners if isinstance(each, Slow)]) == 1
        assert [rig.attempts(operation) for operation in rig.operations] == [[("find", 1)]] * 4
    assert not rig.open
