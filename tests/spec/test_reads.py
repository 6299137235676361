"""Seed 000, Retryable Reads: which reads are retried, after which errors, and what is sent and raised then."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pymongo
import pytest
from pymongo.errors import (
    AutoReconnect,
    ConnectionFailure,
    NetworkTimeout,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
)

import otel_retry
from tests.fakes.wire_server import error, sharded
from tests.flavours import Commands, listed, resolve
from tests.spec.rig import (
    LABEL,
    NETWORK,
    POLICIES,
    READS,
    SINGLE_RETRY,
    Observing,
    Pools,
    Unhurried,
    ids,
    server_error,
    until_known,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Seed 000, "Retryable Error".
SEED_CODES = (11600, 11602, 10107, 13435, 13436, 189, 91, 7, 6, 89, 9001)
# Later texts: ExceededTimeLimit, ReadConcernMajorityNotAvailableYet, the legacy "not primary".
LATER_CODES = (262, 134, 10058)
# BadValue, CursorNotFound, MaxTimeMSExpired, WriteConflict, Interrupted, WriteConcernFailed.
OTHER_CODES = (2, 43, 50, 112, 11601, 64)


@pytest.mark.parametrize(
    ("policy", "read"),
    [("backpressure", read) for read in READS.values()]
    + [(policy, READS["find"]) for policy in POLICIES[1:]],
    ids=ids,
)
async def test_a_supported_read_is_retried_after_a_network_error(rig, instrument, read, policy):
    instrument(policy=policy)
    at = rig()
    await at.seed()
    if read.name.startswith("gridfs"):
        await resolve(at.bucket.upload_from_stream("file", b"content"))
    undisturbed = await read.run(at)
    at.commands.clear()
    at.fail(read.command, **NETWORK)
    assert await read.run(at) == undisturbed
    first, second = at.commands.named(read.command)[:2]
    assert first.request_id != second.request_id
    assert first.operation_id == second.operation_id


@pytest.mark.parametrize("policy", SINGLE_RETRY)
async def test_a_second_network_error_is_raised(rig, instrument, policy):
    instrument(policy=policy)
    at = rig()
    await at.seed()
    at.fail("find", times=None, **NETWORK)
    with pytest.raises(AutoReconnect) as raised:
        await resolve(at.collection.find_one({}))
    assert at.commands.count("find") == 2
    assert [attempt.decision for attempt in otel_retry.attempts(raised.value)] == ["retry", "limit"]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_get_more_is_never_repeated(rig, instrument, policy):
    """The server may have advanced the cursor already."""
    instrument(policy=policy)
    at = rig()
    await at.seed()
    at.fail("getMore", **NETWORK)
    with pytest.raises(AutoReconnect):
        await listed(at.collection.find({}, batch_size=2))
    assert at.commands.count("find") == 1
    assert at.commands.count("getMore") == 1


@pytest.mark.parametrize("stage", [{"$out": "copies"}, {"$merge": {"into": "copies"}}], ids=["out", "merge"])
@pytest.mark.parametrize("failure", [NETWORK, server_error(189)], ids=["network", "code"])
@pytest.mark.parametrize("policy", ["backpressure", "persistent"])
async def test_an_aggregation_that_writes_is_not_retried(rig, instrument, policy, failure, stage):
    instrument(policy=policy)
    at = rig(retryWrites=True)
    await at.seed()
    at.fail("aggregate", **failure)
    with pytest.raises((AutoReconnect, OperationFailure)) as raised:
        await resolve(at.collection.aggregate([{"$match": {}}, stage]))
    (command,) = at.commands.named("aggregate")
    assert "txnNumber" not in command.command
    assert not raised.value.has_error_label("RetryableWriteError")


@pytest.mark.parametrize(
    ("policy", "name"),
    [("backpressure", name) for name in ("find", "count", "aggregate", "distinct", "listIndexes")]
    + [(policy, "find") for policy in POLICIES[1:]],
)
@pytest.mark.parametrize("failure", [NETWORK, server_error(189)], ids=["network", "code"])
async def test_run_command_is_not_retried_even_with_a_read_command(rig, instrument, policy, failure, name):
    instrument(policy=policy)
    at = rig()
    await at.seed()
    at.fail(name, **failure)
    options = {"distinct": {"key": "x"}, "aggregate": {"pipeline": [], "cursor": {}}}.get(name, {})
    with pytest.raises((AutoReconnect, OperationFailure)):
        await resolve(at.database.command(name, at.collection.name, **options))
    assert at.commands.count(name) == 1


async def test_a_cursor_command_is_not_retried(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("find", **NETWORK)
    with pytest.raises(AutoReconnect):
        await resolve(at.database.cursor_command({"find": at.collection.name}))
    assert at.commands.count("find") == 1


async def test_map_reduce_by_run_command_is_treated_like_any_other_command(rig, instrument):
    """PyMongo has no mapReduce helper any more; the generic one repeats nothing."""
    instrument()
    at = rig()
    await at.seed()
    command = {
        "mapReduce": at.collection.name,
        "map": "function() { emit(1, 1) }",
        "reduce": "function() {}",
        "out": {"inline": 1},
    }
    at.fail("mapReduce", **NETWORK)
    with pytest.raises(AutoReconnect):
        await resolve(at.database.command(command))
    assert at.commands.count("mapReduce") == 1


@pytest.mark.parametrize(
    "failure", [NETWORK, server_error(189), server_error(91)], ids=["network", "189", "91"]
)
@pytest.mark.parametrize("policy", ["backpressure", "persistent"])
async def test_with_retry_reads_off_a_read_is_executed_exactly_once(rig, instrument, policy, failure):
    instrument(policy=policy)
    at = rig(retryReads=False)
    await at.seed()
    at.fail("find", **failure)
    with pytest.raises((AutoReconnect, OperationFailure)):
        await resolve(at.collection.find_one({}))
    assert at.commands.count("find") == 1


async def test_reads_are_retried_by_default_and_the_option_is_called_retry_reads(rig, instrument):
    instrument()
    assert rig().client.options.retry_reads is True
    assert rig(rig().deployment.uri + "&retryReads=false").client.options.retry_reads is False


@pytest.mark.parametrize(
    ("policy", "code"),
    [(policy, code) for policy in ("backpressure", "persistent") for code in SEED_CODES]
    + [("backpressure", code) for code in LATER_CODES],
)
async def test_each_retryable_code_is_retried(rig, instrument, policy, code):
    instrument(policy=policy)
    at = rig()
    await at.seed()
    at.fail("find", **server_error(code))
    assert len(await at.data()) == 3
    assert at.commands.count("find") == 2


@pytest.mark.parametrize(
    ("policy", "code"),
    [(policy, code) for policy in ("backpressure", "persistent") for code in OTHER_CODES]
    + [(policy, code) for policy in ("once", "persistent") for code in (262, 134)],
)
async def test_no_other_code_is_retried(rig, instrument, policy, code):
    instrument(policy=policy)
    at = rig()
    await at.seed()
    at.fail("find", **server_error(code))
    with pytest.raises(OperationFailure) as raised:
        await resolve(at.collection.find_one({}))
    assert raised.value.code == code
    assert at.commands.count("find") == 1


@pytest.mark.usefixtures("slow_rediscovery")
async def test_a_pool_that_was_cleared_is_retried(rig, instrument):
    """A read waits for the only connection; the one that has it loses it, and with it the pool."""
    policy = Observing()
    instrument(policy=policy)
    # Slow enough that the pool is still closed when the waiting read wakes up.
    at = rig(maxPoolSize=1)
    await at.seed()
    at.fail("find", blockConnection=True, blockTimeMS=300, **NETWORK)
    one = asyncio.create_task(at.beside(lambda: at.collection.find_one({"_id": 1})))
    await at.until_started("find")
    two = asyncio.create_task(at.beside(lambda: at.collection.find_one({"_id": 2})))
    assert [document["_id"] for document in await asyncio.gather(one, two)] == [1, 2]
    assert {failure.kind for failure in policy.failures} == {
        otel_retry.Kind.NETWORK,
        otel_retry.Kind.POOL_CLEARED,
    }
    # The attempt that found no pool sent nothing.
    assert at.commands.count("find") == 3


@pytest.mark.usefixtures("slow_rediscovery")
@pytest.mark.parametrize("policy", POLICIES)
async def test_a_first_attempt_that_finds_no_server_says_so(rig, instrument, policy):
    instrument(policy=policy)
    at = rig("mongodb://127.0.0.1:1/", serverSelectionTimeoutMS=60)
    with pytest.raises(ServerSelectionTimeoutError) as raised:
        await resolve(at.collection.find_one({}))
    (attempt,) = otel_retry.attempts(raised.value)
    assert attempt.server is None
    assert attempt.decision == "no_server"
    assert not at.commands.started_events


@pytest.mark.usefixtures("slow_rediscovery")
@pytest.mark.parametrize("policy", POLICIES)
async def test_a_retry_that_finds_no_server_raises_the_error_before(rig, instrument, proxy, policy):
    instrument(policy=policy)
    at = rig(proxy.uri, serverSelectionTimeoutMS=150)
    await at.seed()
    proxy.cut_reply("find", then_dark=True)
    with pytest.raises(AutoReconnect) as raised:
        await resolve(at.collection.find_one({}))
    assert not isinstance(raised.value, ServerSelectionTimeoutError)
    assert isinstance(raised.value.__cause__, ServerSelectionTimeoutError)
    assert [attempt.decision for attempt in otel_retry.attempts(raised.value)] == ["retry", "no_server"]
    assert at.commands.count("find") == 1


async def test_a_retry_that_gets_no_connection_raises_the_error_before(rig, instrument, monkeypatch):
    instrument(policy=Unhurried())
    at = rig(maxPoolSize=1, waitQueueTimeoutMS=200)
    await at.seed()
    at.hold_retries(monkeypatch, until="sleep")
    at.fail("find", **server_error(6, LABEL))
    with pytest.raises(OperationFailure) as raised:
        await at.lose_the_only_connection("find", lambda: at.collection.find_one({}))
    assert raised.value.code == 6
    assert isinstance(raised.value.__cause__, WaitQueueTimeoutError)
    assert at.commands.count("find") == 1


class Meanwhile(Commands):
    """Somebody else writes when the first find has been made and not yet sent: nobody can have told its client."""

    def __init__(self, write: Callable[[], object]) -> None:
        super().__init__()
        self._write = write

    def started(self, event):
        super().started(event)
        if event.command_name == "find" and self.count("find") == 2:
            self._write()


async def test_a_retry_is_a_new_message_that_gossips_the_newest_time(rig, instrument, deployment):
    """The first attempt's error carries a newer time than the session knew; the second attempt reads after it."""
    instrument()
    write = partial(deployment.primary().command, {"appendOplogNote": 1, "data": {}})
    at = rig(event_listeners=[meanwhile := Meanwhile(write)])
    async with at.session(causal_consistency=True) as session:
        await resolve(at.collection.find_one({}, session=session))
        at.fail("find", **server_error(189))
        await resolve(at.collection.find_one({}, session=session))
    _, first, second = meanwhile.named("find")
    assert first.request_id != second.request_id
    assert first.command["lsid"] == second.command["lsid"]
    assert first.command["$clusterTime"]["clusterTime"] < second.command["$clusterTime"]["clusterTime"]
    assert (
        first.command["readConcern"]["afterClusterTime"] < second.command["readConcern"]["afterClusterTime"]
    )


async def test_a_retry_is_equivalent_to_the_first_attempt(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("find", **server_error(189))
    query = {"filter": {"x": {"$gt": 1}}, "sort": {"x": -1}, "limit": 1, "comment": "same"}
    await listed(at.collection.find(query["filter"], sort=query["sort"], limit=1, comment="same"))
    first, second = (
        {key: value for key, value in event.command.items() if key not in {"$clusterTime", "readConcern"}}
        for event in at.commands.named("find")
    )
    assert first == second
    assert query.items() <= first.items()


async def test_every_command_that_started_ends_once(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("find", **NETWORK)
    await resolve(at.collection.find_one({}))
    started = [event.request_id for event in at.commands.started_events]
    ended = [(event.request_id, type(event).__name__) for event in at.commands.ended_events]
    assert ended == [(started[0], "CommandFailedEvent"), (started[1], "CommandSucceededEvent")]


@pytest.mark.parametrize("times", [1, 2])
async def test_the_topology_hears_of_each_failed_attempt(rig, instrument, times):
    """Seed 000, 3 and 3c: the pool of the server that failed is cleared, which is how PyMongo forgets a server."""
    instrument()
    pools = Pools()
    at = rig(event_listeners=[pools])
    await at.seed()
    at.fail("find", times=times, **NETWORK)
    if times == 1:
        await resolve(at.collection.find_one({}))
    else:
        with pytest.raises(AutoReconnect):
            await resolve(at.collection.find_one({}))
    assert pools.cleared == times


async def test_a_deadline_allows_many_retries(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("find", times=6, **server_error(189))
    with pymongo.timeout(10):
        assert len(await at.data()) == 3
    assert at.commands.count("find") == 7


@pytest.mark.parametrize("policy", ["backpressure", "current", "persistent"])
@pytest.mark.parametrize("given", ["block", "option"])
async def test_a_deadline_ends_the_retries(rig, instrument, policy, given):
    instrument(policy=policy)
    at = rig(timeoutMS=400) if given == "option" else rig()
    await at.seed()
    at.fail("find", times=None, **server_error(189))
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(PyMongoError) as raised:
        if given == "option":
            await resolve(at.collection.find_one({}))
        else:
            with pymongo.timeout(0.4):
                await resolve(at.collection.find_one({}))
    assert 0.2 < loop.time() - began < 30
    assert at.commands.count("find") > 3
    assert otel_retry.attempts(raised.value)[-1].number > 3


async def test_on_a_sharded_cluster_the_retry_prefers_another_mongos(rig, serve, instrument):
    """With scripted servers: there is no mongos to be had here."""
    instrument()
    servers, uri = serve(sharded(2))
    client = rig(uri, localThresholdMS=10_000).client  # none of them is too far
    await until_known(client, 2)
    for _ in range(8):
        for server in servers:
            server.clear()
        tried = []

        def answer(command, server, tried=tried):
            tried.append(server)
            return error(6) if len(tried) == 1 else {"ok": 1, "n": 7}

        for server in servers:
            server.reply("count", lambda command, server=server: answer(command, server))
        assert await resolve(client.db.things.estimated_document_count()) == 7
        first, second = tried
        assert first is not second


@pytest.mark.parametrize("policy", ["backpressure", "persistent"])
async def test_a_socket_timeout_is_retried_once(rig, instrument, policy):
    instrument(policy=policy)
    at = rig(socketTimeoutMS=200)
    await at.seed()
    at.fail("find", blockConnection=True, blockTimeMS=500)
    assert len(await at.data()) == 3
    assert at.commands.count("find") == 2


@pytest.mark.parametrize("policy", ["backpressure", "persistent"])
async def test_the_second_socket_timeout_is_raised(rig, instrument, policy):
    instrument(policy=policy)
    at = rig(socketTimeoutMS=200)
    await at.seed()
    at.fail("find", times=None, blockConnection=True, blockTimeMS=500)
    with pytest.raises(NetworkTimeout) as raised:
        await resolve(at.collection.find_one({}))
    assert at.commands.count("find") == 2
    first, second = otel_retry.attempts(raised.value)
    assert second.error is raised.value
    assert first.error is not raised.value


async def test_an_error_that_is_not_retryable_ends_a_retry(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail_in_turn("find", server_error(189), server_error(2), server_error(189))
    with pytest.raises(OperationFailure) as raised:
        await resolve(at.collection.find_one({}))
    assert raised.value.code == 2
    assert not isinstance(raised.value, ConnectionFailure)
    assert at.commands.count("find") == 2


async def test_a_timeout_of_zero_is_a_deadline_that_never_comes(mongo, deployment, database_name, instrument):
    """timeoutMS=0 switches client-side timeouts on, and with them any number of retries."""
    instrument()
    client = mongo.client(deployment.uri, timeoutMS=0)
    with deployment.fail_command(commands=["find"], times=4, errorCode=6, errorLabels=[]):
        await resolve(client[database_name].c.find_one())
