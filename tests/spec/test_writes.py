"""Seeds 002 and 003, Retryable Writes: which writes carry a transaction ID and are retried, after which errors."""

from __future__ import annotations

import asyncio

import pymongo
import pytest
from pymongo import UpdateOne, WriteConcern
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConnectionFailure,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
    WriteError,
)

import otel_retry
from tests.fakes.wire_server import DROP, FakeServer, error, sharded
from tests.flavours import resolve
from tests.spec.rig import (
    LABEL,
    NETWORK,
    POLICIES,
    SINGLE_RETRY,
    WRITES,
    Observing,
    ids,
    is_transaction_number,
    server_error,
    transaction_id,
    until_known,
)

# Seed 003, "RetryableWriteError Labels".
RETRYABLE_CODES = (11600, 11602, 10107, 13435, 13436, 189, 91, 7, 6, 89, 9001, 262)


@pytest.mark.parametrize(
    ("policy", "write"),
    [("backpressure", write) for write in WRITES.values()]
    + [(policy, WRITES["update_one"]) for policy in POLICIES[1:]],
    ids=ids,
)
async def test_a_supported_write_is_retried_with_the_same_transaction_id(rig, instrument, policy, write):
    instrument(policy=policy)
    at = rig(retryWrites=True)
    await at.seed()
    at.fail(write.command, **NETWORK)
    await write.run(at)
    first, second = at.commands.named(write.command)
    assert transaction_id(first) == transaction_id(second)
    assert is_transaction_number(first.command["txnNumber"])
    assert first.request_id != second.request_id
    assert first.operation_id == second.operation_id
    assert first.operation_id != first.command["txnNumber"]


async def test_writes_are_retried_by_default_and_the_option_is_called_retry_writes(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", **NETWORK)
    await resolve(at.collection.insert_one({}))
    assert at.commands.count("insert") == 2
    assert rig(at.deployment.uri + "&retryWrites=false").client.options.retry_writes is False


@pytest.mark.parametrize("policy", SINGLE_RETRY)
async def test_without_a_deadline_a_write_is_retried_once(rig, instrument, policy):
    instrument(policy=policy)
    at = rig(retryWrites=True)
    await at.seed()
    at.fail("insert", times=None, **server_error(189, LABEL))
    with pytest.raises(PyMongoError) as raised:
        await resolve(at.collection.insert_one({}))
    assert at.commands.count("insert") == 2
    assert [attempt.decision for attempt in otel_retry.attempts(raised.value)] == ["retry", "limit"]


@pytest.mark.parametrize("policy", ["backpressure", "current", "persistent"])
async def test_a_deadline_allows_many_retries(rig, instrument, policy):
    instrument(policy=policy)
    at = rig()
    await at.seed()
    at.fail("insert", times=6, **server_error(189, LABEL))
    with pymongo.timeout(10):
        await resolve(at.collection.insert_one({"_id": 4}))
    events = at.commands.named("insert")
    assert len(events) == 7
    assert len({transaction_id(event) for event in events}) == 1


@pytest.mark.parametrize("policy", ["backpressure", "current", "persistent"])
async def test_a_deadline_ends_the_retries(rig, instrument, policy):
    instrument(policy=policy)
    at = rig(timeoutMS=400)
    await at.seed()
    at.fail("insert", times=None, **server_error(189, LABEL))
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(PyMongoError):
        await resolve(at.collection.insert_one({}))
    assert 0.2 < loop.time() - began < 30
    assert at.commands.count("insert") > 3


async def _update_many(at):
    await resolve(at.collection.update_many({}, {"$inc": {"x": 1}}))


async def _delete_many(at):
    await resolve(at.collection.delete_many({}))


async def _run_command(at):
    await resolve(at.database.command("insert", at.collection.name, documents=[{"_id": 4}]))


async def _out(at):
    await resolve(at.collection.aggregate([{"$out": f"{at.collection.name}_copy"}]))


async def _merge(at):
    await resolve(at.collection.aggregate([{"$merge": {"into": f"{at.collection.name}_copy"}}]))


async def _create_index(at):
    await resolve(at.collection.create_index("x"))


async def _create_collection(at):
    await resolve(at.database.create_collection(f"{at.collection.name}_new"))


async def _rename(at):
    await resolve(at.collection.rename(f"{at.collection.name}_new"))


async def _drop(at):
    await resolve(at.collection.drop())


UNSUPPORTED = {
    "update_many": ("update", _update_many),
    "delete_many": ("delete", _delete_many),
    "run_command": ("insert", _run_command),
    "out": ("aggregate", _out),
    "merge": ("aggregate", _merge),
    "create_index": ("createIndexes", _create_index),
    "create_collection": ("create", _create_collection),
    "rename": ("renameCollection", _rename),
    "drop": ("drop", _drop),
}


@pytest.mark.parametrize("failure", [NETWORK, server_error(189)], ids=["network", "code"])
@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_an_unsupported_write_has_no_transaction_id_and_is_not_retried(rig, instrument, name, failure):
    instrument()
    at = rig()
    await at.seed()
    command, run = UNSUPPORTED[name]
    at.fail(command, **failure)
    with pytest.raises((AutoReconnect, OperationFailure)):
        await run(at)
    (event,) = at.commands.named(command)
    assert "txnNumber" not in event.command


@pytest.mark.parametrize("policy", ["current", "once", "persistent"])
async def test_no_policy_repeats_an_unsupported_write(rig, instrument, policy):
    instrument(policy=policy)
    at = rig(retryWrites=True)
    await at.seed()
    at.fail("update", **NETWORK)
    with pytest.raises(AutoReconnect):
        await _update_many(at)
    (event,) = at.commands.named("update")
    assert "txnNumber" not in event.command


async def test_an_unacknowledged_write_has_no_transaction_id_and_is_not_retried(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", "update", times=None, **NETWORK)
    unacknowledged = at.collection.with_options(write_concern=WriteConcern(w=0))
    await resolve(unacknowledged.insert_one({"_id": 4}))
    await resolve(unacknowledged.bulk_write([UpdateOne({"_id": 1}, {"$inc": {"x": 1}})]))
    for command in ("insert", "update"):
        (event,) = at.commands.named(command)
        assert event.command["writeConcern"] == {"w": 0}
        assert "txnNumber" not in event.command


@pytest.mark.parametrize("failure", [NETWORK, server_error(189, LABEL)], ids=["network", "code"])
@pytest.mark.parametrize("policy", POLICIES)
async def test_with_retry_writes_off_a_write_is_executed_exactly_once(rig, instrument, policy, failure):
    instrument(policy=policy)
    at = rig(retryWrites=False)
    await at.seed()
    at.fail("insert", **failure)
    with pytest.raises(PyMongoError):
        await resolve(at.collection.insert_one({}))
    (event,) = at.commands.named("insert")
    assert "txnNumber" not in event.command


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_standalone_gets_no_transaction_id_and_no_retry(rig, instrument, standalone, policy):
    instrument(policy=policy)
    at = rig(standalone.uri, retryWrites=True)
    with standalone.fail_command(commands=["insert"], times=1, **NETWORK):
        with pytest.raises(AutoReconnect) as raised:
            await resolve(at.collection.insert_one({}))
    (event,) = at.commands.named("insert")
    assert "txnNumber" not in event.command
    assert not raised.value.has_error_label(LABEL)


async def test_a_read_of_a_standalone_is_retried(rig, instrument, standalone):
    """Seed 000, "Supported Server Versions": reads need no replica set."""
    instrument()
    at = rig(standalone.uri)
    with standalone.fail_command(commands=["find"], times=1, **NETWORK):
        await resolve(at.collection.find_one({}))
    assert at.commands.count("find") == 2


async def test_transaction_numbers_grow_with_each_write_and_outlive_the_session(rig, instrument):
    """The server session goes back to PyMongo's pool after each write, and keeps its number there."""
    instrument()
    at = rig()
    await at.seed()
    # Not a lost connection or primary: after that PyMongo throws the session away.
    at.fail("insert", **server_error(6, LABEL))
    for _ in range(3):
        await resolve(at.collection.insert_one({}))
    numbers = [transaction_id(event) for event in at.commands.named("insert")]
    sessions = {session for session, _ in numbers}
    first, again, second, third = (number for _, number in numbers)
    assert len(sessions) == 1
    assert first == again < second < third


async def test_an_explicit_session_lends_its_id(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", **NETWORK)
    async with at.session() as session:
        await resolve(at.collection.insert_one({}, session=session))
        assert {event.command["lsid"]["id"] for event in at.commands.named("insert")} == {
            session.session_id["id"]
        }


@pytest.mark.parametrize("code", RETRYABLE_CODES)
async def test_a_server_that_labels_its_error_is_believed(rig, instrument, code):
    """From MongoDB 4.4 on the server labels by itself, when the command has a txnNumber: nothing is forced here."""
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", errorCode=code)
    await resolve(at.collection.insert_one({}))
    assert at.commands.count("insert") == 2


@pytest.mark.parametrize("code", [2, 43, 112, 8000])
async def test_any_error_with_the_label_is_retried(rig, instrument, code):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", **server_error(code, LABEL))
    await resolve(at.collection.insert_one({}))
    assert at.commands.count("insert") == 2


@pytest.mark.parametrize("code", [91, 189, 10107, 6, 262])
@pytest.mark.parametrize("policy", ["backpressure", "persistent"])
async def test_the_driver_adds_no_label_to_an_answer_of_a_server_that_labels_itself(
    rig, instrument, policy, code
):
    instrument(policy=policy)
    at = rig()
    await at.seed()
    at.fail("insert", **server_error(code))
    with pytest.raises(PyMongoError) as raised:
        await resolve(at.collection.insert_one({}))
    assert not raised.value.has_error_label(LABEL)
    assert at.commands.count("insert") == 1


@pytest.mark.parametrize("code", [2, 50, 112, 11601])
async def test_no_other_error_is_retried(rig, instrument, code):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", errorCode=code)
    with pytest.raises(OperationFailure) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.code == code
    assert at.commands.count("insert") == 1


async def test_a_real_duplicate_key_is_not_retried(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    with pytest.raises(WriteError):
        await resolve(at.collection.insert_one({"_id": 1}))
    assert at.commands.count("insert") == 1


async def test_a_write_concern_error_with_the_label_is_retried(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", writeConcernError={"code": 91, "errmsg": "shutting down"}, errorLabels=[LABEL])
    await resolve(at.collection.insert_one({"_id": 4}))
    first, second = at.commands.named("insert")
    assert transaction_id(first) == transaction_id(second)
    assert len(await at.data()) == 4


async def test_a_write_concern_error_without_the_label_is_raised(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", writeConcernError={"code": 100, "errmsg": "too few"}, errorLabels=[])
    with pytest.raises(WriteConcernError) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.code == 100
    assert at.commands.count("insert") == 1


@pytest.mark.parametrize("kind", ["mongos", "primary"])
async def test_the_code_of_a_single_statement_is_never_retryable(rig, serve, instrument, kind):
    """A shard that cannot do retryable writes speaks through `writeErrors`, and the application is to hear it.

    With a scripted server: a real one reports its own state for the whole command, not for a statement.
    """
    instrument()
    refused = {"n": 0, "writeErrors": [{"index": 0, "code": 91, "errmsg": "no retryable writes here"}]}
    server = serve(FakeServer(kind))
    client = rig(server.uri).client
    server.reply("insert", refused, refused)
    with pytest.raises(WriteError) as raised:
        await resolve(client.db.things.insert_one({}))
    assert not raised.value.has_error_label(LABEL)
    with pytest.raises(BulkWriteError) as raised:
        await resolve(client.db.things.insert_many([{}]))
    assert raised.value.details["writeErrors"][0]["errmsg"] == "no retryable writes here"
    assert not raised.value.has_error_label(LABEL)
    assert len(server.commands("insert")) == 2


needs_old_servers = pytest.mark.skipif(
    pymongo.common.MIN_SUPPORTED_WIRE_VERSION > 8,
    reason="this PyMongo refuses servers before 4.4, which are the ones that do not label",
)


@needs_old_servers
@pytest.mark.parametrize("code", RETRYABLE_CODES)
async def test_before_4_4_the_driver_labels_by_code(rig, serve, instrument, code):
    """With a scripted server: MongoDB 4.2 is not to be had here."""
    instrument()
    server = serve(FakeServer("primary", max_wire_version=8))
    client = rig(server.uri).client
    server.reply("insert", error(code))
    await resolve(client.db.things.insert_one({}))
    assert len(server.commands("insert")) == 2


@needs_old_servers
@pytest.mark.parametrize(("kind", "attempts"), [("primary", 2), ("mongos", 1)])
async def test_before_4_4_only_a_mongod_may_have_a_retryable_write_concern_error(
    rig, serve, instrument, kind, attempts
):
    instrument()
    server = serve(FakeServer(kind, max_wire_version=8))
    client = rig(server.uri).client
    server.reply("insert", {"n": 1, "writeConcernError": {"code": 91, "errmsg": "shutting down"}})
    if attempts == 1:
        with pytest.raises(WriteConcernError) as raised:
            await resolve(client.db.things.insert_one({}))
        assert not raised.value.has_error_label(LABEL)
    else:
        await resolve(client.db.things.insert_one({}))
    assert len(server.commands("insert")) == attempts


@pytest.mark.parametrize("retry_writes", [True, False])
async def test_a_network_error_has_the_label_where_writes_are_retried(rig, instrument, retry_writes):
    instrument()
    at = rig(retryWrites=retry_writes)
    await at.seed()
    at.fail("insert", times=None, **NETWORK)
    with pytest.raises(AutoReconnect) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.has_error_label(LABEL) is retry_writes


async def test_a_connection_that_cannot_be_made_is_labelled_and_retried(rig, instrument, proxy):
    policy = Observing()
    instrument(policy=policy)
    at = rig(proxy.uri, maxIdleTimeMS=1)
    await resolve(at.client.admin.command("ping"))
    await asyncio.sleep(0.01)  # the connection is too old now, and a new one must be made
    proxy.refuse(1)
    await resolve(at.collection.insert_one({}))
    (failure,) = policy.failures
    assert failure.phase is otel_retry.Phase.CONNECTION
    assert LABEL in failure.labels
    assert at.commands.count("insert") == 1


async def test_a_connection_that_cannot_be_made_is_not_labelled_with_retry_writes_off(rig, instrument, proxy):
    instrument()
    at = rig(proxy.uri, maxIdleTimeMS=1, retryWrites=False)
    await resolve(at.client.admin.command("ping"))
    await asyncio.sleep(0.01)
    proxy.refuse(1)
    with pytest.raises(ConnectionFailure) as raised:
        await resolve(at.collection.insert_one({}))
    assert not raised.value.has_error_label(LABEL)
    assert not at.commands.count("insert")


@pytest.mark.usefixtures("slow_rediscovery")
async def test_a_pool_that_was_cleared_is_labelled_and_retried(rig, instrument):
    """A write waits for the only connection; the one that has it loses it, and with it the pool."""
    policy = Observing()
    instrument(policy=policy)
    at = rig(maxPoolSize=1)
    await at.seed()
    at.fail("insert", blockConnection=True, blockTimeMS=300, **NETWORK)
    one = asyncio.create_task(at.beside(lambda: at.collection.insert_one({"_id": 4})))
    await at.until_started("insert")
    two = asyncio.create_task(at.beside(lambda: at.collection.insert_one({"_id": 5})))
    await asyncio.gather(one, two)
    (cleared,) = [f for f in policy.failures if f.kind is otel_retry.Kind.POOL_CLEARED]
    assert LABEL in cleared.labels
    assert at.commands.count("insert") == 3
    assert len(await at.data()) == 5


async def test_a_write_without_a_transaction_id_gets_no_label(rig, instrument):
    """As a server would do it: no txnNumber, no label."""
    instrument()
    at = rig()
    await at.seed()
    at.fail("update", times=None, **NETWORK)
    with pytest.raises(AutoReconnect) as raised:
        await _update_many(at)
    assert not raised.value.has_error_label(LABEL)


async def test_on_a_sharded_cluster_the_retry_prefers_another_mongos(rig, serve, instrument):
    """With scripted servers: there is no mongos to be had here. The error leaves the server selectable."""
    instrument()
    servers, uri = serve(sharded(2))
    client = rig(uri, localThresholdMS=10_000).client  # none of them is too far
    await until_known(client, 2)
    for _ in range(8):
        tried = []

        def answer(server, tried=tried):
            tried.append(server)
            return error(6, labels=(LABEL,)) if len(tried) == 1 else {"n": 1}

        for server in servers:
            server.clear()
            # Enough for both attempts to go to the one server.
            server.reply("insert", *[lambda _, server=server, answer=answer: answer(server)] * 2)
        await resolve(client.db.things.insert_one({}))
        first, second = tried
        assert first is not second
        ((number,),) = [{command["txnNumber"] for each in servers for command in each.commands("insert")}]
        assert number > 0
        for server in servers:
            server._script["insert"].clear()


async def test_every_command_that_started_ends_once(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", **NETWORK)
    await resolve(at.collection.insert_one({}))
    started = [event.request_id for event in at.commands.started_events]
    ended = [(event.request_id, type(event).__name__) for event in at.commands.ended_events]
    assert ended == [(started[0], "CommandFailedEvent"), (started[1], "CommandSucceededEvent")]


async def test_a_retry_gossips_the_newest_time(rig, instrument):
    """Seed 003: the original message must not be sent again, for it would not hold the highest time seen."""
    instrument()
    at, other = rig(), rig()
    await at.seed()
    await resolve(other.collection.insert_one({"_id": "meanwhile"}))
    at.fail("insert", **server_error(189, LABEL))
    await resolve(at.collection.insert_one({"_id": 4}))
    first, second = at.commands.named("insert")
    failed = at.commands.ended_events[0]
    answered = failed.failure["$clusterTime"]["clusterTime"]
    assert first.command["$clusterTime"]["clusterTime"] <= answered
    assert second.command["$clusterTime"]["clusterTime"] >= answered
    assert first.request_id != second.request_id


async def test_with_a_server_before_3_6_nothing_can_be_retried(rig, serve, instrument):
    """PyMongo refuses such a server altogether, so that no command is ever sent to one."""
    instrument()
    server = serve(FakeServer("primary", max_wire_version=5))
    client = rig(server.uri, serverSelectionTimeoutMS=300).client
    with pytest.raises(PyMongoError, match="wire version"):
        await resolve(client.db.things.insert_one({}))
    assert not server.commands("insert")


async def test_a_server_without_sessions_gets_no_transaction_id(rig, serve, instrument, monkeypatch):
    """`logicalSessionTimeoutMinutes` is missing from its hello: with a scripted server, for real ones all have it."""
    instrument()
    hello = FakeServer._hello

    def without_sessions(self, connection):
        reply = hello(self, connection)
        del reply["logicalSessionTimeoutMinutes"]
        return reply

    monkeypatch.setattr(FakeServer, "_hello", without_sessions)
    server = serve(FakeServer("primary"))
    client = rig(server.uri).client
    server.reply("insert", DROP)
    with pytest.raises(AutoReconnect):
        await resolve(client.db.things.insert_one({}))
    (command,) = server.commands("insert")
    assert "txnNumber" not in command
