"""`python -m tests.chaos`: break it on purpose, and say what became of it. Exit code 1 if anything was violated."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from tests.chaos import page
from tests.chaos.faults import schedule
from tests.chaos.run import Plan, Progress, Result, run

RESULTS = Path(__file__).parent / "results.jsonl"
POLICIES = ("driver", "current", "backpressure")

_WIDTH = 200
"""Of a table in a log, where nobody says how wide it may be."""

out = Console(width=None if sys.stdout.isatty() else _WIDTH)
err = Console(stderr=True)


def seeds_of(text: str) -> list[int]:
    """`3`, `1-20`, `1,5,9`, or `random`."""
    if text == "random":
        return [random.SystemRandom().randrange(1, 1_000_000)]
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", "--seeds", dest="seeds", default="random", help="3, 1-20, 1,5,9 or random")
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of faults for each seed")
    parser.add_argument("--policy", choices=POLICIES, default="backpressure")
    parser.add_argument("--compare", action="store_true", help="each seed with each policy")
    parser.add_argument("--schedule", action="store_true", help="only print the faults of each seed")
    parser.add_argument("--save", action="store_true", help=f"add the figures to {RESULTS.name}")
    parser.add_argument("--write-page", action="store_true", help="write the tables of docs/reliability.md")
    return parser.parse_args(arguments)


LOST, VIOLATED = 1, 3
"""Exit codes: data or resources are wrong; something else that is promised did not hold."""


def main() -> int:
    asked = parsed()
    if asked.write_page:
        page.write(page.load(RESULTS))
        return 0
    seeds = seeds_of(asked.seeds)
    if asked.schedule:
        for seed in seeds:
            out.print(f"seed {seed}")
            faults = itertools.chain.from_iterable(schedule(seed, asked.duration))
            for fault in sorted(faults, key=lambda fault: fault.at):
                out.print(str(fault), highlight=False)
        return 0
    results = []
    for seed in seeds:
        for policy in POLICIES if asked.compare else (asked.policy,):
            results.append(_one(Plan(seed=seed, duration=asked.duration, policy=policy), saved=asked.save))
            _report(results[-1])
    if len(results) > 1:
        out.print(_table([each.figures for each in results]))
        _sum([each.figures for each in results])
    # PyMongo's own loop is there to compare: what it loses is shown, and is not ours.
    ours = [each for each in results if each.figures["policy"] != "driver"]
    if any(each.figures[key] for each in ours for key in ("lost", "doubled", "leaked")):
        return LOST
    return VIOLATED if any(each.violations for each in ours) else 0


def _one(plan: Plan, *, saved: bool) -> Result:
    err.print(
        f"seed {plan.seed}, {plan.duration:g} s, policy {plan.policy}; again with: "
        f"make chaos SEED={plan.seed} DURATION={plan.duration:g}",
        highlight=False,
    )
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=err, transient=True) as bars:
        task = bars.add_task("starting", total=plan.duration, figures="")

        def show(progress: Progress) -> None:
            bars.update(
                task,
                completed=progress.elapsed,
                description=progress.stage,
                figures=f"{progress.operations:,} operations, {progress.errors:,} errors, {progress.faults} faults",
            )

        result = run(plan, show)
    if saved:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**result.figures, "complaints": result.violations}) + "\n")
    return result


def _report(result: Result) -> None:
    out.print(_upright(result.figures))
    kinds = ", ".join(f"{kind} {times}" for kind, times in result.figures["faults_by_kind"].items())
    out.print(f"faults: {kinds}", highlight=False)
    errors = ", ".join(f"{name} {times}" for name, times in result.figures["errors"].items())
    out.print(f"errors raised: {errors or 'none'}", highlight=False)
    for violation in result.violations:
        out.print(violation, style="red", highlight=False, markup=False)
    if result.violations:
        figures = result.figures
        out.print(f"seed {figures['seed']} is VIOLATED", style="bold red", highlight=False)


def _upright(figures: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    for title, show in page.COLUMNS:
        table.add_row(title, show(figures))
    return table


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for title, _ in page.COLUMNS:
        table.add_column(title, justify="right")
    for figures in rows:
        table.add_row(*(show(figures) for _, show in page.COLUMNS))
    return table


def _sum(rows: list[dict[str, Any]]) -> None:
    total = {
        key: sum(row[key] for row in rows) for key in ("operations", "faults", "lost", "doubled", "leaked")
    }
    out.print(", ".join(f"{value:,} {key}" for key, value in total.items()), highlight=False)


if __name__ == "__main__":
    sys.exit(main())
