"""Programs that run beside the tests, and end with them, however the tests end."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

Value = TypeVar("Value")

HOST = "127.0.0.1"
# Below what systems lend to outgoing connections, so that a port is still free when its program is started again; below
# those of mongod; and others for each worker of pytest-xdist: between the choice of a port and the program's bind nobody
# of ours may take it.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = range(10_000 + _WORKER % 10 * 1000, 11_000 + _WORKER % 10 * 1000)

# The shell holds the other end of a pipe from here. It closes when this process ends in whatever way, or when `kill`
# closes it; then the program is killed too.
_LEASH = '"$@" </dev/null & program=$!; read -r _; kill -9 $program; wait $program'


class StackError(RuntimeError):
    """Something that the tests stand on did not come up or did not answer; the message holds the end of its log."""


class Program:
    """A program on a leash. It can be killed and started again, as often as a test likes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        ready: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = list(command)
        # Nothing of ours but PATH: an OTEL_ variable of the shell that runs the tests must not reach a backend.
        self._environment = {"PATH": os.environ["PATH"], **(environment or {})}
        self._ready = ready
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, timeout: float = 60.0) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _LEASH, "sh", *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
            )
        wait_until(
            lambda: _answers(self._ready),
            f"{self.name} does not answer at {self._ready}",
            self,
            timeout=timeout,
        )

    def kill(self) -> None:
        """With SIGKILL: it has no chance to save or to say goodbye."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def wait_until(
    condition: Callable[[], Value], complaint: str, *programs: Program, timeout: float = 60.0
) -> Value:
    """The first true answer of `condition`, asked again and again for up to `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        asked = time.monotonic()
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            logs = "".join(f"\n--- {program.name}\n{program.log_tail()}" for program in programs)
            raise StackError(f"After {timeout:.0f} s: {complaint}{logs}")
        # Whoever is slow to answer has enough to do.
        time.sleep(max(0.1, time.monotonic() - asked))


def free_ports(names: Iterable[str]) -> dict[str, int]:
    """A port for each name."""
    found: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        for name in names:
            while name not in found:
                probe = held.enter_context(socket.socket())
                with contextlib.suppress(OSError):
                    probe.bind((HOST, random.choice(_PORTS)))
                    found[name] = probe.getsockname()[1]
    return found


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False
