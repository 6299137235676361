"""Seed 001, "Command Monitoring": what an application's listeners and PyMongo's log say of each attempt."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import InsertOne, UpdateMany
from pymongo.errors import OperationFailure

from tests.flavours import OVERLOAD, Commands, listed, resolve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour

OPERATIONS: dict[str, tuple[str, Callable[[Any], Awaitable[Any]]]] = {
    "find": ("find", lambda db: resolve(db.items.find_one({}))),
    "getMore": ("getMore", lambda db: listed(db.items.find({}, batch_size=2))),
    "count_documents": ("aggregate", lambda db: resolve(db.items.count_documents({}))),
    "insert_one": ("insert", lambda db: resolve(db.items.insert_one({}))),
    "update_many": ("update", lambda db: resolve(db.items.update_many({}, {"$set": {"n": 1}}))),
    "bulk_write": ("update", lambda db: resolve(db.items.bulk_write([UpdateMany({}, {"$set": {"n": 1}})]))),
    "command": ("ping", lambda db: resolve(db.command("ping"))),
    "create_index": ("createIndexes", lambda db: resolve(db.items.create_index("n"))),
    "create_collection": ("create", lambda db: resolve(db.create_collection("other"))),
    "drop_database": ("dropDatabase", lambda db: resolve(db.client.drop_database(db.name))),
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
    await resolve(database.items.insert_many([{} for _ in range(3)]))
    sent.clear()
    return database


def each_start_has_one_end(sent: Commands) -> bool:
    """And each end belongs to a start."""
    started = [event.request_id for event in sent.started_events]
    ended = [event.request_id for event in sent.ended_events]
    return len(set(started)) == len(started) and sorted(started) == sorted(ended)


@every_operation
async def test_each_attempt_has_one_start_and_one_end_of_its_own_under_one_operation_id(
    database: Any,
    deployment: Deployment,
    sent: Commands,
    command: str,
    operation: Callable[[Any], Awaitable[Any]],
) -> None:
    deployment.fail_command(commands=[command], times=3, **OVERLOAD)
    await operation(database)
    started = sent.named(command)
    ended = [event for event in sent.ended_events if event.command_name == command]
    assert each_start_has_one_end(sent)
    assert [event.request_id for event in started] == [event.request_id for event in ended]
    assert [hasattr(event, "failure") for event in ended] == [True, True, True, False]
    assert len({event.operation_id for event in [*started, *ended]}) == 1


@pytest.mark.parametrize(
    ("command", "operation"),
    [OPERATIONS[name] for name in ("find", "update_many", "command")],
    ids=["read", "write", "command"],
)
async def test_an_operation_that_fails_in_the_end_has_a_failed_event_for_each_attempt(
    database: Any,
    deployment: Deployment,
    sent: Commands,
    command: str,
    operation: Callable[[Any], Awaitable[Any]],
) -> None:
    deployment.fail_command(commands=[command], **OVERLOAD)
    with pytest.raises(OperationFailure):
        await operation(database)
    ended = [event for event in sent.ended_events if event.command_name == command]
    assert each_start_has_one_end(sent)
    assert [event.failure["code"] for event in ended] == [462] * 6
    assert len({event.operation_id for event in [*sent.named(command), *ended]}) == 1


async def test_a_retry_after_a_network_error_has_its_own_events_too(
    database: Any, deployment: Deployment, sent: Commands
) -> None:
    deployment.fail_command(commands=["find"], times=1, closeConnection=True)
    await resolve(database.items.find_one({}))
    assert [hasattr(event, "failure") for event in sent.ended_events] == [True, False]
    assert each_start_has_one_end(sent)
    assert len({event.operation_id for event in [*sent.started_events, *sent.ended_events]}) == 1
    first, second = sent.started_events
    assert first.request_id != second.request_id


async def test_all_commands_of_a_bulk_write_and_their_attempts_share_one_operation_id(
    database: Any, deployment: Deployment, sent: Commands
) -> None:
    deployment.fail_command(commands=["update"], times=2, **OVERLOAD)
    await resolve(
        database.items.bulk_write([InsertOne({}), UpdateMany({}, {"$set": {"n": 1}}), InsertOne({})])
    )
    assert [event.command_name for event in sent.started_events] == ["insert", *["update"] * 3, "insert"]
    assert each_start_has_one_end(sent)
    assert len({event.operation_id for event in sent.started_events}) == 1


async def test_two_operations_have_two_operation_ids(
    database: Any, deployment: Deployment, sent: Commands
) -> None:
    for _ in range(2):
        deployment.fail_command(commands=["find", "ping"], times=1, **OVERLOAD)
        await resolve(database.items.find_one({}))
        deployment.fail_command(commands=["find", "ping"], times=1, **OVERLOAD)
        await resolve(database.command("ping"))
    ids = [event.operation_id for event in sent.started_events]
    assert ids[::2] == ids[1::2]
    assert len(set(ids)) == 4


async def test_the_operation_id_is_not_the_transaction_number_which_stays_the_same_as_well(
    database: Any, deployment: Deployment, sent: Commands
) -> None:
    deployment.fail_command(commands=["insert"], times=2, **OVERLOAD)
    await resolve(database.items.insert_one({}))
    first, *others = sent.named("insert")
    assert first.command["txnNumber"] != first.operation_id
    assert all(event.command["txnNumber"] == first.command["txnNumber"] for event in others)
    assert all(event.command["lsid"] == first.command["lsid"] for event in others)


async def test_the_log_pairs_the_commands_of_all_attempts_as_well(
    database: Any, deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pymongo.command")
    deployment.fail_command(commands=["insert"], times=2, **OVERLOAD)
    await resolve(database.items.insert_one({}))
    entries = [
        json.loads(record.getMessage()) for record in caplog.records if record.name == "pymongo.command"
    ]
    inserts = [entry for entry in entries if entry.get("commandName") == "insert" and "requestId" in entry]
    ends = [entry["message"] for entry in inserts]
    assert ends == [
        "Command started",
        "Command failed",
        "Command started",
        "Command failed",
        "Command started",
        "Command succeeded",
    ]
    requests = [entry["requestId"] for entry in inserts]
    assert requests[::2] == requests[1::2]
    assert len(set(requests)) == 3
