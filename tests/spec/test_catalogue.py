"""What `otel-retry explain` says of each operation is what the running driver does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from gridfs import AsyncGridFSBucket, GridFSBucket
from pymongo import InsertOne, UpdateOne, WriteConcern
from pymongo.errors import PyMongoError

from otel_retry import RetryContext, RetryDecision, RetryPolicy
from otel_retry.cli.catalogue import OPERATIONS
from tests.flavours import OVERLOAD, listed, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour


class Recorder(RetryPolicy):
    def __init__(self) -> None:
        self.contexts: list[RetryContext] = []

    def _note(self, context: RetryContext) -> RetryDecision:
        self.contexts.append(context)
        return RetryDecision.rethrow()

    on_unavailable = on_read_timeout = on_write_timeout = on_request_error = _note


COMMANDS = [
    "find",
    "aggregate",
    "distinct",
    "count",
    "listDatabases",
    "listCollections",
    "listIndexes",
    "getMore",
    "insert",
    "update",
    "delete",
    "findAndModify",
    "create",
    "createIndexes",
    "drop",
    "dropIndexes",
    "renameCollection",
    "ping",
    "commitTransaction",
]


async def gridfs_read(collection: Any, session: Any) -> None:
    kind = AsyncGridFSBucket if "Async" in type(collection).__name__ else GridFSBucket
    await listed(kind(collection.database).find({}))


async def get_more(collection: Any, session: Any) -> None:
    await listed(collection.find(batch_size=2))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "find": lambda c, s: listed(c.find()),
    "find_one": lambda c, s: c.find_one(),
    "aggregate": lambda c, s: c.aggregate([]),
    "distinct": lambda c, s: c.distinct("a"),
    "count_documents": lambda c, s: c.count_documents({}),
    "estimated_document_count": lambda c, s: c.estimated_document_count(),
    "watch": lambda c, s: c.watch(),
    "list_databases": lambda c, s: c.database.client.list_databases(),
    "list_collections": lambda c, s: c.database.list_collections(),
    "list_indexes": lambda c, s: c.list_indexes(),
    "gridfs_read": gridfs_read,
    "getMore": get_more,
    "insert_one": lambda c, s: c.insert_one({}),
    "insert_many": lambda c, s: c.insert_many([{}]),
    "update_one": lambda c, s: c.update_one({}, {"$set": {"a": 1}}),
    "replace_one": lambda c, s: c.replace_one({}, {"a": 1}),
    "delete_one": lambda c, s: c.delete_one({}),
    "find_one_and_update": lambda c, s: c.find_one_and_update({}, {"$set": {"a": 1}}),
    "find_one_and_replace": lambda c, s: c.find_one_and_replace({}, {"a": 1}),
    "find_one_and_delete": lambda c, s: c.find_one_and_delete({}),
    "bulk_write": lambda c, s: c.bulk_write([InsertOne({}), UpdateOne({}, {"$set": {"a": 1}})]),
    "update_many": lambda c, s: c.update_many({}, {"$set": {"a": 1}}),
    "delete_many": lambda c, s: c.delete_many({}),
    "aggregate_out": lambda c, s: c.aggregate([{"$out": "other"}]),
    "create_collection": lambda c, s: c.database.create_collection("new", check_exists=False),
    "create_index": lambda c, s: c.create_index("a"),
    "drop_collection": lambda c, s: c.drop(),
    "drop_index": lambda c, s: c.drop_index("b_1"),
    "rename_collection": lambda c, s: c.rename("other"),
    "run_command": lambda c, s: c.database.command("ping"),
    "find_in_transaction": lambda c, s: c.find_one(session=s),
    "insert_in_transaction": lambda c, s: c.insert_one({}, session=s),
    "commit_transaction": lambda c, s: s.commit_transaction(),
}


def test_every_operation_of_the_catalogue_is_tried() -> None:
    assert set(CALLS) == set(OPERATIONS) - {"unacknowledged_write"}


@pytest.mark.parametrize("name", CALLS)
async def test_the_driver_agrees_with_the_catalogue(
    mongo: Flavour, deployment: Deployment, database_name: str, instrument: Callable[..., None], name: str
) -> None:
    operation = OPERATIONS[name]
    client = mongo.client(deployment.uri)
    collection = client[database_name].c
    await resolve(collection.insert_many([{"_id": number, "b": number} for number in range(6)]))
    await resolve(collection.create_index("b"))
    session = await resolve(client.start_session())
    try:
        if operation.in_transaction:
            await resolve(session.start_transaction())
            if name == "commit_transaction":
                await resolve(collection.find_one(session=session))
        recorder = Recorder()
        instrument(policy=recorder)
        failing = ["getMore"] if name == "getMore" else [each for each in COMMANDS if each != "getMore"]
        app = client.options.pool_options.appname
        with (
            deployment.fail_command(commands=failing, times=1, appName=app, **OVERLOAD),
            pytest.raises(PyMongoError),
        ):
            await resolve(CALLS[name](collection, session))
        context = recorder.contexts[0]
        assert (context.kind, context.retryable) == (operation.kind, operation.retryable)
        assert context.in_transaction == operation.in_transaction
    finally:
        await resolve(session.end_session())


async def test_an_unacknowledged_write_asks_nobody(
    mongo: Flavour, deployment: Deployment, database_name: str, instrument: Callable[..., None]
) -> None:
    recorder = Recorder()
    instrument(policy=recorder)
    client = mongo.client(deployment.uri)
    collection = client[database_name].get_collection("c", write_concern=WriteConcern(w=0))
    await resolve(collection.insert_one({}))
    assert recorder.contexts == []
