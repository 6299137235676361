"""What an operation looks like in a trace: one operation span, one span for each command or attempt under it."""

from __future__ import annotations

import asyncio
import gc
import uuid
from typing import Any

import pymongo
import pytest
from bson import Int64
from bson.raw_bson import RawBSONDocument
from gridfs import AsyncGridFSBucket, GridFSBucket
from opentelemetry import baggage, context, trace
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode
from pymongo import DeleteMany, InsertOne, UpdateMany, UpdateOne, WriteConcern, network_layer
from pymongo.cursor import CursorType
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DuplicateKeyError,
    InvalidDocument,
    OperationFailure,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
)
from pymongo.monitoring import ConnectionPoolListener

import otel_retry
from otel_retry import instrumentor
from tests.fakes.wire_server import FakeServer, error, sharded
from tests.flavours import OVERLOAD, Commands, listed, resolve
from tests.integration.telemetry_rig import (
    Interrupter,
    Rig,
    discovered,
    events,
    eventually,
    first_of,
    is_child,
    outcome,
)

VERSION = pymongo.version_tuple[:2]
EVERY_OPERATION_IS_RETRYABLE = VERSION >= (4, 17)


def skip_if_cancelling_is_impossible(mongo: Any) -> None:
    if mongo.is_async and not hasattr(network_layer, "async_receive_message"):
        pytest.skip("this PyMongo's asynchronous client blocks the loop while it reads")


class Borrowed(ConnectionPoolListener):
    """Which connections were lent."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def connection_checked_out(self, event: Any) -> None:
        self.numbers.append(event.connection_id)

    def _other(self, event: Any) -> None:
        pass

    pool_created = pool_ready = pool_cleared = pool_closed = connection_created = connection_ready = _other
    connection_closed = connection_check_out_started = connection_check_out_failed = connection_checked_in = (
        _other
    )


def no_jitter(client: Any) -> None:
    """Backoff is exactly 0.1 s, 0.2 s, 0.4 s…"""
    instrumentor._registry.of(client).jitter = lambda: 1.0


async def started_session(client: Any) -> Any:
    return await resolve(client.start_session())


async def fill(collection: Any, count: int = 5) -> None:
    """Without a trace."""
    with suppress_instrumentation():
        await resolve(collection.insert_many([{"_id": i, "n": i} for i in range(count)]))


# One operation, one command


async def test_an_operation_is_one_span_with_one_command_span_under_it(connect, things, watch, rig):
    heard, borrowed = Commands(), Borrowed()
    watch()
    client = connect(event_listeners=[heard, borrowed])
    collection = things(client)
    await resolve(collection.find_one({"n": 1}))

    [event] = heard.named("find")
    host, port = event.connection_id
    namespace = f"{collection.database.name}.{collection.name}"
    operation, command = rig.operation(), rig.command()
    assert rig.names() == [(f"find {namespace}", ["find"])]
    assert operation.kind is command.kind is SpanKind.CLIENT
    assert operation.status.status_code is command.status.status_code is StatusCode.UNSET
    assert not operation.events
    assert not command.events
    assert not command.links
    assert operation.attributes == {
        "db.system.name": "mongodb",
        "db.namespace": collection.database.name,
        "db.collection.name": collection.name,
        "db.operation.name": "find",
        "db.operation.summary": f"find {namespace}",
        "mongodb.operation_id": event.operation_id,
        "mongodb.retry.attempts": 1,
        "mongodb.retry.outcome": "first_try",
        "mongodb.retry.policy": "backpressure",
    }
    assert command.attributes == {
        "db.system.name": "mongodb",
        "db.command.name": "find",
        "db.namespace": collection.database.name,
        "db.collection.name": collection.name,
        "db.query.summary": f"find {namespace}",
        "server.address": host,
        "server.port": port,
        "network.transport": "tcp",
        "db.mongodb.server_connection_id": event.server_connection_id,
        "db.mongodb.driver_connection_id": borrowed.numbers[-1],
        "db.mongodb.lsid": str(uuid.UUID(bytes=event.command["lsid"]["id"])),
        "mongodb.operation_id": event.operation_id,
        "mongodb.request_id": event.request_id,
        "mongodb.retry.attempt": 1,
    }
    assert operation.start_time <= command.start_time <= command.end_time <= operation.end_time


async def test_the_scope_is_ours_with_version_and_schema(connect, things, watch, rig):
    watch()
    await resolve(things(connect()).find_one({}))

    for span in rig.spans:
        scope = span.instrumentation_scope
        assert (scope.name, scope.version) == ("otel_retry", otel_retry.__version__)
        assert scope.schema_url.startswith("https://opentelemetry.io/schemas/1.")


async def test_a_write_has_its_transaction_number_and_attributes_have_the_types_of_the_conventions(
    connect, things, watch, rig
):
    watch()
    await resolve(things(connect()).insert_one({}))

    found = rig.command("insert").attributes
    assert type(found["db.mongodb.txn_number"]) is int
    for name in ("server.port", "mongodb.request_id", "mongodb.operation_id", "mongodb.retry.attempt"):
        assert type(found[name]) is int, name


async def test_a_client_that_was_there_before_has_the_same_spans(connect, things, watch, rig):
    client = connect()
    await fill(things(client))
    watch()
    await resolve(things(client).find_one({}))

    assert [(span.name, rig.attempts(span)) for span in rig.operations] == [
        (rig.operation().name, [("find", 1)])
    ]
    assert "db.mongodb.driver_connection_id" in rig.command().attributes


# Retries


async def test_each_attempt_is_a_command_span_with_number_delay_and_a_link_to_the_one_before(
    connect, things, watch, rig, fail, delays
):
    heard = Commands()
    watch()
    client = connect(event_listeners=[heard])
    fail(client, "find", times=2, **OVERLOAD)
    no_jitter(client)
    await resolve(things(client).find_one({}))

    sent = heard.named("find")
    operation = rig.operation()
    first, second, third = rig.children(operation)
    assert rig.attempts(operation) == [("find", 1), ("find", 2), ("find", 3)]
    assert delays == [0.1, 0.2]
    assert [span.attributes.get("mongodb.retry.delay") for span in (first, second, third)] == [None, 0.1, 0.2]
    assert [span.attributes["mongodb.request_id"] for span in (first, second, third)] == [
        event.request_id for event in sent
    ]
    assert {span.attributes["mongodb.operation_id"] for span in (first, second, third, operation)} == {
        sent[0].operation_id
    }
    assert not first.links
    for span, previous in ((second, first), (third, second)):
        [link] = span.links
        assert link.context.span_id == previous.context.span_id
        assert link.context.trace_id == operation.context.trace_id
        assert link.attributes == {"mongodb.retry.link": "previous_attempt"}
    assert operation.attributes["mongodb.retry.attempts"] == 3
    assert outcome(operation) == "retried"
    assert operation.status.status_code is StatusCode.UNSET


async def test_an_event_tells_each_retry(connect, things, watch, rig, fail, delays):
    heard = Commands()
    watch()
    client = connect(event_listeners=[heard])
    fail(client, "find", times=2, **OVERLOAD)
    no_jitter(client)
    await resolve(things(client).find_one({}))

    host, port = heard.named("find")[0].connection_id
    assert events(rig.operation()) == [
        {
            "mongodb.retry.attempt": number,
            "mongodb.retry.reason": "overload",
            "mongodb.retry.decision": "try_next_host",
            "mongodb.retry.policy": "backpressure",
            "mongodb.retry.delay": delay,
            "mongodb.retry.tokens": tokens,
            "mongodb.retry.server": f"{host}:{port}",
            "error.type": "OperationFailure",
        }
        for number, delay, tokens in ((1, 0.1, 999.0), (2, 0.2, 998.0))
    ]


@pytest.mark.parametrize(
    ("failure", "reason", "error_type"),
    [
        ({"closeConnection": True}, "network", "AutoReconnect"),
        ({"errorCode": 10107}, "not_primary", "NotPrimaryError"),
        ({"errorCode": 6}, "server_error", "OperationFailure"),
        ({"errorCode": 262}, "server_timeout", "OperationFailure"),
        (OVERLOAD, "overload", "OperationFailure"),
    ],
    ids=["network", "not_primary", "server_error", "server_timeout", "overload"],
)
async def test_the_reason_of_a_retry_is_a_bounded_word(
    connect, things, watch, rig, fail, delays, failure, reason, error_type
):
    watch()
    client = connect()
    await fill(things(client))
    fail(client, "find", times=1, **failure)
    await resolve(things(client).find_one({}))

    [event] = events(rig.operation())
    assert (event["mongodb.retry.reason"], event["error.type"]) == (reason, error_type)
    assert rig.attempts(rig.operation()) == [("find", 1), ("find", 2)]


async def test_a_failed_command_says_so_and_the_next_attempt_does_not(
    connect, things, watch, rig, fail, delays
):
    watch()
    client = connect()
    fail(client, "find", times=1, **OVERLOAD)
    await resolve(things(client).find_one({}))

    failed, succeeded = rig.commands
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["db.response.status_code"] == "462"
    assert failed.attributes["error.type"] == "OperationFailure"
    assert failed.attributes["exception.type"] == "pymongo.errors.OperationFailure"
    assert failed.attributes["exception.message"]
    assert "Traceback" in failed.attributes["exception.stacktrace"]
    [event] = events(failed, "exception")
    assert event == {key: failed.attributes[key] for key in event}
    assert set(event) == {"exception.type", "exception.message", "exception.stacktrace"}
    assert succeeded.status.status_code is StatusCode.UNSET
    assert not {"error.type", "db.response.status_code", "exception.type"} & set(succeeded.attributes)


async def test_a_retry_that_goes_to_another_server_names_each(mongo, watch, rig, delays):
    with sharded(2) as cluster:
        answers = iter([error(6)])
        found = {"cursor": {"id": Int64(0), "ns": "db.c", "firstBatch": []}}
        for server in cluster.servers:
            server.reply("find", lambda _: next(answers, found))
        watch()
        client = mongo.client(cluster.uri)
        await discovered(client, 2)
        await resolve(client.db.c.find_one({}))
        known = {server.port for server in cluster.servers}
        await mongo.close()

    operation = rig.operation("find")
    ports = [span.attributes["server.port"] for span in rig.children(operation)]
    assert len(ports) == 2
    assert {*ports} == known
    assert [event["mongodb.retry.server"] for event in events(operation)] == [
        f"127.0.0.1:{port}" for port in ports[:-1]
    ]


# Attempts that sent nothing


def assert_unsent(span: Any, *, number: int, error_type: str, server: bool) -> None:
    assert span.name == "attempt"
    assert span.kind is SpanKind.CLIENT
    assert span.status.status_code is StatusCode.ERROR
    found = span.attributes
    assert found["db.system.name"] == "mongodb"
    assert found["mongodb.retry.attempt"] == number
    assert found["error.type"] == error_type
    assert "exception.type" in found
    assert "exception.stacktrace" in found
    assert ("server.address" in found, "server.port" in found) == (server, server)
    assert span.start_time <= span.end_time


async def test_no_server_from_the_start_is_an_attempt_span(mongo, dying, watch, rig):
    watch()
    with FakeServer("mongos") as server:
        uri = server.uri
    client = mongo.client(uri, serverSelectionTimeoutMS=60)
    with pytest.raises(ServerSelectionTimeoutError):
        await resolve(client.db.c.find_one({}))

    operation = rig.operation()
    [unsent] = rig.children(operation)
    assert_unsent(unsent, number=1, error_type="ServerSelectionTimeoutError", server=False)
    assert unsent.end_time - unsent.start_time > 50_000_000
    assert operation.start_time <= unsent.start_time + 50_000_000
    assert outcome(operation) == "no_server"
    assert operation.attributes["error.type"] == "ServerSelectionTimeoutError"
    assert operation.status.status_code is StatusCode.ERROR


async def test_a_server_that_dies_leaves_a_command_span_and_then_an_attempt_span(mongo, dying, watch, rig):
    watch()
    with FakeServer("mongos") as server:
        client = mongo.client(server.uri, serverSelectionTimeoutMS=60, heartbeatFrequencyMS=10_000)
        await resolve(client.db.c.find_one({}))
        rig.clear()
    with pytest.raises(AutoReconnect):
        await resolve(client.db.c.find_one({}))

    operation = rig.operation()
    sent, unsent = rig.children(operation)
    assert rig.attempts(operation) == [("find", 1), ("attempt", 2)]
    assert_unsent(unsent, number=2, error_type="ServerSelectionTimeoutError", server=False)
    assert [link.context.span_id for link in unsent.links] == [sent.context.span_id]
    assert unsent.attributes["mongodb.operation_id"] == sent.attributes["mongodb.operation_id"]
    assert outcome(operation) == "no_server"
    assert operation.attributes["mongodb.retry.attempts"] == 2


async def test_a_connection_that_is_refused_is_an_attempt_span(mongo, dying, watch, rig):
    """From 4.17 on PyMongo calls a refused connection an overload, and it is tried more than once."""
    watch()
    with FakeServer("mongos") as server:
        # Each operation makes a connection of its own, and the monitor sleeps: the server is still thought to be there.
        client = mongo.client(
            server.uri, serverSelectionTimeoutMS=60, heartbeatFrequencyMS=10_000, maxIdleTimeMS=1
        )
        await resolve(client.db.c.find_one({}))
        rig.clear()
        await asyncio.sleep(0.01)
    instrumentor._registry.of(client).jitter = lambda: 0.0
    with pytest.raises(AutoReconnect):
        await resolve(client.db.c.find_one({}))

    operation = rig.operation()
    children = sorted(rig.children(operation), key=lambda span: span.attributes["mongodb.retry.attempt"])
    assert len(children) == operation.attributes["mongodb.retry.attempts"] > 1
    for index, unsent in enumerate(children):
        refused = unsent.attributes["error.type"] == "AutoReconnect"
        assert refused or index
        kind = "AutoReconnect" if refused else "ServerSelectionTimeoutError"
        assert_unsent(unsent, number=index + 1, error_type=kind, server=refused)
        assert unsent.attributes.get("server.port", server.port) == server.port
        before = [children[index - 1].context.span_id] if index else []
        assert [link.context.span_id for link in unsent.links] == before
    assert {event["mongodb.retry.reason"] for event in events(operation)} <= {"network", "overload"}


async def test_a_command_after_a_refused_connection_is_linked_to_the_attempt_span(
    mongo, connect, watch, rig, proxy, things, delays
):
    watch()
    client = connect(proxy.uri, maxIdleTimeMS=1, heartbeatFrequencyMS=10_000)
    await resolve(things(client).find_one({}))
    rig.clear()
    await asyncio.sleep(0.01)
    proxy.refuse(1)
    await resolve(things(client).find_one({}))
    await mongo.close()

    operation = rig.operation("find")
    refused, sent = rig.children(operation)
    assert rig.attempts(operation) == [("attempt", 1), ("find", 2)]
    assert_unsent(refused, number=1, error_type="AutoReconnect", server=True)
    assert [link.context.span_id for link in sent.links] == [refused.context.span_id]
    assert outcome(operation) == "retried"


async def test_a_pool_that_was_cleared_is_an_attempt_span(connect, watch, rig, things):
    watch()
    client = connect()
    await resolve(things(client).find_one({}))
    rig.clear()
    [server] = client._topology._servers.values()
    await resolve(server.pool.reset())
    await resolve(things(client).find_one({}))

    operation = rig.operation()
    paused, _ = rig.children(operation)
    assert rig.attempts(operation) == [("attempt", 1), ("find", 2)]
    assert_unsent(paused, number=1, error_type="AutoReconnect", server=True)
    assert [event["mongodb.retry.reason"] for event in events(operation)] == ["pool_cleared"]


async def test_a_pool_without_a_free_connection_is_an_attempt_span(connect, watch, rig, things):
    watch()
    client = connect(maxPoolSize=1, waitQueueTimeoutMS=50)
    await fill(things(client))
    holder = things(client).find({}, batch_size=2, cursor_type=CursorType.EXHAUST)
    await first_of(holder)
    rig.clear()
    with pytest.raises(WaitQueueTimeoutError):
        await resolve(things(client).find_one({}))
    operation = rig.operation()
    await resolve(holder.close())

    [unsent] = rig.children(operation)
    assert_unsent(unsent, number=1, error_type="WaitQueueTimeoutError", server=True)
    assert outcome(operation) == "not_retryable"


async def test_a_document_that_cannot_be_sent_is_an_attempt_span(connect, watch, rig, things):
    watch()
    with pytest.raises(InvalidDocument):
        await resolve(things(connect()).insert_one({"it": object()}))

    [unsent] = rig.children(rig.operation())
    assert_unsent(unsent, number=1, error_type="InvalidDocument", server=True)
    assert outcome(rig.operation()) == "not_retryable"


# Why it gave up


class Unwilling(otel_retry.RetryPolicy):
    """Refuses, and gives no reason of its own."""

    rules = otel_retry.RULES["backpressure"]

    def _rethrow(self, _: Any) -> otel_retry.RetryDecision:
        return otel_retry.RetryDecision.rethrow()

    on_unavailable = on_read_timeout = on_write_timeout = on_request_error = _rethrow


async def give_up_by_limit(client, fail, operate):
    fail(client, "find", **OVERLOAD)
    with pytest.raises(OperationFailure):
        await operate()
    return 6


async def give_up_by_budget(client, fail, operate):
    bucket = otel_retry.budget(client)
    while bucket.try_withdraw():
        pass
    fail(client, "find", **OVERLOAD)
    with pytest.raises(OperationFailure):
        await operate()
    return 1


async def give_up_by_deadline(client, fail, operate):
    jitter = iter([0.0, 0.0, 0.0, 1.0])
    instrumentor._registry.of(client).jitter = lambda: next(jitter)
    fail(client, "find", **OVERLOAD)
    with pytest.raises(OperationFailure), pymongo.timeout(0.79):
        await operate()
    return 4  # the next wait would be 0.8 s


async def give_up_by_not_retryable(client, fail, operate):
    fail(client, "find", errorCode=2)
    with pytest.raises(OperationFailure):
        await operate()
    return 1


@pytest.mark.parametrize(
    ("reason", "give_up"),
    [
        ("limit", give_up_by_limit),
        ("budget", give_up_by_budget),
        ("deadline", give_up_by_deadline),
        ("not_retryable", give_up_by_not_retryable),
    ],
)
async def test_the_outcome_is_the_reason_why_it_gave_up(
    connect, things, watch, rig, fail, delays, reason, give_up
):
    watch()
    client = connect()
    await fill(things(client))

    async def operate() -> None:
        await resolve(things(client).find_one({}))

    attempts = await give_up(client, fail, operate)
    operation = rig.operation()
    assert outcome(operation) == reason
    assert operation.attributes["mongodb.retry.attempts"] == attempts
    assert rig.attempts(operation) == [("find", number + 1) for number in range(attempts)]
    assert len(events(operation)) == attempts - 1
    assert operation.status.status_code is StatusCode.ERROR
    assert operation.attributes["error.type"] == "OperationFailure"
    assert operation.attributes["db.response.status_code"] in {"462", "2"}
    assert operation.attributes["exception.type"] == "pymongo.errors.OperationFailure"
    assert len(events(operation, "exception")) == 1


async def test_the_outcome_of_a_policy_that_refuses_is_policy(connect, things, watch, rig, fail):
    watch(policy=Unwilling())
    client = connect()
    fail(client, "find", errorCode=6)
    with pytest.raises(OperationFailure):
        await resolve(things(client).find_one({}))

    assert outcome(rig.operation()) == "policy"
    assert rig.operation().attributes["mongodb.retry.policy"] == str(Unwilling())


async def test_the_outcome_of_a_cancelled_operation_is_cancelled_and_its_command_ends(
    mongo, connect, things, watch, rig, fail
):
    skip_if_cancelling_is_impossible(mongo)
    watch()
    interrupter = Interrupter()
    client = connect(event_listeners=[interrupter])
    await fill(things(client))
    fail(client, "find", blockConnection=True, blockTimeMS=300, times=1)
    await interrupter.interrupt(mongo, lambda: things(client).find_one({}), "find")

    operation, command = rig.operation(), rig.command("find")
    assert outcome(operation) == "cancelled"
    assert rig.attempts(operation) == [("find", 1)]
    cancelled = "CancelledError" if mongo.is_async else "KeyboardInterrupt"
    for span in (operation, command):
        assert span.attributes["error.type"] == cancelled
        assert span.status.status_code is StatusCode.ERROR
    assert not rig.open


async def test_an_operation_that_is_cancelled_in_its_wait_has_only_the_attempts_it_made(
    connect, things, watch, rig, fail, monkeypatch
):
    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    async def sleep_async(_: float) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep", sleep)
    monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep_async", sleep_async)
    watch()
    client = connect()
    await fill(things(client))
    no_jitter(client)
    fail(client, "find", **OVERLOAD)
    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
        await resolve(things(client).find_one({}))

    assert outcome(rig.operation()) == "cancelled"
    assert rig.attempts(rig.operation()) == [("find", 1)]
    assert len(events(rig.operation())) == 1


async def test_a_write_error_is_an_error_of_the_operation_and_not_of_the_command(connect, things, watch, rig):
    watch()
    collection = things(connect())
    await fill(collection)
    with pytest.raises(DuplicateKeyError):
        await resolve(collection.insert_one({"_id": 1}))

    operation = rig.operation()
    assert rig.command().status.status_code is StatusCode.UNSET
    assert operation.attributes["error.type"] == "DuplicateKeyError"
    assert operation.attributes["db.response.status_code"] == "11000"
    assert outcome(operation) == "not_retryable"


# Every kind of operation


async def test_a_cursor_has_an_operation_for_each_batch_with_collection_and_cursor_id(
    connect, things, watch, rig
):
    watch()
    collection = things(connect())
    await fill(collection)
    assert len(await listed(collection.find({}, batch_size=2))) == 5

    namespace = f"{collection.database.name}.{collection.name}"
    assert rig.names() == [
        (f"find {namespace}", ["find"]),
        (f"getMore {namespace}", ["getMore"]),
        (f"getMore {namespace}", ["getMore"]),
    ]
    find, *more = rig.commands
    cursor = find.attributes["db.mongodb.cursor_id"]
    assert type(cursor) is int
    assert [each.attributes["db.mongodb.cursor_id"] for each in more] == [cursor, cursor]
    assert {each.attributes["db.collection.name"] for each in rig.spans} == {collection.name}
    assert len({each.attributes["mongodb.operation_id"] for each in rig.operations}) == 3


async def test_a_client_that_decodes_nothing_has_its_cursor_ids_too(connect, things, watch, rig):
    watch()
    collection = things(connect(document_class=RawBSONDocument))
    await fill(things(connect()))
    rig.clear()
    await listed(collection.find({}, batch_size=3))

    ids = [each.attributes.get("db.mongodb.cursor_id") for each in rig.commands]
    assert len(ids) == 2
    assert ids[0] == ids[1] is not None


async def test_a_cursor_that_is_closed_early_kills_itself_in_an_operation_of_its_own(
    connect, things, watch, rig
):
    watch()
    collection = things(connect())
    await fill(collection)
    cursor = collection.find({}, batch_size=2)
    await first_of(cursor)
    await resolve(cursor.close())

    namespace = f"{collection.database.name}.{collection.name}"
    assert rig.names() == [(f"find {namespace}", ["find"]), (f"killCursors {namespace}", ["killCursors"])]
    assert outcome(rig.operation("killCursors")) == "first_try"


async def test_a_cursor_that_is_forgotten_is_killed_in_a_trace_of_its_own(
    request, mongo, connect, things, watch, rig
):
    watch()
    client = connect()
    collection = things(client)
    tracer = rig.tracer_provider.get_tracer("test")
    with tracer.start_as_current_span("request"):
        await resolve(collection.insert_many([{} for _ in range(5)]))
    cursor = collection.find({}, batch_size=2)
    await first_of(cursor)
    del cursor
    gc.collect()
    await eventually(lambda: any(each.name == "killCursors" for each in rig.commands))

    operation = rig.operation("killCursors")
    assert operation.parent is None
    assert rig.attempts(operation) == [("killCursors", 1)]


async def test_an_exhaust_cursor_has_an_operation_for_each_batch(connect, things, watch, rig):
    watch()
    collection = things(connect())
    await fill(collection)
    assert len(await listed(collection.find({}, batch_size=2, cursor_type=CursorType.EXHAUST))) == 5

    for operation in rig.operations:
        assert rig.attempts(operation) == [(operation.attributes["db.operation.name"], 1)]
        assert operation.attributes["db.collection.name"] == collection.name
    assert {each.name for each in rig.commands} == {"find", "getMore"}


async def test_a_command_outside_of_any_operation_that_fails_names_the_error(
    connect, things, watch, rig, fail
):
    watch()
    client = connect()
    collection = things(client)
    await fill(collection)
    cursor = collection.find({}, batch_size=2, cursor_type=CursorType.EXHAUST)
    await first_of(cursor)
    rig.clear()
    fail(client, "getMore", errorCode=43)
    with pytest.raises(OperationFailure):
        await listed(cursor)
    await resolve(cursor.close())

    operation = rig.operation("getMore")
    [command] = rig.children(operation)
    assert command.attributes["error.type"] == "CursorNotFound"
    assert operation.attributes["error.type"] == "CursorNotFound"
    assert operation.attributes["exception.type"] == "pymongo.errors.CursorNotFound"


OPERATIONS = {
    "insert_one": (lambda c: c.insert_one({}), "insert", ["insert"]),
    "insert_many": (lambda c: c.insert_many([{}, {}]), "insert", ["insert"]),
    "update_one": (lambda c: c.update_one({}, {"$set": {"x": 1}}), "update", ["update"]),
    "update_many": (lambda c: c.update_many({}, {"$set": {"x": 1}}), "update", ["update"]),
    "replace_one": (lambda c: c.replace_one({"_id": 1}, {}), "update", ["update"]),
    "delete_one": (lambda c: c.delete_one({}), "delete", ["delete"]),
    "delete_many": (lambda c: c.delete_many({"x": 99}), "delete", ["delete"]),
    "find_one_and_update": (
        lambda c: c.find_one_and_update({}, {"$set": {"x": 1}}),
        "findAndModify",
        ["findAndModify"],
    ),
    "find_one_and_delete": (lambda c: c.find_one_and_delete({}), "findAndModify", ["findAndModify"]),
    "count_documents": (lambda c: c.count_documents({}), "count", ["aggregate"]),
    "estimated_document_count": (lambda c: c.estimated_document_count(), "count", ["count"]),
    "distinct": (lambda c: c.distinct("x"), "distinct", ["distinct"]),
    "bulk_write": (
        lambda c: c.bulk_write(
            [InsertOne({}), UpdateOne({}, {"$set": {"x": 1}}), DeleteMany({"x": 99})], ordered=True
        ),
        "bulkWrite",
        ["insert", "update", "delete"],
    ),
    "create_index": (lambda c: c.create_index("x"), "createIndexes", ["createIndexes"]),
    "drop_indexes": (lambda c: c.drop_indexes(), "dropIndexes", ["dropIndexes"]),
    "drop": (lambda c: c.drop(), "dropCollection", ["drop"]),
    "rename": (lambda c: c.rename(c.name + "_renamed"), "renameCollection", ["renameCollection"]),
}


def grouped(operations: dict[str, Any], lost: set[str]) -> Any:
    """Two tests: a server is not healed between all of them, and what is not right yet stands apart."""
    return pytest.mark.parametrize(
        "names",
        [
            pytest.param([name for name in operations if name not in lost], id="most"),
            pytest.param(sorted(lost), id="by other callbacks"),
        ],
    )


@grouped(OPERATIONS, {"drop", "rename"})
async def test_an_operation_of_a_collection_has_its_name_and_its_namespace(
    connect, things, watch, rig, names
):
    watch()
    collection = things(connect())
    found, expected = {}, {}
    for name in names:
        operate, operation_name, commands = OPERATIONS[name]
        await fill(collection)
        rig.clear()
        await resolve(operate(collection))
        operation = rig.operation()
        summary = f"{operation_name} {collection.database.name}.{collection.name}"
        expected[name] = (
            summary,
            summary,
            operation_name,
            collection.database.name,
            collection.name,
            [(command, 1) for command in commands],
            {("admin", None) if name == "rename" else (collection.database.name, collection.name)},
        )
        found[name] = (
            operation.name,
            *(
                operation.attributes.get(key)
                for key in (
                    "db.operation.summary",
                    "db.operation.name",
                    "db.namespace",
                    "db.collection.name",
                )
            ),
            rig.attempts(operation),
            {
                (each.attributes["db.namespace"], each.attributes.get("db.collection.name"))
                for each in rig.commands
            },
        )
        with suppress_instrumentation():
            await resolve(collection.drop())

    assert found == expected


ELSEWHERE = {
    "list_databases": (lambda db: db.client.list_database_names(), "listDatabases admin", ["listDatabases"]),
    "list_collections": (lambda db: db.list_collection_names(), "listCollections {db}", ["listCollections"]),
    "command": (lambda db: db.command("ping"), "runCommand {db}", ["ping"]),
    "command with a collection": (lambda db: db.command("find", "c"), "runCommand {db}", ["find"]),
    "validate": (lambda db: db.validate_collection("c"), "runCommand {db}", ["validate"]),
    "server_info": (lambda db: db.client.server_info(), "runCommand admin", ["buildinfo"]),
    "cursor_command": (lambda db: db.cursor_command("find", "c"), "runCommand {db}", ["find"]),
    "drop_collection": (lambda db: db.drop_collection("nothing"), "dropCollection {db}.nothing", ["drop"]),
    "create_collection": (
        lambda db: db.create_collection("another", check_exists=False),
        "createCollection {db}.another",
        ["create"],
    ),
    "drop_database": (lambda db: db.client.drop_database(db.name), "dropDatabase {db}", ["dropDatabase"]),
    "aggregate of a database": (
        lambda db: db.client.admin.aggregate([{"$currentOp": {}}]),
        "aggregate admin",
        ["aggregate"],
    ),
}


@grouped(ELSEWHERE, {"cursor_command", "drop_collection"})
async def test_an_operation_of_a_database_or_client_has_its_name_and_its_namespace(
    connect, watch, rig, shared_database, names
):
    watch()
    client = connect()
    database = client[f"{shared_database}_elsewhere"]
    found, expected = {}, {}
    for name in names:
        operate, summary, commands = ELSEWHERE[name]
        with suppress_instrumentation():
            await resolve(database.c.insert_one({}))
        rig.clear()
        await resolve(operate(database))
        found[name] = (rig.operation().name, rig.attempts(rig.operation()))
        expected[name] = (summary.format(db=database.name), [(command, 1) for command in commands])
    with suppress_instrumentation():
        await resolve(client.drop_database(database.name))

    assert found == expected


async def test_a_bulk_write_has_a_command_span_for_each_command_and_counts_attempts_by_command(
    connect, things, watch, rig, fail, delays
):
    watch()
    client = connect()
    collection = things(client)
    await fill(collection)
    fail(client, "update", times=2, **OVERLOAD)
    await resolve(
        collection.bulk_write([InsertOne({}), UpdateOne({}, {"$set": {"x": 1}}), DeleteMany({"x": 9})])
    )

    operation = rig.operation()
    assert rig.attempts(operation) == [
        ("insert", 1),
        ("update", 1),
        ("update", 2),
        ("update", 3),
        ("delete", 1),
    ]
    linked = [[link.context.span_id for link in span.links] for span in rig.children(operation)]
    ids = [span.context.span_id for span in rig.children(operation)]
    assert linked == [[], [], [ids[1]], [ids[2]], []]
    assert operation.attributes["mongodb.retry.attempts"] == 3
    assert outcome(operation) == "retried"


async def test_a_bulk_write_that_fails_in_part_is_an_operation_that_failed(connect, things, watch, rig):
    watch()
    collection = things(connect())
    await fill(collection)
    with pytest.raises(BulkWriteError):
        await resolve(collection.bulk_write([InsertOne({"_id": 1}), UpdateMany({}, {"$set": {"x": 1}})]))

    assert rig.attempts(rig.operation()) == [("insert", 1)]
    assert rig.operation().attributes["error.type"] == "BulkWriteError"
    assert outcome(rig.operation()) == "not_retryable"


async def test_a_clients_bulk_write_is_an_operation_of_admin(mongo, watch, rig, delays):
    watch()
    with FakeServer("mongos") as server:
        server.reply("bulkWrite", error(462, labels=OVERLOAD["errorLabels"]))
        client = mongo.client(server.uri)
        await resolve(
            client.bulk_write(
                [
                    InsertOne(namespace="db.c", document={}),
                    UpdateOne({}, {"$set": {"x": 1}}, namespace="db.d"),
                ]
            )
        )

    assert rig.names() == [("bulkWrite admin", ["bulkWrite", "bulkWrite"])]
    assert rig.attempts(rig.operation()) == [("bulkWrite", 1), ("bulkWrite", 2)]
    assert "db.collection.name" not in rig.operation().attributes


async def test_a_change_stream_is_an_aggregate_and_a_get_more_for_each_look(connect, things, watch, rig):
    watch()
    collection = things(connect())
    await fill(collection)
    stream = await resolve(collection.watch(max_await_time_ms=20))
    await resolve(stream.try_next())
    await resolve(stream.close())

    namespace = f"{collection.database.name}.{collection.name}"
    opened, *looked, killed = rig.names()
    assert opened == (f"aggregate {namespace}", ["aggregate"])
    assert looked == [(f"getMore {namespace}", ["getMore"])]
    assert killed == (f"killCursors {namespace}", ["killCursors"])
    assert "db.mongodb.cursor_id" in rig.commands[0].attributes


async def test_gridfs_is_the_operations_it_consists_of(mongo, connect, things, watch, rig):
    watch()
    client = connect()
    collection = things(client)
    bucket = (AsyncGridFSBucket if mongo.is_async else GridFSBucket)(
        collection.database, bucket_name=collection.name
    )
    number = await resolve(bucket.upload_from_stream("name", b"x" * 300_000))
    stream = await resolve(bucket.open_download_stream(number))
    assert len(await resolve(stream.read())) == 300_000

    for operation in rig.operations:
        assert operation.attributes["db.collection.name"] in {
            f"{collection.name}.files",
            f"{collection.name}.chunks",
        }
        assert len(rig.children(operation)) == 1
    names = [each.attributes["db.operation.name"] for each in rig.operations]
    assert names.count("insert") == 2
    assert "find" in names
    assert "createIndexes" in names


async def test_unacknowledged_writes_have_spans(connect, things, watch, rig):
    watch()
    collection = things(connect())
    await fill(collection)
    careless = collection.with_options(write_concern=WriteConcern(0))
    await resolve(careless.insert_one({}))
    await resolve(careless.bulk_write([InsertOne({}), UpdateOne({}, {"$set": {"x": 1}})]))

    namespace = f"{collection.database.name}.{collection.name}"
    assert rig.names() == [
        (f"insert {namespace}", ["insert"]),
        (f"insert {namespace}", ["insert"]),
        (f"update {namespace}", ["update"]),
    ]
    assert not rig.open


async def test_operations_of_older_drivers_that_bypass_the_retryable_path_are_retried_in_one_span(
    connect, watch, rig, fail, delays, things
):
    watch()
    client = connect()
    collection = things(client)
    await fill(collection)
    fail(client, "ping", "createIndexes", "drop", times=2, **OVERLOAD)
    await resolve(collection.database.command("ping"))
    operation = rig.operation("runCommand")
    assert rig.attempts(operation) == [("ping", 1), ("ping", 2), ("ping", 3)]
    assert len({each.attributes["mongodb.operation_id"] for each in rig.spans}) == 1
    assert outcome(operation) == "retried"
    fail(client, "createIndexes", times=1, **OVERLOAD)
    await resolve(collection.create_index("x"))
    assert rig.attempts(rig.operation("createIndexes")) == [("createIndexes", 1), ("createIndexes", 2)]
    fail(client, "drop", times=1, **OVERLOAD)
    await resolve(collection.drop())
    assert rig.attempts(rig.operation("dropCollection")) == [("drop", 1), ("drop", 2)]


# Transactions


async def test_a_transaction_is_a_span_around_its_operations_and_nothing_after_it_is_inside(
    connect, things, watch, rig
):
    watch()
    client = connect()
    collection = things(client)
    await fill(collection)
    session = await started_session(client)
    await resolve(session.start_transaction())
    await resolve(collection.insert_one({}, session=session))
    await resolve(collection.find_one({}, session=session))
    await resolve(session.commit_transaction())
    await resolve(collection.find_one({}, session=session))
    await resolve(session.end_session())

    namespace = f"{collection.database.name}.{collection.name}"
    assert rig.names() == [
        (
            "transaction",
            [
                (f"insert {namespace}", ["insert"]),
                (f"find {namespace}", ["find"]),
                ("commitTransaction admin", ["commitTransaction"]),
            ],
        ),
        (f"find {namespace}", ["find"]),
    ]
    [transaction] = rig.transactions
    assert transaction.attributes == {"db.system.name": "mongodb"}
    assert transaction.kind is SpanKind.CLIENT
    assert transaction.status.status_code is StatusCode.UNSET
    numbers = {
        span.attributes["db.mongodb.txn_number"]
        for span in rig.commands[:3]
        if is_child(rig.operation("insert"), transaction)
    }
    assert len(numbers) == 1


async def test_an_aborted_transaction_ends_its_span(connect, things, watch, rig):
    watch()
    client = connect()
    collection = things(client)
    await fill(collection)
    session = await started_session(client)
    await resolve(session.start_transaction())
    await resolve(collection.insert_one({}, session=session))
    await resolve(session.abort_transaction())
    await resolve(session.end_session())

    [(name, children)] = rig.names()
    assert (name, [each[0].split()[0] for each in children]) == (
        "transaction",
        ["insert", "abortTransaction"],
    )
    assert not rig.open


async def test_a_transaction_whose_session_is_dropped_ends_its_span(connect, things, watch, rig):
    watch()
    client = connect()
    await fill(things(client))
    session = await started_session(client)
    await resolve(session.start_transaction())
    await resolve(things(client).insert_one({}, session=session))
    await resolve(session.end_session())

    assert len(rig.transactions) == 1
    assert not rig.open


async def test_a_transaction_without_operations_is_a_span_alone(connect, things, watch, rig):
    watch()
    client = connect()
    await fill(things(client))
    for finish in ("commit_transaction", "abort_transaction"):
        session = await started_session(client)
        await resolve(session.start_transaction())
        await resolve(getattr(session, finish)())
        await resolve(session.end_session())

    assert rig.names() == ["transaction", "transaction"]


async def test_with_transaction_is_one_span_for_each_run_of_the_callback(
    mongo, connect, things, watch, rig, fail
):
    watch()
    client = connect()
    collection = things(client)
    await fill(collection)
    fail(client, "insert", times=1, errorCode=112, errorLabels=["TransientTransactionError"])

    async def work_async(session: Any) -> None:
        await collection.insert_one({}, session=session)

    def work(session: Any) -> None:
        collection.insert_one({}, session=session)

    session = await started_session(client)
    await resolve(session.with_transaction(work_async if mongo.is_async else work))
    await resolve(session.end_session())

    first, second = rig.names()
    assert first[1][0] == second[1][0]
    assert [each[0].split()[0] for each in second[1]] == ["insert", "commitTransaction"]


async def test_a_commit_that_is_retried_has_its_attempts_in_the_transaction(
    connect, things, watch, rig, fail
):
    watch()
    client = connect()
    collection = things(client)
    await fill(collection)
    fail(client, "commitTransaction", times=1, errorCode=11602, errorLabels=["RetryableWriteError"])
    session = await started_session(client)
    await resolve(session.start_transaction())
    await resolve(collection.insert_one({}, session=session))
    await resolve(session.commit_transaction())
    await resolve(session.end_session())

    [(_, [_, commit])] = rig.names()
    assert commit == ("commitTransaction admin", ["commitTransaction", "commitTransaction"])
    assert outcome(rig.operation("commitTransaction")) == "retried"


async def test_a_commit_that_the_application_tries_again_stays_in_its_transaction_without_complaints(
    connect, things, watch, rig, fail, caplog
):
    watch()
    client = connect()
    collection = things(client)
    await fill(collection)
    session = await started_session(client)
    await resolve(session.start_transaction())
    await resolve(collection.insert_one({}, session=session))
    fail(client, "commitTransaction", times=1, errorCode=50, errorLabels=["UnknownTransactionCommitResult"])
    with pytest.raises(OperationFailure):
        await resolve(session.commit_transaction())
    await resolve(session.commit_transaction())
    await resolve(session.end_session())

    [(name, children)] = rig.names()
    assert name == "transaction"
    assert [each[0].split()[0] for each in children] == ["insert", "commitTransaction", "commitTransaction"]
    assert not [record.getMessage() for record in caplog.records if record.levelname != "INFO"]


async def test_a_transaction_is_part_of_the_span_around_it(connect, things, watch, rig):
    watch()
    client = connect()
    collection = things(client)
    await fill(collection)
    tracer = rig.tracer_provider.get_tracer("test")
    with tracer.start_as_current_span("request"):
        session = await started_session(client)
        await resolve(session.start_transaction())
        await resolve(collection.insert_one({}, session=session))
        await resolve(collection.find_one({}))
        await resolve(session.commit_transaction())
        await resolve(session.end_session())

    [(request, children)] = rig.names()
    assert request == "request"
    assert [each[0].split()[0] for each in children] == ["transaction", "find"]


# Sensitive commands


SENSITIVE = {
    "createUser": {"createUser": "planted_user", "pwd": "planted_password", "roles": []},
    "updateUser": {"updateUser": "planted_user", "pwd": "planted_password"},
    "saslStart": {"saslStart": 1, "mechanism": "PLAIN", "payload": b"planted_password", "db": "$external"},
    "hello": {
        "hello": 1,
        "speculativeAuthenticate": {"saslStart": 1, "mechanism": "planted", "payload": b"planted_password"},
    },
}


@pytest.mark.parametrize(
    "name",
    [
        *SENSITIVE,
    ],
)
async def test_a_sensitive_command_has_no_command_span_and_no_text_anywhere(
    connect, watch, rig, shared_database, name
):
    watch(query_text_max_length=10_000, query_text_raw=True)
    client = connect()
    database = client[f"{shared_database}_users"]
    failure = ""
    try:
        await resolve(database.command(SENSITIVE[name]))
    except OperationFailure as raised:
        failure = raised.details[
            "errmsg"
        ]  # may name the user: with raw text the application asked for messages
    finally:
        with suppress_instrumentation():
            if name == "createUser":
                await resolve(database.command("dropUser", "planted_user"))

    assert not rig.commands, rig.tree()
    assert rig.operation().name == f"runCommand {database.name}"
    said = "".join(span.to_json() for span in rig.spans).replace(failure, "") if failure else ""
    assert "planted_password" not in "".join(span.to_json() for span in rig.spans)
    assert "db.query.text" not in said


async def test_a_sensitive_command_by_cursor_command_is_not_even_named(connect, watch, rig, shared_database):
    watch()
    database = connect()[f"{shared_database}_users"]
    with pytest.raises(Exception):  # noqa: B017 - whatever the driver makes of a reply without a cursor
        await resolve(database.cursor_command("updateUser", "nobody", pwd="planted_password"))

    assert [span.name for span in rig.operations] == [f"runCommand {database.name}"]
    assert not rig.commands


# Samplers, suppression, context


class Recorder(Sampler):
    """Records what a sampler can see, and decides by name."""

    def __init__(self, *, drop: str = "") -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self._drop = drop

    def should_sample(
        self,
        parent_context: Any,
        trace_id: int,
        name: str,
        kind: Any = None,
        attributes: Any = None,
        links: Any = None,
        trace_state: Any = None,
    ) -> SamplingResult:
        self.seen.append((name, dict(attributes or {})))
        dropped = bool(self._drop) and name.startswith(self._drop)
        return SamplingResult(Decision.DROP if dropped else Decision.RECORD_AND_SAMPLE, attributes)

    def get_description(self) -> str:
        return "Recorder"


@pytest.fixture
def sampled(instrument):
    """A rig with a sampler, and `instrument` reporting to it."""
    made: list[Rig] = []

    def make(sampler: Sampler, **options: Any) -> Rig:
        made.append(Rig(sampler=sampler))
        instrument(**{**made[-1].providers, **options})
        return made[-1]

    yield make
    for rig in made:
        rig.shutdown()


async def test_a_sampler_sees_all_that_is_known_when_a_span_starts(connect, things, sampled, fail, delays):
    sampler = Recorder()
    rig = sampled(sampler)
    client = connect()
    collection = things(client)
    fail(client, "find", times=1, **OVERLOAD)
    await resolve(collection.find_one({}))

    (_, operation), (_, first), (_, second) = sampler.seen
    late = {"mongodb.operation_id", "mongodb.retry.attempts", "mongodb.retry.outcome"}
    assert operation == {key: value for key, value in rig.operation().attributes.items() if key not in late}
    failed, succeeded = rig.commands
    assert first == {
        key: value
        for key, value in failed.attributes.items()
        if not key.startswith(("exception.", "error.", "db.response."))
    }
    assert second == dict(succeeded.attributes)
    assert second["mongodb.retry.attempt"] == 2


async def test_nothing_is_built_and_nobody_listens_where_no_span_is_recorded(
    connect, things, sampled, monkeypatch
):
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("built for a span that is not recorded")

    monkeypatch.setattr("otel_retry.telemetry.spans.query_text", never)
    monkeypatch.setattr("otel_retry.telemetry.spans.exception_attributes", never)
    monkeypatch.setattr("otel_retry.telemetry.names.OperationNames.command_attributes", never)
    rig = sampled(ALWAYS_OFF, query_text_max_length=1000)
    client = connect()
    collection = things(client)
    await resolve(collection.insert_one({"_id": 1}))
    with pytest.raises(DuplicateKeyError):
        await resolve(collection.insert_one({"_id": 1}))

    assert not client._event_listeners.enabled_for_commands
    assert not rig.spans
    assert rig.total("db.client.operation.duration") == 2


async def test_an_operation_that_is_not_sampled_among_others_has_no_spans_at_all(connect, things, sampled):
    rig = sampled(Recorder(drop="insert"))
    collection = things(connect())
    await resolve(collection.find_one({}))
    await resolve(collection.insert_one({}))
    await resolve(collection.find_one({}))

    assert [span.name for span in rig.spans if span.name == "insert"] == []
    assert len(rig.operations) == len(rig.commands) == 2


async def test_suppressed_operations_have_no_span_and_no_metric(connect, things, watch, rig, fail, delays):
    watch()
    client = connect()
    collection = things(client)
    await resolve(collection.insert_one({}))
    rig.clear()
    before = {
        name: [(dict(point.attributes), getattr(point, "count", None)) for point in metric.data.data_points]
        for name, metric in rig.metrics().items()
        if not name.startswith(("db.client.connection.", "mongodb.retry.budget."))
    }
    fail(client, "find", times=1, **OVERLOAD)
    with suppress_instrumentation():
        await resolve(collection.find_one({}))
        await resolve(collection.bulk_write([InsertOne({})]))
        cursor = collection.find({}, batch_size=1)
        await first_of(cursor)
        await resolve(cursor.close())
        session = await started_session(client)
        await resolve(session.start_transaction())
        await resolve(collection.insert_one({}, session=session))
        await resolve(session.commit_transaction())
        await resolve(session.end_session())

    assert not rig.spans
    assert not rig.open
    assert before == {
        name: [(dict(point.attributes), getattr(point, "count", None)) for point in metric.data.data_points]
        for name, metric in rig.metrics().items()
        if name in before
    }
    assert set(rig.metrics()) - set(before) == {
        name for name in rig.metrics() if name.startswith(("db.client.connection.", "mongodb.retry.budget."))
    }


class CallsBack(Commands):
    """An application that stores what its listener hears, with the client that it listens to."""

    def __init__(self) -> None:
        super().__init__()
        self.client: Any = None

    def started(self, event: Any) -> None:
        super().started(event)
        if event.command_name == "find" and self.client is not None:
            client, self.client = self.client, None
            with suppress_instrumentation():
                client.audit.log.insert_one({})


def test_a_suppressed_operation_inside_of_another_does_not_touch_its_spans(deployment, watch, rig, request):
    """Synchronous only: a listener cannot await."""
    watch()
    listener = CallsBack()
    with pymongo.MongoClient(deployment.uri, event_listeners=[listener]) as client:
        client.db.c.find_one({})
        rig.clear()
        listener.client = client
        client.db.c.find_one({})
        listener.client = None
        client.drop_database("audit")
        rig_open = rig.open
        found = [(span.name, rig.attempts(span)) for span in rig.operations[:1]]

    assert not rig_open
    assert found == [("find db.c", [("find", 1)])]


async def test_the_span_around_an_operation_is_its_parent(connect, things, watch, rig):
    watch()
    collection = things(connect())
    tracer = rig.tracer_provider.get_tracer("test")
    with tracer.start_as_current_span("request") as request:
        await resolve(collection.find_one({}))

    assert rig.operation().parent.span_id == request.get_span_context().span_id
    assert rig.operation().context.trace_id == request.get_span_context().trace_id


def snapshot() -> tuple[Any, ...]:
    """The context itself, not an equal one."""
    return context.get_current(), trace.get_current_span(), baggage.get_all()


async def succeeds(mongo, client, collection, fail):
    await resolve(collection.find_one({}))


async def retries(mongo, client, collection, fail):
    fail(client, "find", times=2, **OVERLOAD)
    await resolve(collection.find_one({}))


async def fails(mongo, client, collection, fail):
    fail(client, "find", errorCode=2)
    with pytest.raises(OperationFailure):
        await resolve(collection.find_one({}))


async def gives_up(mongo, client, collection, fail):
    fail(client, "find", **OVERLOAD)
    with pytest.raises(OperationFailure):
        await resolve(collection.find_one({}))


async def is_cancelled(mongo, client, collection, fail):
    if mongo.is_async and not hasattr(network_layer, "async_receive_message"):
        return
    fail(client, "find", times=1, blockConnection=True, blockTimeMS=200)
    [interrupter] = [each for each in client.options.event_listeners if isinstance(each, Interrupter)]
    await interrupter.interrupt(mongo, lambda: collection.find_one({}), "find")


async def is_suppressed(mongo, client, collection, fail):
    with suppress_instrumentation():
        await resolve(collection.find_one({}))


async def is_in_a_transaction(mongo, client, collection, fail):
    session = await started_session(client)
    await resolve(session.start_transaction())
    await resolve(collection.insert_one({}, session=session))
    await resolve(session.commit_transaction())
    await resolve(session.end_session())


async def iterates(mongo, client, collection, fail):
    await listed(collection.find({}, batch_size=2))


async def runs_a_command(mongo, client, collection, fail):
    await resolve(collection.database.command("ping"))
    with pytest.raises(OperationFailure):
        await resolve(collection.database.command("nonsense"))


WHAT_HAPPENS = (
    succeeds,
    retries,
    fails,
    gives_up,
    is_cancelled,
    is_suppressed,
    is_in_a_transaction,
    iterates,
    runs_a_command,
)


@pytest.mark.parametrize("policy", ["backpressure", "driver"])
async def test_the_context_is_the_same_before_and_after_whatever_happens(
    mongo, connect, things, watch, rig, fail, delays, deployment, policy, monkeypatch
):
    monkeypatch.setattr("random.random", lambda: 0.0)
    watch(policy=policy)
    client = connect(event_listeners=[Interrupter()])
    collection = things(client)
    await fill(collection)
    outside = snapshot()
    for happens in WHAT_HAPPENS:
        if policy == "driver" and happens in {retries, gives_up} and not EVERY_OPERATION_IS_RETRYABLE:
            continue
        with rig.tracer_provider.get_tracer("test").start_as_current_span("request"):
            token = context.attach(baggage.set_baggage("tenant", "one"))
            inside = snapshot()
            await happens(mongo, client, collection, fail)
            assert snapshot() == inside, happens
            assert all(now is then for now, then in zip(snapshot()[:2], inside[:2], strict=True)), happens
            context.detach(token)
        with suppress_instrumentation():
            deployment.clear_failpoints()
        assert snapshot() == outside, happens
        assert not rig.open, happens


# Policy `driver`: PyMongo's own loop


@pytest.fixture
def instant_driver(monkeypatch):
    """PyMongo's own waits, from 4.17 on, take no time."""
    monkeypatch.setattr("random.random", lambda: 0.0)


async def test_retries_that_pymongo_makes_by_itself_have_the_same_spans(
    connect, things, watch, rig, fail, instant_driver
):
    watch(policy="driver")
    client = connect()
    await fill(things(client))
    fail(client, "find", times=1, errorCode=6)
    await resolve(things(client).find_one({}))

    operation = rig.operation()
    first, second = rig.children(operation)
    assert rig.attempts(operation) == [("find", 1), ("find", 2)]
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert len({span.attributes["mongodb.operation_id"] for span in rig.spans}) == 1
    assert operation.attributes["mongodb.retry.policy"] == "driver"
    assert operation.attributes["mongodb.retry.attempts"] == 2
    assert outcome(operation) == "retried"
    [event] = events(operation)
    assert event["mongodb.retry.reason"] == "server_error"
    assert event["mongodb.retry.attempt"] == 1
    assert event["mongodb.retry.server"].endswith(str(first.attributes["server.port"]))
    assert "mongodb.retry.tokens" not in event


async def test_the_commands_of_a_bulk_write_that_pymongo_retries_are_counted_one_by_one(
    connect, things, watch, rig, fail, instant_driver
):
    watch(policy="driver")
    client = connect()
    await fill(things(client))
    fail(client, "insert", times=1, errorCode=6, errorLabels=["RetryableWriteError"])
    await resolve(things(client).bulk_write([InsertOne({}), UpdateOne({}, {"$set": {"x": 1}})]))

    assert rig.attempts(rig.operation()) == [("insert", 1), ("insert", 2), ("update", 1)]
    assert [len(span.links) for span in rig.commands] == [0, 1, 0]


async def test_what_pymongo_gives_up_by_itself_has_an_outcome(
    connect, things, watch, rig, fail, instant_driver
):
    watch(policy="driver")
    client = connect()
    await fill(things(client))
    fail(client, "find", errorCode=6)
    with pytest.raises(OperationFailure):
        await resolve(things(client).find_one({}))
    assert rig.attempts(rig.operation()) == [("find", 1), ("find", 2)]
    assert outcome(rig.operation()) == "limit"

    rig.clear()
    fail(client, "find", errorCode=2)
    with pytest.raises(OperationFailure):
        await resolve(things(client).find_one({}))
    assert outcome(rig.operation()) == "not_retryable"


async def test_an_attempt_of_pymongo_that_sent_nothing_is_an_attempt_span_too(mongo, dying, watch, rig):
    watch(policy="driver")
    with FakeServer("mongos") as server:
        client = mongo.client(
            server.uri, serverSelectionTimeoutMS=60, heartbeatFrequencyMS=10_000, maxIdleTimeMS=1
        )
        await resolve(client.db.c.find_one({}))
        rig.clear()
        await asyncio.sleep(0.01)
    with pytest.raises(AutoReconnect):
        await resolve(client.db.c.find_one({}))

    operation = rig.operation()
    attempts = operation.attributes["mongodb.retry.attempts"]
    assert sorted(rig.attempts(operation)) == [("attempt", number + 1) for number in range(attempts)]
    assert attempts > 1
    assert outcome(operation) in {"no_server", "limit"}
    for unsent in rig.children(operation):
        assert operation.start_time - 1_000_000 <= unsent.start_time <= unsent.end_time <= operation.end_time


async def test_run_command_and_ddl_have_their_spans_under_policy_driver(connect, things, watch, rig):
    watch(policy="driver")
    collection = things(connect())
    await fill(collection)
    await resolve(collection.database.command("ping"))
    await resolve(collection.create_index("x"))
    with pytest.raises(OperationFailure):
        await resolve(collection.database.command("nonsense"))

    assert [each.attributes["db.operation.name"] for each in rig.operations] == [
        "runCommand",
        "createIndexes",
        "runCommand",
    ]
    assert [outcome(each) for each in rig.operations] == ["first_try", "first_try", "not_retryable"]
    assert all(len(rig.children(each)) == 1 for each in rig.operations)


async def test_a_wait_of_pymongo_is_no_part_of_the_attempts_around_it(
    connect, things, watch, rig, fail, monkeypatch
):
    if not EVERY_OPERATION_IS_RETRYABLE:
        pytest.skip("PyMongo waits by itself from 4.17 on")
    monkeypatch.setattr("random.random", lambda: 0.5)
    watch(policy="driver")
    client = connect()
    await fill(things(client))
    fail(client, "find", times=1, **OVERLOAD)
    await resolve(things(client).find_one({}))

    [event] = events(rig.operation())
    first, second = rig.commands
    waited = second.attributes["mongodb.retry.delay"]
    assert waited == event["mongodb.retry.delay"]
    assert waited >= 0.05
    assert (second.start_time - first.end_time) / 1e9 > waited - 0.005
    attempts = rig.points("mongodb.client.attempt.duration")
    operation = rig.operation()
    in_all = (operation.end_time - operation.start_time) / 1e9
    assert sum(point.sum for point in attempts) < in_all - waited + 0.005
    assert all(point.sum > 0 for point in attempts)
