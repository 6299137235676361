"""One variant in one process: told what to run, it answers with what that took.

As a script it reads one order per line (JSON: operation, flavour, workers, count, and what `Load` knows) and answers each
with a line. It imports nothing but PyMongo and the standard library by itself, so that it runs in the peers' environments
too; and PyMongo not before it must, since some peers have to be there first.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.variants import VARIANTS, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

OPERATIONS = ("find_one", "insert_one", "update_one", "aggregate", "find_1000")
FLAVOURS = ("sync", "async")
WORKERS = {"sync": (1, 8), "async": (1, 50)}

# One look at the server and no more: what the monitors do is not the operation's cost.
QUIET: dict[str, Any] = {
    "heartbeatFrequencyMS": 600_000,
    "serverMonitoringMode": "poll",
    "serverSelectionTimeoutMS": 20_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is done: one operation again and again, in turn over so many clients and collections, each time with so many
    attempts, of which only the last succeeds (replayed transport, one worker).
    """

    operation: str
    flavour: str
    workers: int = 1
    clients: int = 1
    collections: int = 1
    attempts: int = 1

    @classmethod
    def parse(cls, case: str) -> Load:
        """`insert_one/async`, `insert_one/sync/attempts=3`."""
        operation, flavour, *options = case.split("/")
        return cls(
            operation=operation, flavour=flavour, **{k: int(v) for k, v in (o.split("=") for o in options)}
        )


def perform(collection: Any, operation: str) -> Callable[[], Any]:
    """One call of it, for a synchronous collection."""
    from benchmarks import replay

    def find_1000() -> None:
        for _ in collection.find({}, batch_size=replay.BATCH):
            pass

    # Elsewhere, or on a real server what is read would grow with what is inserted.
    inserted = collection.database[f"{collection.name}_inserted"]
    calls: dict[str, Callable[[], Any]] = {
        "find_one": lambda: collection.find_one({"_id": 1}),
        "insert_one": lambda: inserted.insert_one({"a": 1, "b": "x"}),
        "update_one": lambda: collection.update_one({"_id": 1}, {"$set": {"stock": 7}}),
        "aggregate": lambda: list(collection.aggregate(replay.PIPELINE)),
        "find_1000": find_1000,
    }
    return calls[operation]


def perform_async(collection: Any, operation: str) -> Callable[[], Awaitable[Any]]:
    """The same for an asynchronous one."""
    from benchmarks import replay

    async def find_1000() -> None:
        async for _ in collection.find({}, batch_size=replay.BATCH):
            pass

    async def aggregate() -> None:
        await (await collection.aggregate(replay.PIPELINE)).to_list()

    inserted = collection.database[f"{collection.name}_inserted"]
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "find_one": lambda: collection.find_one({"_id": 1}),
        "insert_one": lambda: inserted.insert_one({"a": 1, "b": "x"}),
        "update_one": lambda: collection.update_one({"_id": 1}, {"$set": {"stock": 7}}),
        "aggregate": aggregate,
        "find_1000": find_1000,
    }
    return calls[operation]


class Bench:
    """A variant switched on, with clients of each flavour, made when they are needed. `uri` None: replies are replayed."""

    def __init__(self, variant: str, uri: str | None = None, *, yields: bool = False) -> None:
        self.variant = VARIANTS[variant]
        if self.variant.early:
            self.variant.switch_on()
        # Otherwise PyMongo first, as in a program that imports it at its top; ours and the peers patch it afterwards.
        import pymongo

        from benchmarks import replay

        self.pymongo = pymongo
        self.replay = None if uri is not None else replay.Replay(yields=yields)
        if self.replay is not None:
            self.replay.install()
        self._uri = uri if self.replay is None else self.replay.uri
        if not self.variant.early:
            self.variant.switch_on()
        self._runner = asyncio.Runner()
        self._clients: dict[str, list[Any]] = {flavour: [] for flavour in FLAVOURS}
        self._calls: dict[Load, Callable[[], Any]] = {}

    def client(self, flavour: str, number: int = 0) -> Any:
        clients = self._clients[flavour]
        while len(clients) <= number:
            if flavour == "async":
                clients.append(self.pymongo.AsyncMongoClient(self._uri, **QUIET))
            else:
                clients.append(self.pymongo.MongoClient(self._uri, **QUIET))
                _silence(clients[-1])
        return clients[number]

    def run(self, load: Load, count: int) -> None:
        """`count` operations, shared by `workers` threads or tasks."""
        if self.replay is not None:
            if load.operation == "find_1000":
                self.replay.find_many()
            else:
                self.replay.find_one()
        if load.flavour == "async":
            self._runner.run(self._run_async(load, count))
        elif load.workers == 1:
            self._repeat(self._call(load), count)
        else:
            call = self._call(load)
            threads = [
                threading.Thread(target=self._repeat, args=(call, count // load.workers))
                for _ in range(load.workers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _call(self, load: Load) -> Callable[[], Any]:
        """What does it once. It is kept, so that blocks go on where the one before ended."""
        call = self._calls.get(load)
        if call is None:
            call = self._calls[load] = self._attempts(load, self._in_turn(load))
        return call

    def _in_turn(self, load: Load) -> Callable[[], Any]:
        from benchmarks import replay

        make = perform_async if load.flavour == "async" else perform
        calls = [
            make(self.client(load.flavour, client)[replay.DATABASE][name], load.operation)
            for client in range(load.clients)
            for name in (replay.COLLECTION, *(f"other_{number}" for number in range(1, load.collections)))
        ]
        if len(calls) == 1:
            return calls[0]
        turns = itertools.cycle(calls)

        def next_one() -> Any:
            return next(turns)()

        return next_one

    def _attempts(self, load: Load, call: Callable[[], Any]) -> Callable[[], Any]:
        if load.attempts == 1:
            return call
        replay = self.replay
        if replay is None:
            raise Unavailable("a real server does not reject commands on request")
        random.random = lambda: 0.0  # the jitter: nobody waits before a retry

        def attempted() -> Any:
            replay.overloads = load.attempts - 1
            return call()

        return attempted

    def _repeat(self, call: Callable[[], Any], count: int) -> None:
        with self.variant.around():
            for _ in range(count):
                call()

    async def _run_async(self, load: Load, count: int) -> None:
        call = self._call(load)

        async def worker() -> None:
            with self.variant.around():
                for _ in range(count // load.workers):
                    await call()

        if load.workers == 1:
            await worker()
        else:
            async with asyncio.TaskGroup() as group:
                for _ in range(load.workers):
                    group.create_task(worker())

    def timed(self, load: Load, count: int) -> dict[str, float]:
        """Seconds of wall and of this process's own CPU, for each operation."""
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        self.run(load, count)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        done = count // load.workers * load.workers
        return {"wall": wall / done, "cpu": cpu / done}


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
    except Exception as error:
        said = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
        print(json.dumps({"unavailable": said}), file=answers)
        return
    print(json.dumps({"pymongo": bench.pymongo.version}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer: dict[str, Any] = bench.timed(Load(**order["load"]), order["count"])
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # clients of two flavours, agents' threads: there is nothing to wait for


if __name__ == "__main__":
    obey(sys.argv[1], sys.argv[2] or None, yields="yields" in sys.argv[3:])
