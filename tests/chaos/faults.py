"""What is done to the cluster, and when: all of it follows from the seed, except on whom, where that is a role.

Faults come in tracks, one after the other within a track, so several are on at once: one process trouble (never more
than one node down), one failpoint, two troubles of the net.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from otel_retry.mongod import MongodError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.cluster import Cluster

APP_NAME = "chaos"
"""Of the workload's clients: failpoints aim at it, and spare everybody else."""

OVERLOAD = {"errorCode": 462, "errorLabels": ["SystemOverloadedError", "RetryableError"]}
WRITES = ["insert", "update", "delete", "findAndModify"]
COMMANDS = [*WRITES, "find", "getMore", "aggregate", "count", "distinct", "commitTransaction"]
HANDSHAKE = ["hello", "isMaster", "ismaster"]


@dataclass(frozen=True, slots=True)
class Fault:
    """`on`: a node's number, or `primary` or `all`, which is looked up when it begins. Times in seconds."""

    at: float
    kind: str
    on: str
    seconds: float
    share: float = 1.0
    data: Any = None

    def __str__(self) -> str:
        share = f" {self.share:.2f}" if self.share < 1 else ""
        return f"{self.at:6.1f} s  {self.kind:<17} {self.on:<8} {self.seconds:4.1f} s{share}"


def _process(chance: random.Random, at: float) -> Fault:
    kind = chance.choice(["step_down", "step_down", "kill", "suspend"])
    on = chance.choice(["primary", "primary", "0", "1", "2"])
    seconds = {"step_down": 1.0, "kill": chance.uniform(0.5, 2.5), "suspend": chance.uniform(0.3, 4.0)}
    return Fault(at, kind, "primary" if kind == "step_down" else on, seconds[kind])


# Kind, commands, data of the failpoint, the range of its share, on whom.
_FAILPOINTS: tuple[tuple[str, list[str], list[dict[str, Any]], tuple[float, float], str], ...] = (
    ("overload", COMMANDS, [OVERLOAD], (0.2, 0.8), "all"),
    ("overload", COMMANDS, [OVERLOAD], (0.2, 0.8), "all"),
    ("handshake_closed", HANDSHAKE, [{"closeConnection": True}], (0.3, 0.8), "primary"),
    ("handshake_refused", HANDSHAKE, [OVERLOAD], (0.3, 0.8), "all"),
    (
        "get_more_fails",
        ["getMore"],
        [{"closeConnection": True}, {"errorCode": 43}, {"errorCode": 91}],
        (0.1, 0.5),
        "all",
    ),
    (
        "slow_server",
        COMMANDS,
        [{"blockConnection": True, "blockTimeMS": each} for each in (200, 800, 2500)],
        (0.02, 0.1),
        "all",
    ),
    (
        "retryable_error",
        COMMANDS,
        [{"errorCode": 91}, {"errorCode": 10107}, {"errorCode": 11600}],
        (0.02, 0.2),
        "primary",
    ),
    (
        "write_concern",
        WRITES,
        [
            {
                "writeConcernError": {
                    "code": 91,
                    "errmsg": "applied, then it shut down",
                    "errorLabels": ["RetryableWriteError"],
                }
            }
        ],
        (0.05, 0.3),
        "primary",
    ),
    ("closed", COMMANDS, [{"closeConnection": True}], (0.02, 0.2), "all"),
)


def _failpoint(chance: random.Random, at: float) -> Fault:
    kind, commands, data, shares, on = chance.choice(_FAILPOINTS)
    return Fault(
        at,
        kind,
        on,
        chance.uniform(0.8, 3.0),
        chance.uniform(*shares),
        {"failCommands": commands, "appName": APP_NAME, **chance.choice(data)},
    )


# Kind, the range of its share, the longest time it lasts. The share of `slow` is seconds of delay.
_NETWORK: tuple[tuple[str, tuple[float, float], float], ...] = (
    ("cut_reply", (0.1, 0.6), 3.0),
    ("cut_reply", (0.1, 0.6), 3.0),
    ("cut_reply", (0.1, 0.6), 3.0),
    ("torn_reply", (0.1, 0.5), 2.0),
    ("cut_request", (0.1, 0.4), 2.0),
    ("reset", (1.0, 1.0), 0.1),
    ("stall", (1.0, 1.0), 2.5),
    ("slow", (0.005, 0.05), 2.0),
    ("fragment", (1.0, 1.0), 2.0),
    ("refuse", (0.3, 1.0), 1.5),
)


def _network(chance: random.Random, at: float) -> Fault:
    kind, shares, longest = chance.choice(_NETWORK)
    on = chance.choice(["primary", "primary", "primary", "0", "1", "2"])
    return Fault(at, kind, on, chance.uniform(0.1, longest), chance.uniform(*shares))


_TRACKS: tuple[tuple[Callable[[random.Random, float], Fault], tuple[float, float]], ...] = (
    (_process, (10.0, 20.0)),
    (_failpoint, (2.0, 8.0)),
    (_network, (2.0, 7.0)),
    (_network, (3.0, 11.0)),
)
"""What makes a track's faults, and the range of the calm between two of them."""

KINDS = sorted(
    {
        "step_down",
        "kill",
        "suspend",
        *(entry[0] for entry in _FAILPOINTS),
        *(entry[0] for entry in _NETWORK),
    }
)


def schedule(seed: int, duration: float) -> list[list[Fault]]:
    """The tracks of one run."""
    tracks = []
    for number, (make, calm) in enumerate(_TRACKS):
        chance = random.Random(f"{seed}/{number}")
        faults = []
        at = chance.uniform(0.5, calm[1])
        while at < duration:
            fault = make(chance, at)
            faults.append(fault)
            at += fault.seconds + chance.uniform(*calm)
        tracks.append(faults)
    return tracks


class Injector:
    """Plays a schedule in threads, one for each track; `overloaded` is set while an overload wave is on."""

    def __init__(self, cluster: Cluster, tracks: list[list[Fault]], *, duration: float) -> None:
        self._cluster = cluster
        self._tracks = tracks
        self._duration = duration
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.overloaded = threading.Event()
        self.overload_seconds = 0.0

    def start(self) -> None:
        self._began = time.monotonic()
        self._threads = [
            threading.Thread(target=self._play, args=(track,), name=f"chaos-track-{number}")
            for number, track in enumerate(self._tracks)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _play(self, track: list[Fault]) -> None:
        for fault in track:
            wait = self._began + fault.at - time.monotonic()
            if self._over.wait(max(0.0, wait)) or time.monotonic() - self._began >= self._duration:
                return
            try:
                done = self._commit(fault)
            except (MongodError, PyMongoError):
                done = False  # the node is in the middle of some other trouble
            with self._lock:
                (self.done if done else self.skipped)[fault.kind] += 1

    def _commit(self, fault: Fault) -> bool:
        """Begin the fault, let it last, end it. False: it could not be done to the cluster as it is."""
        nodes = self._nodes(fault.on)
        if not nodes:
            return False
        if fault.kind in {"step_down", "kill", "suspend"}:
            return self._cluster.trouble(fault.kind, nodes[0], fault.seconds, self._over.wait)
        if fault.data is not None:
            return self._failpoint(fault, nodes)
        for node in nodes:
            self._cluster.proxies.ask(fault=fault.kind, node=node, seconds=fault.seconds, share=fault.share)
        self._over.wait(fault.seconds)
        return True

    def _failpoint(self, fault: Fault, nodes: list[int]) -> bool:
        reached = [node for node in nodes if self._cluster.set_failpoint(node, fault.share, fault.data)]
        began = time.monotonic()
        if fault.kind == "overload" and reached:
            self.overloaded.set()
        self._over.wait(fault.seconds)
        if fault.kind == "overload" and reached:
            self.overloaded.clear()
            self.overload_seconds += time.monotonic() - began
        for node in reached:
            self._cluster.clear_failpoint(node)
        return bool(reached)

    def _nodes(self, on: str) -> list[int]:
        if on == "all":
            return list(range(len(self._cluster.deployment.nodes)))
        if on == "primary":
            found = self._cluster.primary()
            return [] if found is None else [found]
        return [int(on)]
