"""Recorded replies, given back inside the connection: no server, no network, no other process to schedule.

The replies were taken from a real mongod and are kept in `replies.json`; `python -m benchmarks.replay` takes them again.
A socket that listens and is never read from stands for the server, so that PyMongo connects and checks out as it always
does; only sending and receiving are replaced, and everything that PyMongo does to a message before and after remains.
Nothing here knows of OpenTelemetry or of otel_retry.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import threading
from pathlib import Path
from typing import Any

import bson
from bson import json_util
from pymongo.message import _OpMsg

REPLIES = Path(__file__).with_name("replies.json")
DATABASE, COLLECTION = "bench", "coll"
DOCUMENTS, BATCH = 1000, 100

# An OP_MSG: header, flags, kind of section, length of the document, type of its first element, and then its name.
_NAME = 26
_CURSOR = slice(34, 42)
# An OP_QUERY, in which PyMongo up to 4.17 says hello: header, flags, "admin.$cmd", two numbers, and then the document.
_NAME_IN_QUERY = 44
_OVERLOADED = frozenset({b"find", b"insert", b"update", b"aggregate"})

# Written, not recorded: servers that reject for overload are newer than the one the rest was taken from.
OVERLOAD = {
    "ok": 0.0,
    "errmsg": "rejected for overload",
    "code": 462,
    "codeName": "IngressRequestRateLimitExceeded",
    "errorLabels": ["SystemOverloadedError", "RetryableError"],
}


class Replay:
    """Answers by the name of the command. Invariant: between a message and its answer nothing else runs in its thread."""

    def __init__(self, *, yields: bool = False) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self.uri = f"mongodb://{self.address}/?replicaSet=rs0"
        self._yields = yields
        self._last = threading.local()
        recorded = json_util.loads(REPLIES.read_text())
        hello = recorded["hello"]
        hello.update(hosts=[self.address], me=self.address, primary=self.address)
        hello.pop("topologyVersion", None)  # with it, PyMongo would wait for news on a second connection
        self._answers = {name.encode(): bson.encode(reply) for name, reply in recorded.items()}
        self._answers[b"isMaster"] = self._answers[b"ismaster"] = self._answers[b"hello"]
        self._batches = _batches(recorded["getMore"])
        self._default = bson.encode({"ok": 1.0})
        self._overload = bson.encode(OVERLOAD)
        self.overloads = 0
        """So many commands from now on are rejected for overload."""
        self.documents_in_find = 1

    def find_many(self) -> None:
        """From now on a find has 1,000 documents; its cursor's number is how many batches are left."""
        if self.documents_in_find == DOCUMENTS:
            return
        batch = bson.decode(self._batches[1])["cursor"]["nextBatch"]
        reply = bson.decode(self._answers[b"find"])
        reply["cursor"] = {"firstBatch": batch, "id": bson.Int64(len(self._batches)), "ns": _namespace()}
        self._one, self._answers[b"find"] = self._answers[b"find"], bson.encode(reply)
        self.documents_in_find = DOCUMENTS

    def find_one(self) -> None:
        if self.documents_in_find != 1:
            self._answers[b"find"] = self._one
            self.documents_in_find = 1

    def _answer(self) -> Any:
        message = self._last.message
        name = message[_NAME : message.index(0, _NAME)]
        if name == b"getMore":
            return _OpMsg(0, self._batches[int.from_bytes(message[_CURSOR], "little")])
        answer = self._answers.get(name)
        if answer is None:
            return _OpMsg(0, self._answer_to_query(message))
        if self.overloads and name in _OVERLOADED:
            self.overloads -= 1
            return _OpMsg(0, self._overload)
        return _OpMsg(0, answer)

    def _answer_to_query(self, message: bytes) -> bytes:
        end = message.find(0, _NAME_IN_QUERY)
        return self._answers.get(message[_NAME_IN_QUERY:end], self._default)

    def is_about(self, command: bytes) -> bool:
        """Whether this thread's last message was such a command."""
        return bool(self._last.message.startswith(command + b"\0", _NAME))

    @staticmethod
    async def pause() -> None:
        """Or fifty tasks would run one after the other."""
        await asyncio.sleep(0)

    def install(self) -> None:
        """Up to PyMongo 4.17 most commands pass by the connection's own methods, through `network`."""
        last = self._last

        def send(_: Any, message: bytes, __: int = 0) -> None:
            last.message = message

        def receive(_: Any, __: int | None, ___: int = 0) -> Any:
            return self._answer()

        async def send_async(_: Any, message: bytes, __: int = 0) -> None:
            last.message = message

        async def receive_async(_: Any, __: int | None, ___: int = 0) -> Any:
            found = self._answer()
            if self._yields:
                await self.pause()
            return found

        for half, prefix, pair in (
            ("synchronous", "", (send, receive)),
            ("asynchronous", "async_", (send_async, receive_async)),
        ):
            pool = importlib.import_module(f"pymongo.{half}.pool")
            connection = pool.AsyncConnection if prefix else pool.Connection
            connection.send_message, connection.receive_message = pair
            try:
                network: Any = importlib.import_module(f"pymongo.{half}.network")
            except ImportError:
                continue
            for name, function in zip(("sendall", "receive_message"), pair, strict=True):
                for spelled in (f"{prefix}{name}", name):
                    if hasattr(network, spelled):
                        setattr(network, spelled, function)
                        break


def _namespace() -> str:
    return f"{DATABASE}.{COLLECTION}"


def _batches(reply: dict[str, Any]) -> dict[int, bytes]:
    """By how many are left, itself included."""
    return {
        left: bson.encode(reply | {"cursor": {**reply["cursor"], "id": bson.Int64(left - 1)}})
        for left in range(1, DOCUMENTS // BATCH)
    }


def fill(client: Any) -> None:
    """What the operations find, on a real server."""
    client[DATABASE].drop_collection(COLLECTION)
    client[DATABASE][COLLECTION].insert_many(
        {"_id": number, "name": f"item {number}", "price": number / 4, "tags": ["a", "b"], "stock": number}
        for number in range(DOCUMENTS)
    )


def record(uri: str) -> dict[str, Any]:
    """What a server answers to each of the commands; of a cursor's batches one is enough."""
    from pymongo import MongoClient

    client: Any
    with MongoClient(uri) as client:
        fill(client)
        database = client[DATABASE]
        with client.start_session() as session:
            found = {
                "hello": client.admin.command("hello"),
                "find": database.command("find", COLLECTION, filter={"_id": 1}, limit=1, session=session),
                "insert": database.command(
                    "insert", COLLECTION, documents=[{"_id": "recorded"}], session=session
                ),
                "update": database.command(
                    "update",
                    COLLECTION,
                    updates=[{"q": {"_id": 1}, "u": {"$set": {"stock": 7}}}],
                    session=session,
                ),
                "aggregate": database.command(
                    "aggregate", COLLECTION, pipeline=PIPELINE, cursor={}, session=session
                ),
            }
            first = database.command("find", COLLECTION, batchSize=BATCH, session=session)
            found["getMore"] = database.command(
                "getMore", first["cursor"]["id"], collection=COLLECTION, batchSize=BATCH, session=session
            )
        return found


PIPELINE: list[dict[str, Any]] = [
    {"$match": {"stock": {"$lt": 50}}},
    {"$group": {"_id": "$tags", "total": {"$sum": "$price"}}},
]


if __name__ == "__main__":
    from otel_retry import mongod

    with mongod.start() as server:
        REPLIES.write_text(json_util.dumps(record(server.uri), indent=1) + "\n")
