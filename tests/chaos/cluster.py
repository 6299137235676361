"""Three real mongods as a replica set, each behind a proxy; clients know only the proxies."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Self

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from otel_retry import mongod
from tests.chaos.proxy import HOST, Proxies

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

NODES = 3

_PARAMETERS = {
    # A transaction whose client was cut off holds its documents until then.
    "transactionLifetimeLimitSeconds": 5,
}


class Cluster:
    """`uri` leads through the proxies; `deployment.uri` leads to the nodes themselves, past every fault of the net."""

    def __init__(self, *, seed: int) -> None:
        self.deployment = mongod.start(NODES, parameters=_PARAMETERS, timeout=120)
        try:
            self.proxies = Proxies([node.port for node in self.deployment.nodes], seed=seed)
        except BaseException:
            self.deployment.stop()
            raise
        addresses = ",".join(f"{HOST}:{port}" for port in self.proxies.ports)
        self.uri = f"mongodb://{addresses}/?replicaSet={self.deployment.replica_set}"
        self._admins: list[MongoClient[dict[str, Any]]] = []

    def attend(self) -> None:
        """Open a client for each node, until `leave`: one for each question would take more than the questions do."""
        self._admins = [
            MongoClient(
                node.uri,
                serverSelectionTimeoutMS=500,
                connectTimeoutMS=500,
                socketTimeoutMS=1500,
                retryReads=False,
                maxPoolSize=4,
            )
            for node in self.deployment.nodes
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()
        self.proxies.close()
        self.deployment.stop()

    def leave(self) -> None:
        for admin in self._admins:
            admin.close()
        self._admins.clear()

    def heal(self) -> None:
        """Nothing is wrong any more: all nodes up, one primary, no failpoint, the net quick and quiet."""
        for node in range(NODES):
            self.proxies.ask(fault="heal", node=node)
        self.deployment.heal(timeout=120)
        self.deployment.clear_failpoints()
        self.deployment.wait_ready(timeout=120)

    def ask(self, node: int, command: dict[str, Any]) -> dict[str, Any]:
        """One admin command, past the proxy."""
        if self.deployment.nodes[node].suspended:
            raise mongod.MongodError("It is suspended, and would not answer.")
        return dict(self._admins[node].admin.command(command))

    def primary(self) -> int | None:
        """The node that takes writes now, if there is one."""
        for node in range(NODES):
            with contextlib.suppress(PyMongoError, mongod.MongodError):
                if self.ask(node, {"hello": 1}).get("isWritablePrimary"):
                    return node
        return None

    def is_whole(self) -> bool:
        """A primary and two secondaries."""
        roles = []
        for node in range(NODES):
            with contextlib.suppress(PyMongoError, mongod.MongodError):
                hello = self.ask(node, {"hello": 1})
                roles.append("primary" if hello.get("isWritablePrimary") else bool(hello.get("secondary")))
        return sorted(map(str, roles)) == ["True", "True", "primary"]

    def trouble(self, kind: str, number: int, seconds: float, wait: Callable[[float], Any]) -> bool:
        """Something happens to a process. Not before the last such trouble is over: a majority stays up."""
        deadline = time.monotonic() + 10
        while not self.is_whole():
            if time.monotonic() > deadline or wait(0.1):
                return False
        node = self.deployment.nodes[number]
        if kind == "step_down":
            command = {"replSetStepDown": 2, "secondaryCatchUpPeriodSecs": 1, "force": True}
            self.ask(number, command)
        elif kind == "kill":
            node.kill()
            wait(seconds)
            node.restart(timeout=120)
        else:
            node.suspend()
            wait(seconds)
            node.resume()
        return True

    def set_failpoint(self, node: int, share: float, data: dict[str, Any]) -> bool:
        mode = {"activationProbability": share}
        with contextlib.suppress(PyMongoError, mongod.MongodError):
            self.ask(node, {"configureFailPoint": "failCommand", "mode": mode, "data": data})
            return True
        return False

    def clear_failpoint(self, node: int) -> None:
        with contextlib.suppress(PyMongoError, mongod.MongodError):
            self.ask(node, {"configureFailPoint": "failCommand", "mode": "off"})
