"""Client CPU and wall time of an operation, measured so that the machine's moods fall on all alike.

Every variant has a process of its own. A round is one short block of each, in random order, all within the same second or
two; what a variant adds is its block less plain PyMongo's block of the same round, and the median over the rounds counts.
A second plain PyMongo takes part as a variant: what it seems to add is the noise.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from benchmarks import environments
from benchmarks.environments import ROOT
from benchmarks.variants import VARIANTS
from benchmarks.workload import OPERATIONS, WORKERS, Load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

CASES = tuple(
    Load(operation=operation, flavour=flavour, workers=workers)
    for operation in OPERATIONS
    for flavour, numbers in WORKERS.items()
    for workers in numbers
)
TRANSPORTS = ("mongod", "replay")
BLOCK_SECONDS = 0.03
"""Of plain PyMongo's CPU. Short, so that a disturbance hits few blocks; long beside the clocks' resolution."""
LEAST_OPERATIONS = 6

CLOCKS = ("cpu", "wall")
Block = dict[str, float]
Rounds = list[dict[str, Block]]
"""For each round, by variant: seconds per operation."""


class Refused(Exception):  # noqa: N818 - goes into the table as it is
    """A variant does not run, and why."""


class Process:
    """One variant's process, which does what it is told."""

    def __init__(self, variant: str, uri: str | None) -> None:
        self.variant = variant
        try:
            python = environments.python_of(VARIANTS[variant].environment)
        except environments.NotInstalled as reason:
            raise Refused(str(reason)) from None
        # A file, since nobody reads it: a pipe would fill up.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._child = subprocess.Popen(
            [python, "-m", "benchmarks.workload", variant, uri or "", "yields"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        greeting = self._answer()
        if "unavailable" in greeting:
            self.__exit__()
            raise Refused(greeting["unavailable"])
        self.pymongo = greeting["pymongo"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        line = self._child.stdout.readline() if self._child.stdout is not None else ""
        if not line:
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()
            raise Refused(said[-1] if said else "it ended without a word")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def block(self, load: Load, count: int) -> Block:
        if self._child.stdin is None:
            raise Refused("its input is closed")
        self._child.stdin.write(json.dumps({"load": asdict(load), "count": count}) + "\n")
        self._child.stdin.flush()
        answer = self._answer()
        if "failed" in answer:
            raise Refused(answer["failed"])
        return answer


def measure(
    variants: Iterable[str],
    cases: Sequence[Load],
    *,
    uri: str | None,
    rounds: int,
    report: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The summary of each case, by its name; and what did not run. `uri` None: replies are replayed."""
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for variant in variants:
            try:
                processes[variant] = stack.enter_context(Process(variant, uri))
            except Refused as reason:
                failures[variant] = str(reason)
                report(f"{variant} does not run: {reason}")
        found: dict[str, Any] = {}
        for number, load in enumerate(cases, start=1):
            blocks = _rounds(processes, load, rounds, failures)
            found[name_of(load)] = summary(blocks)
            report(f"{number}/{len(cases)} {name_of(load)}: {rounds} rounds of {len(blocks[0])} variants")
    return found, failures


def _rounds(
    processes: Mapping[str, Process], load: Load, rounds: int, failures: dict[str, str]
) -> list[dict[str, Block]]:
    count = 0
    taking_part = {}
    for variant, process in processes.items():  # plain PyMongo is first: its pace sets the length for all
        try:
            least = max(load.workers, LEAST_OPERATIONS)
            process.block(load, least)
            if not count:
                count = max(round(BLOCK_SECONDS / process.block(load, least)["cpu"]), least)
            process.block(load, count)
        except Refused as reason:
            failures[f"{variant}, {name_of(load)}"] = str(reason)
        else:
            taking_part[variant] = process
    found = []
    for _ in range(rounds):
        order = list(taking_part.items())
        random.shuffle(order)
        found.append({variant: process.block(load, count) for variant, process in order})
    return found


def summary(rounds: Rounds) -> dict[str, dict[str, Any]]:
    """By variant, microseconds: the median itself, what it adds to what it stands against in the same round (median), and
    how far the middle half of the rounds spreads around that.
    """
    found: dict[str, dict[str, Any]] = {}
    for variant in rounds[0]:
        against = VARIANTS[variant].against
        found[variant] = {}
        for clock in CLOCKS:
            itself = [each[variant][clock] * 1e6 for each in rounds]
            row = {"median": round(statistics.median(itself), 1)}
            if against != variant and against in rounds[0]:
                added = [(each[variant][clock] - each[against][clock]) * 1e6 for each in rounds]
                row["added"] = round(statistics.median(added), 1)
                row["spread"] = round(_spread(added), 1)
            found[variant][clock] = row
    return found


def _spread(values: list[float]) -> float:
    """Half the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2


def name_of(load: Load) -> str:
    return f"{load.operation}/{load.flavour}/{load.workers}"
