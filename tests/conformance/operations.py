"""The operations of the unified test format, done with PyMongo, and what a test expects of their results and errors.

An operation that is not in the tables is a failure that names it; only what PyMongo 4 has removed is skipped.
"""

from __future__ import annotations

import copy
import inspect
import io
import re
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pymongo
from bson import SON
from pymongo import CursorType, MongoClient, ReturnDocument
from pymongo.driver_info import DriverInfo
from pymongo.errors import (
    BulkWriteError,
    ClientBulkWriteException,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    WriteError,
)
from pymongo.operations import (
    DeleteMany,
    DeleteOne,
    IndexModel,
    InsertOne,
    ReplaceOne,
    SearchIndexModel,
    UpdateMany,
    UpdateOne,
)
from pymongo.results import BulkWriteResult
from pymongo.synchronous.client_session import _TxnState
from pymongo.synchronous.cursor import Cursor

from tests.conformance.entities import (
    WAIT_SECONDS,
    HeldCursor,
    MismatchError,
    RemovedError,
    RunnerError,
    UnsupportedError,
    common_options,
    completed,
    event_problems,
    only_known,
    transaction_options,
)
from tests.conformance.matching import MISSING, operator_of, shown
from tests.flavours import listed, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.conformance.entities import Entities

REMOVED = {
    "collection": {
        "mapReduce": "Collection.map_reduce",
        "inlineMapReduce": "Collection.inline_map_reduce",
        "count": "Collection.count",
        "group": "Collection.group",
        "ensureIndex": "Collection.ensure_index",
        "reindex": "Collection.reindex",
        "parallelScan": "Collection.parallel_scan",
    },
    "database": {
        "eval": "Database.eval",
        "currentOp": "Database.current_op",
        "addUser": "Database.add_user",
        "removeUser": "Database.remove_user",
    },
    "client": {"fsync": "MongoClient.fsync", "unlock": "MongoClient.unlock"},
}
"""What PyMongo 4.0 no longer has, by the kind of entity and the operation's name."""

METHODS: dict[str, dict[str, str]] = {
    "client": {"clientBulkWrite": "bulk_write", "dropDatabase": "drop_database"},
    "database": {"dropCollection": "drop_collection"},
    "collection": {
        "insertOne": "insert_one",
        "insertMany": "insert_many",
        "updateOne": "update_one",
        "updateMany": "update_many",
        "replaceOne": "replace_one",
        "deleteOne": "delete_one",
        "deleteMany": "delete_many",
        "bulkWrite": "bulk_write",
        "findOne": "find_one",
        "findOneAndDelete": "find_one_and_delete",
        "findOneAndReplace": "find_one_and_replace",
        "findOneAndUpdate": "find_one_and_update",
        "countDocuments": "count_documents",
        "estimatedDocumentCount": "estimated_document_count",
        "distinct": "distinct",
        "createIndex": "create_index",
        "createIndexes": "create_indexes",
        "dropIndex": "drop_index",
        "dropIndexes": "drop_indexes",
        "createSearchIndex": "create_search_index",
        "createSearchIndexes": "create_search_indexes",
        "updateSearchIndex": "update_search_index",
        "dropSearchIndex": "drop_search_index",
        "drop": "drop",
        "rename": "rename",
    },
    "session": {
        "startTransaction": "start_transaction",
        "commitTransaction": "commit_transaction",
        "abortTransaction": "abort_transaction",
        "endSession": "end_session",
    },
    "bucket": {
        "delete": "delete",
        "deleteByName": "delete_by_name",
        "rename": "rename",
        "renameByName": "rename_by_name",
    },
}
"""Operations that are one call of a method, with arguments of the same names."""

LISTED: dict[str, dict[str, str]] = {
    "client": {
        "listDatabases": "list_databases",
        "listDatabaseObjects": "list_databases",
        "listDatabaseNames": "list_database_names",
    },
    "database": {
        "aggregate": "aggregate",
        "listCollections": "list_collections",
        "listCollectionObjects": "list_collections",
        "listCollectionNames": "list_collection_names",
    },
    "collection": {
        "find": "find",
        "aggregate": "aggregate",
        "listIndexes": "list_indexes",
        "listSearchIndexes": "list_search_indexes",
    },
    "bucket": {"find": "find"},
}
"""The same, for those whose result is iterated to its end."""

RENAMED: dict[str, dict[str, str]] = {
    "distinct": {"fieldName": "key"},
    "createCollection": {"collection": "name"},
    "dropCollection": {"collection": "name_or_collection"},
    "dropDatabase": {"database": "name_or_database"},
    "createIndexes": {"models": "indexes"},
    "dropIndex": {"name": "index_or_name", "keys": "index_or_name"},
    "rename": {"to": "new_name", "id": "file_id", "newFilename": "new_filename"},
    "delete": {"id": "file_id"},
    "download": {"id": "file_id"},
    "uploadWithId": {"id": "file_id"},
}

WRITE_MODELS = {
    "insertOne": InsertOne,
    "updateOne": UpdateOne,
    "updateMany": UpdateMany,
    "replaceOne": ReplaceOne,
    "deleteOne": DeleteOne,
    "deleteMany": DeleteMany,
}

CURSOR_TYPES = {
    "nonTailable": CursorType.NON_TAILABLE,
    "tailable": CursorType.TAILABLE,
    "tailableAwait": CursorType.TAILABLE_AWAIT,
}

OPERATION_KEYS = {
    "name",
    "object",
    "arguments",
    "ignoreResultAndError",
    "expectError",
    "expectResult",
    "saveResultAsEntity",
}


def snake(name: str) -> str:
    """`maxTimeMS` → `max_time_ms`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z]+)", r"_\1", name).lower()


class Operations:
    """Executes a test's operations against its entities.

    `internal` is a synchronous client that nobody observes, for what the runner does itself. The failpoints that were
    set are switched off by `close`.
    """

    def __init__(self, entities: Entities, internal: MongoClient[Any]) -> None:
        self._entities = entities
        self._internal = internal
        self._failpoints: list[tuple[tuple[str, int] | None, str]] = []

    async def run(self, operations: Sequence[Mapping[str, Any]]) -> None:
        for operation in operations:
            await self._run(operation)

    async def close(self) -> None:
        for address, name in self._failpoints:
            off = {"configureFailPoint": name, "mode": "off"}
            if address is None:
                self._internal.admin.command(off)
            else:
                with MongoClient(*address, directConnection=True) as client:
                    client.admin.command(off)

    async def _in_callback(self, operations: Sequence[Mapping[str, Any]]) -> None:
        """An error leaves the callback also where it was expected: `withTransaction` has to see it."""
        for operation in operations:
            if error := await self._run(operation):
                raise error

    async def _run(self, operation: Mapping[str, Any]) -> Exception | None:
        """The error that the operation raised, if that was expected or did not matter."""
        only_known("an operation", operation, OPERATION_KEYS)
        name, entity = operation["name"], operation["object"]
        arguments = copy.deepcopy(operation.get("arguments", {}))
        if entity == "testRunner":
            special = getattr(self, f"_special_{snake(name)}", None)
            if special is None:
                raise UnsupportedError(f"operation {name} of the test runner")
            await special(arguments)
            return None
        kind = self._entities.kind(entity)
        ignored = operation.get("ignoreResultAndError", False)
        try:
            result = await self._perform(kind, self._entities.get(entity), name, arguments)
        except RunnerError:
            raise
        except (LookupError, AttributeError, NameError) as error:
            # PyMongo raises none of these: the file lacks something, or the runner is wrong.
            raise RunnerError(f"{name}: {error!r}") from error
        except Exception as error:
            if not ignored or not isinstance(error, PyMongoError):
                self._check_error(name, operation.get("expectError"), error)
            return error
        if ignored:
            return None
        if "expectError" in operation:
            raise MismatchError(f"{name} succeeded, expected was {shown(operation['expectError'])}")
        if "expectResult" in operation:
            self._check_result(kind, name, operation["expectResult"], result)
        if "saveResultAsEntity" in operation:
            saved = {"createChangeStream": "changeStream", "watch": "changeStream"}
            saved |= {
                "createCollection": "collection",
                "createFindCursor": "cursor",
                "createCommandCursor": "cursor",
            }
            self._entities.add(
                operation["saveResultAsEntity"], saved.get(name, "value"), as_document(name, result)
            )
        return None

    async def _perform(self, kind: str, target: Any, name: str, arguments: dict[str, Any]) -> Any:
        if removed := REMOVED.get(kind, {}).get(name):
            raise RemovedError(f"PyMongo 4 has no {removed}")
        special = getattr(self, f"_{snake(kind)}_{snake(name)}", None)
        method = METHODS.get(kind, {}).get(name)
        iterated = LISTED.get(kind, {}).get(name)
        if special is None and method is None and iterated is None:
            raise UnsupportedError(f"operation {name} of a {kind}")
        timeout = arguments.pop("timeoutMS", None)
        with nullcontext() if timeout is None else pymongo.timeout(timeout / 1000):
            if special is not None:
                return await special(target, arguments)
            result = await self._call(target, name, method or iterated, arguments)
            return result if method else await listed(result)

    async def _call(self, target: Any, name: str, method: str, arguments: dict[str, Any]) -> Any:
        renamed = RENAMED.get(name, {})
        given = {renamed.get(key, key): self._argument(name, key, value) for key, value in arguments.items()}
        function = getattr(target, method, None)
        if function is None:
            raise UnsupportedError(f"PyMongo {pymongo.version} has no {type(target).__name__}.{method}")
        accepted, open_ended = parameters(function)
        # What the method does not take belongs to the collection or the database that it is called on.
        options = {
            snake(key): given.pop(key)
            for key in ("readConcern", "readPreference", "writeConcern")
            if key in given and snake(key) not in accepted
        }
        if options:
            function = getattr(target.with_options(**options), method)
        keywords = {}
        for key, value in given.items():
            if snake(key) in accepted:
                keywords[snake(key)] = value
            elif open_ended:
                keywords[key] = value  # becomes a field of the command
            else:
                raise UnsupportedError(f"argument {key} of {name}")
        return await resolve(function(**keywords))

    def _argument(self, operation: str, name: str, value: Any) -> Any:
        match name:
            case "session":
                return self._entities.get(value, "session")
            case "readConcern" | "readPreference" | "writeConcern":
                return common_options({name: value})[snake(name)]
            case "returnDocument":
                return {"before": ReturnDocument.BEFORE, "after": ReturnDocument.AFTER}[value.lower()]
            case "cursorType":
                return CURSOR_TYPES[value]
            case "sort":
                # With an update it is a document, with a read a list of pairs.
                return value if operation in {"updateOne", "replaceOne"} else list(value.items())
            case "keys":
                return list(value.items())
            case "requests":
                return [write_model(model) for model in value]
            case "models" if operation == "clientBulkWrite":
                return [write_model(model) for model in value]
            case "models" if operation == "createSearchIndexes":
                return [search_index(model) for model in value]
            case "models" | "indexes" if operation == "createIndexes":
                return [index_model(model) for model in value]
            case "model":
                return search_index(value)
            case _:
                return value

    # Clients

    async def _client_create_change_stream(self, target: Any, arguments: dict[str, Any]) -> Any:
        return await self._call(target, "createChangeStream", "watch", arguments)

    _database_create_change_stream = _collection_create_change_stream = _client_create_change_stream
    _client_watch = _database_watch = _collection_watch = _client_create_change_stream

    async def _client_close(self, target: Any, arguments: dict[str, Any]) -> None:
        only_known("close", arguments, set())
        await resolve(target.close())

    async def _client_append_metadata(self, target: Any, arguments: dict[str, Any]) -> None:
        only_known("appendMetadata", arguments, {"driverInfoOptions"})
        options = arguments["driverInfoOptions"]
        info = DriverInfo(options["name"], options.get("version"), options.get("platform"))
        await self._call(target, "appendMetadata", "append_metadata", {"driver_info": info})

    # Databases

    async def _database_run_command(self, target: Any, arguments: dict[str, Any]) -> Any:
        arguments["command"] = ordered(arguments)
        return await self._call(target, "runCommand", "command", arguments)

    async def _database_run_cursor_command(self, target: Any, arguments: dict[str, Any]) -> Any:
        return await listed(await self._database_create_command_cursor(target, arguments))

    async def _database_create_command_cursor(self, target: Any, arguments: dict[str, Any]) -> Any:
        command = ordered(arguments)
        kind = arguments.pop("cursorType", "nonTailable")
        if kind != "nonTailable":
            command |= {"tailable": True} | ({"awaitData": True} if kind == "tailableAwait" else {})
        size = arguments.pop("batchSize", 0)
        if "maxTimeMS" in arguments:
            arguments["maxAwaitTimeMS"] = arguments.pop("maxTimeMS")
        arguments["command"] = command
        cursor = await self._call(target, "runCursorCommand", "cursor_command", arguments)
        return cursor.batch_size(size) if size else cursor

    async def _database_create_collection(self, target: Any, arguments: dict[str, Any]) -> Any:
        # PyMongo would first list the collections, which the specifications do not know of.
        return await self._call(
            target, "createCollection", "create_collection", {"check_exists": False, **arguments}
        )

    async def _database_list_collections(self, target: Any, arguments: dict[str, Any]) -> Any:
        if "batchSize" in arguments:
            arguments["cursor"] = {"batchSize": arguments.pop("batchSize")}
        return await listed(await self._call(target, "listCollections", "list_collections", arguments))

    # Collections

    async def _collection_create_find_cursor(self, target: Any, arguments: dict[str, Any]) -> HeldCursor:
        if "filter" not in arguments:
            raise UnsupportedError("createFindCursor without a filter")
        cursor = HeldCursor(await self._call(target, "find", "find", arguments))
        await cursor.fetch()
        return cursor

    async def _collection_list_index_names(self, target: Any, arguments: dict[str, Any]) -> list[str]:
        indexes = await listed(await self._call(target, "listIndexNames", "list_indexes", arguments))
        return [index["name"] for index in indexes]

    async def _collection_list_search_indexes(self, target: Any, arguments: dict[str, Any]) -> Any:
        arguments |= arguments.pop("aggregationOptions", {})
        return await listed(await self._call(target, "listSearchIndexes", "list_search_indexes", arguments))

    # Sessions

    async def _session_with_transaction(self, target: Any, arguments: dict[str, Any]) -> Any:
        operations = arguments.pop("callback")
        options = transaction_options(arguments)
        if self._entities.flavour.is_async:

            async def callback(_session: Any) -> None:
                await self._in_callback(operations)
        else:

            def callback(_session: Any) -> None:  # type: ignore[misc]
                completed(self._in_callback(operations))

        return await resolve(target.with_transaction(callback, **options))

    async def _session_get_snapshot_time(self, target: Any, arguments: dict[str, Any]) -> Any:
        only_known("getSnapshotTime", arguments, set())
        if not hasattr(target, "snapshot_time"):
            raise UnsupportedError(f"PyMongo {pymongo.version} has no ClientSession.snapshot_time")
        return target.snapshot_time

    # Cursors

    async def _cursor_iterate_until_document_or_error(self, target: Any, arguments: dict[str, Any]) -> Any:
        only_known("iterateUntilDocumentOrError", arguments, set())
        deadline = time.monotonic() + WAIT_SECONDS
        while target.alive:
            document = await resolve(target.try_next())
            if document is not None:
                return document
            if time.monotonic() > deadline:
                raise MismatchError(f"no document and no error within {WAIT_SECONDS:g} s")
        return None

    async def _cursor_iterate_once(self, target: Any, arguments: dict[str, Any]) -> Any:
        only_known("iterateOnce", arguments, set())
        return await resolve(target.try_next())

    async def _cursor_close(self, target: Any, arguments: dict[str, Any]) -> None:
        only_known("close", arguments, set())
        with suppress(PyMongoError):  # drivers differ, so the format says
            await resolve(target.close())

    _change_stream_iterate_until_document_or_error = _cursor_iterate_until_document_or_error
    _change_stream_iterate_once = _cursor_iterate_once
    _change_stream_close = _cursor_close

    # Buckets

    async def _bucket_download(self, target: Any, arguments: dict[str, Any]) -> bytes:
        stream = await self._call(target, "download", "open_download_stream", arguments)
        return await resolve(stream.read())

    async def _bucket_download_by_name(self, target: Any, arguments: dict[str, Any]) -> bytes:
        stream = await self._call(target, "downloadByName", "open_download_stream_by_name", arguments)
        return await resolve(stream.read())

    async def _bucket_upload(self, target: Any, arguments: dict[str, Any]) -> Any:
        return await self._call(target, "upload", "upload_from_stream", uploaded(arguments))

    async def _bucket_upload_with_id(self, target: Any, arguments: dict[str, Any]) -> Any:
        return await self._call(target, "uploadWithId", "upload_from_stream_with_id", uploaded(arguments))

    async def _bucket_drop(self, target: Any, arguments: dict[str, Any]) -> None:
        # PyMongo's buckets have no drop(): these are the two commands that it would send.
        await self._call(target._files, "drop", "drop", arguments)
        await self._call(target._chunks, "drop", "drop", arguments)

    # What the test runner is asked to do itself

    async def _special_create_entities(self, arguments: dict[str, Any]) -> None:
        await self._entities.create(arguments["entities"])

    async def _special_fail_point(self, arguments: dict[str, Any]) -> None:
        only_known("failPoint", arguments, {"client", "failPoint"})
        name, command = arguments["client"], arguments["failPoint"]
        client = self._entities.get(name, "client")
        self._failpoints.append((None, command["configureFailPoint"]))
        # The runner's own command, no part of what the test observes.
        with self._entities.observed().get(name, nullcontext()):
            await resolve(client.admin.command(command))

    async def _special_targeted_fail_point(self, arguments: dict[str, Any]) -> None:
        only_known("targetedFailPoint", arguments, {"session", "failPoint"})
        address = self._entities.get(arguments["session"], "session")._pinned_address
        if address is None:
            raise MismatchError(f"{arguments['session']} is not pinned to a mongos")
        self._failpoints.append((address, arguments["failPoint"]["configureFailPoint"]))
        with MongoClient(*address, directConnection=True) as client:
            client.admin.command(arguments["failPoint"])

    async def _special_assert_session_transaction_state(self, arguments: dict[str, Any]) -> None:
        state = self._entities.get(arguments["session"], "session")._transaction.state
        names = {value: name for name, value in vars(_TxnState).items() if name.isupper()}
        found = names[state].lower().removesuffix("_empty")
        if found != arguments["state"]:
            raise MismatchError(f"the transaction should be {arguments['state']} and is {found}")

    async def _special_assert_session_pinned(self, arguments: dict[str, Any]) -> None:
        if self._entities.get(arguments["session"], "session")._pinned_address is None:
            raise MismatchError(f"{arguments['session']} is not pinned")

    async def _special_assert_session_unpinned(self, arguments: dict[str, Any]) -> None:
        if address := self._entities.get(arguments["session"], "session")._pinned_address:
            raise MismatchError(f"{arguments['session']} is pinned to {address}")

    async def _special_assert_session_dirty(self, arguments: dict[str, Any]) -> None:
        if not self._entities.get(arguments["session"], "session")._server_session.dirty:
            raise MismatchError(f"{arguments['session']} is not dirty")

    async def _special_assert_session_not_dirty(self, arguments: dict[str, Any]) -> None:
        if self._entities.get(arguments["session"], "session")._server_session.dirty:
            raise MismatchError(f"{arguments['session']} is dirty")

    async def _special_assert_same_lsid_on_last_two_commands(self, arguments: dict[str, Any]) -> None:
        first, second = self._last_two_lsids(arguments["client"])
        if first != second:
            raise MismatchError(f"the last two commands have the lsids {first} and {second}")

    async def _special_assert_different_lsid_on_last_two_commands(self, arguments: dict[str, Any]) -> None:
        first, second = self._last_two_lsids(arguments["client"])
        if first == second:
            raise MismatchError(f"the last two commands have the same lsid {first}")

    def _last_two_lsids(self, client: str) -> list[Any]:
        commands = [
            event.command for event in self._entities.events(client).events() if hasattr(event, "command")
        ]
        found = [command["lsid"] for command in commands[-2:] if "lsid" in command]
        if len(found) != 2:
            raise MismatchError(
                f"{client} sent {len(commands)} commands, {len(found)} of the last 2 with lsid"
            )
        return found

    async def _special_assert_collection_exists(self, arguments: dict[str, Any]) -> None:
        if not self._collection_exists(arguments):
            raise MismatchError(f"collection {arguments['collectionName']} does not exist")

    async def _special_assert_collection_not_exists(self, arguments: dict[str, Any]) -> None:
        if self._collection_exists(arguments):
            raise MismatchError(f"collection {arguments['collectionName']} exists")

    def _collection_exists(self, arguments: dict[str, Any]) -> bool:
        only_known("the assertion", arguments, {"databaseName", "collectionName"})
        names = self._internal[arguments["databaseName"]].list_collection_names()
        return arguments["collectionName"] in names

    async def _special_assert_index_exists(self, arguments: dict[str, Any]) -> None:
        if not self._index_exists(arguments):
            raise MismatchError(f"index {arguments['indexName']} does not exist")

    async def _special_assert_index_not_exists(self, arguments: dict[str, Any]) -> None:
        if self._index_exists(arguments):
            raise MismatchError(f"index {arguments['indexName']} exists")

    def _index_exists(self, arguments: dict[str, Any]) -> bool:
        only_known("the assertion", arguments, {"databaseName", "collectionName", "indexName"})
        collection = self._internal[arguments["databaseName"]][arguments["collectionName"]]
        return arguments["indexName"] in {index["name"] for index in collection.list_indexes()}

    async def _special_assert_number_connections_checked_out(self, arguments: dict[str, Any]) -> None:
        found = self._entities.events(arguments["client"]).checked_out
        if found != arguments["connections"]:
            raise MismatchError(f"{found} connections are checked out, expected {arguments['connections']}")

    async def _special_run_on_thread(self, arguments: dict[str, Any]) -> None:
        operation = arguments["operation"]
        self._entities.get(arguments["thread"], "thread").schedule(lambda: self._run(operation))

    async def _special_wait_for_thread(self, arguments: dict[str, Any]) -> None:
        try:
            await self._entities.get(arguments["thread"], "thread").finish()
        except TimeoutError:
            raise MismatchError(f"{arguments['thread']} did not end within {WAIT_SECONDS:g} s") from None

    async def _special_wait_for_event(self, arguments: dict[str, Any]) -> None:
        await self._entities.wait_until(
            lambda: self._count(arguments) >= arguments["count"],
            f"{arguments['count']} times {shown(arguments['event'])}",
            WAIT_SECONDS,
        )

    async def _special_assert_event_count(self, arguments: dict[str, Any]) -> None:
        if (found := self._count(arguments)) != arguments["count"]:
            raise MismatchError(
                f"{shown(arguments['event'])}: {found} times, expected {arguments['count']} times"
            )

    def _count(self, arguments: dict[str, Any]) -> int:
        events = self._entities.events(arguments["client"]).events()
        matcher, expected = self._entities.matcher, arguments["event"]
        return sum(not list(event_problems(matcher, expected, event)) for event in events)

    async def _special_record_topology_description(self, arguments: dict[str, Any]) -> None:
        description = self._entities.get(arguments["client"], "client").topology_description
        self._entities.add(arguments["id"], "topologyDescription", description)

    async def _special_assert_topology_type(self, arguments: dict[str, Any]) -> None:
        description = self._entities.get(arguments["topologyDescription"], "topologyDescription")
        if description.topology_type_name != arguments["topologyType"]:
            raise MismatchError(
                f"the topology should be {arguments['topologyType']} and is {description.topology_type_name}"
            )

    async def _special_wait_for_primary_change(self, arguments: dict[str, Any]) -> None:
        client = self._entities.get(arguments["client"], "client")
        before = primary(self._entities.get(arguments["priorTopologyDescription"], "topologyDescription"))
        await self._entities.wait_until(
            lambda: primary(client.topology_description) not in {None, before},
            "another primary",
            arguments.get("timeoutMS", WAIT_SECONDS * 1000) / 1000,
        )

    async def _special_wait(self, arguments: dict[str, Any]) -> None:
        await self._entities.sleep(arguments["ms"] / 1000)

    # What came of it

    def _check_result(self, kind: str, name: str, expected: Any, result: Any) -> None:
        actual = as_document(name, result)
        matcher = self._entities.matcher
        if actual is None and operator_of(expected) == "$$unsetOrMatches":
            actual = MISSING
        documents = name in LISTED.get(kind, {}) or name == "runCursorCommand"
        if documents and isinstance(expected, list) and len(expected) == len(actual):
            # Documents that a cursor yields are roots, each of them; the values of `distinct` are not.
            problems = [
                problem
                for index, pair in enumerate(zip(expected, actual, strict=True))
                for problem in matcher.problems(*pair, str(index), root=True)
            ]
        else:
            problems = matcher.problems(expected, actual, root=True)
        if problems:
            raise MismatchError(f"result of {name}: {'; '.join(problems)}")

    def _check_error(self, name: str, expected: Mapping[str, Any] | None, error: Exception) -> None:
        if expected is None:
            raise MismatchError(f"{name} raised {type(error).__name__}: {error}") from error
        if problems := list(self._error_problems(expected, error)):
            raise MismatchError(f"error of {name}: {'; '.join(problems)}") from error

    def _error_problems(self, expected: Mapping[str, Any], error: Exception) -> Iterator[str]:  # noqa: PLR0912 - a branch for each key of the format
        # A bulk write of a client keeps the error of the whole apart from those of single writes.
        cause = error.error or error if isinstance(error, ClientBulkWriteException) else error
        said = f"{type(cause).__name__}: {cause}"
        for key, value in expected.items():
            match key:
                case "isError":
                    pass
                case "isClientError":
                    if is_client_error(cause) is not value:
                        yield f"should {'' if value else 'not '}come from the client, got {said}"
                case "isTimeoutError":
                    if (isinstance(cause, PyMongoError) and cause.timeout) is not value:
                        yield f"should {'' if value else 'not '}be a timeout, got {said}"
                case "errorContains":
                    text = f"{cause} {getattr(error, 'details', '')}"
                    if value.lower() not in text.lower():
                        yield f"should contain {value!r}, got {said}"
                case "errorCode" | "errorCodeName":
                    field = "code" if key == "errorCode" else "codeName"
                    if value not in (found := list(answered(cause, field))):
                        yield f"{key} should be {value!r}, got {found} of {said}"
                case "errorLabelsContain" | "errorLabelsOmit":
                    wanted = key == "errorLabelsContain"
                    for label in value:
                        if has_label(cause, label) is not wanted:
                            yield f"should {'' if wanted else 'not '}have the label {label}, got {said}"
                case "errorResponse":
                    yield from self._entities.matcher.problems(
                        value, getattr(cause, "details", None), "response", root=True
                    )
                case "writeErrors":
                    found = {str(each["idx"]): each for each in getattr(error, "write_errors", [])}
                    if found.keys() != value.keys():
                        yield f"writeErrors should be at {sorted(value)}, got {sorted(found)}"
                    for index in found.keys() & value.keys():
                        yield from self._entities.matcher.problems(
                            value[index], found[index], f"writeErrors {index}", root=True
                        )
                case "writeConcernErrors":
                    found = getattr(error, "write_concern_errors", [])
                    if len(found) != len(value):
                        yield f"expected {len(value)} writeConcernErrors, got {len(found)}"
                    for wanted, actual in zip(value, found, strict=False):
                        yield from self._entities.matcher.problems(
                            wanted, actual, "writeConcernErrors", root=True
                        )
                case "expectResult":
                    actual = partial_result(error)
                    if actual is None and operator_of(value) == "$$unsetOrMatches":
                        actual = MISSING
                    yield from self._entities.matcher.problems(value, actual, "result", root=True)
                case _:
                    raise UnsupportedError(f"{key} of expectError")


def parameters(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """The names that a method takes, and whether it takes any other too."""
    # `find` hands everything on to the cursor, whose names are the ones that count.
    final = Cursor.__init__ if function.__name__ in {"find", "find_one"} else function
    found = inspect.signature(final).parameters.values()
    names = {each.name for each in found if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}}
    return names - {"self", "collection"}, any(each.kind is each.VAR_KEYWORD for each in found)


def ordered(arguments: dict[str, Any]) -> SON[str, Any]:
    """The command with its name as the first key."""
    command, name = arguments.pop("command"), arguments.pop("commandName", None)
    first = name or next(iter(command))
    return SON([(first, command[first]), *((key, value) for key, value in command.items() if key != first)])


def write_model(model: Mapping[str, Any]) -> Any:
    ((name, arguments),) = model.items()
    if name not in WRITE_MODELS:
        raise UnsupportedError(f"write model {name}")
    kind = WRITE_MODELS[name]
    accepted, _ = parameters(kind)
    if unknown := [key for key in arguments if snake(key) not in accepted]:
        raise UnsupportedError(f"{', '.join(unknown)} of write model {name}")
    return kind(**{snake(key): value for key, value in arguments.items()})


def search_index(model: Mapping[str, Any]) -> SearchIndexModel:
    only_known("a search index", model, {"name", "definition", "type"})
    return SearchIndexModel(**model)


def index_model(model: Mapping[str, Any]) -> IndexModel:
    rest = dict(model)
    keys = rest.pop("keys", None) or rest.pop("key")
    return IndexModel(list(keys.items()), **rest)


def uploaded(arguments: dict[str, Any]) -> dict[str, Any]:
    arguments["source"] = io.BytesIO(bytes.fromhex(arguments.pop("source")["$$hexBytes"]))
    arguments.pop("disableMD5", None)  # PyMongo 4 never computes it
    if "contentType" in arguments:
        arguments["metadata"] = {
            **arguments.get("metadata", {}),
            "contentType": arguments.pop("contentType"),
        }
    return arguments


def primary(description: Any) -> Any:
    for address, server in description.server_descriptions().items():
        if server.server_type_name == "RSPrimary":
            return address
    return None


def as_document(name: str, result: Any) -> Any:
    """A result object of PyMongo in the words of the specifications."""
    if getattr(result, "acknowledged", True) is False:
        return {"acknowledged": False}
    match name:
        case "insertOne":
            return {"insertedId": result.inserted_id}
        case "insertMany":
            ids = {str(index): each for index, each in enumerate(result.inserted_ids)}
            return {"insertedIds": ids, "insertedCount": len(ids)}
        case "updateOne" | "updateMany" | "replaceOne":
            return updated(result) | {"upsertedCount": 0 if result.upserted_id is None else 1}
        case "deleteOne" | "deleteMany":
            return {"deletedCount": result.deleted_count}
        case "bulkWrite":
            return bulk_written(result)
        case "clientBulkWrite":
            return client_bulk_written(result)
        case "find" if result and hasattr(result[0], "upload_date"):
            return [each._file for each in result]
        case _:
            return result


def updated(result: Any) -> dict[str, Any]:
    document = {"matchedCount": result.matched_count, "modifiedCount": result.modified_count}
    return document if result.upserted_id is None else {**document, "upsertedId": result.upserted_id}


def counts(result: Any) -> dict[str, Any]:
    return {
        "insertedCount": result.inserted_count,
        "matchedCount": result.matched_count,
        "modifiedCount": result.modified_count,
        "deletedCount": result.deleted_count,
        "upsertedCount": result.upserted_count,
    }


def bulk_written(result: Any) -> dict[str, Any]:
    ids = {str(index): each for index, each in (result.upserted_ids or {}).items()}
    return counts(result) | {"upsertedIds": ids}


def client_bulk_written(result: Any) -> dict[str, Any]:
    document = counts(result)
    if result.has_verbose_results:
        document |= {
            "insertResults": {
                str(index): {"insertedId": each.inserted_id} for index, each in result.insert_results.items()
            },
            "updateResults": {str(index): updated(each) for index, each in result.update_results.items()},
            "deleteResults": {
                str(index): {"deletedCount": each.deleted_count}
                for index, each in result.delete_results.items()
            },
        }
    return document


def partial_result(error: Exception) -> Any:
    if isinstance(error, BulkWriteError):
        return bulk_written(BulkWriteResult(error.details, acknowledged=True))
    if isinstance(error, ClientBulkWriteException):
        return client_bulk_written(error.partial_result) if error.partial_result else None
    return None


def is_client_error(error: Exception) -> bool:
    """Not derived from a reply of the server."""
    return not isinstance(error, (OperationFailure, NotPrimaryError, WriteError, ClientBulkWriteException))


def has_label(error: Exception, label: str) -> bool:
    return isinstance(error, PyMongoError) and error.has_error_label(label)


def answered(error: Exception, field: str) -> Iterator[Any]:
    """A field of the server's reply, and of each error that a bulk write has gathered."""
    details = getattr(error, "details", None) or {}
    replies = [details, *details.get("writeErrors", []), *details.get("writeConcernErrors", [])]
    if concern := details.get("writeConcernError"):
        replies.append(concern)
    for reply in replies:
        if isinstance(reply, dict) and field in reply:
            yield reply[field]
