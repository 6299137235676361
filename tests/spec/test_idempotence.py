"""Is the analysis right? Generated statements are applied once and twice to a real server, and the data compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo import InsertOne, MongoClient, UpdateMany
from pymongo.errors import AutoReconnect, PyMongoError

import otel_retry
from otel_retry import mongod
from otel_retry.idempotence import Statement, is_idempotent
from tests.fakes.proxy import Proxy
from tests.flavours import Commands, listed, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour

START = [
    {"_id": 1, "a": 1, "b": [1, 2, 3], "c": {"d": 1}, "s": "new", "l": [{"s": "new"}, {"s": "new"}]},
    {"_id": 2, "a": 2, "b": [3, 3], "s": "new", "l": [{"s": "new"}, {"s": "old"}]},
    {"_id": 3, "a": 5, "b": [], "s": "old"},
]

FIELDS = st.sampled_from(["a", "b", "c.d", "s", "n", "l.$[].s", "l.$.s"])
NUMBERS = st.integers(-3, 7)
UPDATES = st.one_of(
    st.builds(lambda f, v: {"$set": {f: v}}, FIELDS, st.one_of(NUMBERS, st.just("done"))),
    st.builds(lambda f: {"$unset": {f: ""}}, FIELDS),
    st.builds(lambda f, v, w: {"$max": {f: v}, "$set": {"z": w}}, FIELDS, NUMBERS, NUMBERS),
    st.builds(lambda f, v: {"$min": {f: v}}, FIELDS, NUMBERS),
    st.builds(lambda v: {"$addToSet": {"b": v}}, NUMBERS),
    st.builds(lambda v: {"$pull": {"b": {"$gte": v}}}, NUMBERS),
    st.builds(lambda v: {"$pullAll": {"b": [v]}}, NUMBERS),
    st.builds(lambda op, v: {"$bit": {"a": {op: v}}}, st.sampled_from(["and", "or", "xor"]), NUMBERS),
    st.builds(lambda v: {"$inc": {"a": v}}, NUMBERS),
    st.builds(lambda v: {"$mul": {"a": v}}, NUMBERS),
    st.builds(lambda v: {"$push": {"b": v}}, NUMBERS),
    st.builds(lambda v: {"$setOnInsert": {"n": v}, "$set": {"m": v}}, NUMBERS),
    st.just({"$pop": {"b": 1}}),
    st.just({"$rename": {"a": "n"}}),
    st.just([{"$set": {"n": 7, "c": {"e": [1]}}}]),
    st.just([{"$set": {"a": {"$add": ["$a", 1]}}}]),
    st.just([{"$unset": "a"}]),
)
FILTERS = st.one_of(
    st.builds(lambda i: {"_id": i}, st.integers(1, 4)),
    st.builds(lambda i, v: {"_id": i, "a": {"$lt": v}}, st.integers(1, 4), NUMBERS),
    st.builds(lambda v: {"a": {"$lt": v}}, NUMBERS),
    st.just({"s": "new"}),
    st.just({"l.s": "new"}),
    st.just({}),
)


@pytest.fixture(scope="module")
def collection(deployment: Deployment) -> Iterator[Any]:
    with MongoClient(deployment.uri) as client:
        yield client["test_idempotence"].c
        client.drop_database("test_idempotence")


def applied(collection: Any, times: int, apply: Callable[[], Any], read: Callable[[], Any]) -> Any:
    """The data after so many applications; None: the server refuses it, so nobody would repeat it."""
    collection.delete_many({})
    collection.insert_many(START)
    for _ in range(times):
        try:
            apply()
        except PyMongoError:
            return None
    return read()


def same_once_and_twice(collection: Any, apply: Callable[[], Any], read: Callable[[], Any]) -> bool:
    once = applied(collection, 1, apply, read)
    return once is None or once == applied(collection, 2, apply, read)


SLOW = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SLOW
@given(query=FILTERS, change=UPDATES, multi=st.booleans(), upsert=st.booleans())
def test_updates_called_idempotent_are(
    collection: Any, query: Any, change: Any, multi: bool, upsert: bool
) -> None:
    statement = Statement(verb="update", filter=query, update=change, multi=multi, upsert=upsert)
    if not is_idempotent([statement]):
        return
    method = collection.update_many if multi else collection.update_one

    def read() -> Any:
        return list(collection.find().sort("_id"))

    assert same_once_and_twice(collection, lambda: method(query, change, upsert=upsert), read)


@SLOW
@given(query=FILTERS, multi=st.booleans())
def test_deletes_called_idempotent_are(collection: Any, query: Any, multi: bool) -> None:
    if not is_idempotent([Statement(verb="delete", filter=query, multi=multi)]):
        return
    method = collection.delete_many if multi else collection.delete_one
    assert same_once_and_twice(collection, lambda: method(query), lambda: list(collection.find().sort("_id")))


PIPELINES = st.lists(
    st.sampled_from(
        [
            {"$match": {"a": {"$gt": 1}}},
            {"$project": {"a": 1}},
            {"$project": {"_id": 0, "a": 1}},
            {"$group": {"_id": "$s", "n": {"$sum": 1}}},
            {"$set": {"k": 1}},
            {"$unset": "a"},
            {"$sort": {"a": -1}},
            {"$limit": 1},
            {"$set": {"r": {"$rand": {}}}},
        ]
    ),
    max_size=3,
)
ENDS = st.sampled_from(
    [
        {"$out": "target"},
        {"$merge": "target"},
        {"$merge": {"into": "target", "whenMatched": "replace"}},
        {"$merge": {"into": "target", "whenMatched": "keepExisting"}},
        {"$merge": {"into": "target", "whenMatched": [{"$set": {"hits": {"$add": ["$hits", 1]}}}]}},
        {"$merge": {"into": "c"}},
    ]
)


@SLOW
@given(stages=PIPELINES, end=ENDS)
def test_aggregations_called_idempotent_are(collection: Any, stages: Any, end: Any) -> None:
    pipeline = [*stages, end]
    if not is_idempotent([Statement(verb="aggregate", pipeline=pipeline, collection="c")]):
        return
    target = collection.database.target

    def apply() -> None:
        collection.aggregate(pipeline)

    def read() -> Any:
        found = list(target.find().sort("_id"))
        target.drop()
        return found

    assert same_once_and_twice(collection, apply, read)


# What the policy makes of it.


@pytest.fixture
def aware(instrument: Callable[..., None]) -> None:
    instrument(policy=otel_retry.IdempotenceAware(otel_retry.BackpressurePolicy()))


@pytest.fixture
async def client(mongo: Flavour, deployment: Deployment, aware: None) -> Any:
    return mongo.client(deployment.uri, event_listeners=[Commands()])


async def filled(client: Any, name: str) -> Any:
    collection = client[name].c
    await resolve(collection.insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": 2}]))
    return collection


async def test_an_idempotent_update_many_survives_a_lost_connection(
    client: Any, deployment: Deployment, database_name: str
) -> None:
    collection = await filled(client, database_name)
    with deployment.fail_command(commands=["update"], times=1, closeConnection=True):
        await resolve(collection.update_many({}, {"$set": {"n": 9}}))
    assert [document["n"] for document in await listed(collection.find())] == [9, 9]


@pytest.mark.parametrize("change", [{"$inc": {"n": 1}}, {"$push": {"l": 1}}])
async def test_one_that_is_not_is_raised(
    client: Any, deployment: Deployment, database_name: str, change: Any
) -> None:
    collection = await filled(client, database_name)
    with (
        deployment.fail_command(commands=["update"], times=1, closeConnection=True),
        pytest.raises(AutoReconnect) as caught,
    ):
        await resolve(collection.update_many({}, change))
    (attempt,) = otel_retry.attempts(caught.value)
    assert attempt.decision == "not_retryable"


async def test_the_callers_word_makes_it_repeatable(
    client: Any, deployment: Deployment, database_name: str
) -> None:
    collection = await filled(client, database_name)
    with deployment.fail_command(commands=["update"], times=1, closeConnection=True), otel_retry.idempotent():
        await resolve(collection.update_many({}, {"$inc": {"n": 1}}))


async def test_the_callers_word_forbids_it(client: Any, deployment: Deployment, database_name: str) -> None:
    collection = await filled(client, database_name)
    with (
        deployment.fail_command(commands=["delete"], times=1, closeConnection=True),
        otel_retry.idempotent(False),
        pytest.raises(AutoReconnect),
    ):
        await resolve(collection.delete_many({}))


async def test_delete_many_and_merge_survive_too(
    client: Any, deployment: Deployment, database_name: str
) -> None:
    collection = await filled(client, database_name)
    with deployment.fail_command(commands=["aggregate"], times=1, closeConnection=True):
        await resolve(collection.aggregate([{"$merge": "copy"}]))
    assert len(await listed(client[database_name]["copy"].find())) == 2
    with deployment.fail_command(commands=["delete"], times=1, closeConnection=True):
        await resolve(collection.delete_many({}))
    assert await listed(collection.find()) == []


async def test_a_mixed_bulk_write_repeats_the_idempotent_command(
    client: Any, deployment: Deployment, database_name: str
) -> None:
    collection = await filled(client, database_name)
    with deployment.fail_command(commands=["update"], times=1, closeConnection=True):
        await resolve(collection.bulk_write([InsertOne({"_id": 3}), UpdateMany({}, {"$set": {"n": 0}})]))
    assert [document["n"] for document in await listed(collection.find())] == [0, 0, 0]


@pytest.fixture(scope="module")
def standalone() -> Iterator[Deployment]:
    """A server without retryable writes: nothing but its ObjectId tells that a document is the same."""
    with mongod.start(standalone=True) as started:
        yield started


async def test_a_repeated_insert_that_meets_itself_has_succeeded(
    mongo: Flavour, standalone: Deployment, aware: None
) -> None:
    node = standalone.nodes[0]
    with Proxy((node.host, node.port)) as proxy:
        commands = Commands()
        client = mongo.client(proxy.uri, event_listeners=[commands])
        collection = client.test_insert[mongo.name]
        proxy.cut_reply("insert")
        result = await resolve(collection.insert_one({"n": 1}))
        assert commands.count("insert") == 2
        assert all("txnNumber" not in event.command for event in commands.named("insert"))
        assert await listed(collection.find()) == [{"_id": result.inserted_id, "n": 1}]
        await mongo.close()


async def test_a_repeated_insert_that_meets_another_document_is_an_error(
    mongo: Flavour, standalone: Deployment, aware: None
) -> None:
    """An _id that others may use too proves nothing, so the insert is not even repeated."""
    node = standalone.nodes[0]
    with Proxy((node.host, node.port)) as proxy:
        commands = Commands()
        client = mongo.client(proxy.uri, event_listeners=[commands])
        proxy.cut_reply("insert")
        with pytest.raises(AutoReconnect):
            await resolve(client.test_insert[f"{mongo.name}_other"].insert_one({"_id": 1}))
        assert commands.count("insert") == 1
        await mongo.close()
