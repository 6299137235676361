"""Garbage from a server, through the whole path: a real client of either driver, a socket, a server that says it.

A real mongod cannot be made to answer garbage, so a scripted one stands in. The oracle is PyMongo itself: a client
that is not instrumented gets the same answers, and what it raises is what the watched one must raise.
"""

from __future__ import annotations

from typing import Any

import pytest
from bson import Int64
from pymongo import DeleteMany, InsertOne, UpdateOne
from pymongo.errors import OperationFailure

import otel_retry
from tests.fakes.wire_server import DROP
from tests.flavours import listed, resolve
from tests.hostile.bench import (
    LONGEST_TEXT,
    LONGEST_WAIT,
    MOST_ATTEMPTS,
    examples_of,
    in_metrics,
    in_spans,
    outcome,
    where,
)
from tests.hostile.replies import MEGABYTE, bytes_of_replies, overloads, replies
from tests.integration.telemetry_rig import eventually

OPERATIONS: dict[str, tuple[str, Any]] = {
    "find_one": ("find", lambda c: c.db.things.find_one()),
    "find": ("find", lambda c: listed(c.db.things.find())),
    "insert_one": ("insert", lambda c: c.db.things.insert_one({"_id": 1})),
    "insert_many": ("insert", lambda c: c.db.things.insert_many([{"_id": 1}, {"_id": 2}], ordered=False)),
    "update_many": ("update", lambda c: c.db.things.update_many({}, {"$inc": {"a": 1}})),
    "bulk_write": (
        "update",
        lambda c: c.db.things.bulk_write([InsertOne({}), UpdateOne({}, {"$set": {"a": 1}}), DeleteMany({})]),
    ),
    "find_one_and_delete": ("findAndModify", lambda c: c.db.things.find_one_and_delete({})),
    "getMore": ("getMore", lambda c: listed(c.db.things.find())),
    "client.bulk_write": (
        "bulkWrite",
        lambda c: c.bulk_write(
            [InsertOne({}, namespace="db.things"), UpdateOne({}, {"$set": {"a": 1}}, namespace="db.things")]
        ),
    ),
    "distinct": ("distinct", lambda c: c.db.things.distinct("a")),
    "create_index": ("createIndexes", lambda c: c.db.things.create_index("a")),
    "command": ("ping", lambda c: c.db.command("ping")),
}
POLICIES = ("backpressure", "current", "once")


HOSTILE = [
    DROP,
    {
        "ok": 0,
        "code": 462,
        "errorLabels": ["SystemOverloadedError", "RetryableError"],
        "baseBackoffMS": 365 * 86_400_000,
    },
    {"ok": 0, "code": 2**40, "codeName": "x" * 1000, "errmsg": MEGABYTE},
    {"ok": 1, "cursor": {"id": MEGABYTE, "ns": "db.things", "firstBatch": []}},
]

# PyMongo's asynchronous client, interrupted while it connects, forgets the socket: nothing of ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_whatever_a_server_answers_the_application_gets_what_pymongo_gives(
    watched, mongo, server, rig, delays, logged, operation
):
    command, operate = OPERATIONS[operation]
    clients = [watched(policy=policy, query_text_max_length=200) for policy in POLICIES]
    bare = mongo.client(server.uri, retryReads=False, retryWrites=False)
    examples = [
        *HOSTILE,
        *examples_of(replies, 20),
        *examples_of(overloads, 8),
        *examples_of(bytes_of_replies, 8),
    ]
    for number, answer in enumerate(examples):
        client = clients[number % len(clients)]
        server.always = {command: answer}
        if command == "getMore":
            server.always["find"] = {"cursor": {"id": Int64(7), "ns": "db.things", "firstBatch": [{}]}}
        rig.clear()
        delays.clear()
        raised = await outcome(lambda: operate(client), resolve)  # noqa: B023 - awaited in this very round
        expected = await outcome(lambda: operate(bare), resolve)

        # A retry may meet a pool that the first answer has paused: then the first answer is in the history.
        history = [] if raised is None else otel_retry.attempts(raised)
        seen = {type(raised), *(type(each.error) for each in history)}
        assert type(expected) in seen, f"{raised!r:.500} instead of {expected!r:.500}"
        assert rig.operations
        await eventually(lambda: rig.open == [], seconds=30)  # cursors are killed in the background
        assert all(0 <= delay <= LONGEST_WAIT for delay in delays)
        assert len(delays) < MOST_ATTEMPTS
        assert logged.complaints == []
        assert max(len(text) for _, text in in_spans(rig)) <= LONGEST_TEXT
        if raised is not None:
            assert len(history) <= MOST_ATTEMPTS
            assert all(len(note) < 500 for note in getattr(raised, "__notes__", ()))
    assert max(len(text) for _, text in in_metrics(rig)) < 500


@pytest.mark.parametrize("raw", [False, True])
async def test_the_words_of_a_server_are_bounded_also_raw(watched, server, rig, logged, raw):
    client = watched(query_text_raw=raw, query_text_max_length=500)
    server.always = {"find": {"ok": 0, "code": 96, "errmsg": MEGABYTE, "codeName": "y" * 1000}}
    raised = await outcome(client.db.things.find_one, resolve)

    assert type(raised) is OperationFailure
    assert logged.complaints == []
    for span in rig.spans:
        assert len(span.attributes["exception.message"]) <= 1024
        assert len(span.status.description) <= 1024
    assert max(len(text) for _, text in in_spans(rig)) <= LONGEST_TEXT


@pytest.mark.parametrize("cursor_id", ["7", 7.5, b"7", [7], {"a": 7}, None, True, Int64(7)], ids=repr)
async def test_a_cursor_id_of_any_type_leaves_no_span_open(watched, server, rig, logged, cursor_id):
    client = watched()
    server.always = {"find": {"cursor": {"id": cursor_id, "ns": "db.things", "firstBatch": [{}]}}}
    await outcome(lambda: client.db.things.find_one(), resolve)  # noqa: PLW0108 - a method of the cursor otherwise

    await eventually(lambda: rig.open == [], seconds=30)
    assert logged.complaints == []
    assert rig.command("find").attributes.get("db.mongodb.cursor_id") in {None, 7, True}


@pytest.mark.parametrize(
    "connection", ["7", 7.5, MEGABYTE, [7], {"a": 7}, Int64(2**40)], ids=lambda each: type(each).__name__
)
async def test_a_connection_id_of_any_type_is_no_attribute_unless_it_is_a_number(
    watched, server, rig, logged, connection
):
    server.greeting = {"connectionId": connection}
    client = watched()
    await resolve(client.db.things.find_one())

    expected = connection if isinstance(connection, int) else None
    assert rig.command("find").attributes.get("db.mongodb.server_connection_id") == expected
    assert logged.complaints == []


@pytest.mark.parametrize(
    "command",
    [
        {"getMore": "marker", "collection": "things"},
        {"getMore": [1], "collection": 7},
        {"ping": 1, "txnNumber": "marker"},
        {"ping": 1, "lsid": "marker"},
        {"ping": 1, "lsid": {"id": "marker"}},
        {"ping": 1, "lsid": {"id": 2**40}},
        {"ping": 1, "lsid": {"id": b"marker"}, "txnNumber": "marker"},
    ],
    ids=str,
)
async def test_a_command_of_the_application_s_own_may_hold_anything(watched, server, rig, logged, command):
    """Where sessions are not supported PyMongo leaves these fields to the application."""
    server.kind = "standalone"
    server.greeting = {"logicalSessionTimeoutMinutes": None}
    client = watched(server.uri)
    await outcome(lambda: client.db.command(command), resolve)

    assert [span.name for span in rig.commands] == [next(iter(command))]
    assert rig.open == []
    assert logged.complaints == []
    assert where("marker", rig, logged) == []
