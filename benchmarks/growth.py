"""What is paid beside the cost of a calm operation: at start, in memory, while retrying, and with more of everything."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

from benchmarks import environments, instructions, startup, timing
from benchmarks.variants import VARIANTS
from benchmarks.workload import Load

Report = Callable[[str], None]

MEMORY = ("plain", "contrib", "engine", "no_sdk", "off_metrics", "retried", "recording")
MANY = ("plain", "recording")
MILLION = 1_000_000
ATTEMPTS = (1, 3, 5)
# PyMongo's own loop makes at most three attempts when it is rejected for overload.
RETRYING = {
    "plain": ATTEMPTS[:2],
    "engine": ATTEMPTS,
    "off_metrics": ATTEMPTS,
    "retried": ATTEMPTS,
    "recording": ATTEMPTS,
}
NUMBERS = {"clients": (1, 10, 50), "collections": (1, 100, 1000)}
WORKERS = tuple(
    Load(operation="insert_one", flavour=flavour, workers=workers)
    for flavour, numbers in (("sync", (1, 8, 32)), ("async", (1, 50, 200)))
    for workers in numbers
)
WORKING = ("plain", "plain_again", "recording")


def measure(part: str, *, operations: int, rounds: int, report: Callable[[str], None]) -> dict[str, Any]:
    return PARTS[part](operations, rounds, report)


def _startup(_: int, rounds: int, report: Report) -> dict[str, Any]:
    return startup.measure(rounds, report)


def _in_flight(_: int, __: int, report: Report) -> dict[str, Any]:
    return {variant: _memory(report, "in_flight", variant) for variant in MEMORY}


def _many(operations: int, _: int, report: Report) -> dict[str, Any]:
    return {variant: _memory(report, "many", variant, str(operations)) for variant in MANY}


def _workers(_: int, rounds: int, report: Report) -> dict[str, Any]:
    return timing.measure(WORKING, WORKERS, uri=None, rounds=rounds, report=report)[0]


def _attempts(_: int, __: int, report: Report) -> dict[str, Any]:
    """Instructions, since a bucket of tokens is soon empty if one times what is always rejected."""
    found: dict[str, Any] = {}
    for variant, attempts in RETRYING.items():
        cases = {str(number): f"insert_one/sync/attempts={number}" for number in attempts}
        counts, _failures = instructions.count([variant], cases.values(), report)
        if variant in counts:
            found[variant] = {number: counts[variant][case] for number, case in cases.items()}
    return found


def _numbers(_: int, __: int, report: Report) -> dict[str, Any]:
    found = {}
    for what, numbers in NUMBERS.items():
        cases = [f"insert_one/sync/{what}={number}" for number in numbers]
        found[what], _failures = instructions.count(("plain", "recording"), cases, report)
    return found


PARTS: dict[str, Callable[[int, int, Report], dict[str, Any]]] = {
    "startup": _startup,
    "in_flight": _in_flight,
    "workers": _workers,
    "attempts": _attempts,
    "numbers": _numbers,
    "many": _many,
}
COUNTED = ("attempts", "numbers")


def _memory(report: Callable[[str], None], what: str, variant: str, *options: str) -> dict[str, Any]:
    report(f"memory, {what}: {variant}")
    done = subprocess.run(
        [
            environments.python_of(VARIANTS[variant].environment),
            "-m",
            "benchmarks.memory",
            what,
            variant,
            *options,
        ],
        cwd=environments.ROOT,
        env=os.environ | {"PYTHONPATH": str(environments.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
