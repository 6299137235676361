"""A small shop, as somebody else might have written it: plain PyMongo, sync and async, not a word of otel_retry.

It is started with `opentelemetry-instrument python shop.py URI LEDGER SEED` and runs until its standard input is closed.
The ledger, a line of JSON for each operation, is its own account of what happened: the demo compares.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import PyMongoError


class Ledger:
    """What the shop knows: for each operation when, what, how long, and whether it was acknowledged."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def note(self, name: str, started: float, error: Exception | None, key: str | None = None) -> None:
        entry = {
            "at": time.time(),
            "name": name,
            "seconds": round(time.monotonic() - started, 6),
            "error": type(error).__name__ if error else None,
            "key": key,
        }
        with self._lock:
            self._file.write(json.dumps(entry) + "\n")


def clerk(uri: str, ledger: Ledger, stop: threading.Event, number: int, seed: int) -> None:
    """Takes orders, synchronously: an insert with a key of its own, a counter, a look."""
    rng = random.Random(seed * 1000 + number)  # noqa: S311 - a shop, not a bank
    with MongoClient[dict[str, Any]](uri, appname="shop", heartbeatFrequencyMS=1000) as client:
        shop = client.shop
        count = 0
        while not stop.is_set():
            count += 1
            key = f"{number}-{count}"
            attempt(
                ledger,
                "order",
                lambda key=key: shop.orders.insert_one({"_id": key, "sku": rng.randrange(50)}),
                key,
            )
            attempt(
                ledger,
                "stock",
                lambda: shop.stock.update_one({"_id": rng.randrange(50)}, {"$inc": {"sold": 1}}, upsert=True),
            )
            attempt(ledger, "look", lambda: shop.orders.find_one({"sku": rng.randrange(50)}))
            stop.wait(rng.uniform(0.005, 0.03))


def attempt(ledger: Ledger, name: str, call: Any, key: str | None = None) -> None:
    started = time.monotonic()
    try:
        call()
    except PyMongoError as error:
        ledger.note(name, started, error, key)
    else:
        ledger.note(name, started, None, key)


async def visitors(uri: str, ledger: Ledger, stop: threading.Event, seed: int) -> None:
    """Browse, asynchronously."""
    rng = random.Random(seed)  # noqa: S311
    async with AsyncMongoClient[dict[str, Any]](uri, appname="shop", heartbeatFrequencyMS=1000) as client:
        shop = client.shop

        async def visitor() -> None:
            while not stop.is_set():
                started = time.monotonic()
                error: Exception | None = None
                try:
                    pipeline: list[dict[str, Any]] = [{"$match": {"sku": rng.randrange(50)}}, {"$count": "n"}]
                    await (await shop.orders.aggregate(pipeline)).to_list()
                except PyMongoError as caught:
                    error = caught
                ledger.note("browse", started, error)
                await asyncio.sleep(rng.uniform(0.01, 0.05))

        await asyncio.gather(*(visitor() for _ in range(4)))


def main() -> None:
    uri, path, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    ledger, stop = Ledger(path), threading.Event()
    clerks = [threading.Thread(target=clerk, args=(uri, ledger, stop, number, seed)) for number in range(3)]
    web = threading.Thread(target=lambda: asyncio.run(visitors(uri, ledger, stop, seed)))
    for thread in [*clerks, web]:
        thread.start()
    sys.stdin.read()  # until whoever started the shop closes it, or dies
    stop.set()
    for thread in [*clerks, web]:
        thread.join()


if __name__ == "__main__":
    main()
