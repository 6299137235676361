"""Start and stop real mongod processes for the tests, the demo and the benchmarks.

The processes belong to a supervisor: this same file run as a script, in a process and a session of its own, with
nothing but the standard library. It starts each mongod and owns the temporary folder. When the pipe from the caller
closes, for whatever reason, a SIGKILL of the caller included, it kills the processes and removes the folder.

The two halves speak in lines of JSON. The supervisor opens with its folder; then each request (`spawn`, `signal`,
`kill` or `poll`) has one answer, `{"number": N, "answer": ...}` or `{"number": N, "error": "..."}`.

This module never downloads anything, never prints, never touches a mongod it did not start except through
`MONGODB_URI`, and is never imported by the parts of the library that run inside applications.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType, TracebackType
    from typing import Self

__all__ = [
    "Deployment",
    "FailPoint",
    "MongodError",
    "MongodUnavailable",
    "Node",
    "deployment",
    "find_binary",
    "start",
]

APP_NAME: Final = "otel_retry.mongod"
BINARY_VARIABLE: Final = "OTEL_RETRY_MONGOD"
URI_VARIABLE: Final = "MONGODB_URI"

_HOST: Final = "127.0.0.1"
_REPLICA_SET: Final = "rs0"
_SUPERVISE: Final = "--supervise"
_FOLDER_PREFIX: Final = "otel_retry-mongod-"
_EXECUTABLE: Final = "mongod.exe" if sys.platform == "win32" else "mongod"

# Below the range from which Linux (32768 and up) and macOS (49152 and up) serve outgoing connections: a node that is
# killed and restarted a minute later would otherwise find its port lent to some client.
_PORTS: Final = range(20_000, 32_000)
_PORT_ATTEMPTS: Final = 5

# A failover must be a matter of seconds, yet a busy CI machine must not hold elections for want of a heartbeat.
_REPLICA_SET_SETTINGS: Final = {"electionTimeoutMillis": 1500, "heartbeatIntervalMillis": 500}

_PARAMETERS: Final[Mapping[str, object]] = {
    "enableTestCommands": True,
    "diagnosticDataCollectionEnabled": False,
}

# The journal's files would be 100 MB each, three of them made in advance.
_ENGINE_CONFIG: Final = "log=(file_max=8MB,prealloc=false)"

# mongod's EXIT_NET_ERROR, its answer to a port that is taken.
_EXIT_NET_ERROR: Final = 48
# What a shell, and glibc's loader, exit with when there is nothing to run.
_EXIT_CANNOT_RUN: Final = 127

# As the loaders of Linux and of macOS put it; the second form is a system older than the binary.
_MISSING_LIBRARY: Final = re.compile(
    r"(?:error while loading shared libraries: |version [`'](?=[A-Z]+_[\d.]+' not found)|Library not loaded: )([^:'\s]+)"
)

_POLL_SECONDS: Final = 0.02
# One admin command to a node that answers at all takes milliseconds; one to a node that hangs must not stall a poll.
_COMMAND_SECONDS: Final = 5.0
_STOP_SECONDS: Final = 20.0
_LOG_LINES: Final = 15
_LOG_LINE_CHARACTERS: Final = 500

_HANDSHAKES: Final = frozenset({"hello", "isMaster", "ismaster"})

_HOW_TO_GET_ONE: Final = (
    f"Get one with `pip install 'otel-retry[mongod]'`, or set {BINARY_VARIABLE} to the path of a mongod, "
    f"or set {URI_VARIABLE} to use a deployment that already runs."
)


class MongodError(RuntimeError):
    """A mongod did not start, or did not do what was asked of it."""


class MongodUnavailable(MongodError):  # noqa: N818 - the name says what to tell the reader, not what kind of thing it is
    """There is no mongod that could run here; the message says what is missing and how to get it."""


class _PortTakenError(MongodError):
    pass


def start(
    nodes: int = 1,
    *,
    standalone: bool = False,
    parameters: Mapping[str, object] | None = None,
    timeout: float = 30.0,
) -> Deployment:
    """Start a replica set of `nodes` members, and return once it is writable and all others are secondaries.

    `standalone` starts one mongod that is no replica set, so without retryable writes or transactions. `parameters` are
    server parameters, as for `--setParameter`. `timeout` is in seconds, for the whole start.

    The deployment stops with its context manager, with `stop()`, when it is garbage, or when this process ends.
    """
    if nodes < 1:
        raise ValueError(f"A deployment has one node or more, not {nodes}.")
    if standalone and nodes != 1:
        raise ValueError(
            f"A standalone is one node, not {nodes}: leave out standalone=True for a replica set."
        )
    binary = find_binary()
    deadline = time.monotonic() + timeout
    last: _PortTakenError | None = None
    for _ in range(_PORT_ATTEMPTS):
        supervisor = _Supervisor()
        try:
            return _start_on(
                supervisor,
                binary,
                _free_ports(nodes),
                standalone=standalone,
                parameters=parameters or {},
                deadline=deadline,
            )
        except _PortTakenError as error:
            # Between the choice of a port and mongod's bind anybody may have taken it: choose again.
            supervisor.close()
            last = error
        except BaseException:
            supervisor.close()
            raise
    raise MongodError(
        f"{_PORT_ATTEMPTS} times mongod could not bind a port that had been free: {last}"
    ) from last


def deployment(
    nodes: int = 1,
    *,
    standalone: bool = False,
    parameters: Mapping[str, object] | None = None,
    timeout: float = 30.0,
) -> Deployment:
    """The deployment that `MONGODB_URI` names, or else one that is started as by `start()`.

    An external deployment is taken as it is: the arguments, but for `timeout` (seconds), apply to a started one only.
    """
    uri = os.environ.get(URI_VARIABLE)
    if not uri:
        return start(nodes, standalone=standalone, parameters=parameters, timeout=timeout)
    try:
        hello = _command(uri, {"hello": 1}, timeout=timeout)
    except MongodError as error:
        shown = re.sub(r"//.*@", "//***@", uri)  # to the last one: a password may have an @ or a / in it
        raise MongodUnavailable(
            f"{URI_VARIABLE}={shown!r} does not answer: {error}. Correct the variable, or unset it to have a mongod started."
        ) from error
    return Deployment(uri=uri, replica_set=hello.get("setName"))


def find_binary() -> Path:
    """The mongod to run: `OTEL_RETRY_MONGOD`, else the wheel of the extra `mongod`, else the one on `PATH`."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        path = Path(named).absolute()
        if not path.is_file():
            problem = "there is no such file"
        elif not os.access(path, os.X_OK):
            problem = "that file is not executable"
        else:
            return path
        raise MongodUnavailable(
            f"{BINARY_VARIABLE}={named!r}: {problem}. Set it to the path of a mongod executable, "
            "or unset it to use the one of `pip install 'otel-retry[mongod]'`."
        )
    # Searched for as a file: the wheel's package need not be imported, and its name differs between platforms.
    for entry in sys.path:
        path = Path(entry or ".", "fiftyone", "db", "bin", _EXECUTABLE).absolute()
        if path.is_file() and os.access(path, os.X_OK):
            return path
    if found := shutil.which("mongod"):
        return Path(found).absolute()
    raise MongodUnavailable(
        f"No mongod: neither in {BINARY_VARIABLE}, nor in a wheel, nor on PATH. {_HOW_TO_GET_ONE}"
    )


class Deployment:
    """A replica set or a standalone that this module started, or an external one, which has no nodes to handle.

    `uri` is what an application would be given. `directory` holds a folder per node with its data, its log
    (`mongod.log`) and what it printed (`output`); it is None for an external deployment.
    """

    def __init__(
        self,
        *,
        uri: str,
        replica_set: str | None,
        nodes: tuple[Node, ...] = (),
        supervisor: _Supervisor | None = None,
    ) -> None:
        self.uri = uri
        self.replica_set = replica_set
        self.nodes = nodes
        self._disturbed = False
        self._pids = self._seen_pids()
        self.directory = supervisor.directory if supervisor else None
        # At the interpreter's exit as well: an open pipe to a live child would otherwise end in a ResourceWarning.
        self._close = weakref.finalize(self, supervisor.close) if supervisor else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(node.address for node in self.nodes) or 'external'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the processes and remove the folder; again, or for an external deployment, do nothing."""
        if self._close:
            self._close()

    def primary(self, *, timeout: float = 15.0) -> Node:
        """The node that takes writes, waiting up to `timeout` seconds for an election."""
        found: list[Node] = []

        def elected() -> bool:
            found[:] = self._primaries()
            return bool(found)

        self._owned()
        self._wait(elected, "No primary", timeout)
        return found[0]

    def secondaries(self) -> tuple[Node, ...]:
        """The nodes that call themselves secondaries now; killed and suspended ones are left out."""
        return tuple(node for node, hello in self._greetings() if hello.get("secondary"))

    def wait_ready(self, *, timeout: float = 30.0) -> None:
        """Wait up to `timeout` seconds until one node is writable and every other node is a secondary."""
        others = len(self._owned()) - 1
        self._wait(
            lambda: len(self._primaries()) == 1 and len(self.secondaries()) == others,
            f"No primary with {others} secondaries",
            timeout,
        )

    def step_down(self, seconds: int = 1) -> None:
        """Make the primary step down and stay out of elections for `seconds`; does not wait for the next primary."""
        self._disturbed = True
        self.primary().command({"replSetStepDown": seconds, "force": True})

    def fail_command(
        self,
        node: Node | Literal["all"] | None = None,
        *,
        commands: Sequence[str],
        times: int | Literal["alwaysOn"] | None = None,
        probability: float | None = None,
        **data: Any,
    ) -> FailPoint:
        """Make `commands` fail on the primary, on `node`, or on all nodes, as the failpoint `failCommand` does.

        `data` is the failpoint's own: `errorCode`, `errorLabels`, `closeConnection`, `blockConnection` with
        `blockTimeMS`, `appName`, `writeConcernError`. The first `times` commands fail on each node, or all of them
        (`"alwaysOn"`, the default), or each with a `probability` between 0 and 1.

        It is on when this returns, and stays on until `FailPoint.off()`, the end of a `with` block around it, the
        next `fail_command` on the same node (a node has but one), or `clear_failpoints()`.
        """
        if isinstance(commands, str):
            raise TypeError(f"commands is a list of names, not one name: [{commands!r}].")
        if _HANDSHAKES.intersection(commands) and "appName" not in data:
            # Otherwise the connection that is to switch the failpoint off would fail as well.
            raise ValueError(
                "To fail the handshake (hello, isMaster), give the appName of the client that shall fail."
            )
        mode: object = "alwaysOn" if times is None else times
        if probability is not None:
            mode = {"activationProbability": probability}
        elif isinstance(mode, int):
            mode = {"times": mode}
        if not self.nodes:
            if node is not None:
                raise MongodError("The nodes of an external deployment cannot be chosen: leave out node.")
            targets: tuple[str, ...] = (self.uri,)
        elif node == "all":
            targets = tuple(each.uri for each in self._reachable())
        else:
            targets = ((node or self.primary()).uri,)
        self._disturbed = True
        point = FailPoint(uris=targets)
        point._set(mode, {"failCommands": list(commands), **data})
        return point

    def clear_failpoints(self) -> None:
        """Switch `failCommand` off everywhere; killed and suspended nodes are passed over."""
        FailPoint(uris=tuple(node.uri for node in self._reachable()) if self.nodes else (self.uri,)).off()

    def heal(self, *, timeout: float = 30.0) -> None:
        """Undo what was done to the nodes: resume, restart, switch failpoints off, and wait (seconds) until ready.

        Costs nothing if nothing was done: tests call it after each of them.
        """
        untouched = all(node.alive and not node.suspended for node in self.nodes)
        if self.nodes and untouched and not self._disturbed and self._pids == self._seen_pids():
            return
        for node in self.nodes:
            if node.suspended:
                node.resume()
            if not node.alive:
                node.restart(timeout=timeout)
        self.clear_failpoints()
        self._disturbed = False
        self._pids = self._seen_pids()
        if not self.nodes or not self.replica_set:
            return
        for node in self.nodes:
            # Ends the wait of a node that stepped down; a primary refuses, and needs no such thing.
            with contextlib.suppress(MongodError):
                node.command({"replSetFreeze": 0})
        self.wait_ready(timeout=timeout)

    def _seen_pids(self) -> tuple[int, ...]:
        """A node that was killed and restarted is another process."""
        return tuple(node.pid for node in self.nodes)

    def _owned(self) -> tuple[Node, ...]:
        if not self.nodes:
            raise MongodError(f"An external deployment ({URI_VARIABLE}) has no nodes to handle.")
        return self.nodes

    def _reachable(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.alive and not node.suspended)

    def _greetings(self) -> Iterator[tuple[Node, dict[str, Any]]]:
        for node in self._reachable():
            # A node may be between two states, or killed meanwhile by another thread: then it has nothing to say.
            with contextlib.suppress(MongodError):
                yield node, node.command({"hello": 1}, timeout=1.0)

    def _primaries(self) -> list[Node]:
        """The newest first: one that was suspended may claim to be primary until it hears of its successor."""
        claims = [
            (hello.get("electionId"), node)
            for node, hello in self._greetings()
            if hello.get("isWritablePrimary")
        ]
        return [node for _, node in sorted(claims, key=lambda claim: str(claim[0]), reverse=True)]

    def _wait(self, condition: Callable[[], bool], complaint: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {node.address}\n{node.log_tail()}" for node in self.nodes)
                raise MongodError(f"{complaint} within {timeout:.1f} s.\n{logs}")
            time.sleep(_POLL_SECONDS)


class Node:
    """One mongod that this module started; it keeps its port and its data when it is killed and restarted."""

    host = _HOST

    def __init__(
        self, *, supervisor: _Supervisor, port: int, directory: Path, arguments: Sequence[str]
    ) -> None:
        self.port = port
        self.address = f"{_HOST}:{port}"
        self.uri = f"mongodb://{self.address}/?directConnection=true"
        self.directory = directory
        self.suspended = False
        self._supervisor = supervisor
        self._arguments = list(arguments)
        self._pid = self._spawn()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    @property
    def pid(self) -> int:
        """The process, or the last one if it was killed."""
        return self._pid

    @property
    def alive(self) -> bool:
        """Whether the process exists; a suspended one does."""
        return not self._supervisor.closed and self._supervisor.request("poll", pid=self._pid) is None

    def kill(self) -> None:
        """SIGKILL, as a crash; returns when the process is gone."""
        self._supervisor.request("kill", pid=self._pid)
        self.suspended = False

    def suspend(self) -> None:
        """SIGSTOP, as a hang: connections stay open and nothing answers."""
        self._supervisor.request("signal", pid=self._pid, signal="SIGSTOP")
        self.suspended = True

    def resume(self) -> None:
        """SIGCONT, the end of `suspend()`."""
        self._supervisor.request("signal", pid=self._pid, signal="SIGCONT")
        self.suspended = False

    def restart(self, *, timeout: float = 30.0) -> None:
        """Start the process again, killing it first if need be; returns when it answers, before any election.

        `timeout` is in seconds.
        """
        self.kill()
        deadline = time.monotonic() + timeout
        while True:
            self._pid = self._spawn()
            try:
                self._wait_answering(deadline)
                return
            except _PortTakenError:
                # Somebody else has the port for now, and the other members know this node by it.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)

    def command(self, command: Mapping[str, Any], *, timeout: float = _COMMAND_SECONDS) -> dict[str, Any]:
        """Run a command on this node's `admin` database, within `timeout` seconds, on a connection of its own."""
        return _command(self.uri, command, timeout=timeout)

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        """The last lines of what the process printed and logged, and before them every error that it logged."""
        said: list[str] = []
        for name in ("output", "mongod.log"):
            with contextlib.suppress(OSError):
                said += (self.directory / name).read_text(encoding="utf-8", errors="replace").splitlines()
        # mongod says much while it shuts down, so that the reason may stand far above the end.
        errors = [line for line in said[:-lines] if re.search(r'"s":"[EF]"', line)]
        return "\n".join(line[:_LOG_LINE_CHARACTERS] for line in [*errors, *said[-lines:]])

    def _spawn(self) -> int:
        output = str(self.directory / "output")
        pid: int = self._supervisor.request("spawn", arguments=self._arguments, output=output)
        return pid

    def _wait_answering(self, deadline: float) -> None:
        while True:
            code = self._supervisor.request("poll", pid=self._pid)
            if code is not None:
                raise self._start_error(code)
            if self._answers():
                return
            if time.monotonic() > deadline:
                raise MongodError(f"mongod on {self.address} does not answer in time.\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)

    def _answers(self) -> bool:
        try:
            socket.create_connection((_HOST, self.port), timeout=1.0).close()
            status = self.command({"serverStatus": 1, "repl": 0, "metrics": 0}, timeout=1.0)
        except (OSError, MongodError):
            return False
        # Another mongod may sit on the port, in which case this one is about to say so and exit.
        return bool(status["pid"] == self._pid)

    def _start_error(self, code: int) -> MongodError:
        binary, tail = self._arguments[0], self.log_tail()
        if missing := _MISSING_LIBRARY.search(tail):
            return MongodUnavailable(
                f"{binary} needs the shared library {missing[1]}, which is missing. "
                f"On Debian and Ubuntu: `apt-get install libcurl4 libssl3`. {_HOW_TO_GET_ONE}\n{tail}"
            )
        if code == _EXIT_CANNOT_RUN:
            return MongodUnavailable(f"{binary} cannot be run (exit code {code}). {_HOW_TO_GET_ONE}\n{tail}")
        if code == _EXIT_NET_ERROR:
            return _PortTakenError(f"port {self.port} is taken.\n{tail}")
        return MongodError(
            f"{binary} ended with exit code {code} before it answered on {self.address}.\n{tail}"
        )


class FailPoint:
    """The failpoint `failCommand` on the nodes where it was set."""

    def __init__(self, *, uris: Sequence[str]) -> None:
        self._uris = tuple(uris)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.off()

    def off(self) -> None:
        """Switch it off; a node that is gone has none."""
        for uri in self._uris:
            with contextlib.suppress(MongodError):
                _command(uri, {"configureFailPoint": "failCommand", "mode": "off"}, timeout=_COMMAND_SECONDS)

    def _set(self, mode: object, data: Mapping[str, Any]) -> None:
        for uri in self._uris:
            command = {"configureFailPoint": "failCommand", "mode": mode, "data": dict(data)}
            _command(uri, command, timeout=_COMMAND_SECONDS)


def _start_on(
    supervisor: _Supervisor,
    binary: Path,
    ports: Sequence[int],
    *,
    standalone: bool,
    parameters: Mapping[str, object],
    deadline: float,
) -> Deployment:
    nodes = []
    for port in ports:
        directory = supervisor.directory / str(port)
        (directory / "data").mkdir(parents=True)
        arguments = [
            *(str(binary), "--bind_ip", _HOST, "--port", str(port)),
            *("--dbpath", str(directory / "data"), "--logpath", str(directory / "mongod.log"), "--logappend"),
            *("--wiredTigerCacheSizeGB", "0.25", "--wiredTigerEngineConfigString", _ENGINE_CONFIG),
        ]
        if sys.platform != "win32":
            arguments.append("--nounixsocket")
        if not standalone:
            arguments += ["--replSet", _REPLICA_SET, "--oplogSize", "64"]
        for name, value in {**_PARAMETERS, **parameters}.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            arguments += ["--setParameter", f"{name}={text}"]
        nodes.append(Node(supervisor=supervisor, port=port, directory=directory, arguments=arguments))
    for node in nodes:
        node._wait_answering(deadline)

    addresses = ",".join(node.address for node in nodes)
    if standalone:
        uri = f"mongodb://{addresses}/?directConnection=true"
        return Deployment(uri=uri, replica_set=None, nodes=tuple(nodes), supervisor=supervisor)
    members = [{"_id": number, "host": node.address} for number, node in enumerate(nodes)]
    config = {"_id": _REPLICA_SET, "members": members, "settings": _REPLICA_SET_SETTINGS}
    nodes[0].command({"replSetInitiate": config}, timeout=max(1.0, deadline - time.monotonic()))
    uri = f"mongodb://{addresses}/?replicaSet={_REPLICA_SET}"
    started = Deployment(uri=uri, replica_set=_REPLICA_SET, nodes=tuple(nodes), supervisor=supervisor)
    started.wait_ready(timeout=max(1.0, deadline - time.monotonic()))
    return started


def _command(uri: str, command: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
    # Imported here, since the supervisor runs this file without any site-packages.
    from pymongo import MongoClient  # noqa: PLC0415
    from pymongo.errors import PyMongoError  # noqa: PLC0415

    milliseconds = max(1, int(timeout * 1000))
    try:
        client: MongoClient[dict[str, Any]] = MongoClient(
            uri,
            appname=APP_NAME,
            serverSelectionTimeoutMS=milliseconds,
            connectTimeoutMS=milliseconds,
            socketTimeoutMS=milliseconds,
            retryReads=False,
            retryWrites=False,
        )
        with client:
            return dict(client.admin.command(dict(command)))
    except PyMongoError as error:
        raise MongodError(f"{next(iter(command))} failed: {error}") from error


def _free_ports(count: int) -> list[int]:
    ports: list[int] = []
    # Not the module's generator: a test that seeds it would have every run fight for the same ports.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise MongodError(f"No {count} free ports on {_HOST} between {_PORTS.start} and {_PORTS.stop}.")


class _Supervisor:
    """The caller's end of the pipe: while it is open, the processes and the folder live; one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.closed = False
        self._number = 0
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this file
            # Isolated and without site: no PYTHONPATH, no auto-instrumentation, no modules of this package by accident.
            [sys.executable, "-I", "-S", __file__, _SUPERVISE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            # Ctrl-C goes to the terminal's whole process group: this one must outlive it, to clean up.
            start_new_session=True,
        )
        _supervisors.add(self)
        self.directory = Path(self._answer())

    def request(self, action: str, **arguments: Any) -> Any:
        with self._lock:
            if self.closed:
                raise MongodError("The deployment is stopped.")
            pipe = self._pipes()[0]
            self._number += 1
            try:
                pipe.write(json.dumps({"number": self._number, "action": action, **arguments}) + "\n")
                pipe.flush()
            except OSError as error:
                raise MongodError("The supervisor of the mongod processes has ended.") from error
            return self._answer()

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            requests, replies = self._pipes()
            with contextlib.suppress(OSError):
                requests.close()
            self._process.wait(timeout=_STOP_SECONDS)
            replies.close()

    def abandon(self) -> None:
        """In a forked child: let go of the pipe, or the parent's death would go unnoticed while the child lives."""
        self._lock = threading.Lock()
        self.closed = True
        for pipe in self._pipes():
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.returncode = 0

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        requests, replies = self._process.stdin, self._process.stdout
        if requests is None or replies is None:
            raise AssertionError("both were asked for")
        return requests, replies

    def _answer(self) -> Any:
        while line := self._pipes()[1].readline():
            reply = json.loads(line)
            # A Ctrl-C between a request and its answer leaves the answer in the pipe, for nobody.
            if reply["number"] != self._number:
                continue
            if "error" in reply:
                raise MongodUnavailable(f"{reply['error']}. {_HOW_TO_GET_ONE}")
            return reply["answer"]
        raise MongodError("The supervisor of the mongod processes has ended.")


_supervisors: weakref.WeakSet[_Supervisor] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for supervisor in list(_supervisors):
        supervisor.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _supervise(requests: IO[str], replies: IO[str]) -> None:
    """The supervisor's life: answer until the pipe closes, then leave nothing behind."""
    children: dict[int, subprocess.Popen[bytes]] = {}
    directory = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
    try:
        _reply(replies, number=0, answer=directory)
        for line in requests:
            request = json.loads(line)
            try:
                answer = _perform(request, children)
            except OSError as error:
                _reply(replies, number=request["number"], error=str(error))
            else:
                _reply(replies, number=request["number"], answer=answer)
    finally:
        for child in children.values():
            child.kill()
        for child in children.values():
            child.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _perform(request: dict[str, Any], children: dict[int, subprocess.Popen[bytes]]) -> int | None:
    if request["action"] == "spawn":
        with Path(request["output"]).open("ab") as output:
            child = subprocess.Popen(  # noqa: S603 - the binary that find_binary() chose
                request["arguments"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        children[child.pid] = child
        return child.pid
    child = children[request["pid"]]
    if request["action"] == "signal":
        child.send_signal(signal.Signals[request["signal"]])
    elif request["action"] == "kill":
        child.kill()
        child.wait()
    return child.poll()


def _reply(replies: IO[str], **reply: object) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit


if __name__ == "__main__" and sys.argv[1:] == [_SUPERVISE]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    _supervise(sys.stdin, sys.stdout)
