"""Where an operation's work is done: bytecodes by function, counted exactly by tracing one operation of a warm process.

It sees Python code only: what C code does (BSON, dictionaries, locks) is in the instructions that callgrind counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from benchmarks.environments import ROOT
from benchmarks.workload import Bench, Load

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType, FrameType

WARM_UP = 20
# A file's owner, by the first of these that its path has; the rest is the standard library's.
OWNERS = (
    ("/otel_retry/telemetry/", "otel_retry, telemetry"),
    ("/otel_retry/pymongo/listener", "otel_retry, telemetry"),
    ("/otel_retry/", "otel_retry, engine"),
    ("/opentelemetry/sdk/", "OpenTelemetry SDK"),
    ("/opentelemetry/instrumentation/pymongo", "opentelemetry-instrumentation-pymongo"),
    ("/opentelemetry/", "OpenTelemetry API"),
    ("/pymongo/monitoring", "PyMongo, its events"),
    ("/pymongo/", "PyMongo"),
    ("/bson/", "PyMongo"),
    ("/benchmarks/", "the benchmark"),
)


def profile(variant: str, case: str) -> Counter[CodeType]:
    """Bytecodes of one operation, by the code that executed them."""
    load = Load.parse(case)
    bench = Bench(variant)
    bench.run(load, WARM_UP)
    found: Counter[CodeType] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            found[frame.f_code] += 1
        else:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        return trace

    def traced(count: int) -> Counter[CodeType]:
        found.clear()
        sys.settrace(trace)
        try:
            bench.run(load, count)
        finally:
            sys.settrace(None)
        return found.copy()

    one = traced(1)
    two = traced(2)
    two.subtract(one)  # what a block costs, whatever its length, drops out
    return Counter({code: count for code, count in two.items() if count > 0})


def owner(filename: str) -> str:
    return next((name for part, name in OWNERS if part in filename), "standard library")


def by_owner(found: Counter[CodeType]) -> Counter[str]:
    total: Counter[str] = Counter()
    for code, count in found.items():
        total[owner(code.co_filename)] += count
    return total


def by_function(found: Counter[CodeType]) -> Counter[tuple[str, str]]:
    """By owner and by `module.function`."""
    total: Counter[tuple[str, str]] = Counter()
    for code, count in found.items():
        module = "/".join(code.co_filename.removesuffix(".py").split("/")[-2:])
        total[owner(code.co_filename), f"{module}:{code.co_qualname}"] += count
    return total


def in_processes(variants: Iterable[str], case: str, most: int) -> dict[str, Any]:
    """Each variant in a process of its own: by owner, and the last one's most expensive functions."""
    found: dict[str, Any] = {"case": case, "owners": {}, "functions": []}
    for variant in variants:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.opcodes", variant, case, str(most)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        found["owners"][variant], found["functions"] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    counted = profile(sys.argv[1], sys.argv[2])
    functions = [[*key, count] for key, count in by_function(counted).most_common(int(sys.argv[3]))]
    print(json.dumps([dict(by_owner(counted).most_common()), functions]))
    sys.stdout.flush()
    os._exit(0)
