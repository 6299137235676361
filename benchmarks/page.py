"""docs/performance.md's tables, its picture, and the README's figures, all made from results.json.

A table stands between `<!-- bench: NAME -->` and `<!-- end -->`; the words around it are written by hand.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from benchmarks import environments, instructions, results, tables
from benchmarks.variants import VARIANTS
from otel_retry.dashboards.plot import Series
from otel_retry.dashboards.plot import bars as draw

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = environments.ROOT / "docs"
PAGE = DOCS / "performance.md"
PICTURE = DOCS / "performance.svg"
README = environments.ROOT / "README.md"

_BLOCK = re.compile(r"(<!-- bench: ([a-z_ 0-9]+) -->\n).*?(<!-- end -->)", re.DOTALL)

OURS, THEIRS, NEITHER = "#3274d9", "#e0752d", "#8f8f8f"
IN_PICTURE = (
    "engine",
    "no_sdk",
    "off",
    "off_metrics",
    "retried",
    "recording",
    "noop_listener",
    "contrib_off",
    "contrib",
    "newrelic",
    "ddtrace",
    "logfire",
    "sentry",
)
IN_README = (
    "no_sdk",
    "off",
    "off_metrics",
    "retried",
    "recording",
    "contrib_off",
    "contrib",
    "newrelic",
    "ddtrace",
    "logfire",
    "sentry",
)


def colour(variant: str) -> str:
    if VARIANTS[variant].title.startswith("otel_retry"):
        return OURS
    return NEITHER if variant == "noop_listener" else THEIRS


def picture_of_counts(part: dict[str, Any], case: str = "insert_one/sync") -> str:
    found = part["counts"]
    series = [
        Series(
            name=VARIANTS[variant].title,
            points=((0.0, instructions.added(found, variant, case) / 1000),),
            unit="suffix: k",
            colour=colour(variant),
        )
        for variant in IN_PICTURE
        if variant in found
    ]
    if "floor_recording" in found:
        floor = found["floor_recording"][case] / 1000
        series.append(
            Series(
                name="the SDK's calls alone: the floor of recording",
                points=((0.0, floor),),
                unit="suffix: k",
                colour=NEITHER,
            )
        )
    plain = tables.thousand(found["plain"][case])
    return draw(f"insert_one: thousand instructions added to plain PyMongo's {plain} k", series)


def picture_of_times(part: dict[str, Any], transport: str, case: str = "insert_one/sync/1") -> str:
    """For a run of one's own. Noise can be negative; a bar cannot."""
    found = part["transports"][transport][case]
    series = [
        Series(
            name=VARIANTS[variant].title,
            points=((0.0, max(found[variant]["cpu"]["added"], 0.0)),),
            unit="suffix: µs",
            colour=colour(variant),
        )
        for variant in ("plain_again", *IN_PICTURE)
        if variant in found
    ]
    return draw(f"insert_one, {transport}: µs of client CPU added to plain PyMongo", series)


def surroundings(part: dict[str, Any]) -> str:
    machine, versions = part["machine"], part["versions"]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['kernel']}; {listed}. Measured {part['date']}.\n"


def readme(measured: dict[str, Any]) -> str:
    found = measured["instructions"]["counts"]
    plain = found["plain"]["insert_one/sync"]
    timed = measured["timing"]["transports"]["replay"]["insert_one/sync/1"]
    rows = [
        [
            VARIANTS[variant].title,
            f"+{tables.thousand(instructions.added(found, variant, 'insert_one/sync'))}",
            f"{timed[variant]['cpu']['added']:+,.0f}" if variant in timed else "",
        ]
        for variant in IN_README
        if variant in found
    ]
    own = f"plain PyMongo's own: {tables.thousand(plain)} thousand, {timed['plain']['cpu']['median']:,.0f} µs"
    return tables.markdown([f"one `insert_one` ({own})", "thousand instructions", "µs of CPU"], rows)


def _times(transport: str, flavour: str, workers: int, clock: str) -> Callable[[dict[str, Any]], str]:
    return lambda measured: tables.times(measured["timing"], transport, flavour, workers, clock)


def _of(part: str, table: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    return lambda measured: table(measured[part])


BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "readme": readme,
    "instructions": _of("instructions", tables.counts),
    "instructions surroundings": _of("instructions", surroundings),
    "floors": _of("instructions", tables.floors),
    "bars": _of("instructions", tables.bars),
    "shares": _of("instructions", tables.shares),
    "bytecodes": _of("profile", tables.bytecodes),
    "functions": _of("profile", tables.functions),
    "timing surroundings": _of("timing", surroundings),
    "timing missing": lambda measured: tables.missing(measured["timing"].get("failures", {})),
    "startup": _of("growth", tables.startup),
    "in flight": _of("growth", tables.in_flight),
    "many": _of("growth", tables.many),
    "attempts": _of("growth", tables.attempts),
    "numbers": _of("growth", tables.numbers),
    "workers": _of("growth", tables.workers),
    "growth surroundings": _of("growth", surroundings),
    **{
        f"{transport} {flavour} {workers} {clock}": _times(transport, flavour, workers, clock)
        for transport in ("mongod", "replay")
        for flavour, workers in tables.WORKER_TITLES
        for clock in ("cpu", "wall")
    },
}


def rewritten(text: str, measured: dict[str, Any]) -> str:
    return _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]](measured)}\n{found[3]}", text)


def files(measured: dict[str, Any]) -> dict[Any, str]:
    """Each file as it should be."""
    return {
        PAGE: rewritten(PAGE.read_text(), measured),
        README: rewritten(README.read_text(), measured),
        PICTURE: picture_of_counts(measured["instructions"]),
    }


def write() -> None:
    for path, text in files(results.load()).items():
        path.write_text(text)
