"""A mock MongoDB server: it speaks the wire protocol and answers by script, and it stores nothing.

It stands in only for what cannot be had where these tests run: mongos (a sharded cluster), MongoDB 8.0
(the `bulkWrite` command), and a server that answers garbage. Everything else is tested against a real mongod; what passes here shows what a
client sent and how it took an answer, never that a real server would have answered so.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import bson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

Kind = Literal["mongos", "primary", "standalone", "secondary"]

OP_REPLY, OP_QUERY, OP_MSG = 1, 2004, 2013
CHECKSUM_PRESENT, MORE_TO_COME = 1 << 0, 1 << 1

HELLO = frozenset({"hello", "ismaster", "isMaster"})
UNRECORDED = HELLO | {"endSessions"}

# Where a kind-1 section of OP_MSG carries what a write does.
SEQUENCE = {"insert": "documents", "update": "updates", "delete": "deletes"}

CODE_NAMES = {
    2: "BadValue",
    6: "HostUnreachable",
    7: "HostNotFound",
    20: "IllegalOperation",
    43: "CursorNotFound",
    50: "MaxTimeMSExpired",
    59: "CommandNotFound",
    64: "WriteConcernTimeout",
    89: "NetworkTimeout",
    91: "ShutdownInProgress",
    112: "WriteConflict",
    134: "ReadConcernMajorityNotAvailableYet",
    189: "PrimarySteppedDown",
    251: "NoSuchTransaction",
    262: "ExceededTimeLimit",
    462: "IngressRequestRateLimitExceeded",
    9001: "SocketException",
    10107: "NotWritablePrimary",
    11000: "DuplicateKey",
    11600: "InterruptedAtShutdown",
    11602: "InterruptedDueToReplStateChange",
    13435: "NotPrimaryNoSecondaryOk",
    13436: "NotPrimaryOrSecondary",
}


class Drop:
    """The answer that is none: the connection is closed instead."""

    def __repr__(self) -> str:
        return "DROP"


DROP = Drop()

Document = dict[str, Any]
Answer = Document | bytes | Drop


class Received(NamedTuple):
    """A command as it arrived, its document sequences merged in as arrays."""

    name: str
    command: Document


def error(code: int, message: str = "", labels: Iterable[str] = ()) -> Document:
    """The reply of a command that failed; a code without a name here is called `Location<code>`, as servers do."""
    name = CODE_NAMES.get(code, f"Location{code}")
    reply: Document = {"ok": 0, "code": code, "codeName": name, "errmsg": message or name}
    if labels := list(labels):
        reply["errorLabels"] = labels
    return reply


class FakeServer:
    """One server on 127.0.0.1, alive between `__enter__` and `__exit__`; no thread or socket outlives it.

    `kind`, `max_wire_version` and `peers` are read at each hello, so a test may change them while clients are
    connected. `peers` are the other members of a replica set: servers, or addresses as "host:port".
    """

    def __init__(
        self,
        kind: Kind = "mongos",
        max_wire_version: int = 25,
        replica_set: str = "fake",
        peers: Iterable[FakeServer | str] = (),
    ) -> None:
        self.kind = kind
        self.max_wire_version = max_wire_version
        self.replica_set = replica_set
        self.peers = list(peers)
        self.greeting: Document = {}
        """Merged into the answer to each hello."""
        self.always: dict[str, Answer] = {}
        """The answers to commands of these names, where nothing else is scripted."""
        self._lock = threading.Lock()
        self._script: defaultdict[str, deque[Answer | Callable[[Document], Answer]]] = defaultdict(deque)
        self._received: list[Received] = []
        self._handshakes: list[Document] = []
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._numbers = itertools.count(1)
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._port = 0

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(
            target=self._accept, args=(self._listener,), name=f"fake-{self.kind}-{self._port}", daemon=True
        )
        self._acceptor.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        # Neither close() nor shutdown() of a listener wakes accept() on every system; a visitor does.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        self._acceptor.join(5)
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for thread, sock in connections.items():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join(5)
        stuck = [thread.name for thread in (self._acceptor, *connections) if thread.is_alive()]
        if stuck and exc is None:
            raise RuntimeError(f"still running after 5 seconds, perhaps in a scripted callable: {stuck}")

    @property
    def port(self) -> int:
        if not self._port:
            raise RuntimeError("the server has no port before it is entered")
        return self._port

    @property
    def address(self) -> str:
        """As "host:port"."""
        return f"127.0.0.1:{self.port}"

    @property
    def uri(self) -> str:
        member = self.kind in {"primary", "secondary"}
        return f"mongodb://{self.address}/" + (f"?replicaSet={self.replica_set}" if member else "")

    def reply(self, command_name: str, *responses: Answer | Callable[[Document], Answer]) -> None:
        """Queue responses to the next commands of that name; after the last, the default success is given again.

        A response is a document (merged over `{"ok": 1}`), `error(...)`, `DROP`, bytes (sent as they are in the place
        of the document), or a callable that is given the command and returns one of these. Unacknowledged commands are not answered and use up no response.
        """
        if command_name in UNRECORDED:
            raise ValueError(
                f"{command_name} is sent whenever a monitor or pool likes: it cannot be scripted"
            )
        with self._lock:
            self._script[command_name].extend(responses)

    @property
    def received(self) -> list[Received]:
        """A copy of what arrived so far, in order, without hello and endSessions."""
        with self._lock:
            return list(self._received)

    @property
    def handshakes(self) -> list[Document]:
        """A copy of each hello that opened a connection (it names the client), in order; heartbeats are not kept."""
        with self._lock:
            return list(self._handshakes)

    def commands(self, name: str) -> list[Document]:
        """The commands of that name that arrived so far, in order."""
        return [command for received, command in self.received if received == name]

    def clear(self) -> None:
        """Forget what arrived (commands and handshakes); the script stays."""
        with self._lock:
            self._received.clear()
            self._handshakes.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            if self._closing.is_set():
                sock.close()
                return
            number = next(self._numbers)
            thread = threading.Thread(
                target=self._serve, args=(sock, number), name=f"fake-{self._port}-{number}", daemon=True
            )
            with self._lock:
                self._connections[thread] = sock
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        try:
            with sock, contextlib.suppress(ConnectionError):
                while not self._closing.is_set():
                    request_id, opcode, body = _read_message(sock)
                    command, wants_answer = _parse(opcode, body)
                    answer = self._answer(command, number, wants_answer=wants_answer)
                    if answer is DROP:
                        return
                    if answer is not None:
                        sock.sendall(_message(request_id, opcode, answer))
        finally:
            with self._lock:
                self._connections.pop(threading.current_thread(), None)

    def _answer(self, command: Document, connection: int, *, wants_answer: bool) -> Answer | None:
        name = next(iter(command))
        with self._lock:
            if name in HELLO and "client" in command:
                self._handshakes.append(command)
            if name not in UNRECORDED:
                self._received.append(Received(name, command))
            if not wants_answer:
                return None
            script = self._script[name]
            scripted = script.popleft() if script else self.always.get(name)
        if scripted is None:
            return self._hello(connection) if name in HELLO else _success(name, command)
        # Outside the lock: a scripted callable may wait, or look at what was received.
        answer = scripted(command) if callable(scripted) else scripted
        return {"ok": 1} | answer if isinstance(answer, dict) else answer

    def _hello(self, connection: int) -> Document:
        # Without topologyVersion monitors poll: a streaming one would want exhaust replies.
        writable = self.kind != "secondary"
        reply: Document = {
            "helloOk": True,
            "isWritablePrimary": writable,
            "ismaster": writable,
            "maxBsonObjectSize": 16 * 1024 * 1024,
            "maxMessageSizeBytes": 48_000_000,
            "maxWriteBatchSize": 100_000,
            "logicalSessionTimeoutMinutes": 30,
            "connectionId": connection,
            "minWireVersion": 0,
            "maxWireVersion": self.max_wire_version,
            "readOnly": False,
            "ok": 1,
        }
        if self.kind == "mongos":
            reply["msg"] = "isdbgrid"
        elif self.kind != "standalone":
            reply |= self._membership()
        return reply | self.greeting

    def _membership(self) -> Document:
        members = [self, *self.peers]
        membership: Document = {
            "setName": self.replica_set,
            "setVersion": 1,
            "secondary": self.kind == "secondary",
            "hosts": [member if isinstance(member, str) else member.address for member in members],
            "me": self.address,
        }
        for member in members:
            if isinstance(member, FakeServer) and member.kind == "primary":
                membership["primary"] = member.address
                break
        return membership


class Sharded(NamedTuple):
    """Several mongos of one imagined cluster, and a URI that lists them all."""

    servers: tuple[FakeServer, ...]
    uri: str


@contextlib.contextmanager
def sharded(n: int, *, max_wire_version: int = 25) -> Iterator[Sharded]:
    with contextlib.ExitStack() as stack:
        servers = tuple(
            stack.enter_context(FakeServer("mongos", max_wire_version=max_wire_version)) for _ in range(n)
        )
        # On a busy machine one of them may seem far away, and no retry would go there.
        listed = ",".join(server.address for server in servers)
        yield Sharded(servers, f"mongodb://{listed}/?localThresholdMS=60000")


def _success(name: str, command: Document) -> Document:
    """What a server would say to a command that went well, on empty collections."""
    namespace = f"{command.get('$db')}.{command[name]}"
    match name:
        case "insert" | "delete":
            return {"ok": 1, "n": len(command[SEQUENCE[name]])}
        case "update":
            n = len(command[SEQUENCE[name]])
            return {"ok": 1, "n": n, "nModified": n}
        case "find":
            return _cursor(namespace)
        case "aggregate":
            whole_database = not isinstance(command[name], str)
            return _cursor(f"{command.get('$db')}.$cmd.aggregate" if whole_database else namespace)
        case "listCollections" | "listIndexes":
            return _cursor(f"{command.get('$db')}.$cmd.{name}")
        case "getMore":
            ns = f"{command.get('$db')}.{command.get('collection')}"
            return {"ok": 1, "cursor": {"id": bson.Int64(0), "ns": ns, "nextBatch": []}}
        case "bulkWrite":
            return _bulk_write(command)
        case "findAndModify":
            return {"ok": 1, "value": None}
        case "count":
            return {"ok": 1, "n": 0}
        case "distinct":
            return {"ok": 1, "values": []}
        case "listDatabases":
            return {"ok": 1, "databases": []}
        case _:
            return {"ok": 1}


def _cursor(namespace: str, batch: Iterable[Document] = ()) -> Document:
    return {"ok": 1, "cursor": {"id": bson.Int64(0), "ns": namespace, "firstBatch": list(batch)}}


def _bulk_write(command: Document) -> Document:
    """MongoDB 8.0's bulkWrite, where each operation found exactly one document to act on."""
    counts = {"insert": 0, "update": 0, "delete": 0}
    batch = []
    for index, operation in enumerate(command["ops"]):
        action = next(iter(operation))
        counts[action] += 1
        result = {"ok": 1, "idx": index, "n": 1}
        if action == "update":
            result["nModified"] = 1
        batch.append(result)
    return {
        **_cursor("admin.$cmd.bulkWrite", [] if command.get("errorsOnly") else batch),
        "nErrors": 0,
        "nInserted": counts["insert"],
        "nMatched": counts["update"],
        "nModified": counts["update"],
        "nUpserted": 0,
        "nDeleted": counts["delete"],
    }


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionResetError("the client went away")
        data += chunk
    return bytes(data)


def _read_message(sock: socket.socket) -> tuple[int, int, bytes]:
    length, request_id, _, opcode = struct.unpack("<iiii", _read(sock, 16))
    return request_id, opcode, _read(sock, length - 16)


def _parse(opcode: int, body: bytes) -> tuple[Document, bool]:
    """The command, and whether the client waits for an answer."""
    if opcode == OP_QUERY:
        # flags, the collection's name, numberToSkip, numberToReturn, then the command.
        start = body.index(b"\0", 4) + 1 + 8
        return bson.decode(body[start:]), True
    if opcode != OP_MSG:
        raise ValueError(f"opcode {opcode}: neither OP_MSG nor OP_QUERY, and no compressor was offered")
    (flags,) = struct.unpack_from("<I", body)
    end = len(body) - (4 if flags & CHECKSUM_PRESENT else 0)
    position = 4
    command: Document = {}
    sequences: Document = {}
    while position < end:
        kind = body[position]
        position += 1
        (size,) = struct.unpack_from("<i", body, position)
        section = body[position : position + size]
        position += size
        if kind == 0:
            command = bson.decode(section)
        elif kind == 1:
            name_end = section.index(b"\0", 4)
            sequences[section[4:name_end].decode()] = bson.decode_all(section[name_end + 1 :])
        else:
            raise ValueError(f"section kind {kind}: neither a body nor a document sequence")
    # The body may come after a sequence, but its first key has to stay the command's name.
    return command | sequences, not flags & MORE_TO_COME


def _message(response_to: int, opcode: int, document: Document | bytes) -> bytes:
    payload = document if isinstance(document, bytes) else bson.encode(document)
    if opcode == OP_QUERY:
        # responseFlags, cursorID, startingFrom, numberReturned.
        reply_opcode, body = OP_REPLY, struct.pack("<iqii", 0, 0, 0, 1) + payload
    else:
        # flagBits, then one section of kind 0.
        reply_opcode, body = OP_MSG, struct.pack("<IB", 0, 0) + payload
    return struct.pack("<iiii", 16 + len(body), response_to, response_to, reply_opcode) + body
