"""Seed 003, "Executing Retryable Write Commands": which error is raised when a retry did not help."""

from __future__ import annotations

import asyncio

import pymongo
import pytest
from pymongo.errors import (
    AutoReconnect,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WriteConcernError,
)

import otel_retry
from tests.fakes.wire_server import FakeServer, error, sharded
from tests.flavours import resolve
from tests.spec.rig import (
    LABEL,
    NETWORK,
    NO_WRITES,
    POLICIES,
    SINGLE_RETRY,
    Pools,
    Unhurried,
    server_error,
    until_known,
)


@pytest.mark.usefixtures("slow_rediscovery")
@pytest.mark.parametrize("policy", POLICIES)
async def test_a_first_attempt_that_finds_no_server_says_so(rig, instrument, policy):
    instrument(policy=policy)
    at = rig("mongodb://127.0.0.1:1/", serverSelectionTimeoutMS=60, retryWrites=True)
    with pytest.raises(ServerSelectionTimeoutError) as raised:
        await resolve(at.collection.insert_one({}))
    (attempt,) = otel_retry.attempts(raised.value)
    assert attempt.server is None
    assert attempt.decision == "no_server"
    assert not at.commands.started_events


@pytest.mark.usefixtures("slow_rediscovery")
@pytest.mark.parametrize("policy", POLICIES)
async def test_a_retry_that_finds_no_server_raises_the_error_before(rig, instrument, proxy, policy):
    instrument(policy=policy)
    at = rig(proxy.uri, serverSelectionTimeoutMS=150, retryWrites=True)
    await at.seed()
    proxy.cut_reply("insert", then_dark=True)
    with pytest.raises(AutoReconnect) as raised:
        await resolve(at.collection.insert_one({}))
    assert not isinstance(raised.value, ServerSelectionTimeoutError)
    assert isinstance(raised.value.__cause__, ServerSelectionTimeoutError)
    assert raised.value.has_error_label(LABEL)
    assert at.commands.count("insert") == 1


async def test_a_retry_that_finds_a_server_without_retryable_writes_raises_the_error_before(
    rig, serve, instrument
):
    """With a scripted server that turns into a standalone, as in a downgrade."""
    instrument()
    server = serve(FakeServer("primary"))
    client = rig(f"mongodb://{server.address}/?directConnection=true").client
    await until_known(client, 1)

    def turn(command):
        server.kind = "standalone"
        return error(10107, labels=(LABEL,))

    server.reply("insert", turn)
    with pytest.raises(NotPrimaryError) as raised:
        await resolve(client.db.things.insert_one({}))
    assert raised.value.details["code"] == 10107
    assert len(server.commands("insert")) == 1


async def test_a_retry_that_gets_no_connection_raises_the_error_before(rig, instrument, monkeypatch):
    instrument(policy=Unhurried())
    at = rig(maxPoolSize=1, waitQueueTimeoutMS=200)
    await at.seed()
    at.hold_retries(monkeypatch, until="sleep")
    at.fail("insert", **server_error(6, LABEL))
    with pytest.raises(OperationFailure) as raised:
        await at.lose_the_only_connection("insert", lambda: at.collection.insert_one({}))
    assert raised.value.code == 6
    assert isinstance(raised.value.__cause__, WaitQueueTimeoutError)
    assert at.commands.count("insert") == 1


async def test_a_first_attempt_that_gets_no_connection_says_so(rig, instrument):
    instrument()
    at = rig(maxPoolSize=1, waitQueueTimeoutMS=100)
    await at.seed()
    hogging = asyncio.create_task(
        at.beside(lambda: at.client.admin.command({"sleep": 1, "millis": 400, "lock": "none"}))
    )
    await at.until_started("sleep")
    with pytest.raises(WaitQueueTimeoutError):
        await at.beside(lambda: at.collection.insert_one({}))
    await hogging
    assert not at.commands.count("insert")


@pytest.mark.parametrize("policy", SINGLE_RETRY)
async def test_the_error_of_the_retry_is_raised_when_it_may_have_written(rig, instrument, policy):
    instrument(policy=policy)
    at = rig(retryWrites=True)
    await at.seed()
    at.fail_in_turn("insert", server_error(91, LABEL), server_error(189, LABEL))
    with pytest.raises(PyMongoError) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.details["code"] == 189


async def test_an_error_of_the_server_that_is_not_retryable_is_raised_from_the_retry(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail_in_turn("insert", server_error(91, LABEL), server_error(2), server_error(91, LABEL))
    with pytest.raises(OperationFailure) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.code == 2
    assert at.commands.count("insert") == 2


@pytest.mark.parametrize("second", [server_error(10107, LABEL, NO_WRITES), server_error(2, NO_WRITES)])
async def test_a_retry_that_wrote_nothing_does_not_hide_the_error_before(rig, instrument, second):
    """A write concern error means that it was written; the retry's "not primary" would say the opposite."""
    instrument()
    at = rig()
    await at.seed()
    written = {"writeConcernError": {"code": 91, "errmsg": "shutting down"}, "errorLabels": [LABEL]}
    at.fail_in_turn("insert", written, second)
    with pytest.raises(WriteConcernError) as raised:
        await resolve(at.collection.insert_one({"_id": 4}))
    assert raised.value.code == 91
    assert raised.value.__cause__.details["code"] == second["errorCode"]
    assert at.commands.count("insert") == 2
    assert len(await at.data()) == 4


async def test_when_no_attempt_wrote_the_first_error_is_raised(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail_in_turn("insert", server_error(91, LABEL, NO_WRITES), server_error(10107, LABEL, NO_WRITES))
    with pytest.raises(PyMongoError) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.details["code"] == 91


async def test_the_error_raised_is_the_last_that_may_have_written(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail_in_turn(
        "insert",
        server_error(91, LABEL, NO_WRITES),
        server_error(6, LABEL),
        server_error(189, LABEL, NO_WRITES),
        server_error(2, NO_WRITES),
    )
    with pymongo.timeout(10), pytest.raises(OperationFailure) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.code == 6
    assert at.commands.count("insert") == 4
    assert [attempt.failure.code for attempt in otel_retry.attempts(raised.value)] == [91, 6, 189, 2]


async def test_code_20_becomes_advice(rig, serve, instrument):
    """The message decides, and `failCommand` cannot set it: hence a scripted server.

    A bulk write has the same advice.
    """
    instrument()
    refusal = error(20, "Transaction numbers are only allowed on a replica set member or mongos")
    server = serve(FakeServer("primary"))
    client = rig(server.uri).client
    server.reply("insert", refusal, refusal)
    for call in (
        lambda: client.db.things.insert_one({}),
        lambda: client.db.things.insert_many([{}]),
    ):
        with pytest.raises(OperationFailure) as raised:
            await resolve(call())
        assert raised.value.code == 20
        assert "This MongoDB deployment does not support retryable writes." in str(raised.value)
        assert "Please add retryWrites=false to your connection string." in str(raised.value)
    assert len(server.commands("insert")) == 2


async def test_any_other_code_20_is_left_as_it_is(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", errorCode=20)
    with pytest.raises(OperationFailure) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.code == 20
    assert "retryWrites" not in str(raised.value)


async def test_each_attempt_names_the_server_that_failed_it(rig, serve, instrument):
    """With scripted servers: the retry must go elsewhere, which without a mongos takes an election."""
    instrument()
    servers, uri = serve(sharded(2))
    client = rig(uri, localThresholdMS=10_000).client  # none of them is too far
    await until_known(client, 2)
    tried = []

    def refuse(server):
        tried.append(server.address)
        return error(6, f"by {server.address}", labels=(LABEL,))

    for server in servers:
        server.reply("insert", *[lambda _, server=server: refuse(server)] * 2)
    with pytest.raises(OperationFailure) as raised:
        await resolve(client.db.things.insert_one({}))
    history = otel_retry.attempts(raised.value)
    assert [attempt.server for attempt in history] == tried
    assert len(set(tried)) == 2
    for attempt in history:
        assert f"by {attempt.server}" in str(attempt.error)
    assert [note for note in raised.value.__notes__ if tried[0] in note]


async def test_an_error_that_stands_for_another_keeps_its_own_server(rig, serve, instrument):
    """The error raised is the first one's, so the server it names must be the first one's too."""
    instrument()
    servers, uri = serve(sharded(2))
    client = rig(uri, localThresholdMS=10_000).client  # none of them is too far
    await until_known(client, 2)
    tried = []

    def refuse(server):
        tried.append(server.address)
        labels = (LABEL, NO_WRITES) if len(tried) == 2 else (LABEL,)
        return error(6, f"by {server.address}", labels=labels)

    for server in servers:
        server.reply("insert", *[lambda _, server=server: refuse(server)] * 2)
    with pytest.raises(OperationFailure) as raised:
        await resolve(client.db.things.insert_one({}))
    first, second = otel_retry.attempts(raised.value)
    assert first.error is raised.value
    assert first.server == tried[0]
    assert f"by {tried[0]}" in str(raised.value)
    assert second.server == tried[1]


async def test_the_topology_hears_of_each_failed_attempt(rig, instrument):
    """The pool of the server that failed is cleared each time, which is how PyMongo forgets a server."""
    instrument()
    pools = Pools()
    at = rig(event_listeners=[pools])
    await at.seed()
    at.fail("insert", times=2, **NETWORK)
    with pytest.raises(AutoReconnect):
        await resolve(at.collection.insert_one({}))
    assert pools.cleared == 2


async def test_a_retry_goes_to_the_new_primary(mongo, instrument, three_nodes, database_name):
    """A real step-down: the write that meets it arrives at the node that was elected, and once."""
    instrument()
    old = three_nodes.primary()
    client = mongo.client(three_nodes.uri)
    collection = client[database_name].things
    await resolve(collection.insert_one({"_id": 1, "x": 0}))
    three_nodes.step_down(60)
    await resolve(collection.update_one({"_id": 1}, {"$inc": {"x": 1}}))
    assert (await resolve(collection.find_one({})))["x"] == 1
    assert three_nodes.primary() is not old
