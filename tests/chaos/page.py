"""The tables of docs/reliability.md, written from the figures of saved runs; the words around them are by hand."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"

Figures = dict[str, Any]

COLUMNS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("seed", lambda f: str(f["seed"])),
    ("policy", lambda f: f["policy"]),
    ("operations", lambda f: f"{f['operations']:,}"),
    ("succeeded", lambda f: f"{f['success_rate']:.2%}"),
    ("attempts/op", lambda f: f"{f['attempts_per_operation']:.3f}"),
    ("p99", lambda f: f"{f['p99_ms']:,.0f} ms"),
    ("faults", lambda f: str(f["faults"])),
    ("answers cut", lambda f: str(f["strikes"].get("cut_reply", 0) + f["strikes"].get("torn_reply", 0))),
    ("writes acknowledged", lambda f: f"{f['acknowledged']:,}"),
    ("not acknowledged", lambda f: f"{f['unacknowledged']:,}"),
    ("of these applied", lambda f: f"{f['applied_unacknowledged']:,}"),
    ("lost", lambda f: str(f["lost"])),
    ("doubled", lambda f: str(f["doubled"])),
    ("leaked", lambda f: str(f["leaked"])),
    ("violations", lambda f: str(f["violations"])),
)

COMPARED: tuple[tuple[str, Callable[[list[Figures]], str]], ...] = (
    ("operations", lambda rows: f"{sum(f['operations'] for f in rows):,}"),
    ("succeeded", lambda rows: f"{_rate(rows, 'succeeded', 'operations'):.2%}"),
    ("attempts per operation", lambda rows: f"{fmean(f['attempts_per_operation'] for f in rows):.3f}"),
    ("p99", lambda rows: f"{fmean(f['p99_ms'] for f in rows):,.0f} ms"),
    (
        "time in backoff, per 1,000 operations",
        lambda rows: f"{1000 * _rate(rows, 'backoff_seconds', 'operations'):.1f} s",
    ),
    ("succeeded during overload", lambda rows: f"{fmean(f['overload_success_rate'] for f in rows):.2%}"),
    (
        "commands sent per operation during overload",
        lambda rows: f"{fmean(f['overload_commands_per_operation'] for f in rows):.2f}",
    ),
    (
        "commands per second on the servers during overload",
        lambda rows: f"{fmean(f['overload_commands_per_second'] for f in rows):,.0f}",
    ),
    ("writes lost", lambda rows: str(sum(f["lost"] for f in rows))),
    ("writes doubled", lambda rows: str(sum(f["doubled"] for f in rows))),
)


def _rate(rows: list[Figures], part: str, whole: str) -> float:
    return float(sum(f[part] for f in rows) / max(1, sum(f[whole] for f in rows)))


def load(path: Path) -> list[Figures]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def by_seed(rows: list[Figures]) -> str:
    """One line for each seed of the default policy, and their sum."""
    ours = [row for row in rows if row["policy"] == "backpressure"]
    lines = [_line(title for title, _ in COLUMNS), _line("---:" for _ in COLUMNS)]
    lines += [_line(show(row) for _, show in COLUMNS) for row in ours]
    total = {
        key: sum(row[key] for row in ours)
        for key in (
            "operations",
            "faults",
            "acknowledged",
            "unacknowledged",
            "lost",
            "doubled",
            "leaked",
            "spans",
        )
    }
    said = ", ".join(f"{value:,} {key}" for key, value in total.items())
    return "\n".join([*lines, "", f"In all, over {len(ours)} runs: {said}."])


def compared(rows: list[Figures]) -> str:
    """The seeds that were run with every policy, one column for each."""
    by_policy: dict[str, dict[tuple[int, float], Figures]] = defaultdict(dict)
    for row in rows:
        by_policy[row["policy"]][row["seed"], row["duration"]] = row
    shared = set.intersection(*(set(found) for found in by_policy.values())) if len(by_policy) > 1 else set()
    policies = [policy for policy in ("driver", "current", "backpressure") if policy in by_policy]
    lines = [
        _line(["", *(f"`{policy}`" for policy in policies)]),
        _line(["---", *("---:" for _ in policies)]),
    ]
    for title, show in COMPARED:
        lines.append(
            _line([title, *(show([by_policy[policy][key] for key in sorted(shared)]) for policy in policies)])
        )
    seeds = ", ".join(f"{seed} ({duration:g} s)" for seed, duration in sorted(shared))
    return "\n".join([*lines, "", f"Seeds {seeds}."]) if shared else "Not measured yet."


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def write(rows: list[Figures], path: Path = PAGE) -> None:
    text = path.read_text(encoding="utf-8")
    for name, table in (("seeds", by_seed(rows)), ("comparison", compared(rows))):
        pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, times = pattern.subn(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
        if times != 1:
            raise ValueError(f"{path.name} has no place for the table of {name}")
    path.write_text(text, encoding="utf-8")
