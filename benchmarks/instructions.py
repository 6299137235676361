"""Instructions per operation, counted by callgrind: the same to a percent or two on a busy machine, so this is what is tracked.

The collector is off while it counts, and callgrind counts no cache misses and no waiting: it says how much work is done,
and timing.py says how long that takes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import callgrind, counted, results
from benchmarks.environments import ROOT, NotInstalled, python_of
from benchmarks.floor import FLOOR_OF, FLOORS
from benchmarks.variants import PEERS, VARIANTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.05

SMALL = ("plain", "engine", "no_sdk", "off", "off_metrics", "recording", "retried")
"""What CI counts: otel_retry in each of its states, against plain PyMongo."""
LARGE = (
    *SMALL,
    "noop_listener",
    "noop_listeners",
    "contrib_off",
    "contrib",
    "recording_no_metrics",
    *FLOORS,
    *PEERS,
)
QUICK = tuple(
    variant
    for variant in LARGE
    if (variant not in PEERS and variant not in FLOORS) or variant == "floor_recording"
)
"""Without those that need an environment of their own."""
CASES = ("find_one/sync", "insert_one/sync", "find_one/async", "insert_one/async")
SMALL_CASES = ("insert_one/sync", "find_one/async")
"""A write and a read, one of each flavour: CI has minutes, and callgrind makes everything fifty times slower."""

HOW_TO_INSTALL = "valgrind is not installed, so nothing was counted: `apt-get install valgrind` (or dnf, brew) and run this again."

Counts = dict[str, dict[str, int]]


class Uncounted(Exception):  # noqa: N818 - goes into the table as it is
    """A variant that could not be counted, and why."""


def count_one(variant: str, cases: Iterable[str] = CASES) -> dict[str, int]:
    """One process under callgrind."""
    cases = tuple(cases)
    environment = VARIANTS[variant].environment if variant in VARIANTS else None
    try:
        python = python_of(environment)
    except NotInstalled as reason:
        raise Uncounted(str(reason)) from None
    with tempfile.TemporaryDirectory(prefix="otel_retry-callgrind-") as folder:
        out = Path(folder, "out")
        command = [
            "valgrind",
            "--tool=callgrind",
            "--dump-before=getppid",
            f"--instr-atstart={'no' if callgrind.can_start_late() else 'yes'}",
            f"--callgrind-out-file={out}",
            python,
            "-m",
            "benchmarks.counted",
            variant,
            *cases,
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if not line.startswith("==")]
            raise Uncounted(said[-1] if said else f"exit code {done.returncode}")
        # A floor is counted once: it does the same whatever the operation.
        measured = 1 if variant in FLOORS else len(cases)
        dumps = [_total(Path(f"{out}.{number}")) for number in range(1, 1 + counted.MARKS * measured)]
        dumps *= len(cases) // measured
    operations = counted.LONG - counted.SHORT
    return {
        case: round((dumps[first + 2] - dumps[first + 1]) / operations)
        for case, first in zip(cases, range(0, len(dumps), counted.MARKS), strict=True)
    }


def _total(dump: Path) -> int:
    found = re.search(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)
    if found is None:
        raise Uncounted(f"callgrind wrote no total: {dump.name}")
    return int(found.group(1))


def count(
    variants: Iterable[str], cases: Iterable[str] = CASES, report: Callable[[str], None] = print
) -> tuple[Counts, dict[str, str]]:
    """Counts, and what could not be counted. Processes run side by side: instructions do not compete."""
    counts: Counts = {}
    failures: dict[str, str] = {}

    def one(variant: str) -> None:
        try:
            counts[variant] = count_one(variant, cases)
        except Uncounted as reason:
            failures[variant] = str(reason)
        report(f"{variant}: {failures.get(variant, counts.get(variant))}")

    wanted = tuple(variants)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(one, wanted))
    return {variant: counts[variant] for variant in wanted if variant in counts}, failures


def installed() -> bool:
    return shutil.which("valgrind") is not None


def save(counts: Counts) -> None:
    text = json.dumps({"versions": results.versions(), "instructions": counts}, indent=2)
    BASELINE.write_text(text + "\n")


def baseline() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BASELINE.read_text())
    return found


def other_versions(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Which versions are others than the baseline's. A newer SDK or PyMongo that does more work is no fault of ours, nor is
    a Python that does the same work with other instructions: then the figures are shown, and judge nothing.
    """
    found = []
    for name in ("python", "compiler", "pymongo", "opentelemetry-api", "opentelemetry-sdk"):
        was, is_ = before.get(name, "?"), now.get(name, "?")
        if name == "python":
            was, is_ = was.rpartition(".")[0], is_.rpartition(".")[0]
        if was != is_:
            found.append(f"{name} {is_}, the baseline has {was}")
    return found


def least(first: Counts, second: Counts) -> Counts:
    """By case, the smaller of the two: what disturbs a count only ever adds to it."""
    return {
        variant: {
            case: min(count, second.get(variant, cases).get(case, count)) for case, count in cases.items()
        }
        for variant, cases in first.items()
    }


def regressions(now: Counts, before: Counts, tolerance: float = TOLERANCE) -> list[str]:
    """What costs more than before, relative to plain PyMongo of the same run: another Python or another machine makes
    other counts, but hardly another ratio.
    """
    found = []
    for variant, cases in now.items():
        if variant == "plain" or variant not in before:
            continue
        for case, instructions in cases.items():
            was = before[variant].get(case)
            if was is None:
                continue
            ratio = instructions / now["plain"][case]
            ratio_before = was / before["plain"][case]
            if ratio > ratio_before * (1 + tolerance):
                found.append(
                    f"{variant} {case}: {ratio:.3f} times plain PyMongo, was {ratio_before:.3f} "
                    f"({ratio / ratio_before - 1:+.1%})"
                )
    return found


# Where the package wants to be: (variant, its title, how much of what it may cost, and the measure itself).
BARS = (
    ("no_sdk", "engine on, no SDK", 0.10, "plain"),
    ("off", "not sampled, metrics off", 1.0, "contrib_off"),
    ("off_metrics", "not sampled, metrics on", 1.6, "contrib_off"),
    ("recording", "recording, all metrics", 1.6, "contrib"),
    ("retried", 'attempt_spans="retried"', 1.0, "contrib"),
    ("recording", "recording, all metrics", 1.0, "ddtrace"),
    ("recording", "recording, all metrics", 1.0, "logfire"),
    ("recording", "recording, all metrics", 1.0, "sentry"),
    ("recording", "distance from the floor", 1.2, "floor_recording"),
)

MEASURES = {
    "plain": "plain PyMongo's own cost",
    "contrib_off": "contrib, not sampled",
    "contrib": "contrib, recording",
    "ddtrace": "ddtrace",
    "logfire": "logfire",
    "sentry": "sentry-sdk",
    "floor_recording": "the floor",
}


def added(counts: Counts, variant: str, case: str) -> int:
    """Over plain PyMongo of its own version."""
    against = VARIANTS[variant].against
    return counts[variant][case] - counts[against][case]


class Standing(NamedTuple):
    """Where a variant stands against one bar, and where the SDK's calls alone would stand: below that nobody can get.
    None: it could not be counted, or there is no such floor.
    """

    title: str
    bar: float
    measure: str
    stands: float | None
    floor: float | None


def bars(counts: Counts, case: str) -> list[Standing]:
    found = []
    for variant, title, bar, measure in BARS:
        stands = floor = None
        if variant in counts and measure in counts:
            itself = measure == "plain" or measure in FLOORS
            unit = counts[measure][case] if itself else added(counts, measure, case)
            stands = added(counts, variant, case) / unit
            lowest = FLOOR_OF.get(variant)
            if lowest in counts:
                floor = counts[lowest][case] / unit
        found.append(Standing(title, bar, measure, stands, floor))
    return found
