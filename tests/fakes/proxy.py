"""A TCP proxy in front of one mongod, to lose what `failCommand` cannot: the answer to a command that was executed.

`failCommand` with `closeConnection` closes before the server does anything. Here the command reaches the server, the
server answers, and the answer is thrown away together with the client's connection. Nothing is ever changed on the
way: all other bytes pass as they are.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter
from typing import TYPE_CHECKING, Self

from tests.fakes.wire_server import OP_MSG

if TYPE_CHECKING:
    from types import TracebackType

_HEADER = struct.Struct("<iiii")
# Where the first key of a command begins: header, flagBits, section kind, the document's size, the key's type.
_NAME = 16 + 4 + 1 + 4 + 1


class Proxy:
    """Listens on 127.0.0.1 between `__enter__` and `__exit__`; no thread or socket outlives it.

    Clients must use `uri`, which says directConnection: a replica set would tell them its members' own addresses.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._to_cut: Counter[str] = Counter()
        self._then_dark = False
        self._to_refuse = 0
        self._links: set[_Link] = set()
        self._closing = False

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name=f"proxy-{self._port}", daemon=True)
        self._acceptor.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.go_dark()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.join()

    @property
    def uri(self) -> str:
        return f"mongodb://127.0.0.1:{self._port}/?directConnection=true"

    def cut_reply(self, command: str, *, times: int = 1, then_dark: bool = False) -> None:
        """Lose the answers to the next `times` commands of that name, and with each the client's connection.

        `then_dark`: with the last of them the server is gone for good.
        """
        with self._lock:
            self._to_cut[command] += times
            self._then_dark = then_dark

    def refuse(self, times: int = 1) -> None:
        """Close the next `times` connections as soon as they are made."""
        with self._lock:
            self._to_refuse = times

    def go_dark(self) -> None:
        """Close all connections and stop listening, as a process does that ends."""
        self._stop_listening()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def _stop_listening(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        # Neither close() nor shutdown() of a listener wakes accept() on every system; a visitor does.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        self._acceptor.join(5)
        self._listener.close()

    @property
    def pending(self) -> int:
        """How many answers are still to be lost."""
        with self._lock:
            return self._to_cut.total()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            with self._lock:
                if self._closing:
                    client.close()
                    return
                refused = self._to_refuse > 0
                if refused:
                    self._to_refuse -= 1
            if refused:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
            link.start()

    def dooms(self, request: bytes) -> bool:
        """Whether the answer to this request is to be lost."""
        name = _command_name(request)
        with self._lock:
            if name is None or self._to_cut[name] <= 0:
                return False
            self._to_cut[name] -= 1
            return True

    def cut(self, link: _Link) -> None:
        with self._lock:
            dark = self._then_dark and not self._to_cut.total()
        if dark:
            self.go_dark()
        link.close()

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Link:
    """One client's connection and its counterpart to the server, pumped by a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._doomed: set[int] = set()
        self._threads = [
            threading.Thread(target=pump, name=f"proxy-{pump.__name__}", daemon=True)
            for pump in (self._requests, self._replies)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(5)

    def close(self) -> None:
        """Wakes both pumps; the one that ends last gives the sockets back."""
        for sock in (self._client, self._server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _requests(self) -> None:
        with contextlib.suppress(OSError):
            while request := _message(self._client):
                if self._proxy.dooms(request):
                    self._doomed.add(_HEADER.unpack_from(request)[1])
                self._server.sendall(request)
        self.close()

    def _replies(self) -> None:
        with contextlib.suppress(OSError):
            while reply := _message(self._server):
                if _HEADER.unpack_from(reply)[2] in self._doomed:
                    self._proxy.cut(self)
                    break
                self._client.sendall(reply)
        self.close()
        self._threads[0].join()
        self._client.close()
        self._server.close()
        self._proxy.forget(self)


def _message(sock: socket.socket) -> bytes:
    """The next whole message of the wire protocol; empty at the end."""
    header = _read(sock, _HEADER.size)
    return header and header + _read(sock, _HEADER.unpack(header)[0] - _HEADER.size)


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


def _command_name(request: bytes) -> str | None:
    if _HEADER.unpack_from(request)[3] != OP_MSG:
        return None
    return request[_NAME : request.index(b"\0", _NAME)].decode()
