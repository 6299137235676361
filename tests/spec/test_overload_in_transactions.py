"""An overload inside a transaction: the server did nothing, so the command is repeated and the transaction goes on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import AsyncMongoClient, InsertOne, UpdateMany
from pymongo.errors import AutoReconnect, OperationFailure

import otel_retry
from tests.fakes.wire_server import error, sharded
from tests.flavours import OVERLOAD, Commands, listed, resolve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour

OPERATIONS: dict[str, tuple[str, Callable[[Any, Any], Awaitable[Any]]]] = {
    "find": ("find", lambda db, s: listed(db.items.find({}, session=s))),
    "count_documents": ("aggregate", lambda db, s: resolve(db.items.count_documents({}, session=s))),
    "distinct": ("distinct", lambda db, s: resolve(db.items.distinct("n", session=s))),
    "insert_one": ("insert", lambda db, s: resolve(db.items.insert_one({}, session=s))),
    "update_many": (
        "update",
        lambda db, s: resolve(db.items.update_many({}, {"$set": {"n": 1}}, session=s)),
    ),
    "find_one_and_delete": (
        "findAndModify",
        lambda db, s: resolve(db.items.find_one_and_delete({}, session=s)),
    ),
    "bulk_write": (
        "update",
        lambda db, s: resolve(db.items.bulk_write([UpdateMany({}, {"$set": {"n": 1}})], session=s)),
    ),
    "command": (
        "insert",
        lambda db, s: resolve(db.command("insert", "items", documents=[{}], session=s)),
    ),
    "create_index": ("createIndexes", lambda db, s: resolve(db.fresh.create_index("n", session=s))),
}
every_operation = pytest.mark.parametrize(("command", "operation"), OPERATIONS.values(), ids=OPERATIONS)


@pytest.fixture
def sent() -> Commands:
    return Commands()


@pytest.fixture
async def database(
    mongo: Flavour,
    deployment: Deployment,
    instrument: Callable[..., None],
    database_name: str,
    delays: list[float],
    sent: Commands,
) -> Any:
    instrument("backpressure")
    database = mongo.client(deployment.uri, event_listeners=[sent])[database_name]
    await resolve(database.items.insert_many([{"n": 0}, {"n": 0}]))
    sent.clear()
    return database


@pytest.fixture
async def session(database: Any, deployment: Deployment) -> AsyncIterator[Any]:
    """In a transaction, which does not outlive the test: it would hold up the drop of the database."""
    session = await resolve(database.client.start_session())
    await resolve(session.start_transaction())
    yield session
    deployment.clear_failpoints()
    if session.in_transaction:
        await resolve(session.abort_transaction())
    await resolve(session.end_session())


@every_operation
async def test_the_first_command_starts_the_transaction_again(
    database: Any,
    session: Any,
    deployment: Deployment,
    sent: Commands,
    command: str,
    operation: Callable[[Any, Any], Awaitable[Any]],
) -> None:
    deployment.fail_command(commands=[command], times=2, **OVERLOAD)
    await operation(database, session)
    attempts = [event.command for event in sent.named(command)]
    assert len(attempts) == 3
    assert all(attempt["startTransaction"] is True for attempt in attempts)
    assert len({attempt["txnNumber"] for attempt in attempts}) == 1
    await resolve(session.commit_transaction())


@every_operation
async def test_a_command_in_mid_transaction_is_repeated_without_starting_another(
    database: Any,
    session: Any,
    deployment: Deployment,
    sent: Commands,
    command: str,
    operation: Callable[[Any, Any], Awaitable[Any]],
) -> None:
    await resolve(database.items.insert_one({"first": True}, session=session))
    sent.clear()
    deployment.fail_command(commands=[command], times=2, **OVERLOAD)
    await operation(database, session)
    attempts = [event.command for event in sent.named(command)]
    assert len(attempts) == 3
    assert not any("startTransaction" in attempt for attempt in attempts)
    assert all(attempt["autocommit"] is False for attempt in attempts)
    await resolve(session.commit_transaction())


async def test_what_was_repeated_is_committed_once(
    database: Any, session: Any, deployment: Deployment
) -> None:
    deployment.fail_command(commands=["update"], times=2, **OVERLOAD)
    await resolve(database.items.update_many({}, {"$inc": {"n": 1}}, session=session))
    deployment.fail_command(commands=["update"], times=2, **OVERLOAD)
    await resolve(database.items.update_many({}, {"$inc": {"n": 1}}, session=session))
    await resolve(session.commit_transaction())
    assert await resolve(database.items.distinct("n")) == [2]


async def test_each_command_of_a_bulk_write_is_repeated_and_only_the_first_starts_the_transaction(
    database: Any, session: Any, deployment: Deployment, sent: Commands
) -> None:
    deployment.fail_command(commands=["insert"], times=1, **OVERLOAD)
    await resolve(
        database.items.bulk_write([InsertOne({}), UpdateMany({}, {"$set": {"n": 1}})], session=session)
    )
    assert ["startTransaction" in event.command for event in sent.started_events] == [True, True, False]
    await resolve(session.commit_transaction())


async def test_a_bulk_write_overloaded_at_its_second_command_does_not_start_again(
    database: Any, session: Any, deployment: Deployment, sent: Commands
) -> None:
    deployment.fail_command(commands=["update"], times=1, **OVERLOAD)
    await resolve(
        database.items.bulk_write([InsertOne({}), UpdateMany({}, {"$set": {"n": 1}})], session=session)
    )
    assert [(event.command_name, "startTransaction" in event.command) for event in sent.started_events] == [
        ("insert", True),
        ("update", False),
        ("update", False),
    ]
    await resolve(session.commit_transaction())
    assert await resolve(database.items.count_documents({"n": 1})) == 3


@pytest.mark.parametrize("end", ["commitTransaction", "abortTransaction"])
async def test_commit_and_abort_are_repeated(
    database: Any, session: Any, deployment: Deployment, delays: list[float], sent: Commands, end: str
) -> None:
    await resolve(database.items.insert_one({"new": True}, session=session))
    deployment.fail_command(commands=[end], times=3, **OVERLOAD)
    await resolve(session.commit_transaction() if end == "commitTransaction" else session.abort_transaction())
    assert (sent.count(end), len(delays)) == (4, 3)
    found = await resolve(database.items.count_documents({"new": True}))
    assert found == (1 if end == "commitTransaction" else 0)


async def test_a_commit_that_stays_overloaded_is_raised_after_six_attempts(
    database: Any, session: Any, deployment: Deployment, sent: Commands
) -> None:
    await resolve(database.items.insert_one({"new": True}, session=session))
    deployment.fail_command(commands=["commitTransaction"], **OVERLOAD)
    with pytest.raises(OperationFailure) as raised:
        await resolve(session.commit_transaction())
    assert raised.value.code == 462
    assert otel_retry.attempts(raised.value)[-1].decision == "limit"
    assert sent.count("commitTransaction") == 6
    deployment.clear_failpoints()
    await resolve(session.commit_transaction())
    assert await resolve(database.items.count_documents({"new": True})) == 1


async def test_commit_and_abort_need_no_retry_writes(
    mongo: Flavour,
    deployment: Deployment,
    instrument: Callable[..., None],
    database_name: str,
    delays: list[float],
    sent: Commands,
) -> None:
    instrument("backpressure")
    client = mongo.client(deployment.uri, retryWrites=False, retryReads=False, event_listeners=[sent])
    await resolve(client[database_name].create_collection("items"))
    session = await resolve(client.start_session())
    for end in ("commitTransaction", "abortTransaction"):
        await resolve(session.start_transaction())
        await resolve(client[database_name].items.insert_one({}, session=session))
        deployment.fail_command(commands=[end], times=1, **OVERLOAD)
        await resolve(
            session.commit_transaction() if end == "commitTransaction" else session.abort_transaction()
        )
        assert sent.count(end) == 2
    await resolve(session.end_session())


async def test_other_errors_in_a_transaction_are_left_to_the_application(
    database: Any, session: Any, deployment: Deployment, sent: Commands
) -> None:
    deployment.fail_command(commands=["find"], times=1, closeConnection=True)
    with pytest.raises(AutoReconnect) as raised:
        await resolve(database.items.find_one({}, session=session))
    assert raised.value.has_error_label("TransientTransactionError")
    assert sent.count("find") == 1


@pytest.mark.parametrize(
    ("command", "operation"),
    [OPERATIONS[name] for name in ("find", "insert_one", "command")],
    ids=["read", "write", "command"],
)
async def test_the_retryable_label_alone_repeats_the_first_command_with_its_start(
    database: Any,
    session: Any,
    deployment: Deployment,
    sent: Commands,
    command: str,
    operation: Callable[[Any, Any], Awaitable[Any]],
) -> None:
    deployment.fail_command(commands=[command], times=1, errorCode=8, errorLabels=["RetryableError"])
    await operation(database, session)
    assert [event.command.get("startTransaction") for event in sent.named(command)] == [True, True]
    await resolve(session.commit_transaction())


@pytest.mark.parametrize(
    "labels", [OVERLOAD["errorLabels"], ["RetryableError"]], ids=["overload", "RetryableError alone"]
)
@pytest.mark.parametrize(
    ("command", "operation"),
    [OPERATIONS[name] for name in ("find", "insert_one", "command")],
    ids=["read", "write", "command"],
)
async def test_in_mid_transaction_the_mongos_is_kept(
    mongo: Flavour,
    instrument: Callable[..., None],
    delays: list[float],
    labels: list[str],
    command: str,
    operation: Callable[[Any, Any], Awaitable[Any]],
) -> None:
    """On fake servers, for there is no mongos to be had."""
    instrument("backpressure")
    with sharded(2) as cluster:
        client = mongo.client(cluster.uri, localThresholdMS=5000)
        while len(client.nodes) < 2:
            await resolve(client.admin.command("ping"))
        session = await resolve(client.start_session())
        await resolve(session.start_transaction())
        await resolve(client.db.items.update_one({}, {"$set": {"n": 1}}, session=session))
        pinned, other = sorted(cluster.servers, key=lambda server: -len(server.commands("update")))
        pinned.reply(command, error(462, labels=labels))
        with contextlib.suppress(OperationFailure):
            await operation(client.db, session)
        assert (len(pinned.commands(command)), len(other.commands(command))) == (2, 0)
        await resolve(session.abort_transaction())
        await resolve(session.end_session())
        await mongo.close()


async def test_with_transaction_goes_through_overloads_at_every_step(
    database: Any, deployment: Deployment, sent: Commands
) -> None:
    client = database.client
    calls = []

    async def callback_async(session: Any) -> None:
        calls.append(session)
        await database.items.insert_one({"new": True}, session=session)

    def callback(session: Any) -> None:
        calls.append(session)
        database.items.insert_one({"new": True}, session=session)

    def overload_the_commit(event: Any) -> None:
        if event.command_name == "insert":
            deployment.fail_command(commands=["commitTransaction"], times=2, **OVERLOAD)

    sent.succeeded = overload_the_commit
    deployment.fail_command(commands=["insert"], times=2, **OVERLOAD)
    session = await resolve(client.start_session())
    is_async = isinstance(client, AsyncMongoClient)
    await resolve(session.with_transaction(callback_async if is_async else callback))
    await resolve(session.end_session())
    assert len(calls) == 1
    assert (sent.count("insert"), sent.count("commitTransaction")) == (3, 3)
    assert await resolve(database.items.count_documents({"new": True})) == 1
