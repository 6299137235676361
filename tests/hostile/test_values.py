"""Values of documents, of every BSON type and in every place: with redaction on none of them leaves the process.

The marker is planted as a value everywhere (keys are field names, and may show) and then looked for in all that is
exported: spans with their events, status, links and resource, metrics, and what this package logs.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest
from bson import (
    SON,
    Binary,
    Code,
    DBRef,
    Decimal128,
    Int64,
    MaxKey,
    MinKey,
    ObjectId,
    Regex,
    Timestamp,
    encode,
)
from bson.raw_bson import RawBSONDocument
from hypothesis import given, settings
from hypothesis import strategies as st
from pymongo import InsertOne, UpdateMany, UpdateOne
from pymongo.errors import PyMongoError

import otel_retry
from otel_retry import RetryDecision, RetryPolicy
from otel_retry.history import describe
from otel_retry.telemetry.query_text import query_text
from tests.fakes.wire_server import error
from tests.flavours import listed, resolve
from tests.hostile.bench import examples_of, hostile, outcome, where

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "PLANTED"
NUMBER = 918273645546372819
"""The marker where only a number can stand."""

planted = st.sampled_from(
    [
        MARK,
        MARK * 50,
        f'"}}, {MARK}',
        MARK.encode(),
        Binary(MARK.encode(), 0),
        Binary(MARK.encode(), 128),
        Binary(MARK.encode() * 3, 6),
        Regex(MARK, "i"),
        Code(MARK),
        Code("x", {"scope": MARK}),
        Code(MARK, {MARK[:3]: MARK}),
        DBRef(MARK, MARK, MARK),
        DBRef("c", {"id": MARK}, extra=MARK),
        NUMBER,
        Int64(NUMBER),
        float(NUMBER),
        Decimal128(str(NUMBER)),
        Timestamp(NUMBER % 2**32, 1),
        ObjectId((MARK.encode() * 2)[:12]),
        dt.datetime(2001, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
        MinKey(),
        MaxKey(),
        True,
        None,
        RawBSONDocument(encode({"a": MARK, "b": [{"c": MARK}, MARK]})),
    ]
)
keys = st.sampled_from(
    ["a", "b.c", "$eq", "$in", "$regex", "$where", "$expr", "$function", "find", "_id", ""]
)
documents = st.recursive(
    planted,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(keys, inner, min_size=1, max_size=3),
        st.dictionaries(keys, inner, min_size=1, max_size=2).map(SON),
        st.dictionaries(keys, inner, min_size=1, max_size=2).map(
            lambda document: RawBSONDocument(encode(document))
        ),
    ),
    max_leaves=8,
)
fields = st.sampled_from(
    [
        "filter",
        "query",
        "q",
        "u",
        "update",
        "documents",
        "updates",
        "deletes",
        "pipeline",
        "let",
        "hint",
        "comment",
        "sort",
        "key",
    ]
)
commands = st.builds(
    lambda name, first, rest: {name: first, **rest},
    st.sampled_from(["ping", "explain", "validate", "mapReduce", "eval", "killOp", "anything"]),
    documents,
    st.dictionaries(fields, documents, max_size=4),
) | st.builds(
    lambda name, rest: {name: "things", **rest},
    st.sampled_from(
        ["find", "insert", "update", "delete", "aggregate", "distinct", "count", "findAndModify"]
    ),
    st.dictionaries(fields, documents, max_size=4),
)

TRACES = (MARK, str(NUMBER), str(NUMBER % 2**32), "2001", MARK.encode().hex(), "UExBTlRF")
"""The marker as text, as numbers, as a date, in hexadecimal and in base 64."""


@settings(hostile, max_examples=250)
@given(commands, st.integers(1, 2000))
def test_no_value_is_in_the_text_of_a_query(command, limit):
    text = query_text(command, limit=limit, raw=False)

    assert len(text) <= limit
    assert [trace for trace in TRACES if trace in text] == []


def test_the_marker_can_be_found():
    """Or else the tests here would pass whatever leaves."""
    text = query_text({"find": "things", "filter": {"a": MARK, "n": NUMBER}}, limit=2000, raw=True)

    assert MARK in text
    assert str(NUMBER) in text


class Careless(RetryPolicy):
    """Raises with, and without, the error that it was told of."""

    def on_request_error(self, context: Any) -> RetryDecision:
        if context.attempt == 1:
            raise context.failure.error
        raise ZeroDivisionError

    on_unavailable = on_read_timeout = on_write_timeout = on_request_error


@pytest.mark.parametrize("policy", ["backpressure", "current", "driver", Careless()], ids=str)
async def test_no_value_of_a_command_or_of_a_server_s_answer_leaves(watched, server, rig, logged, policy):
    """The server quotes the document in all its answers, as servers do."""
    client = watched(policy=policy, query_text_max_length=5000)
    found = [each for each in examples_of(documents, 60) if isinstance(each, dict)][:15]
    assert found
    quoting = {
        "errmsg": f"dup key: {{ a: {MARK} {NUMBER} }}",
        "keyValue": {"a": MARK},
        "errInfo": {"details": MARK},
    }
    answers = [
        {
            "n": 1,
            "value": {"a": MARK},
            "values": [MARK],
            "cursor": {"id": 0, "ns": "db.things", "firstBatch": [{"a": MARK}]},
        },
        {**error(11000), **quoting},
        {**error(462, labels=["RetryableError"]), **quoting},
        {"ok": 0, **quoting},
        {"n": 0, "writeErrors": [{"index": 0, "code": 11000, **quoting, "op": {"a": MARK}}]},
        {"n": 1, "writeConcernError": {"code": 64, "codeName": "WriteConcernTimeout", **quoting}},
        {"ok": 0, "code": 43, "codeName": f"is no name {MARK}", "errmsg": MARK},
    ]
    things = client.db.things
    operations: list[Callable[[Any], Any]] = [
        lambda document: listed(things.find(document, comment=MARK)),
        lambda document: things.insert_one({"v": document}),
        lambda document: things.bulk_write(
            [InsertOne({"v": document}), UpdateOne({"v": document}, {"$set": {"v": document}})]
        ),
        lambda document: things.bulk_write([UpdateMany({"v": document}, {"$set": {"v": MARK}})]),
        lambda document: things.find_one_and_update({"v": document}, {"$set": {"v": document}}),
        lambda document: things.distinct("a", {"v": document}),
        lambda document: client.db.command({"anything": MARK, "v": document}),
    ]
    names = ("find", "insert", "update", "findAndModify", "distinct", "anything")
    for number, document in enumerate(found):
        server.always = dict.fromkeys(names, answers[number % len(answers)])
        for operate in operations:
            raised = await outcome(lambda: operate(document), resolve)  # noqa: B023 - awaited in this very round
            said = "".join(describe(each) for each in otel_retry.attempts(raised)) if raised else ""
            assert MARK not in said + "".join(getattr(raised, "__notes__", ()))
    server.always = {}
    assert rig.commands
    for trace in TRACES:
        if trace != "2001":  # that may be a part of any number
            assert where(trace, rig, logged) == []


async def test_no_value_leaves_when_a_real_server_quotes_it(
    mongo, deployment, database_name, instrument, rig, logged, delays
):
    """A duplicate key, a validation that says why, an unknown operator, a value of the wrong type."""
    instrument(**rig.providers, query_text_max_length=5000)
    client = mongo.client(deployment.uri)
    things = client[database_name].things
    rules = {"$jsonSchema": {"properties": {"v": {"bsonType": "string"}}}}
    await resolve(client[database_name].create_collection("things", validator=rules))
    await resolve(things.insert_one({"_id": MARK}))
    quoted: list[PyMongoError] = []
    for operate in (
        lambda: things.insert_one({"_id": MARK}),
        lambda: things.insert_many([{"_id": MARK}, {"_id": MARK}], ordered=False),
        lambda: things.insert_one({"v": {"deep": [MARK]}, "w": MARK}),
        lambda: things.update_one({"_id": MARK}, {"$set": {"v": NUMBER}}),
        lambda: things.update_one({"_id": MARK}, {"$inc": {"_id": MARK}}),
        lambda: listed(things.find({"$where": f"{MARK}(("})),
        lambda: things.aggregate([{"$project": {"a": {"$toInt": MARK}}}]),
        lambda: client[database_name].command({"find": "things", "filter": MARK}),
    ):
        raised = await outcome(operate, resolve)
        assert isinstance(raised, PyMongoError)
        quoted.append(raised)

    assert any(MARK in str(raised) for raised in quoted)  # the application sees what the server said
    assert [trace for trace in (MARK, str(NUMBER)) if where(trace, rig, logged)] == []
    assert rig.open == []
