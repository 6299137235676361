"""Operations that below PyMongo 4.17 bypass its retryable path: there they are repeated as whole calls, and nothing of
that may show. The same tests hold for later versions, where these operations take the path of all others.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pymongo
import pytest
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import AutoReconnect, CollectionInvalid, OperationFailure
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database

import otel_retry
from tests.flavours import OVERLOAD, Commands, listed, resolve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour

OPERATIONS: dict[str, tuple[str, Callable[[Any], Awaitable[Any]]]] = {
    "command": ("ping", lambda db: resolve(db.command("ping"))),
    "create_collection": ("create", lambda db: resolve(db.create_collection("fresh"))),
    "create_index": ("createIndexes", lambda db: resolve(db.items.create_index("m"))),
    "drop_index": ("dropIndexes", lambda db: resolve(db.items.drop_index("n_1"))),
    "rename": ("renameCollection", lambda db: resolve(db.items.rename("renamed"))),
    "drop": ("drop", lambda db: resolve(db.items.drop())),
    "drop_database": ("dropDatabase", lambda db: resolve(db.client.drop_database(db))),
    "validate_collection": ("validate", lambda db: resolve(db.validate_collection("items"))),
    "server_info": ("buildinfo", lambda db: resolve(db.client.server_info())),
}


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
    await resolve(database.items.insert_one({"n": 1}))
    await resolve(database.items.create_index("n"))
    sent.clear()
    return database


async def test_six_attempts_and_then_the_error_with_its_history(
    database: Any, deployment: Deployment, delays: list[float], sent: Commands
) -> None:
    server = deployment.primary().address
    for command, operation in OPERATIONS.values():
        sent.clear()
        delays.clear()
        deployment.fail_command(commands=[command], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised:
            await operation(database)
        assert raised.value.code == 462
        assert (command, sent.count(command), len(delays)) == (command, 6, 5)
        history = otel_retry.attempts(raised.value)
        assert [attempt.decision for attempt in history] == ["retry"] * 5 + ["limit"]
        assert {attempt.server for attempt in history} == {server}
        assert [attempt.delay for attempt in history] == [0, *delays]


@pytest.mark.parametrize("name", ["command", "create_collection", "create_index", "drop_database"])
async def test_a_retry_costs_one_token_and_its_success_deposits_once(
    database: Any, deployment: Deployment, delays: list[float], name: str
) -> None:
    command, operation = OPERATIONS[name]
    bucket = otel_retry.budget(database.client)
    while bucket.tokens > 900:
        bucket.try_withdraw()
    deployment.fail_command(commands=[command], times=3, **OVERLOAD)
    await operation(database)
    # create_collection asks for the collections first: an operation of its own, with a tenth of its own.
    assert bucket.tokens == (898.2 if command == "create" else 898.1)


@pytest.mark.parametrize("name", ["command", "create_index"])
async def test_they_are_not_repeated_after_a_network_error_for_the_server_may_have_done_it(
    database: Any, deployment: Deployment, sent: Commands, name: str
) -> None:
    command, operation = OPERATIONS[name]
    deployment.fail_command(commands=[command], times=1, closeConnection=True)
    with pytest.raises(AutoReconnect):
        await operation(database)
    assert sent.count(command) == 1


async def test_an_error_of_the_command_itself_is_raised_as_it_is(database: Any, sent: Commands) -> None:
    with pytest.raises(CollectionInvalid):
        await resolve(database.create_collection("items"))
    with pytest.raises(OperationFailure):
        await resolve(database.items.drop_index("missing_1"))
    with pytest.raises(OperationFailure):
        await resolve(database.command("nonsense"))
    assert (sent.count("dropIndexes"), sent.count("nonsense")) == (1, 1)


async def test_the_retries_of_an_operation_inside_another_do_not_multiply(
    database: Any, deployment: Deployment, delays: list[float], sent: Commands
) -> None:
    """create_collection lists the collections first: six attempts of that, not six times six."""
    deployment.fail_command(commands=["listCollections"], **OVERLOAD)
    with pytest.raises(OperationFailure) as raised:
        await resolve(database.create_collection("fresh"))
    assert (sent.count("listCollections"), sent.count("create"), len(delays)) == (6, 0, 5)
    assert len(otel_retry.attempts(raised.value)) == 6


async def test_an_operation_after_an_inner_one_that_was_retried_has_retries_of_its_own(
    database: Any, deployment: Deployment, sent: Commands
) -> None:
    def then(event: Any) -> None:
        if event.command_name == "listCollections":
            deployment.fail_command(commands=["create"], times=5, **OVERLOAD)

    sent.succeeded = then
    deployment.fail_command(commands=["listCollections"], times=5, **OVERLOAD)
    await resolve(database.create_collection("fresh"))
    assert (sent.count("listCollections"), sent.count("create")) == (6, 6)


async def test_a_cursor_from_a_command_repeats_its_later_batches_too(
    database: Any, deployment: Deployment, sent: Commands
) -> None:
    await resolve(database.items.insert_many([{} for _ in range(4)]))
    deployment.fail_command(commands=["find"], times=2, **OVERLOAD)
    cursor = await resolve(database.cursor_command("find", "items", batchSize=2))
    deployment.fail_command(commands=["getMore"], times=2, **OVERLOAD)
    assert len(await listed(cursor)) == 5
    assert sent.count("find") == 3
    assert sent.count("getMore") >= 3


async def test_what_a_call_was_given_is_not_used_up_by_its_first_attempt(
    database: Any, deployment: Deployment, sent: Commands
) -> None:
    command = {"insert": "items", "documents": [{"n": 2}, {"n": 3}]}
    deployment.fail_command(commands=["insert"], times=3, **OVERLOAD)
    reply = await resolve(database.command(command))
    assert reply["n"] == 2
    assert command == {"insert": "items", "documents": [{"n": 2}, {"n": 3}]}
    deployment.fail_command(commands=["createIndexes"], times=3, **OVERLOAD)
    models = (pymongo.IndexModel(name) for name in ("a", "b"))
    assert await resolve(database.items.create_indexes(list(models))) == ["a_1", "b_1"]


async def test_a_session_goes_with_every_attempt(
    database: Any, deployment: Deployment, sent: Commands
) -> None:
    session = await resolve(database.client.start_session())
    deployment.fail_command(commands=["ping"], times=2, **OVERLOAD)
    await resolve(database.command("ping", session=session))
    assert [event.command["lsid"] for event in sent.named("ping")] == [session.session_id] * 3
    await resolve(session.end_session())


async def test_operations_side_by_side_have_their_attempts_to_themselves(
    database: Any, deployment: Deployment, sent: Commands, mongo: Flavour
) -> None:
    deployment.fail_command(commands=["ping"], times=5, **OVERLOAD)
    if mongo.is_async:
        await asyncio.gather(*(database.command("ping") for _ in range(8)))
    else:
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda _: database.command("ping"), range(8)):
                pass
    # Not exactly five: under concurrency the server's own count of a failpoint may run over.
    failed = [event for event in sent.ended_events if hasattr(event, "failure")]
    succeeded = [event.operation_id for event in sent.ended_events if not hasattr(event, "failure")]
    assert len(failed) >= 5
    assert sent.count("ping") == 8 + len(failed)
    assert len(set(succeeded)) == len(succeeded) == 8
    assert {event.operation_id for event in sent.named("ping")} == set(succeeded)


@pytest.mark.parametrize("option", ["pymongo.timeout", "timeoutMS"])
async def test_one_deadline_holds_for_all_attempts(
    mongo: Flavour,
    deployment: Deployment,
    instrument: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    delays: list[float],
    sent: Commands,
    option: str,
) -> None:
    monkeypatch.setattr("random.random", lambda: 1.0)
    instrument("backpressure")
    options = {"timeoutMS": 1500} if option == "timeoutMS" else {}
    client = mongo.client(deployment.uri, event_listeners=[sent], **options)
    await resolve(client.admin.command("ping"))
    sent.clear()
    deployment.fail_command(commands=["ping"], **OVERLOAD)
    with pytest.raises(OperationFailure) as raised, pymongo.timeout(None if options else 1.5):
        await resolve(client.admin.command("ping"))
    assert otel_retry.attempts(raised.value)[-1].decision == "deadline"
    assert delays == [0.1, 0.2, 0.4, 0.8]


async def test_under_a_deadline_the_wait_is_part_of_it(
    mongo: Flavour, deployment: Deployment, instrument: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.random", lambda: 1.0)
    instrument("backpressure")
    client = mongo.client(deployment.uri)
    await resolve(client.admin.command("ping"))
    deployment.fail_command(commands=["ping"], **OVERLOAD)
    started = time.monotonic()
    with pytest.raises(OperationFailure), pymongo.timeout(3):
        await resolve(client.admin.command("ping"))
    # 0.1, 0.2, 0.4 and 0.8 were waited; 1.6 more would have been too long.
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("retry_reads", "retry_writes", "expected"),
    [(True, False, 1), (False, True, 2)],
    ids=["no writes", "no reads"],
)
async def test_what_changes_the_schema_is_a_write_and_needs_retry_writes(
    mongo: Flavour,
    deployment: Deployment,
    instrument: Callable[..., None],
    database_name: str,
    delays: list[float],
    sent: Commands,
    retry_reads: bool,
    retry_writes: bool,
    expected: int,
) -> None:
    instrument("backpressure")
    client = mongo.client(
        deployment.uri, retryReads=retry_reads, retryWrites=retry_writes, event_listeners=[sent]
    )
    database = client[database_name]
    for name in ("create_collection", "create_index", "drop_index", "rename", "drop"):
        await resolve(database.items.create_index("n"))
        sent.clear()
        command, operation = OPERATIONS[name]
        deployment.fail_command(commands=[command], times=1, **OVERLOAD)
        if expected == 1:
            with pytest.raises(OperationFailure):
                await operation(database)
        else:
            await operation(database)
        assert (command, sent.count(command)) == (command, expected)


@pytest.mark.parametrize(
    "options", [{"retryReads": False}, {"retryWrites": False}], ids=["no reads", "no writes"]
)
@pytest.mark.parametrize(
    ("command", "operation"),
    [
        ("find", lambda db: resolve(db.command("find", "items"))),
        ("find", lambda db: resolve(db.cursor_command("find", "items"))),
    ],
    ids=["command", "cursor_command"],
)
async def test_a_generic_command_needs_both_gates_open(
    mongo: Flavour,
    deployment: Deployment,
    instrument: Callable[..., None],
    delays: list[float],
    sent: Commands,
    options: dict[str, Any],
    command: str,
    operation: Callable[[Any], Awaitable[Any]],
) -> None:
    instrument("backpressure")
    client = mongo.client(deployment.uri, event_listeners=[sent], **options)
    deployment.fail_command(commands=[command], times=1, **OVERLOAD)
    with pytest.raises(OperationFailure):
        await operation(client.otel_retry_empty)
    assert sent.count(command) == 1


async def test_uninstrument_puts_every_method_back(mongo: Flavour) -> None:
    owners = (
        (AsyncDatabase, AsyncCollection, pymongo.AsyncMongoClient)
        if mongo.is_async
        else (Database, Collection, pymongo.MongoClient)
    )
    before = [dict(vars(owner)) for owner in owners]
    otel_retry.instrument()
    otel_retry.uninstrument()
    assert [dict(vars(owner)) for owner in owners] == before


async def test_without_the_plugin_nothing_is_repeated_below_4_17(
    mongo: Flavour, deployment: Deployment, sent: Commands
) -> None:
    if pymongo.version_tuple >= (4, 17):
        pytest.skip("from 4.17 PyMongo repeats them itself")
    otel_retry.instrument()
    otel_retry.uninstrument()
    client = mongo.client(deployment.uri, event_listeners=[sent])
    deployment.fail_command(commands=["ping"], times=1, **OVERLOAD)
    with pytest.raises(OperationFailure):
        await resolve(client.admin.command("ping"))
    assert sent.count("ping") == 1
