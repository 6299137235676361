"""What is paid beside the cost of a calm operation: at start, in memory, while retrying, and with more of everything."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from benchmarks import environments, instructions, startup, timing
from benchmarks.variants import VARIANTS
from benchmarks.workload import Load

if TYPE_CHECKING:
    from collections.abc import Callable

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


def measure(*, operations: int, rounds: int, report: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {"startup": startup.measure(rounds, report)}
    found["in_flight"] = {variant: _memory(report, "in_flight", variant) for variant in MEMORY}
    found["many"] = {variant: _memory(report, "many", variant, str(operations)) for variant in MANY}
    found["workers"], _ = timing.measure(WORKING, WORKERS, uri=None, rounds=rounds, report=report)
    if instructions.installed():
        found["attempts"] = {}
        for variant, attempts in RETRYING.items():
            cases = [f"insert_one/sync/attempts={number}" for number in attempts]
            counts, failures = instructions.count([variant], cases, report)
            found["attempts"][variant] = dict(
                zip(map(str, attempts), counts.get(variant, {}).values(), strict=False)
            )
            found["attempts"][variant] |= failures
        found["numbers"] = {
            what: instructions.count(
                ("plain", "recording"), [f"insert_one/sync/{what}={number}" for number in numbers], report
            )[0]
            for what, numbers in NUMBERS.items()
        }
    else:
        report(instructions.HOW_TO_INSTALL)
    return found


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
