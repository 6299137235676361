"""docs/policies.md, "Which failure goes to which method", row by row, with real faults; and what answers do."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import ReadPreference
from pymongo.errors import OperationFailure, PyMongoError, ServerSelectionTimeoutError

import otel_retry
from otel_retry import Phase, Reason, RetryContext, RetryDecision, RetryPolicy
from tests.flavours import OVERLOAD, Commands, listed, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour


class Recorder(RetryPolicy):
    """Answers as told, and remembers what it was asked."""

    def __init__(self, answer: RetryDecision | None = None, *, once: bool = True) -> None:
        self.answer = answer or RetryDecision.rethrow()
        self.once = once
        self.heard: list[tuple[str, RetryContext]] = []

    def _note(self, method: str, context: RetryContext) -> RetryDecision:
        self.heard.append((method, context))
        return self.answer if context.retries == 0 or not self.once else RetryDecision.rethrow()

    def on_unavailable(self, context: RetryContext) -> RetryDecision:
        return self._note("on_unavailable", context)

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:
        return self._note("on_read_timeout", context)

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:
        return self._note("on_write_timeout", context)

    def on_request_error(self, context: RetryContext) -> RetryDecision:
        return self._note("on_request_error", context)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.heard]


def code(number: int) -> dict[str, Any]:
    return {"errorCode": number, "errorLabels": []}


SLOW = {"blockConnection": True, "blockTimeMS": 600}


@pytest.mark.parametrize(
    ("command", "fault", "method"),
    [
        ("find", code(10107), "on_unavailable"),
        ("find", code(13435), "on_unavailable"),
        ("insert", code(13436), "on_unavailable"),
        ("insert", code(10058), "on_unavailable"),
        ("find", SLOW, "on_read_timeout"),
        ("find", code(50), "on_read_timeout"),
        ("find", code(89), "on_read_timeout"),
        ("find", code(262), "on_read_timeout"),
        ("insert", SLOW, "on_write_timeout"),
        ("insert", code(50), "on_write_timeout"),
        (
            "insert",
            {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}},
            "on_write_timeout",
        ),
        ("find", OVERLOAD, "on_request_error"),
        ("insert", OVERLOAD, "on_request_error"),
        ("find", {"closeConnection": True}, "on_request_error"),
        ("insert", {"closeConnection": True}, "on_request_error"),
        ("insert", code(189), "on_request_error"),
        ("find", code(91), "on_request_error"),
        ("find", code(11600), "on_request_error"),
        ("find", code(11602), "on_request_error"),
        ("find", code(8), "on_request_error"),
    ],
)
async def test_each_failure_goes_to_its_method(
    mongo: Flavour,
    deployment: Deployment,
    database_name: str,
    instrument: Callable[..., None],
    command: str,
    fault: dict[str, Any],
    method: str,
) -> None:
    recorder = Recorder()
    client = mongo.client(deployment.uri, socketTimeoutMS=300)
    collection = client[database_name].c
    await resolve(collection.insert_one({}))
    instrument(policy=recorder)
    with deployment.fail_command(commands=[command], times=1, **fault), pytest.raises(PyMongoError):
        await resolve(collection.find_one() if command == "find" else collection.insert_one({}))
    assert recorder.methods == [method]
    context = recorder.heard[0][1]
    assert context.server == deployment.nodes[0].address if deployment.nodes else True
    assert (context.attempt, context.is_read) == (1, command == "find")


async def test_no_server_and_no_connection_are_unavailable(
    mongo: Flavour, instrument: Callable[..., None]
) -> None:
    recorder = Recorder()
    instrument(policy=recorder)
    client = mongo.client("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=100)
    with pytest.raises(ServerSelectionTimeoutError):
        await resolve(client.db.c.find_one())
    ((method, context),) = recorder.heard
    assert (method, context.failure.phase, context.server) == ("on_unavailable", Phase.SELECTION, None)


@pytest.mark.parametrize("wrong", [{"$unheardOf": 1}, {"a": {"$nope": 1}}])
async def test_validation_errors_are_raised_without_asking(
    mongo: Flavour, deployment: Deployment, instrument: Callable[..., None], wrong: Any
) -> None:
    recorder = Recorder(RetryDecision.retry())
    instrument(policy=recorder)
    client = mongo.client(deployment.uri)
    with pytest.raises(OperationFailure):
        await resolve(client.db.c.find_one(wrong))
    assert recorder.heard == []


async def test_the_reason_a_policy_gives_is_the_one_that_is_shown(
    mongo: Flavour, deployment: Deployment, instrument: Callable[..., None]
) -> None:
    instrument(policy=Recorder(RetryDecision.rethrow(Reason.LIMIT)))
    client = mongo.client(deployment.uri)
    with (
        deployment.fail_command(commands=["find"], times=1, **code(8)),
        pytest.raises(PyMongoError) as caught,
    ):
        await resolve(client.db.c.find_one())
    assert otel_retry.attempts(caught.value)[0].decision == "limit"


async def test_retry_goes_to_the_same_host_and_try_next_host_to_any(
    mongo: Flavour, three_nodes: Deployment, instrument: Callable[..., None]
) -> None:
    """`nearest` with three equal nodes picks at random: twenty times the same host is no accident."""
    commands = Commands()
    client = mongo.client(three_nodes.uri, event_listeners=[commands], localThresholdMS=1000)
    collection = client.db.get_collection("c", read_preference=ReadPreference.NEAREST)
    await resolve(collection.find_one())
    instrument(policy=Recorder(RetryDecision.retry()))
    for _ in range(20):
        commands.clear()
        with three_nodes.fail_command("all", commands=["find"], times=1, **code(8)):
            for _ in range(2):  # until one of them meets a failpoint
                await resolve(collection.find_one())
        hosts = [event.connection_id for event in commands.named("find")]
        by_operation: dict[int, set[Any]] = {}
        for event in commands.named("find"):
            by_operation.setdefault(event.operation_id, set()).add(event.connection_id)
        assert len(hosts) > 2
        assert all(len(servers) == 1 for servers in by_operation.values())


async def test_a_read_falls_back_to_a_secondary_when_the_primary_is_gone(
    mongo: Flavour, three_nodes: Deployment, database_name: str, instrument: Callable[..., None]
) -> None:
    commands = Commands()
    client = mongo.client(three_nodes.uri, event_listeners=[commands], serverSelectionTimeoutMS=500)
    await resolve(client[database_name].c.insert_one({"_id": 1}))
    instrument(policy=otel_retry.SecondaryFallbackPolicy())
    primary = three_nodes.primary()
    with three_nodes.fail_command(primary, commands=["find"], times=1, errorCode=10107, errorLabels=[]):
        await resolve(client[database_name].c.find_one())
    first, second = commands.named("find")
    assert first.connection_id == (primary.host, primary.port)
    assert second.connection_id != first.connection_id


async def test_a_write_never_falls_back(
    mongo: Flavour, deployment: Deployment, instrument: Callable[..., None]
) -> None:
    instrument(policy=Recorder(RetryDecision.try_next_host(read_preference="secondary")))
    client = mongo.client(deployment.uri, serverSelectionTimeoutMS=2000)
    with deployment.fail_command(commands=["insert"], times=1, closeConnection=True):
        await resolve(client.db.c.insert_one({}))


# ignore()


OPERATIONS: dict[str, tuple[str, Callable[[Any], Any], Any]] = {
    "insert_one": ("insert", lambda c: c.insert_one({}), None),
    "insert_many": ("insert", lambda c: c.insert_many([{}, {}]), None),
    "update_one": ("update", lambda c: c.update_one({}, {"$set": {"a": 1}}), None),
    "update_many": ("update", lambda c: c.update_many({}, {"$set": {"a": 1}}), None),
    "replace_one": ("update", lambda c: c.replace_one({}, {"a": 1}), None),
    "delete_one": ("delete", lambda c: c.delete_one({}), None),
    "delete_many": ("delete", lambda c: c.delete_many({}), None),
    "find_one_and_update": ("findAndModify", lambda c: c.find_one_and_update({}, {"$set": {"a": 1}}), None),
    "find_one_and_delete": ("findAndModify", lambda c: c.find_one_and_delete({}), None),
    "find_one": ("find", lambda c: c.find_one(), None),
    "find": ("find", lambda c: c.find(), []),
    "aggregate": ("aggregate", lambda c: c.aggregate([]), []),
    "count_documents": ("aggregate", lambda c: c.count_documents({}), 0),
    "estimated_document_count": ("count", lambda c: c.estimated_document_count(), 0),
    "distinct": ("distinct", lambda c: c.distinct("a"), []),
    "list_indexes": ("listIndexes", lambda c: c.list_indexes(), []),
    "list_collections": ("listCollections", lambda c: c.database.list_collections(), []),
    "list_database_names": ("listDatabases", lambda c: c.database.client.list_database_names(), []),
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_ignore_gives_an_empty_result(
    mongo: Flavour, deployment: Deployment, database_name: str, instrument: Callable[..., None], name: str
) -> None:
    command, call, empty = OPERATIONS[name]
    client = mongo.client(deployment.uri)
    collection = client[database_name].c
    await resolve(collection.insert_one({"_id": 1, "a": 0}))
    instrument(policy=Recorder(RetryDecision.ignore()))
    with deployment.fail_command(commands=[command], times=1, **code(8)):
        result = await resolve(call(collection))
        if hasattr(result, "__aiter__") or hasattr(result, "alive"):
            result = await listed(result)
    if empty is not None or result is None:
        assert result == empty
    else:
        assert result.acknowledged
        changed = [getattr(result, key, 0) for key in ("modified_count", "matched_count", "deleted_count")]
        assert changed == [0, 0, 0]
    assert await listed(collection.find()) == [{"_id": 1, "a": 0}]


@pytest.mark.parametrize("name", ["watch", "create_index", "command", "transaction", "getMore"])
async def test_ignore_is_refused_where_it_would_mean_nothing(
    mongo: Flavour,
    deployment: Deployment,
    database_name: str,
    instrument: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    client = mongo.client(deployment.uri)
    collection = client[database_name].c
    await resolve(collection.insert_many([{"_id": number} for number in range(10)]))
    cursor = collection.find(batch_size=2)
    await resolve(cursor.__anext__() if mongo.is_async else next(cursor))
    instrument(policy=Recorder(RetryDecision.ignore()))
    calls = {
        "watch": ("aggregate", collection.watch),
        "create_index": ("createIndexes", lambda: collection.create_index("a")),
        "command": ("ping", lambda: client.admin.command("ping")),
        "getMore": ("getMore", lambda: listed(cursor)),
    }
    with caplog.at_level(logging.WARNING, "otel_retry"), pytest.raises(PyMongoError):
        if name == "transaction":
            session = await resolve(client.start_session())
            try:
                await resolve(session.start_transaction())
                with deployment.fail_command(commands=["insert"], times=1, **OVERLOAD):
                    await resolve(collection.insert_one({}, session=session))
            finally:
                await resolve(session.end_session())
        else:
            command, call = calls[name]
            with deployment.fail_command(commands=[command], times=1, **code(8)):
                found = await resolve(call())
                await resolve(found.next())
    assert any("ignore()" in record.getMessage() for record in caplog.records)
    await resolve(cursor.close())
