"""What a process pays once: the import, and the start under `opentelemetry-instrument`, each in fresh processes in turn."""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

INSTRUMENT = str(Path(sys.executable).with_name("opentelemetry-instrument"))
# Without exporters: connecting to a Collector is not what is measured.
QUIET = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
DISABLED = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"

Command = tuple[list[str], dict[str, str]]

IMPORTS: dict[str, Command] = {
    "python": ([sys.executable, "-c", "pass"], {}),
    "import pymongo": ([sys.executable, "-c", "import pymongo"], {}),
    "import pymongo, otel_retry": ([sys.executable, "-c", "import pymongo, otel_retry"], {}),
    "import pymongo, contrib": (
        [sys.executable, "-c", "import pymongo, opentelemetry.instrumentation.pymongo"],
        {},
    ),
}
_PROGRAM = [INSTRUMENT, sys.executable, "-c", "import pymongo"]
STARTS: dict[str, Command] = {
    "opentelemetry-instrument, neither": (_PROGRAM, {DISABLED: "otel_retry,pymongo", **QUIET}),
    "opentelemetry-instrument, contrib": (_PROGRAM, {DISABLED: "otel_retry", **QUIET}),
    "opentelemetry-instrument, otel_retry": (_PROGRAM, {DISABLED: "pymongo", **QUIET}),
}


def measure(rounds: int, report: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Milliseconds, medians over the rounds: wall, and CPU of the process with all that it starts."""
    commands = IMPORTS | STARTS
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        order = list(commands)
        random.shuffle(order)
        for name in order:
            once = _once(*commands[name])
            if number:  # the first writes byte code
                found[name].append(once)
        report(f"start-up, round {number} of {rounds}")
    return {
        name: {
            "wall": round(statistics.median(wall for wall, _ in each) * 1e3, 1),
            "cpu": round(statistics.median(cpu for _, cpu in each) * 1e3, 1),
        }
        for name, each in found.items()
    }


def _once(command: list[str], environment: Mapping[str, str]) -> tuple[float, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
