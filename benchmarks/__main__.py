"""`python -m benchmarks`: measure what otel_retry costs. `make bench` is the short way; docs/performance.md explains."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks import growth, instructions, opcodes, page, replay, results, tables, timing
from benchmarks.floor import FLOORS
from benchmarks.variants import VARIANTS, with_measures
from benchmarks.workload import OPERATIONS
from otel_retry import mongod

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROFILED = ("plain", "contrib", "off_metrics", "recording")
PROFILED_CASE = "insert_one/sync"
MOST_FUNCTIONS = 20


def reporter() -> Callable[[str], None]:
    began = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def transport(name: str) -> Iterator[str | None]:
    """The URI of a server with something in it; None for replayed replies."""
    if name == "replay":
        yield None
        return
    from pymongo import MongoClient

    client: MongoClient[Any]
    with mongod.start() as server:
        uri = f"{server.uri}&w=1"  # a majority would measure the disk
        with MongoClient(uri) as client:
            replay.fill(client)
        yield uri


def time_them(options: argparse.Namespace) -> None:
    report = reporter()
    variants = with_measures(options.variants)
    cases = [load for load in timing.CASES if load.operation in options.operations]
    found: dict[str, Any] = {"rounds": options.rounds, "transports": {}, "failures": {}}
    for name in options.transports:
        report(f"{name}: starting {len(variants)} variants")
        with transport(name) as uri:
            summary, failures = timing.measure(variants, cases, uri=uri, rounds=options.rounds, report=report)
        found["transports"][name] = summary
        found["failures"] |= failures
        results.save(
            options.into, "timing", found
        )  # after each, so that an end before the end costs only the rest
    for name in options.transports:
        for flavour, workers in tables.WORKER_TITLES:
            for clock in timing.CLOCKS:
                print(tables.times(found, name, flavour, workers, clock))
        drawn = results.PRIVATE.with_name(f"bench-{name}.svg")
        if "insert_one" in options.operations:
            drawn.write_text(page.picture_of_times(found, name))
            print(f"drawn: {drawn}")
    print(tables.missing(found["failures"]))


def count_them(options: argparse.Namespace) -> None:
    need_valgrind()
    variants = instructions.QUICK if options.quick else options.variants
    cases = instructions.CASES[1:2] if options.quick else instructions.CASES
    counts, failures = instructions.count(with_measures(variants), cases, reporter())
    found = {"counts": counts, "failures": failures}
    results.save(options.into, "instructions", found)
    print(tables.counts(found))
    print(tables.floors(found))
    print(tables.bars(found))
    drawn = results.PRIVATE.with_name("bench-instructions.svg")
    drawn.write_text(page.picture_of_counts(found))
    print(f"drawn: {drawn}")


def need_valgrind() -> None:
    if not instructions.installed():
        print(instructions.HOW_TO_INSTALL)
        sys.exit(0)


def check(_: argparse.Namespace) -> None:
    need_valgrind()
    before = instructions.baseline()
    now, failures = instructions.count(instructions.SMALL, instructions.SMALL_CASES, reporter())
    worse = instructions.regressions(now, before["instructions"])
    if worse:
        print("more than before: counted once more")
        again, _failures = instructions.count(instructions.SMALL, instructions.SMALL_CASES, reporter())
        now = instructions.least(now, again)
        worse = instructions.regressions(now, before["instructions"])
    print(tables.counts({"counts": now, "failures": failures}))
    others = instructions.other_versions(before["versions"], results.versions())
    for line in worse:
        print(f"MORE EXPENSIVE  {line}")
    if failures:
        sys.exit("some variants could not be counted")
    if others:
        print(f"\nNOT JUDGED: this is {'; '.join(others)}. Run `make bench-baseline` and commit it.")
    elif worse:
        sys.exit(
            f"more than {instructions.TOLERANCE:.0%} above the baseline; if it is worth it: `make bench-baseline`"
        )
    else:
        print(f"nothing is more than {instructions.TOLERANCE:.0%} above the baseline")


def baseline(_: argparse.Namespace) -> None:
    need_valgrind()
    counts, failures = instructions.count(instructions.SMALL, report=reporter())
    if failures:
        sys.exit(f"not written: {failures}")
    instructions.save(counts)
    print(tables.counts({"counts": counts}))


def grow(options: argparse.Namespace) -> None:
    """The parts that are not measured now stay as they are."""
    report = reporter()
    found = results.load(options.into).get("growth", {})
    for part in options.parts:
        if part in growth.COUNTED and not instructions.installed():
            print(instructions.HOW_TO_INSTALL)
            continue
        found[part] = growth.measure(
            part, operations=options.operations, rounds=options.rounds, report=report
        )
        results.save(options.into, "growth", found)
        print(getattr(tables, part)(found))


def profile(options: argparse.Namespace) -> None:
    if options.variant is None:
        profile_for_the_page(options)
        return
    found = opcodes.profile(options.variant, options.case)
    for (owner, function), count in opcodes.by_function(found).most_common(options.lines):
        print(f"{count:6}  {owner:24}  {function}")
    for owner, count in opcodes.by_owner(found).most_common():
        print(f"{count:6}  {owner}")
    print(f"{found.total():6}  in all")


def profile_for_the_page(options: argparse.Namespace) -> None:
    found = opcodes.in_processes(PROFILED, PROFILED_CASE, MOST_FUNCTIONS)
    results.save(options.into, "profile", found)
    print(tables.bytecodes(found))
    print(tables.functions(found))


def write_page(_: argparse.Namespace) -> None:
    page.write()


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(required=True)

    def command(
        name: str, function: Callable[[argparse.Namespace], None], help_: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help_, description=help_)
        made.set_defaults(function=function)
        return made

    def measuring(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made.add_argument(
            "--publish",
            dest="into",
            action="store_const",
            const=results.PUBLISHED,
            default=results.PRIVATE,
            help="keep the figures in benchmarks/results.json instead of .cache/bench.json",
        )
        return made

    timed = measuring(command("timing", time_them, "CPU and wall time, all variants in turn"))
    timed.add_argument("--rounds", type=int, default=5)
    timed.add_argument("--transports", nargs="+", choices=timing.TRANSPORTS, default=timing.TRANSPORTS)
    timed.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    timed.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    counted = measuring(command("count", count_them, "instructions per operation, under callgrind"))
    counted.add_argument("--variants", nargs="+", choices=[*VARIANTS, *FLOORS], default=instructions.LARGE)
    counted.add_argument(
        "--quick", action="store_true", help="insert_one only, without the peers' environments"
    )
    command("check", check, "the small set against baseline.json, in ratios: fails at +5 %%")
    command("baseline", baseline, "write baseline.json anew")
    grown = measuring(command("growth", grow, "start-up, memory, retries, and more of everything"))
    grown.add_argument("--parts", nargs="+", choices=growth.PARTS, default=list(growth.PARTS))
    grown.add_argument("--operations", type=int, default=growth.MILLION, help="for the growth of memory")
    grown.add_argument("--rounds", type=int, default=9)
    profiled = measuring(command("profile", profile, "bytecodes by function, of one operation"))
    profiled.add_argument(
        "variant", nargs="?", choices=VARIANTS, help="left out: those of docs/performance.md"
    )
    profiled.add_argument(
        "case", nargs="?", default=PROFILED_CASE, help="find_one/async, insert_one/sync/attempts=3, ..."
    )
    profiled.add_argument("--lines", type=int, default=40)
    command(
        "page",
        write_page,
        "docs/performance.md's tables and picture and the README's figures, from results.json",
    )
    return top


def main() -> None:
    options = parser().parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
