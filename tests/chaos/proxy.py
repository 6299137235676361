"""TCP proxies in front of the nodes, in a process of their own: `python -m tests.chaos.proxy PORT...`.

Clients see only the proxies: in every reply that describes the replica set, the addresses of the nodes are replaced by
those of the proxies, which have the same length. The members talk with each other directly, so a fault here is one
between a client and a node, never one of the replication.

The process speaks lines of JSON on its standard input and output: it opens with its ports, then each line
(`{"fault": ..., "node": 0, "seconds": 1.5, "share": 0.1}`) is obeyed and answered with what was done so far. It ends
with its input, so that it cannot outlive the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
_OP_MSG = 2013
_HEADER = struct.Struct("<iiii")
# Where the first key of a command begins: header, flagBits, section kind, the document's size, the key's type.
_NAME = 16 + 4 + 1 + 4 + 1
_FRAGMENT_SECONDS = 0.01
_WRITES = tuple(
    f"{name}\0".encode() for name in ("insert", "update", "delete", "findAndModify", "commitTransaction")
)
_OTHERS = 0.2
"""How much less often a cut hits a command that is none of the above."""
_RESET = struct.pack("ii", 1, 0)

LASTING = ("stall", "slow", "fragment", "cut_reply", "torn_reply", "cut_request", "refuse")
"""Faults that last for `seconds`; each hits a `share` of the messages or connections. `reset` is over at once."""


class Link:
    """One client's connection and its counterpart to the node."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.client: asyncio.Transport | None = None
        self.server: asyncio.Transport | None = None
        self.doomed: dict[int, str] = {}
        self._unsent: list[bytes] = []
        self._due = {"client": 0.0, "server": 0.0}
        self._closed = False

    def connected(self, server: asyncio.Transport) -> None:
        self.server = server
        if self._closed:
            server.abort()
            return
        for data in self._unsent:
            server.write(data)
        self._unsent.clear()

    def request(self, message: bytes) -> None:
        door = self.door
        if door.troubled and _is_command(message):
            # Most commands are reads, and it is the writes that must not be lost or doubled.
            scale = 1.0 if message.startswith(_WRITES, _NAME) else _OTHERS
            if door.strikes("cut_request", scale):
                self._to_server(message[: len(message) // 2])
                self.reset()
                return
            for fault in ("cut_reply", "torn_reply"):
                if door.strikes(fault, scale):
                    self.doomed[_HEADER.unpack_from(message)[1]] = fault
                    break
        self._send("server", message)

    def reply(self, message: bytes) -> None:
        if self.doomed:
            # The request went through and was executed; its answer goes no further.
            fault = self.doomed.pop(_HEADER.unpack_from(message)[2], None)
            if fault is not None:
                if fault == "torn_reply" and self.client is not None:
                    self.client.write(message[: len(message) // 2])
                    self.close()
                else:
                    self.reset()
                return
        self._send("client", self.door.translated(message))

    def _send(self, side: str, message: bytes) -> None:
        door, now = self.door, self.door.loop.time()
        due = self._due[side]
        if not door.troubled and due <= now:
            self._write(side, message)
            return
        # The order of messages is kept: none goes before those that wait already.
        due = max(due, now + door.delay(now))
        pieces = [message]
        if door.active("fragment"):
            half = len(message) // 2
            pieces = [message[:half], message[half:]]
        for piece in pieces:
            door.loop.call_at(due, self._write, side, piece)
            self._due[side] = due
            due += _FRAGMENT_SECONDS

    def _write(self, side: str, data: bytes) -> None:
        if self._closed:
            return
        if side == "server":
            self._to_server(data)
        elif self.client is not None:
            self.client.write(data)

    def _to_server(self, data: bytes) -> None:
        if self.server is None:
            self._unsent.append(data)
        else:
            self.server.write(data)

    def close(self) -> None:
        self._closed = True
        self.door.links.discard(self)
        for transport in (self.client, self.server):
            if transport is not None:
                transport.close()

    def reset(self) -> None:
        """Not a polite end: the client's kernel is told that the connection does not exist."""
        if self.client is not None and not self._closed:
            with contextlib.suppress(OSError):
                self.client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.client.abort()
        self.close()


class Side(asyncio.Protocol):
    """Cuts the stream of one direction into messages."""

    def __init__(self, link: Link, *, of_client: bool) -> None:
        self._link = link
        self._of_client = of_client
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        link = self._link
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(transport)
        if not self._of_client:
            link.connected(transport)
            return
        link.client = transport
        link.door.links.add(link)
        if link.door.strikes("refuse"):
            link.reset()
        else:
            link.door.dial(link)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        handle = self._link.request if self._of_client else self._link.reply
        while len(buffer) >= 4:
            size = int.from_bytes(buffer[:4], "little")
            if len(buffer) < size:
                return
            message = bytes(buffer[:size])
            del buffer[:size]
            handle(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.close()


class Door:
    """The proxy of one node: where clients come in, and what is wrong there at the moment."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: int, chance: random.Random) -> None:
        self.loop = loop
        self.target = target
        self.links: set[Link] = set()
        self.addresses: list[tuple[bytes, bytes]] = []
        self.done: Counter[str] = Counter()
        self._until: dict[str, float] = {}
        self._share: dict[str, float] = {}
        self._chance = chance
        self._dials: set[asyncio.Task[None]] = set()
        self.troubled = False
        """A fault is on: the quick way for all messages is closed."""

    def begin(self, fault: str, seconds: float, share: float) -> None:
        if fault == "reset":
            for link in list(self.links):
                self.done[fault] += 1
                link.reset()
            return
        if fault == "heal":
            self._until.clear()
            self.troubled = False
            return
        self.troubled = True
        self._until[fault] = max(self._until.get(fault, 0.0), self.loop.time() + seconds)
        self._share[fault] = share
        self.loop.call_later(seconds + 0.001, self._review)

    def _review(self) -> None:
        now = self.loop.time()
        self._until = {fault: until for fault, until in self._until.items() if until > now}
        self.troubled = bool(self._until)

    def active(self, fault: str) -> bool:
        return self._until.get(fault, 0.0) > self.loop.time()

    def strikes(self, fault: str, scale: float = 1.0) -> bool:
        if not self.active(fault) or self._chance.random() >= self._share[fault] * scale:
            return False
        self.done[fault] += 1
        return True

    def delay(self, now: float) -> float:
        delay = max(0.0, self._until.get("stall", 0.0) - now)
        if self.active("slow"):
            delay += self._share["slow"]  # here a share of a second
        return delay

    def dial(self, link: Link) -> None:
        task = self.loop.create_task(self._dial(link))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, link: Link) -> None:
        try:
            await self.loop.create_connection(lambda: Side(link, of_client=False), HOST, self.target)
        except OSError:
            link.reset()

    def translated(self, reply: bytes) -> bytes:
        if b"setName" in reply:
            for real, shown in self.addresses:
                reply = reply.replace(real, shown)
        return reply


def _is_command(message: bytes) -> bool:
    """Handshakes and heartbeats are left alone: they have faults of their own."""
    return (
        len(message) > _NAME
        and _HEADER.unpack_from(message)[3] == _OP_MSG
        and not message.startswith((b"hello\0", b"isMaster\0", b"ismaster\0"), _NAME)
    )


async def _serve(targets: list[int], seed: int) -> None:
    loop = asyncio.get_running_loop()
    doors, servers = [], []
    for number, target in enumerate(targets):
        door = Door(loop, target, random.Random(seed * 31 + number))
        servers.append(
            await loop.create_server(lambda door=door: Side(Link(door), of_client=True), HOST, 0)  # type: ignore[misc]
        )
        doors.append(door)
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    for door in doors:
        door.addresses = [
            (f"{HOST}:{target}".encode(), f"{HOST}:{port}".encode())
            for target, port in zip(targets, ports, strict=True)
        ]
    _say(ports)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        asked = json.loads(line)
        if "fault" in asked:
            doors[asked["node"]].begin(asked["fault"], asked.get("seconds", 0.0), asked.get("share", 1.0))
        _say(sum((door.done for door in doors), Counter()))


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class Proxies:
    """The caller's end: one proxy for each node, from `__init__` to `close`."""

    def __init__(self, targets: list[int], *, seed: int) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(seed), *map(str, targets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # Ctrl-C is for the run, which then heals and closes
        )
        self.ports: list[int] = json.loads(self._pipe(self._process.stdout).readline())

    @staticmethod
    def _pipe(pipe: Any) -> Any:
        if pipe is None:
            raise AssertionError("it was asked for")
        return pipe

    def ask(self, **what: Any) -> dict[str, int]:
        """Begin a fault; the answer says how often each kind has struck so far."""
        with self._lock:
            requests = self._pipe(self._process.stdin)
            requests.write(json.dumps(what) + "\n")
            requests.flush()
            answer: dict[str, int] = json.loads(self._pipe(self._process.stdout).readline())
            return answer

    def close(self) -> None:
        with self._lock:
            self._pipe(self._process.stdin).close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._pipe(self._process.stdout).close()


if __name__ == "__main__":
    asyncio.run(_serve([int(argument) for argument in sys.argv[2:]], int(sys.argv[1])))
