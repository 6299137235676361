"""The metrics: names, units and attributes are a contract, and their sums agree with the spans to the unit."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pymongo
import pytest
from bson import ObjectId
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.metrics.export import Gauge, Histogram, Sum
from pymongo import InsertOne, UpdateOne, network_layer
from pymongo.cursor import CursorType
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
    WaitQueueTimeoutError,
)

import otel_retry
from otel_retry import instrumentor
from tests.fakes.wire_server import DROP, FakeServer, error, sharded
from tests.flavours import OVERLOAD, Commands, resolve
from tests.integration.telemetry_rig import Rig, discovered, events, first_of, outcome

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)

# name: (kind, unit, monotonic or boundaries)
TABLE: dict[str, tuple[type[Any], str, Any]] = {
    "db.client.operation.duration": (Histogram, "s", SECONDS),
    "mongodb.client.attempt.duration": (Histogram, "s", SECONDS),
    "mongodb.client.operation.retries": (Histogram, "{retry}", None),
    "mongodb.retry.attempts": (Sum, "{attempt}", True),
    "mongodb.retry.backoff": (Histogram, "s", SECONDS),
    "mongodb.retry.gave_up": (Sum, "{operation}", True),
    "mongodb.retry.budget.tokens": (Gauge, "{token}", None),
    "mongodb.retry.budget.capacity": (Gauge, "{token}", None),
    "mongodb.retry.budget.consumed": (Sum, "{token}", True),
    "mongodb.retry.budget.deposited": (Sum, "{token}", True),
    "mongodb.retry.budget.denied": (Sum, "{token}", True),
    "db.client.connection.count": (Sum, "{connection}", False),
    "db.client.connection.idle.max": (Sum, "{connection}", False),
    "db.client.connection.idle.min": (Sum, "{connection}", False),
    "db.client.connection.max": (Sum, "{connection}", False),
    "db.client.connection.pending_requests": (Sum, "{request}", False),
    "db.client.connection.timeouts": (Sum, "{timeout}", True),
    "db.client.connection.create_time": (Histogram, "s", SECONDS),
    "db.client.connection.wait_time": (Histogram, "s", SECONDS),
    "db.client.connection.use_time": (Histogram, "s", SECONDS),
}


def name_of(client: Any) -> str:
    """As metrics call it."""
    return instrumentor._registry.of(client).name


def attribute_sets(rig: Rig, name: str) -> set[frozenset[str]]:
    return {frozenset(point.attributes) for point in rig.points(name)}


async def test_every_metric_has_its_kind_unit_description_and_boundaries(
    connect, things, watch, rig, fail, delays
):
    watch()
    client = connect()
    fail(client, "find", times=7, **OVERLOAD)
    with pytest.raises(OperationFailure):
        await resolve(things(client).find_one({}))
    await resolve(things(client).find_one({}))

    found = rig.metrics()
    assert set(found) == set(TABLE)
    for name, (kind, unit, detail) in TABLE.items():
        metric = found[name]
        assert (type(metric.data), metric.unit) == (kind, unit), name
        assert metric.description.endswith("."), name
        if kind is Sum:
            assert metric.data.is_monotonic is detail, name
        elif kind is Histogram and detail is not None:
            assert all(tuple(point.explicit_bounds) == detail for point in metric.data.data_points), name


async def test_attributes_are_exactly_those_of_the_table(connect, things, watch, rig, fail, delays):
    watch()
    client = connect()
    collection = things(client)
    await resolve(collection.find_one({}))
    host, port = (rig.command().attributes[key] for key in ("server.address", "server.port"))
    fail(client, "find", times=1, **OVERLOAD)
    await resolve(collection.find_one({}))
    fail(client, "find", **OVERLOAD)
    with pytest.raises(OperationFailure):
        await resolve(collection.find_one({}))

    def found(metric: str) -> list[dict[str, Any]]:
        return sorted((dict(point.attributes) for point in rig.points(metric)), key=str)

    server = {"server.address": host, "server.port": port}
    operation = {"db.operation.name": "find"}
    everything = {
        "db.system.name": "mongodb",
        **operation,
        "db.namespace": collection.database.name,
        "db.collection.name": collection.name,
        **server,
    }
    assert found("db.client.operation.duration") == sorted(
        [everything, {**everything, "error.type": "OperationFailure"}], key=str
    )
    assert found("mongodb.client.attempt.duration") == sorted(
        [
            {**operation, **server, "mongodb.retry.outcome": "ok"},
            {**operation, **server, "mongodb.retry.outcome": "error", "mongodb.retry.reason": "overload"},
        ],
        key=str,
    )
    assert found("mongodb.client.operation.retries") == sorted(
        [{**operation, "mongodb.retry.outcome": each} for each in ("limit", "retried")], key=str
    )
    policy = {"mongodb.retry.policy": "backpressure"}
    assert found("mongodb.retry.attempts") == [{**operation, "mongodb.retry.reason": "overload", **policy}]
    assert found("mongodb.retry.backoff") == [{**operation, "mongodb.retry.reason": "overload"}]
    assert found("mongodb.retry.gave_up") == [{**operation, "mongodb.retry.reason": "limit", **policy}]
    for metric in TABLE:
        if metric.startswith("mongodb.retry.budget."):
            assert {"mongodb.client": name_of(client)} in found(metric), metric
        elif metric.startswith("db.client.connection."):
            names = {"db.client.connection.pool.name"}
            if metric.endswith(".count"):
                names.add("db.client.connection.state")
            assert attribute_sets(rig, metric) == {frozenset(names)}, metric


async def test_the_duration_of_an_operation_is_that_of_its_span(connect, things, watch, rig, fail):
    watch()
    client = connect()
    with suppress_instrumentation():
        await resolve(things(client).find_one({}))
    fail(client, "find", times=1, blockConnection=True, blockTimeMS=120)
    await resolve(things(client).find_one({}))

    [point] = rig.points("db.client.operation.duration")
    span = rig.operation()
    assert point.count == 1
    assert 0.12 <= point.sum <= (span.end_time - span.start_time) / 1e9 + 0.005  # two clocks


async def test_the_durations_of_attempts_are_those_of_the_commands_without_the_waits(
    connect, things, watch, rig, fail
):
    watch()
    client = connect()
    with suppress_instrumentation():
        await resolve(things(client).find_one({}))
    instrumentor._registry.of(client).jitter = lambda: 1.0
    fail(client, "find", times=2, **OVERLOAD)
    await resolve(things(client).find_one({}))

    measured = sum(point.sum for point in rig.points("mongodb.client.attempt.duration"))
    sent = sum(span.end_time - span.start_time for span in rig.commands) / 1e9
    waits = 0.1 + 0.2
    [whole] = rig.points("db.client.operation.duration")
    assert sent - 0.005 <= measured <= whole.sum - waits + 0.005  # two clocks
    assert rig.total("mongodb.client.attempt.duration") == 3
    [waits] = rig.points("mongodb.retry.backoff")
    assert waits.sum == pytest.approx(0.3)
    assert rig.points("db.client.operation.duration")[0].sum > measured + 0.3 - 0.005


async def test_an_operation_that_succeeds_at_once_is_one_histogram_and_nothing_else(
    connect, things, watch, rig
):
    watch()
    collection = things(connect())
    await resolve(collection.insert_one({"_id": 1}))
    with pytest.raises(DuplicateKeyError):
        await resolve(collection.insert_one({"_id": 1}))

    found = rig.metrics()
    assert rig.total("db.client.operation.duration") == 2
    for name in (
        "mongodb.client.attempt.duration",
        "mongodb.client.operation.retries",
        "mongodb.retry.attempts",
        "mongodb.retry.backoff",
    ):
        assert name not in found, name
    assert rig.by("mongodb.retry.gave_up", "mongodb.retry.reason") == {"not_retryable": 1}


async def test_the_counters_of_the_budget_are_those_of_the_bucket_client_by_client(
    connect, things, watch, rig, fail, delays
):
    watch()
    one, other = connect(), connect()
    fail(one, "find", times=3, **OVERLOAD)
    await resolve(things(one).find_one({}))
    await resolve(things(other).find_one({}))
    bucket = otel_retry.budget(one)

    def seen(client: Any) -> dict[str, float]:
        return {
            metric: rig.total(f"mongodb.retry.budget.{metric}", {"mongodb.client": name_of(client)})
            for metric in ("tokens", "capacity", "consumed", "deposited", "denied")
        }

    assert name_of(one) != name_of(other)
    assert seen(one) == {
        "tokens": bucket.tokens,
        "capacity": bucket.capacity,
        "consumed": 3.0,
        "deposited": 1.1,
        "denied": 0,
    }
    assert bucket.tokens == pytest.approx(1000 - 3 + 1.1)
    assert seen(other) == {
        "tokens": 1000.0,
        "capacity": 1000.0,
        "consumed": 0.0,
        "deposited": 0.0,
        "denied": 0,
    }
    while bucket.try_withdraw():
        pass
    denied = bucket.denied
    fail(one, "find", times=1, **OVERLOAD)
    with pytest.raises(OperationFailure):
        await resolve(things(one).find_one({}))
    assert seen(one)["denied"] == denied + 1
    assert rig.by("mongodb.retry.gave_up", "mongodb.retry.reason") == {"budget": 1}


async def test_a_policy_without_a_bucket_has_no_budget_metrics(connect, things, watch, rig):
    watch(policy="current")
    await resolve(things(connect()).find_one({}))

    assert not [name for name in rig.metrics() if "budget" in name]
    assert rig.total("db.client.operation.duration") == 1


async def test_metrics_can_be_switched_off_and_spans_stay(connect, things, watch, rig):
    watch(metrics=False)
    await resolve(things(connect()).find_one({}))

    assert not rig.metrics()
    assert len(rig.spans) == 2


# Pools


def pool(rig: Rig, client: Any) -> dict[str, float]:
    """The numbers of the client's only pool."""
    prefix = f"{name_of(client)}@"
    found: dict[str, float] = {}
    for metric in (
        "count",
        "max",
        "idle.max",
        "idle.min",
        "pending_requests",
        "timeouts",
        "create_time",
        "wait_time",
        "use_time",
    ):
        for point in rig.points(f"db.client.connection.{metric}"):
            if point.attributes["db.client.connection.pool.name"].startswith(prefix):
                state = point.attributes.get("db.client.connection.state")
                value = point.count if hasattr(point, "bucket_counts") else point.value
                found[f"{metric} {state}" if state else metric] = value
    return found


@pytest.mark.parametrize("built", ["before", "after"])
async def test_a_pool_at_rest_under_load_and_at_rest_again(connect, things, watch, rig, built):
    if built == "before":
        client = connect(maxPoolSize=3, waitQueueTimeoutMS=100)
        await resolve(things(client).insert_many([{} for _ in range(5)]))
        watch()
    else:
        watch()
        client = connect(maxPoolSize=3, waitQueueTimeoutMS=100)
        await resolve(things(client).insert_many([{} for _ in range(5)]))
    await resolve(things(client).find_one({}))
    rest = pool(rig, client)
    assert (rest["count used"], rest["count idle"]) == (0, 1)
    assert (rest["max"], rest["idle.max"], rest["idle.min"]) == (3, 3, 0)
    assert (rest["pending_requests"], rest["timeouts"]) == (0, 0)

    holders = [things(client).find({}, batch_size=2, cursor_type=CursorType.EXHAUST) for _ in range(3)]
    for holder in holders:
        await first_of(holder)
    busy = pool(rig, client)
    assert (busy["count used"], busy["count idle"]) == (3, 0)
    with pytest.raises(WaitQueueTimeoutError):
        await resolve(things(client).find_one({}))
    assert pool(rig, client)["timeouts"] == 1
    for holder in holders:
        await resolve(holder.close())

    await resolve(things(client).find_one({}))
    again = pool(rig, client)
    assert again["count used"] == again["pending_requests"] == 0
    assert again["count idle"] <= 3  # an exhaust cursor that is closed early takes its connection with it
    assert again["use_time"] >= 4
    assert again["wait_time"] >= 4
    assert again["create_time"] >= 2


async def test_requests_that_wait_are_pending(mongo, connect, things, watch, rig, fail):
    if mongo.is_async and not hasattr(network_layer, "async_receive_message"):
        pytest.skip("this PyMongo's asynchronous client blocks the loop while it reads")
    watch()
    client = connect(maxPoolSize=1)
    await resolve(things(client).find_one({}))
    fail(client, "find", blockConnection=True, blockTimeMS=400, times=1)

    def find(_: int) -> Any:
        return things(client).find_one({})

    if mongo.is_async:
        running = [asyncio.ensure_future(find(number)) for number in range(4)]
    else:
        running = [asyncio.ensure_future(asyncio.to_thread(find, number)) for number in range(4)]
    most = {"count used": 0, "pending_requests": 0}
    while not all(each.done() for each in running):
        await asyncio.sleep(0.01)
        now = pool(rig, client)
        most = {name: max(seen, now[name]) for name, seen in most.items()}
    await asyncio.gather(*running)

    assert most == {"count used": 1, "pending_requests": 3}
    rest = pool(rig, client)
    assert (rest["count used"], rest["count idle"], rest["pending_requests"]) == (0, 1, 0)


async def test_the_pool_of_a_client_that_was_closed_is_gone(mongo, connect, things, watch, rig):
    watch()
    client = connect()
    await resolve(things(client).find_one({}))
    assert pool(rig, client)["count idle"] == 1
    await mongo.close()

    assert pool(rig, client).get("count idle", 0) == 0


# Bounded


async def test_collections_beyond_the_limit_are_other(mongo, watch, rig):
    watch(max_collections=20)
    with FakeServer("mongos") as server:
        client = mongo.client(server.uri)
        for number in range(60):
            await resolve(client.db[f"c{number}"].find_one({}))
        await resolve(client.db.c0.find_one({}))
        await mongo.close()

    found = rig.by("db.client.operation.duration", "db.collection.name")
    assert found.pop("_other") == 40
    found.pop(None, None)  # endSessions
    assert found == {f"c{number}": 1 + (number == 0) for number in range(20)}
    assert rig.operations[45].name == "find db.c45"  # a span has the name all the same


def test_ten_thousand_collections_leave_bounded_sets_and_caches(watch, rig, deployment):
    watch()
    with pymongo.MongoClient(deployment.uri) as client:
        client.db.c.find_one({})
        state = instrumentor._registry.of(client)
        for number in range(10_000):
            # What an operation does but for the network.
            started = state.telemetry.start(state.telemetry.naming.of("find", "db", f"collection{number}"))
            started.address = ("127.0.0.1", 27017)
            started.end(None)
            if not number % 1000:
                rig.clear()

    points = rig.points("db.client.operation.duration")
    assert len(points) <= 203
    assert rig.by("db.client.operation.duration", "db.collection.name")["_other"] >= 9_800
    assert len(state.telemetry.naming._known) <= 2000
    assert len(state.telemetry.naming._namespaces) <= 200


def test_ten_thousand_databases_leave_bounded_sets_too(watch, rig, deployment):
    watch()
    with pymongo.MongoClient(deployment.uri) as client:
        client.db.c.find_one({})
        telemetry = instrumentor._registry.of(client).telemetry
        for number in range(2_000):
            started = telemetry.start(telemetry.naming.of("listCollections", f"tenant{number}", None))
            started.end(None)
        rig.clear()

    assert len(rig.points("db.client.operation.duration")) <= 300


# Exemplars


async def test_exemplars_carry_the_trace_of_the_operation(connect, things, watch, rig, fail, delays):
    watch()
    client = connect()
    fail(client, "find", times=6, **OVERLOAD)
    with pytest.raises(OperationFailure):
        await resolve(things(client).find_one({}))

    span = rig.operation().context
    collected = rig.metrics()  # once: a collection takes the exemplars along
    for name in (
        "db.client.operation.duration",
        "mongodb.client.attempt.duration",
        "mongodb.client.operation.retries",
        "mongodb.retry.attempts",
        "mongodb.retry.backoff",
        "mongodb.retry.gave_up",
    ):
        [point] = collected[name].data.data_points
        assert point.exemplars, name
        for exemplar in point.exemplars:
            assert (exemplar.trace_id, exemplar.span_id) == (span.trace_id, span.span_id), name


# Agreement


async def mixed(collection: Any, number: int) -> None:
    """One operation of eight kinds, some of them certain to fail."""
    match number % 8:
        case 0:
            await resolve(collection.find_one({"n": number}))
        case 1:
            await resolve(collection.insert_one({"_id": number}))
        case 2:
            await resolve(collection.insert_one({"_id": "the same"}))
        case 3:
            await resolve(collection.update_one({"n": number}, {"$set": {"x": 1}}, upsert=True))
        case 4:
            await resolve(collection.bulk_write([InsertOne({}), UpdateOne({}, {"$inc": {"x": 1}})]))
        case 5:
            await resolve(collection.database.command("nonsense"))
        case 6:
            cursor = collection.find({}, batch_size=1)
            await first_of(cursor)
            await resolve(cursor.close())
        case _:
            await resolve(collection.count_documents({}))


@pytest.mark.parametrize("policy", ["backpressure", "current", "driver"])
async def test_metrics_spans_and_events_agree_to_the_unit(
    connect, things, watch, rig, deployment, delays, policy, monkeypatch
):
    monkeypatch.setattr("random.random", lambda: 0.0)
    heard = Commands()
    watch(policy=policy)
    client = connect(event_listeners=[heard])
    with suppress_instrumentation():
        # By another client: background tasks of the asynchronous one inherit the context of its first operation.
        await resolve(things(connect()).insert_many([{"n": number} for number in range(5)]))
        deployment.fail_command(
            commands=["find", "insert", "update", "aggregate"],
            probability=0.45,
            appName=client.options.pool_options.appname,
            **OVERLOAD,
        )
    raised = 0
    for number in range(80):
        try:
            await mixed(things(client), number)
        except PyMongoError:
            raised += 1
    with suppress_instrumentation():
        deployment.clear_failpoints()

    operations, commands = rig.operations, rig.commands
    retries = sum(span.attributes["mongodb.retry.attempts"] - 1 for span in operations)
    failed = [span for span in operations if not span.status.is_ok]
    assert len(heard.started_events) == len(commands) == len(heard.ended_events)
    assert Counter(event.command_name for event in heard.started_events) == Counter(
        span.name for span in commands
    )
    assert sum(hasattr(event, "failure") for event in heard.ended_events) == sum(
        not span.status.is_ok for span in commands
    )
    assert rig.total("db.client.operation.duration") == len(operations)
    assert rig.by("db.client.operation.duration", "db.operation.name") == Counter(
        span.attributes["db.operation.name"] for span in operations
    )
    assert rig.by("db.client.operation.duration", "error.type") == Counter(
        span.attributes.get("error.type") for span in operations
    )
    assert rig.total("mongodb.retry.attempts") == retries == sum(len(events(span)) for span in operations)
    assert rig.by("mongodb.retry.attempts", "mongodb.retry.reason") == Counter(
        event["mongodb.retry.reason"] for span in operations for event in events(span)
    )
    assert rig.total("mongodb.retry.backoff") == retries
    retried = [span for span in operations if span.attributes["mongodb.retry.attempts"] > 1]
    assert rig.total("mongodb.client.operation.retries") == len(retried)
    assert sum(point.sum for point in rig.points("mongodb.client.operation.retries")) == retries
    assert rig.by("mongodb.retry.gave_up", "mongodb.retry.reason") == Counter(map(outcome, failed))
    before = {link.context.span_id for span in commands for link in span.links}
    chained = [span for span in commands if span.links or span.context.span_id in before]
    assert rig.total("mongodb.client.attempt.duration") == len(chained)
    # An attempt may fail though the server said ok: a duplicate key is in the reply.
    in_vain = {rig.children(span)[-1].context.span_id for span in failed}
    assert rig.by("mongodb.client.attempt.duration", "mongodb.retry.outcome") == Counter(
        "ok" if span.status.is_ok and span.context.span_id not in in_vain else "error" for span in chained
    )
    assert len([span for span in commands if span.links]) == retries
    if policy == "backpressure":
        where = {"mongodb.client": name_of(client)}
        assert rig.total("mongodb.retry.budget.consumed", where) == retries
        assert otel_retry.budget(client).consumed == retries
    assert raised >= len(failed)
    assert not rig.open
    if policy != "driver" or pymongo.version_tuple[:2] >= (4, 17):
        assert retries > 5
    assert len(failed) >= 10


async def test_a_bulk_write_that_was_retried_and_then_fails_in_part_has_no_attempt_too_many(
    connect, things, watch, rig, fail, delays
):
    watch()
    client = connect()
    collection = things(client)
    await resolve(collection.insert_one({"_id": 1}))
    fail(client, "insert", times=1, **OVERLOAD)
    with pytest.raises(BulkWriteError):
        await resolve(collection.bulk_write([InsertOne({"_id": 1})]))

    assert rig.total("mongodb.client.attempt.duration") == 2
    assert rig.total("mongodb.retry.attempts") == 1


async def test_the_attempt_of_a_bulk_write_that_went_elsewhere_names_that_server(mongo, watch, rig, delays):
    watch()
    with sharded(2) as cluster:
        answers = iter([error(462, labels=OVERLOAD["errorLabels"])])
        for server in cluster.servers:
            server.reply("insert", lambda _: next(answers, {"n": 1}))
        client = mongo.client(cluster.uri)
        await discovered(client, 2)
        await resolve(client.db.c.bulk_write([InsertOne({})]))
        await mongo.close()

    failed, succeeded = (span.attributes["server.port"] for span in rig.commands if span.name == "insert")
    assert failed != succeeded
    found = {
        point.attributes["mongodb.retry.outcome"]: point.attributes["server.port"]
        for point in rig.points("mongodb.client.attempt.duration")
    }
    assert found == {"error": failed, "ok": succeeded}


async def test_an_attempt_without_a_server_names_none(mongo, dying, watch, rig):
    watch()
    with FakeServer("mongos") as server:
        client = mongo.client(server.uri, serverSelectionTimeoutMS=60, heartbeatFrequencyMS=10_000)
        await resolve(client.db.c.find_one({}))
    with pytest.raises(AutoReconnect):
        await resolve(client.db.c.find_one({}))

    found = {
        point.attributes["mongodb.retry.reason"]: "server.port" in point.attributes
        for point in rig.points("mongodb.client.attempt.duration")
    }
    assert found == {"network": True, "no_server": False}


async def test_an_insert_whose_answer_was_lost_has_two_attempts(mongo, watch, rig, delays):
    """By a server without retryable writes: the second attempt meets the document of the first."""
    watch(policy=otel_retry.IdempotenceAware(otel_retry.BackpressurePolicy()))
    same = ObjectId()
    duplicate = {
        "index": 0,
        "code": 11000,
        "errmsg": "E11000",
        "keyPattern": {"_id": 1},
        "keyValue": {"_id": same},
    }
    with FakeServer("standalone") as server:
        server.reply("insert", DROP, {"n": 0, "writeErrors": [duplicate]})
        client = mongo.client(server.uri)
        await resolve(client.db.c.insert_one({"_id": same}))
        await mongo.close()

    operation = rig.operation("insert")
    assert outcome(operation) == "retried"
    assert rig.attempts(operation) == [("insert", 1), ("insert", 2)]
    assert rig.total("mongodb.client.attempt.duration", {"db.operation.name": "insert"}) == 2
