"""What the tests of the seeds' rules share: a client under observation, ways to make it fail, and the operations."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pymongo
import pytest
from bson import Int64
from gridfs import AsyncGridFSBucket, GridFSBucket
from pymongo import DeleteOne, InsertOne, ReturnDocument, UpdateOne
from pymongo.monitoring import ConnectionPoolListener, ServerHeartbeatListener

from otel_retry.policies import BackpressurePolicy
from tests.flavours import Commands, Flavour, listed, resolve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from otel_retry import Failure, RetryContext, mongod

POLICIES = ("backpressure", "current", "once", "persistent")
SINGLE_RETRY = ("backpressure", "current", "once")
"""Without a deadline and without overload; `persistent` goes on."""

NETWORK: dict[str, Any] = {"closeConnection": True}
LABEL = "RetryableWriteError"
NO_WRITES = "NoWritesPerformed"

SEEDED = [{"_id": 1, "x": 1}, {"_id": 2, "x": 2}, {"_id": 3, "x": 3}]


def server_error(code: int, *labels: str) -> dict[str, Any]:
    """For `failCommand`: without labels the server sends none, instead of those that it would choose itself."""
    return {"errorCode": code, "errorLabels": list(labels)}


class ScriptedCommands(Commands):
    """Records commands, and arms the next failure when one of them has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: frozenset[str] = frozenset()
        self._next: list[Callable[[], Any]] = []

    def then(self, watched: tuple[str, ...], steps: list[Callable[[], Any]]) -> None:
        self._watched, self._next = frozenset(watched), steps

    def succeeded(self, event: Any) -> None:
        super().succeeded(event)
        self._step(event)

    def failed(self, event: Any) -> None:
        super().failed(event)
        self._step(event)

    def _step(self, event: Any) -> None:
        if self._next and event.command_name in self._watched:
            self._next.pop(0)()


class Pools(ConnectionPoolListener):
    """Counts how often a pool was cleared."""

    def __init__(self) -> None:
        self.cleared = 0

    def pool_cleared(self, event: Any) -> None:
        self.cleared += 1

    def _ignored(self, event: Any) -> None:
        pass

    pool_created = pool_ready = pool_closed = _ignored
    connection_created = connection_ready = connection_closed = _ignored
    connection_check_out_started = connection_check_out_failed = _ignored
    connection_checked_out = connection_checked_in = _ignored


class Heartbeats(ServerHeartbeatListener):
    """Knows whether a monitor is checking its server just now."""

    def __init__(self) -> None:
        self._under_way = 0
        self._last = 0.0

    def started(self, event: Any) -> None:
        self._under_way += 1

    def succeeded(self, event: Any) -> None:
        self._under_way -= 1
        self._last = time.monotonic()

    failed = succeeded

    async def pause(self) -> None:
        """Until none has been under way for longer than a monitor sleeps when an operation waits for it."""
        async with asyncio.timeout(60):
            while self._under_way or time.monotonic() < self._last + 0.03:
                await asyncio.sleep(0.005)


class Observing(BackpressurePolicy):
    """The default policy, and a record of the failures that it called retryable."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []

    def may_retry_again(self, context: RetryContext) -> bool:
        self.failures.append(context.failure)
        return super().may_retry_again(context)


class Waiting:
    """Mixed into a policy: it waits before a retry. What for, `Rig.hold_retries` says."""

    def pause(self, context: RetryContext) -> float:
        return 0.1


class Unhurried(Waiting, BackpressurePolicy):
    """The default policy, so."""


class Rig:
    """One client of one flavour, what it sends, and the server that can be made to fail for it alone."""

    def __init__(
        self,
        mongo: Flavour,
        deployment: mongod.Deployment,
        uri: str,
        database: str,
        options: dict[str, Any],
    ) -> None:
        self.mongo = mongo
        self.deployment = deployment
        self.commands = ScriptedCommands()
        self._heartbeats = Heartbeats()
        listeners = [self.commands, self._heartbeats, *options.pop("event_listeners", ())]
        # A streaming monitor notices only twice a second that its check was called off. One that polls checks at
        # once when an operation needs a server; it needs no heartbeat for that, and is asleep when the test ends.
        options = {"serverMonitoringMode": "poll", "heartbeatFrequencyMS": 10_000, **options}
        self.client = mongo.client(uri, event_listeners=listeners, **options)
        self.database = self.client[database]
        self.collection = self.database.things

    async def seed(self) -> None:
        """Three documents and no others, a connection, and nothing recorded."""
        await resolve(self.collection.delete_many({}))
        await resolve(self.collection.insert_many([dict(document) for document in SEEDED]))
        self.commands.clear()

    async def close(self) -> None:
        """An AsyncMongoClient that is closed while its monitor checks leaves a socket open: let that end first."""
        if self.mongo.is_async:
            await self._heartbeats.pause()
        await resolve(self.client.close())

    async def data(self) -> list[Any]:
        return await listed(self.collection.find({}, sort=[("_id", 1)]))

    def fail(self, *commands: str, times: int | None = 1, **data: Any) -> None:
        """`times` None: always."""
        nodes = self.deployment.nodes
        self.deployment.fail_command(
            nodes[0] if len(nodes) == 1 else None,  # or it would be asked first who the primary is
            commands=commands,
            times=times,
            appName=self.client.options.pool_options.appname,
            **data,
        )

    def fail_in_turn(self, command: str, *failures: dict[str, Any]) -> None:
        """One failure after the other, a single time each, with the last of them the server is well again."""

        def arm(failure: dict[str, Any]) -> Callable[[], None]:
            return lambda: self.fail(command, **failure)

        first, *rest = (arm(failure) for failure in failures)
        first()
        self.commands.then((command,), rest)

    @contextlib.asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[Any]:
        session = self.client.start_session(**options)
        try:
            yield session
        finally:
            await resolve(session.end_session())

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A session in a transaction, which ends on the server at the latest with this block.

        One whose end never arrived there would hold its locks for a minute.
        """
        async with self.session() as session:
            identity = session.session_id
            await resolve(session.start_transaction())
            yield session
        self.deployment.clear_failpoints()
        await resolve(self.client.admin.command({"killSessions": [identity]}))

    def beside(self, call: Callable[[], Any]) -> Coroutine[Any, Any, Any]:
        """An operation to run beside others: on the loop, or on a thread of its own."""
        if not self.mongo.is_async:
            return asyncio.to_thread(call)
        if pymongo.version_tuple < (4, 10):
            pytest.skip("AsyncMongoClient of 4.9 blocks the loop while it reads: nothing runs beside it")
        return call()

    async def until_started(self, command: str) -> None:
        async with asyncio.timeout(60):
            while not self.commands.count(command):
                await asyncio.sleep(0.005)

    def hold_retries(self, monkeypatch: pytest.MonkeyPatch, *, until: str) -> None:
        """A retry that has to wait waits until that command was sent, however long that takes."""

        def sleep(_: float) -> None:
            deadline = time.monotonic() + 60
            while not self.commands.count(until) and time.monotonic() < deadline:
                time.sleep(0.005)

        async def sleep_async(_: float) -> None:
            await self.until_started(until)

        monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep", sleep)
        monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep_async", sleep_async)

    async def lose_the_only_connection(self, command: str, call: Callable[[], Any]) -> None:
        """Run `call`, whose first attempt is to fail; somebody else takes the pool's one connection before its retry."""
        calling = asyncio.create_task(self.beside(call))
        await self.until_started(command)
        hog = {"sleep": 1, "millis": 500, "lock": "none"}
        hogging = asyncio.create_task(self.beside(lambda: self.client.admin.command(hog)))
        try:
            await calling
        finally:
            await hogging

    @property
    def bucket(self) -> Any:
        return (AsyncGridFSBucket if self.mongo.is_async else GridFSBucket)(self.database)


async def until_known(client: Any, servers: int) -> None:
    """Until the client has heard from that many servers."""
    await resolve(client.admin.command("ping"))
    async with asyncio.timeout(60):
        while len(client.nodes) < servers:
            await asyncio.sleep(0.005)


class Operation(NamedTuple):
    """An operation of the application: the command that it sends, and how to run it to a comparable result."""

    name: str
    command: str
    run: Callable[..., Awaitable[Any]]

    def __str__(self) -> str:
        return self.name


def ids(operation: Any) -> str:
    return str(operation)


def _reads() -> dict[str, Operation]:
    found: dict[str, Operation] = {}

    def read(command: str) -> Callable[[Any], Any]:
        def register(function: Any) -> Any:
            name = function.__name__
            found[name] = Operation(name, command, function)
            return function

        return register

    @read("find")
    async def find(rig: Rig, **options: Any) -> Any:
        return await listed(rig.collection.find({}, **options))

    @read("find")
    async def find_one(rig: Rig, **options: Any) -> Any:
        return await resolve(rig.collection.find_one({}, **options))

    @read("aggregate")
    async def aggregate(rig: Rig, **options: Any) -> Any:
        return await listed(await resolve(rig.collection.aggregate([{"$match": {}}], **options)))

    @read("distinct")
    async def distinct(rig: Rig, **options: Any) -> Any:
        return await resolve(rig.collection.distinct("x", **options))

    @read("aggregate")
    async def count_documents(rig: Rig, **options: Any) -> Any:
        return await resolve(rig.collection.count_documents({}, **options))

    @read("count")
    async def estimated_document_count(rig: Rig) -> Any:
        return await resolve(rig.collection.estimated_document_count())

    @read("aggregate")
    async def watch_collection(rig: Rig) -> Any:
        await resolve((await resolve(rig.collection.watch())).close())

    @read("aggregate")
    async def watch_database(rig: Rig) -> Any:
        await resolve((await resolve(rig.database.watch())).close())

    @read("aggregate")
    async def watch_client(rig: Rig) -> Any:
        await resolve((await resolve(rig.client.watch())).close())

    @read("listDatabases")
    async def list_databases(rig: Rig) -> Any:
        found = await listed(await resolve(rig.client.list_databases()))
        return rig.database.name in [each["name"] for each in found]

    @read("listDatabases")
    async def list_database_names(rig: Rig) -> Any:
        return rig.database.name in await resolve(rig.client.list_database_names())

    @read("listCollections")
    async def list_collections(rig: Rig) -> Any:
        return [each["name"] for each in await listed(await resolve(rig.database.list_collections()))]

    @read("listCollections")
    async def list_collection_names(rig: Rig) -> Any:
        return await resolve(rig.database.list_collection_names())

    @read("listIndexes")
    async def list_indexes(rig: Rig) -> Any:
        return [each["name"] for each in await listed(await resolve(rig.collection.list_indexes()))]

    @read("listIndexes")
    async def index_information(rig: Rig) -> Any:
        return await resolve(rig.collection.index_information())

    @read("find")
    async def gridfs_find(rig: Rig) -> Any:
        return [file.filename for file in await listed(rig.bucket.find({}))]

    @read("find")
    async def gridfs_download(rig: Rig) -> Any:
        return await resolve((await resolve(rig.bucket.open_download_stream_by_name("file"))).read())

    return found


def _writes() -> dict[str, Operation]:
    found: dict[str, Operation] = {}

    def write(command: str) -> Callable[[Any], Any]:
        def register(function: Any) -> Any:
            name = function.__name__
            found[name] = Operation(name, command, function)
            return function

        return register

    @write("insert")
    async def insert_one(rig: Rig, **options: Any) -> Any:
        return (await resolve(rig.collection.insert_one({"_id": 4, "x": 4}, **options))).inserted_id

    @write("update")
    async def update_one(rig: Rig, **options: Any) -> Any:
        # Not idempotent: applied twice, it shows.
        result = await resolve(rig.collection.update_one({"_id": 1}, {"$inc": {"x": 10}}, **options))
        return result.matched_count, result.modified_count

    @write("update")
    async def replace_one(rig: Rig, **options: Any) -> Any:
        # Applied twice, it would take two documents.
        result = await resolve(rig.collection.replace_one({"x": {"$gt": 0}}, {"x": -1}, **options))
        return result.matched_count, result.modified_count

    @write("delete")
    async def delete_one(rig: Rig, **options: Any) -> Any:
        return (await resolve(rig.collection.delete_one({"x": {"$gt": 0}}, **options))).deleted_count

    @write("findAndModify")
    async def find_one_and_update(rig: Rig, **options: Any) -> Any:
        return await resolve(
            rig.collection.find_one_and_update(
                {"_id": 1}, {"$inc": {"x": 10}}, return_document=ReturnDocument.AFTER, **options
            )
        )

    @write("findAndModify")
    async def find_one_and_replace(rig: Rig, **options: Any) -> Any:
        return await resolve(rig.collection.find_one_and_replace({"x": {"$gt": 0}}, {"x": -1}, **options))

    @write("findAndModify")
    async def find_one_and_delete(rig: Rig, **options: Any) -> Any:
        return await resolve(rig.collection.find_one_and_delete({"x": {"$gt": 0}}, **options))

    @write("insert")
    async def insert_many(rig: Rig, **options: Any) -> Any:
        documents = [{"_id": 4}, {"_id": 5}]
        return (await resolve(rig.collection.insert_many(documents, **options))).inserted_ids

    async def bulk_write(rig: Rig, **options: Any) -> Any:
        requests = [
            InsertOne({"_id": 4}),
            InsertOne({"_id": 5}),
            UpdateOne({"_id": 1}, {"$inc": {"x": 10}}),
            UpdateOne({"_id": 6}, {"$inc": {"x": 1}}, upsert=True),
            DeleteOne({"x": {"$gt": 1}}),
        ]
        result = await resolve(rig.collection.bulk_write(requests, **options))
        return result.bulk_api_result

    async def ordered(rig: Rig, **options: Any) -> Any:
        return await bulk_write(rig, ordered=True, **options)

    async def unordered(rig: Rig, **options: Any) -> Any:
        return await bulk_write(rig, ordered=False, **options)

    for kind, function in (("ordered", ordered), ("unordered", unordered)):
        for command in ("insert", "update", "delete"):
            name = f"{kind}_bulk_write_{command}"
            found[name] = Operation(name, command, function)
    return found


READS = _reads()
WRITES = _writes()


def transaction_id(event: Any) -> tuple[Any, Any]:
    return event.command["lsid"]["id"], event.command["txnNumber"]


def is_transaction_number(value: Any) -> bool:
    """Positive, and a 64-bit integer on the wire (BSON type 0x12)."""
    return isinstance(value, Int64) and value > 0
