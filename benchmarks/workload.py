"""One variant in one process: told what to run, it answers with what that took.

As a script it reads one order per line (JSON: operation, flavour, workers, count) and answers each with a line. It imports
nothing but PyMongo and the standard library by itself, so that it runs in the peers' environments too.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from benchmarks import replay
from benchmarks.variants import VARIANTS, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

OPERATIONS = ("find_one", "insert_one", "update_one", "aggregate", "find_1000")
FLAVOURS = ("sync", "async")
WORKERS = {"sync": (1, 8), "async": (1, 50)}

# One look at the server and no more: what the monitors do is not the operation's cost.
QUIET = {"heartbeatFrequencyMS": 600_000, "serverMonitoringMode": "poll", "serverSelectionTimeoutMS": 20_000}


def perform(collection: Any, operation: str) -> Callable[[], Any]:
    """One call of it, for a synchronous collection."""

    def find_1000() -> None:
        for _ in collection.find({}, batch_size=replay.BATCH):
            pass

    calls: dict[str, Callable[[], Any]] = {
        "find_one": lambda: collection.find_one({"_id": 1}),
        "insert_one": lambda: collection.insert_one({"a": 1, "b": "x"}),
        "update_one": lambda: collection.update_one({"_id": 1}, {"$set": {"stock": 7}}),
        "aggregate": lambda: list(collection.aggregate(replay.PIPELINE)),
        "find_1000": find_1000,
    }
    return calls[operation]


def perform_async(collection: Any, operation: str) -> Callable[[], Awaitable[Any]]:
    async def find_1000() -> None:
        async for _ in collection.find({}, batch_size=replay.BATCH):
            pass

    async def aggregate() -> None:
        await (await collection.aggregate(replay.PIPELINE)).to_list()

    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "find_one": lambda: collection.find_one({"_id": 1}),
        "insert_one": lambda: collection.insert_one({"a": 1, "b": "x"}),
        "update_one": lambda: collection.update_one({"_id": 1}, {"$set": {"stock": 7}}),
        "aggregate": aggregate,
        "find_1000": find_1000,
    }
    return calls[operation]


class Bench:
    """A variant switched on, with a client of each flavour. `uri` None: replies are replayed."""

    def __init__(self, variant: str, uri: str | None = None, *, yields: bool = False) -> None:
        # PyMongo first, as in a program that imports it at its top; ours and the peers patch it afterwards.
        import pymongo

        self.replay = None
        if uri is None:
            self.replay = replay.Replay(yields=yields)
            self.replay.install()
            uri = self.replay.uri
        VARIANTS[variant].switch_on()
        self._uri = uri
        self._runner = asyncio.Runner()
        self._pymongo = pymongo
        self._sync: Any = None
        self._async: Any = None
        self._wrap = _transaction if variant == "newrelic" else None

    @property
    def collection(self) -> Any:
        if self._sync is None:
            self._sync = self._pymongo.MongoClient(self._uri, **QUIET)
            _silence(self._sync)
        return self._sync[replay.DATABASE][replay.COLLECTION]

    async def _collection(self) -> Any:
        if self._async is None:
            self._async = self._pymongo.AsyncMongoClient(self._uri, **QUIET)
        return self._async[replay.DATABASE][replay.COLLECTION]

    def run(self, operation: str, flavour: str, workers: int, count: int) -> None:
        """`count` operations, shared by `workers` threads or tasks."""
        if self.replay is not None:
            if operation == "find_1000":
                self.replay.find_many()
            else:
                self.replay.find_one()
        if flavour == "async":
            self._runner.run(self._run_async(operation, workers, count))
        elif workers == 1:
            self.repeat(perform(self.collection, operation), count)
        else:
            call = perform(self.collection, operation)
            threads = [
                threading.Thread(target=self.repeat, args=(call, count // workers)) for _ in range(workers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def repeat(self, call: Callable[[], Any], count: int) -> None:
        if self._wrap is not None:
            with self._wrap():
                for _ in range(count):
                    call()
            return
        for _ in range(count):
            call()

    async def _run_async(self, operation: str, workers: int, count: int) -> None:
        call = perform_async(await self._collection(), operation)

        async def worker() -> None:
            for _ in range(count // workers):
                await call()

        if workers == 1:
            await worker()
        else:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(worker())

    def timed(self, operation: str, flavour: str, workers: int, count: int) -> dict[str, float]:
        """Seconds of wall and of this process's own CPU, for each operation."""
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        self.run(operation, flavour, workers, count)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        done = count // workers * workers
        return {"wall": wall / done, "cpu": cpu / done}


def _transaction() -> Any:
    """newrelic sees a database call only inside of a transaction of its own."""
    import newrelic.agent

    return newrelic.agent.BackgroundTask(newrelic.agent.application(), "bench")


def _silence(client: Any) -> None:
    """The thread that looks for cursors to kill wakes up every second: under callgrind that is often."""
    executor = getattr(client, "_kill_cursors_executor", None)
    if executor is not None:
        executor.close()


def obey(variant: str, uri: str | None, *, yields: bool) -> None:
    """Orders on standard input until it closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a peer prints is not an answer
    try:
        bench = Bench(variant, uri, yields=yields)
    except Unavailable as reason:
        print(json.dumps({"unavailable": str(reason)}), file=answers)
        return
    except Exception as error:
        print(json.dumps({"unavailable": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps({"pymongo": bench._pymongo.version}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer: dict[str, Any] = bench.timed(**order)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # clients of two flavours, agents' threads: there is nothing to wait for


if __name__ == "__main__":
    obey(sys.argv[1], sys.argv[2] or None, yields="yields" in sys.argv[3:])
