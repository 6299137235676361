"""An application at work: threads or tasks that use one client all the while and check every result."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from pymongo import InsertOne, UpdateOne

from tests.flavours import Flavour, listed, resolve

if TYPE_CHECKING:
    from types import TracebackType

WORKERS = 6
TASKS = 3
PATIENCE = 60.0
"""Seconds without a single operation: then something is stuck."""


class Load:
    """Runs from `async with` to its end. The same lines for both drivers: the synchronous one's workers are threads
    with an event loop each, in which nothing ever waits.
    """

    def __init__(self, mongo: Flavour, client: Any, database: str) -> None:
        self._mongo = mongo
        self._client = client
        self._collection = client[database].load
        self._stopping = threading.Event()
        # Their own: the event loop's are for those who switch.
        self._threads = ThreadPoolExecutor(WORKERS)
        self._running: list[asyncio.Future[None]] = []
        self.errors: list[BaseException] = []
        self._counts = [0] * WORKERS

    @property
    def done(self) -> int:
        """Rounds so far."""
        return sum(self._counts)

    async def __aenter__(self) -> Self:
        await resolve(self._collection.insert_one({"_id": "first"}))
        for number in range(TASKS if self._mongo.is_async else WORKERS):
            if self._mongo.is_async:
                self._running.append(asyncio.ensure_future(self._work(number)))
            else:
                loop = asyncio.get_running_loop()
                self._running.append(loop.run_in_executor(self._threads, asyncio.run, self._work(number)))
        await self.progress()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        await asyncio.wait_for(asyncio.gather(*self._running), PATIENCE)
        self._threads.shutdown()

    async def progress(self, rounds: int = WORKERS) -> None:
        """Wait until the workers have got on by so many rounds, or one has failed."""
        goal, deadline = self.done + rounds, time.monotonic() + PATIENCE
        while self.done < goal and not self.errors:
            assert time.monotonic() < deadline, "the workers are stuck"
            await asyncio.sleep(0.002)

    async def check(self) -> None:
        """Nothing failed, nothing is missing and nothing is there twice."""
        assert not self.errors, self.errors
        found = await listed(self._collection.find({"n": {"$exists": True}}))
        assert len(found) == 2 * self.done
        assert all(each["n"] == 1 for each in found)
        paid = await listed(self._collection.find({"paid": True}))
        assert len(paid) == self.done

    async def _work(self, number: int) -> None:
        try:
            for turn in itertools.count():
                if self._stopping.is_set():
                    return
                await self._round(f"{number}-{turn}")
                self._counts[number] += 1
                await asyncio.sleep(0)  # PyMongo 4.9 lets no other task in while its answers come at once
        except BaseException as error:
            self.errors.append(error)

    async def _round(self, key: str) -> None:
        """Inserts, finds, increments, a bulk write, a cursor of several batches, a transaction."""
        collection = self._collection
        inserted = await resolve(collection.insert_one({"_id": key, "n": 0}))
        assert inserted.inserted_id == key
        assert await resolve(collection.find_one({"_id": key})) == {"_id": key, "n": 0}
        updated = await resolve(collection.update_one({"_id": key}, {"$inc": {"n": 1}}))
        assert updated.modified_count == 1
        written = await resolve(
            collection.bulk_write(
                [
                    InsertOne({"_id": f"{key}-b", "n": 0}),
                    UpdateOne({"_id": f"{key}-b"}, {"$inc": {"n": 1}}),
                ]
            )
        )
        assert (written.inserted_count, written.modified_count) == (1, 1)
        of_this_round = {"_id": {"$in": ["first", key, f"{key}-b"]}}
        assert len(await listed(collection.find(of_this_round, batch_size=1))) == 3
        session = await resolve(self._client.start_session())
        try:
            await resolve(session.start_transaction())
            await resolve(collection.insert_one({"_id": f"{key}-t", "paid": True}, session=session))
            await resolve(session.commit_transaction())
        finally:
            await resolve(session.end_session())
        assert (await resolve(self._client.admin.command("ping")))["ok"] == 1
