"""What an application might do, all at once, by both drivers with the same lines, and each write in the ledger.

A worker of the synchronous driver runs the same coroutines as one of the asynchronous driver; they never suspend there,
so one `send` takes them to their end.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from gridfs import AsyncGridFSBucket, GridFSBucket
from pymongo import AsyncMongoClient, DeleteOne, InsertOne, MongoClient, ReadPreference, UpdateMany, UpdateOne
from pymongo.errors import BulkWriteError, PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

import otel_retry
from otel_retry.events import Kind
from otel_retry.policies import BackpressurePolicy, CurrentPolicy
from tests.chaos.faults import APP_NAME
from tests.chaos.ledger import Stream
from tests.flavours import listed, resolve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from tests.chaos.telemetry_ledger import Telemetry

DATABASE = "chaos"
BOOKS = 400
ACCOUNTS = 200
BALANCE = 1000
SHELVES = 16
"""Documents that one stream of counters is spread over, so that none grows large."""
TICKETS = 150
"""Documents that each worker may delete."""
MANY = ("a", "b", "c")
"""The documents that one worker's update_many changes."""
CHUNK = 1024

_PAUSE = 0.01
"""Seconds after an error: an application that spins would only measure how fast it can fail."""

_READ_PREFERENCES = (
    ReadPreference.PRIMARY,
    ReadPreference.PRIMARY_PREFERRED,
    ReadPreference.SECONDARY_PREFERRED,
    ReadPreference.SECONDARY_PREFERRED,
    ReadPreference.NEAREST,
)

POLICIES: dict[str, Callable[[], Any]] = {"backpressure": BackpressurePolicy, "current": CurrentPolicy}


class Clients:
    """One driver's clients: with a timeout of the socket, with a deadline (CSOT), and aware of idempotence."""

    def __init__(self, uri: str, *, is_async: bool, policy: str, telemetry: Telemetry) -> None:
        self.is_async = is_async
        make: Any = AsyncMongoClient if is_async else MongoClient
        shared: dict[str, Any] = {
            "appname": APP_NAME,
            "w": "majority",
            "heartbeatFrequencyMS": 1000,
            "serverSelectionTimeoutMS": 5000,
            "connectTimeoutMS": 1000,
            "event_listeners": [telemetry.commands],
        }
        self.plain = make(uri, socketTimeoutMS=1500, **shared)
        self.deadline = make(uri, timeoutMS=2500, **shared)
        self.aware = make(uri, socketTimeoutMS=1500, **shared)
        self.all = (self.plain, self.deadline, self.aware)
        for client in self.all:
            chosen: Any = policy
            if client is self.aware and policy in POLICIES:
                chosen = otel_retry.IdempotenceAware(POLICIES[policy]())
            otel_retry.instrument_client(client, chosen, **telemetry.providers)
            telemetry.operations.watch(client, is_async=is_async)

    async def close(self) -> None:
        for client in self.all:
            await resolve(client.close())


class Findings:
    """What workers saw that should not be, and what they were told."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.errors: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def called(self, what: str) -> None:
        with self._lock:
            self.calls[what] += 1

    def check(self, holds: bool, complaint: str) -> None:
        if not holds:
            self.wrong.append(complaint)

    def raised(self, error: BaseException, what: str, *, decides: bool) -> None:
        with self._lock:
            self.errors[type(error).__name__] += 1
        if decides and isinstance(error, PyMongoError):
            complaint = complaint_about(error)
            if complaint:
                self.wrong.append(f"{what}: {complaint}")


def complaint_about(error: PyMongoError) -> str | None:
    """An error that leaves the engine carries its attempts, and each names its server, where there was one."""
    if "E11000" in str(error):
        return f"{type(error).__name__}: a write met its own document: {str(error)[:300]}"
    if isinstance(error.__context__, BulkWriteError):
        return complaint_about(error.__context__)  # GridFS says in other words what a bulk write told it
    history = otel_retry.attempts(error)
    if not history and isinstance(error, BulkWriteError):
        return (
            None  # of single statements: PyMongo makes it when the operation has ended, of several commands
        )
    if not history:
        return f"{type(error).__name__} carries no attempts: {str(error)[:300]}"
    for attempt in history:
        if attempt.server is None and attempt.failure.kind is not Kind.NO_SERVER:
            return f"{type(error).__name__} names no server in attempt {attempt.number}: {str(error)[:300]}"
    return None


class Worker:
    """One thread or task, with streams of its own. `name` is unique in the run."""

    def __init__(
        self,
        name: str,
        clients: Clients,
        client: Any,
        *,
        seed: str,
        findings: Findings,
        begin: threading.Event,
        over: threading.Event,
        decides: bool,
        client_bulk_writes: bool,
    ) -> None:
        self.name = name
        self.is_async = clients.is_async
        self._clients = clients
        self._client = client
        self._repeats = client is clients.aware
        self._chance = random.Random(seed)
        self._findings = findings
        self._begin = begin
        self._over = over
        self._decides = decides
        database = client[DATABASE]
        self._database = database
        self._books = [database.get_collection("books", read_preference=each) for each in _READ_PREFERENCES]
        self._bucket = (AsyncGridFSBucket if self.is_async else GridFSBucket)(
            database, chunk_size_bytes=CHUNK
        )
        self.streams = {
            kind: Stream(f"{name}/{kind}", MANY if kind in {"set_many", "inc_many", "bulk_many"} else ("",))
            for kind in STREAMS
        }
        self.done = False
        jobs = [*JOBS, (Worker.client_bulk, 10)] if client_bulk_writes else JOBS
        self._jobs = [job for job, _ in jobs]
        self._weights = list(itertools.accumulate(weight for _, weight in jobs))

    async def run(self) -> None:
        """Until the run is over; an operation that has begun is brought to its end."""
        try:
            while not self._begin.is_set():  # not before the consumers are there
                await self._sleep(_PAUSE)
            while not self._over.is_set():
                job = self._chance.choices(self._jobs, cum_weights=self._weights)[0]
                await self._attempt(job)
                if self.is_async and self._chance.random() < 0.02:
                    await self._cancel(job)
        finally:
            self.done = True

    async def _attempt(self, job: Callable[[Worker], Awaitable[None]]) -> None:
        self._findings.called(job.__name__)
        try:
            await job(self)
        except PyMongoError as error:
            self._findings.raised(error, f"{self.name} {job.__name__}", decides=self._decides)
            await self._sleep(_PAUSE)

    async def _cancel(self, job: Callable[[Worker], Awaitable[None]]) -> None:
        """An impatient caller: nobody knows what became of the operation."""
        self._findings.called("cancelled")
        try:
            async with asyncio.timeout(self._chance.uniform(0.0, 0.02)):
                await job(self)
        except TimeoutError:
            self._findings.raised(TimeoutError(), "cancelled", decides=False)
        except PyMongoError as error:
            self._findings.raised(error, f"{self.name} {job.__name__}", decides=self._decides)

    async def _sleep(self, seconds: float) -> None:
        if self.is_async:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    # Reads: what they answer is known.

    async def find_one(self) -> None:
        books, number = self._chance.choice(self._books), self._chance.randrange(BOOKS)
        found = await resolve(books.find_one({"_id": number}))
        self._findings.check(found == book(number), f"find_one {number} answered {found}")

    async def find(self) -> None:
        """A long cursor: whole and in order, or an error."""
        books, start = self._chance.choice(self._books), self._chance.randrange(BOOKS // 2)
        cursor = books.find({"_id": {"$gte": start}}, {"_id": 1}, batch_size=8, sort=[("_id", 1)], limit=160)
        found = [each["_id"] for each in await listed(cursor)]
        expected = list(range(start, start + 160))
        self._findings.check(
            found == expected, f"a cursor of {len(expected)} lacks {sorted(set(expected).difference(found))}"
        )

    async def aggregate(self) -> None:
        cursor = await resolve(
            self._chance.choice(self._books).aggregate([{"$group": {"_id": None, "v": {"$sum": "$v"}}}])
        )
        found = await listed(cursor)
        self._findings.check(found[0]["v"] == sum(book(n)["v"] for n in range(BOOKS)), f"aggregate: {found}")

    async def count(self) -> None:
        found = await resolve(self._chance.choice(self._books).count_documents({"t": 3}))
        self._findings.check(found == BOOKS // 10, f"count: {found}")

    async def distinct(self) -> None:
        found = await resolve(self._chance.choice(self._books).distinct("t"))
        self._findings.check(sorted(found) == list(range(10)), f"distinct: {found}")

    # Writes of one document.

    async def insert(self) -> None:
        with self.streams["insert"].write() as number:
            await resolve(self._database.writes.insert_one(self._entry("insert", number)))

    async def event(self) -> None:
        with self.streams["event"].write() as number:
            await resolve(self._database.events.insert_one(self._entry("event", number)))

    async def inc(self) -> None:
        with self.streams["inc"].write() as number:
            found = await resolve(self._database.counters.update_one(*self._shelf("inc", number)))
            self._findings.check(found.matched_count == 1, f"inc {number}: {found.raw_result}")

    async def find_and_modify(self) -> None:
        with self.streams["modify"].write() as number:
            found = await resolve(
                self._database.counters.find_one_and_update(
                    *self._shelf("modify", number), return_document=True
                )
            )
            # The answer of a retry is that of the first execution.
            self._findings.check(
                found is not None and found["o"].get(str(number)) == 1, f"findAndModify {number}: {found}"
            )

    async def delete(self) -> None:
        stream = self.streams["delete"]
        if stream.issued >= TICKETS:
            await self.insert()
            return
        with stream.write() as number:
            found = await resolve(self._database.tickets.delete_one({"_id": f"{stream.name}/{number}"}))
            # IdempotenceAware may send it again without a transaction number, and then the count is of the last sending.
            self._findings.check(
                found.deleted_count == 1 or (self._repeats and found.deleted_count == 0),
                f"{stream.name} {number}: {found.raw_result}",
            )

    # Writes of several documents.

    async def insert_many(self) -> None:
        with self.streams["insert_many"].write() as number:
            documents = [{**self._entry("insert_many", number), "place": ""}]
            documents += [{"filler": index} for index in range(3)]
            await resolve(self._database.writes.insert_many(documents, ordered=bool(number % 2)))

    async def bulk(self) -> None:
        """Several kinds of statements make several commands, and one of those with many is not retryable."""
        streams = self.streams
        with (
            streams["bulk_insert"].write() as first,
            streams["bulk_inc"].write() as second,
            streams["bulk_last"].write() as third,
        ):
            statements = [
                InsertOne({**self._entry("bulk_insert", first), "o": {}}),
                UpdateOne(*self._shelf("bulk_inc", second)),
                DeleteOne({"_id": "never there"}),
                InsertOne({**self._entry("bulk_last", third), "o": {}}),
            ]
            found = await resolve(
                self._database.counters.bulk_write(statements, ordered=self._chance.random() < 0.5)
            )
            self._findings.check(
                (found.inserted_count, found.matched_count) == (2, 1),
                f"bulk {first}: {found.bulk_api_result}",
            )

    async def bulk_with_many(self) -> None:
        streams = self.streams
        with streams["bulk_insert"].write() as first, streams["bulk_many"].write() as second:
            statements = [
                UpdateMany({"g": streams["bulk_many"].name}, {"$inc": {f"o.{second}": 1}}),
                InsertOne({**self._entry("bulk_insert", first), "o": {}}),
            ]
            await resolve(self._database.counters.bulk_write(statements, ordered=self._chance.random() < 0.5))

    async def client_bulk(self) -> None:
        with self.streams["client_bulk"].write() as number:
            statements = [InsertOne(self._entry("client_bulk", number), namespace=f"{DATABASE}.writes")]
            await resolve(self._client.bulk_write(statements))

    async def set_many(self) -> None:
        """Idempotent: IdempotenceAware repeats it after a lost answer."""
        stream = self.streams["set_many"]
        with stream.write() as number:
            found = await resolve(
                self._database.counters.update_many({"g": stream.name}, {"$set": {f"o.{number}": 1}})
            )
            self._findings.check(found.matched_count == len(MANY), f"set_many: {found.raw_result}")

    async def inc_many(self) -> None:
        """Not idempotent: nobody may repeat it after a lost answer."""
        stream = self.streams["inc_many"]
        with stream.write() as number:
            found = await resolve(
                self._database.counters.update_many({"g": stream.name}, {"$inc": {f"o.{number}": 1}})
            )
            self._findings.check(found.matched_count == len(MANY), f"inc_many: {found.raw_result}")

    # Transactions that move money.

    async def transfer(self) -> None:
        with self.streams["transfer"].write() as number:
            session = self._client.start_session()
            try:
                await resolve(session.start_transaction(read_concern=ReadConcern("snapshot")))
                await self._move("transfer", number, session)
                await resolve(session.commit_transaction())
            finally:
                await resolve(session.end_session())

    async def with_transaction(self) -> None:
        with self.streams["with_transaction"].write() as number:

            async def moved(session: Any) -> None:
                await self._move("with_transaction", number, session)

            callback = moved if self.is_async else lambda session: finish(moved(session))
            session = self._client.start_session()
            try:
                await resolve(session.with_transaction(callback))
            finally:
                await resolve(session.end_session())

    async def _move(self, kind: str, number: int, session: Any) -> None:
        giver, taker = self._chance.sample(range(ACCOUNTS), 2)
        accounts, amount = self._database.accounts, self._chance.randint(1, 9)
        await resolve(accounts.update_one({"_id": giver}, {"$inc": {"balance": -amount}}, session=session))
        await resolve(accounts.update_one({"_id": taker}, {"$inc": {"balance": amount}}, session=session))
        await resolve(self._database.writes.insert_one(self._entry(kind, number), session=session))

    # GridFS.

    async def upload(self) -> None:
        stream = self.streams["file"]
        with stream.write() as number:
            name = f"{stream.name}/{number}"
            await resolve(self._bucket.upload_from_stream(name, io.BytesIO(content(name))))

    async def download(self) -> None:
        opened = await resolve(self._bucket.open_download_stream_by_name("first"))
        found = await resolve(opened.read())
        self._findings.check(found == content("first"), "a download differs from what was uploaded")

    def _entry(self, kind: str, number: int) -> dict[str, Any]:
        return {"s": self.streams[kind].name, "n": number}

    def _shelf(self, kind: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Which counter, and what to do to it: the field of this number must be 1 in the end."""
        return {"_id": f"{self.streams[kind].name}/{number % SHELVES}"}, {"$inc": {f"o.{number}": 1}}


COUNTED = ("inc", "modify", "bulk_inc")
COUNTED_MANY = ("set_many", "inc_many", "bulk_many")
STREAMS = (
    *("insert", "event", "insert_many", "transfer", "with_transaction"),
    *("bulk_insert", "bulk_last", "client_bulk", "delete", "file"),
    *COUNTED,
    *COUNTED_MANY,
)

JOBS: tuple[tuple[Callable[[Worker], Awaitable[None]], int], ...] = (
    (Worker.find_one, 500),
    (Worker.find, 60),
    (Worker.aggregate, 15),
    (Worker.count, 15),
    (Worker.distinct, 15),
    (Worker.insert, 50),
    (Worker.event, 20),
    (Worker.inc, 50),
    (Worker.find_and_modify, 30),
    (Worker.delete, 8),
    (Worker.insert_many, 8),
    (Worker.bulk, 20),
    (Worker.bulk_with_many, 8),
    (Worker.set_many, 12),
    (Worker.inc_many, 16),
    (Worker.transfer, 8),
    (Worker.with_transaction, 8),
    (Worker.upload, 3),
    (Worker.download, 6),
)


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("It waits for something: that is not for the synchronous driver.")


class Consumer:
    """Reads a change stream of `events` and counts what it sees; reopens where it stopped after an error."""

    def __init__(self, name: str, client: Any, *, is_async: bool, findings: Findings, decides: bool) -> None:
        self.name = name
        self.seen: Counter[str] = Counter()
        self.finished = False
        self.last = threading.Event()
        """The last event of all has been inserted, its key is `LAST`."""
        self.is_async = is_async
        self._events = client[DATABASE].events
        self._findings = findings
        self._decides = decides
        self._token: Any = None
        self.opened = threading.Event()

    async def run(self, *, give_up: threading.Event) -> None:
        while not self.finished and not give_up.is_set():
            try:
                await self._read(give_up)
            except PyMongoError as error:
                self._findings.raised(error, self.name, decides=self._decides)
                if self.is_async:
                    await asyncio.sleep(_PAUSE)
                else:
                    time.sleep(_PAUSE)

    async def _read(self, give_up: threading.Event) -> None:
        stream = await resolve(self._events.watch(resume_after=self._token, max_await_time_ms=250))
        try:
            self._token = self._token or stream.resume_token
            self.opened.set()
            while not give_up.is_set():
                change = await resolve(stream.try_next())
                self._token = stream.resume_token
                if change is None:
                    continue
                document = change["fullDocument"]
                if document["s"] == LAST:
                    self.finished = True
                    return
                self.seen[f"{document['s']} {document['n']}"] += 1
        finally:
            await resolve(stream.close())


LAST = "last"


def book(number: int) -> dict[str, int]:
    return {"_id": number, "v": number * 7, "t": number % 10}


def content(name: str) -> bytes:
    return (name.encode() * (3 * CHUNK // len(name)))[: 2 * CHUNK + 100]


def prepare(uri: str, workers: list[Worker]) -> None:
    """What is there before the first operation, on all nodes."""
    with MongoClient(uri) as client:
        database: Any = client.get_database(DATABASE, write_concern=WriteConcern(w=3))
        database.books.insert_many([book(number) for number in range(BOOKS)])
        database.accounts.insert_many([{"_id": number, "balance": BALANCE} for number in range(ACCOUNTS)])
        counters, tickets = [], []
        for worker in workers:
            for kind in COUNTED:
                name = worker.streams[kind].name
                counters += [{"_id": f"{name}/{shelf}", "s": name, "o": {}} for shelf in range(SHELVES)]
            for kind in COUNTED_MANY:
                name = worker.streams[kind].name
                counters += [{"_id": f"{name}/{place}", "g": name, "place": place, "o": {}} for place in MANY]
            name = worker.streams["delete"].name
            tickets += [{"_id": f"{name}/{number}"} for number in range(TICKETS)]
        database.counters.create_index("g")
        database.counters.insert_many(counters)
        database.tickets.insert_many(tickets)
        for name in ("writes", "events"):
            database.create_collection(name)
        # The first upload makes the indexes, so that those of the workers need not.
        GridFSBucket(database, chunk_size_bytes=CHUNK).upload_from_stream(
            "first", io.BytesIO(content("first"))
        )
