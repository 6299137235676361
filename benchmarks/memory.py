"""Memory of one variant, in a process of its own: of operations in flight, and what stays after very many.

The transport is replayed, so nothing but PyMongo, the variant and the SDK holds memory. The result is a line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.replay import Replay
from benchmarks.workload import Bench, Load

IN_FLIGHT = {"sync": 50, "async": 200}
FIRST = 20_000
"""Operations after which caches are full and the SDK has made what it makes once."""


def in_flight(variant: str) -> dict[str, int]:
    """Bytes that Python has allocated for each operation that waits for its answer."""
    workload.QUIET["maxPoolSize"] = max(IN_FLIGHT.values())
    bench = Bench(variant, yields=True)
    replay = bench.replay
    if replay is None:
        raise RuntimeError("in flight is measured on the replayed transport only")
    return {"sync": _threads(bench, replay), "async": asyncio.run(_tasks(bench, replay))}


def _threads(bench: Bench, replay: Replay) -> int:
    number = IN_FLIGHT["sync"]
    call = workload.perform(_collection(bench, "sync"), "insert_one")
    answer = replay._answer
    found = 0
    for _ in range(3):  # connections and caches are made in the first
        arrived, go = threading.Semaphore(0), threading.Event()

        def held(arrived: threading.Semaphore = arrived, go: threading.Event = go) -> Any:
            if replay.is_about(b"insert"):  # and not a new connection's handshake
                arrived.release()
                go.wait()
            return answer()

        ready = threading.Barrier(number + 1)

        def work(ready: threading.Barrier = ready) -> None:
            ready.wait()
            call()

        call()
        replay._answer = held  # type: ignore[method-assign]
        threads = [threading.Thread(target=work) for _ in range(number)]
        for thread in threads:
            thread.start()
        with _traced() as size:
            ready.wait()
            for _ in range(number):
                arrived.acquire()
            found = size() // number
        replay._answer = answer  # type: ignore[method-assign]
        go.set()
        for thread in threads:
            thread.join()
    return found


async def _tasks(bench: Bench, replay: Replay) -> int:
    number = IN_FLIGHT["async"]
    call = workload.perform_async(_collection(bench, "async"), "insert_one")
    found = 0
    for _ in range(3):
        arrived, full, go = 0, asyncio.Event(), asyncio.Event()

        async def held(full: asyncio.Event = full, go: asyncio.Event = go) -> None:
            nonlocal arrived
            if replay.is_about(b"insert"):
                arrived += 1
                if arrived == number:
                    full.set()
                await go.wait()

        await call()
        replay.pause = held  # type: ignore[method-assign]
        with _traced() as size:
            tasks = [asyncio.ensure_future(call()) for _ in range(number)]
            await full.wait()
            found = size() // number
        go.set()
        await asyncio.gather(*tasks)
        replay.pause = Replay.pause  # type: ignore[method-assign]
    return found


@contextlib.contextmanager
def _traced() -> Any:
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def _collection(bench: Bench, flavour: str) -> Any:
    from benchmarks import replay

    return bench.client(flavour)[replay.DATABASE][replay.COLLECTION]


def many(variant: str, operations: int) -> dict[str, int]:
    """What a process has allocated and what it occupies, after the first ones and after all: reads and writes of both
    flavours in turn.
    """
    bench = Bench(variant)
    loads = [
        Load.parse(f"{operation}/{flavour}")
        for operation in ("insert_one", "find_one")
        for flavour in ("sync", "async")
    ]
    first = min(FIRST, operations // 2)
    done, block = 0, max(first // 20, 1)
    found: dict[str, int] = {}
    while done < operations:
        for load in loads:
            bench.run(load, block)
            done += block
        if "blocks_first" not in found and done >= first:
            found |= {"first": done, "blocks_first": _blocks(), "resident_first": _resident()}
    return found | {"operations": done, "blocks": _blocks(), "resident": _resident()}


def _blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def _resident() -> int:
    """Bytes; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    what, variant = sys.argv[1:3]
    print(json.dumps(in_flight(variant) if what == "in_flight" else many(variant, int(sys.argv[3]))))
    sys.stdout.flush()
    os._exit(0)
