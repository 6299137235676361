"""What was measured as tables in Markdown: for the terminal and for docs/performance.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import instructions
from benchmarks.floor import FLOORS
from benchmarks.variants import VARIANTS
from benchmarks.workload import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CASE_TITLES = {
    "find_one/sync": "find_one",
    "insert_one/sync": "insert_one",
    "find_one/async": "find_one, async",
    "insert_one/async": "insert_one, async",
}
FLOOR_TITLES = {
    "floor_off": "one span that is not sampled",
    "floor_off_metrics": "that, and three histogram records",
    "floor_recording_no_metrics": "two spans, a context switch",
    "floor_retried": "one span, a context switch, three histogram records",
    "floor_recording": "two spans, a context switch, three histogram records",
}
WORKER_TITLES = {
    ("sync", 1): "sync, 1 thread",
    ("sync", 8): "sync, 8 threads",
    ("async", 1): "async, 1 task",
    ("async", 50): "async, 50 tasks",
}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


def thousand(number: float) -> str:
    return f"{number / 1000:,.0f}"


def missing(failures: dict[str, str]) -> str:
    """What was not measured is said, with the reason."""
    return "".join(f"\nNot measured: {name}: {reason}\n" for name, reason in failures.items())


# Instructions


def counts(part: dict[str, Any]) -> str:
    """Thousand instructions per operation: plain PyMongo's own, and what each variant adds to it."""
    found: instructions.Counts = part["counts"]
    cases = list(found["plain"])
    rows = []
    for variant in VARIANTS:
        if variant not in found:
            continue
        if variant.startswith("plain"):
            numbers = [thousand(found[variant][case]) for case in cases]
        else:
            numbers = [f"+{thousand(instructions.added(found, variant, case))}" for case in cases]
        rows.append([VARIANTS[variant].title, *numbers])
    return markdown(
        ["thousand instructions", *(CASE_TITLES.get(case, case) for case in cases)], rows
    ) + missing(part.get("failures", {}))


def floors(part: dict[str, Any]) -> str:
    found = part["counts"]
    rows = [
        [FLOOR_TITLES[floor], thousand(next(iter(found[floor].values())))]
        for floor in FLOOR_TITLES
        if floor in found and floor in FLOORS
    ]
    return markdown(["the SDK alone, as many attributes as an operation has", "thousand instructions"], rows)


def bars(part: dict[str, Any]) -> str:
    """Where each case stands, and where the floor itself would be (for the first case)."""
    found = part["counts"]
    cases = list(found["plain"])
    rows = []
    for standings in zip(*(instructions.bars(found, case) for case in cases), strict=True):
        first = standings[0]
        rows.append(
            [
                first.title,
                f"≤ {first.bar} times {instructions.MEASURES[first.measure]}",
                *(_stands(each.stands, each.bar) for each in standings),
                "" if first.floor is None else f"{first.floor:.2f}",
            ]
        )
    return markdown(
        ["configuration", "bar", *(CASE_TITLES.get(case, case) for case in cases), "the floor alone"], rows
    )


def _stands(value: float | None, bar: float) -> str:
    if value is None:
        return "not counted"
    return f"{value:.2f}{'' if value <= bar else ' (missed)'}"


def shares(part: dict[str, Any], case: str = "insert_one/sync") -> str:
    """What a recorded operation adds, taken apart by measuring the parts alone."""
    found = part["counts"]
    added = instructions.added(found, "recording", case)
    floor = found["floor_recording"][case]
    events = instructions.added(found, "noop_listeners", case)
    engine = instructions.added(found, "engine", case)
    rows = [
        ["the SDK's own calls (the floor)", thousand(floor), f"{floor / added:.0%}"],
        ["PyMongo making its command and pool events", thousand(events), f"{events / added:.0%}"],
        ["the retry engine", thousand(engine), f"{engine / added:.0%}"],
        [
            "telemetry of ours: the rest",
            thousand(added - floor - events - engine),
            f"{(added - floor - events - engine) / added:.0%}",
        ],
        ["in all", thousand(added), "100%"],
    ]
    return markdown(
        [f"{CASE_TITLES.get(case, case)}, recording, all metrics", "thousand instructions", "share"], rows
    )


def bytecodes(part: dict[str, Any]) -> str:
    """One operation, by who executes it."""
    variants = list(part["owners"])
    owners = dict.fromkeys(owner for variant in variants for owner in part["owners"][variant])
    rows = [
        [owner, *(f"{part['owners'][variant].get(owner, 0):,}" for variant in variants)]
        for owner in owners
        if owner != "the benchmark"
    ]
    return markdown([f"bytecodes, {part['case']}", *(VARIANTS[variant].title for variant in variants)], rows)


def functions(part: dict[str, Any]) -> str:
    rows = [[f"`{name}`", owner, f"{count:,}"] for owner, name, count in part["functions"]]
    return markdown(["function", "whose", "bytecodes"], rows)


# Time


def times(
    part: dict[str, Any],
    transport: str,
    flavour: str,
    workers: int,
    clock: str,
    *,
    titles: Sequence[str] = OPERATIONS,
) -> str:
    """Microseconds per operation: plain PyMongo's own, and what each variant adds to it, ± half the interquartile range."""
    cases = {
        operation: part["transports"][transport].get(f"{operation}/{flavour}/{workers}")
        for operation in titles
    }
    cases = {operation: found for operation, found in cases.items() if found is not None}
    rows = [
        [VARIANTS[variant].title, *(time(cases[operation].get(variant), clock) for operation in cases)]
        for variant in VARIANTS
        if any(variant in found for found in cases.values())
    ]
    where = "real mongod" if transport == "mongod" else "replayed replies"
    what = "client CPU" if clock == "cpu" else "wall"
    return markdown(
        [f"µs of {what}, {WORKER_TITLES.get((flavour, workers), f'{flavour}, {workers}')}, {where}", *cases],
        rows,
    )


def time(found: dict[str, Any] | None, clock: str) -> str:
    if found is None:
        return "not measured"
    row = found[clock]
    if "added" not in row:
        return f"{row['median']:,.0f}"
    return f"{row['added']:+,.0f} ± {row['spread']:,.0f}"


# Growth


def startup(part: dict[str, Any]) -> str:
    return markdown(
        ["a process that does this and ends", "wall, ms", "CPU, ms"],
        ([f"`{name}`", f"{row['wall']:.0f}", f"{row['cpu']:.0f}"] for name, row in part["startup"].items()),
    )


def in_flight(part: dict[str, Any]) -> str:
    plain = part["in_flight"]["plain"]
    rows = []
    for variant, row in part["in_flight"].items():
        if "failed" in row:
            rows.append([VARIANTS[variant].title, row["failed"], ""])
        elif variant == "plain":
            rows.append([VARIANTS[variant].title, f"{row['sync']:,}", f"{row['async']:,}"])
        else:
            rows.append(
                [
                    VARIANTS[variant].title,
                    f"+{row['sync'] - plain['sync']:,}",
                    f"+{row['async'] - plain['async']:,}",
                ]
            )
    return markdown(["bytes per insert_one in flight", "50 threads", "200 tasks"], rows)


def many(part: dict[str, Any]) -> str:
    rows = [
        [
            VARIANTS[variant].title,
            f"{row['first']:,}",
            f"{row['blocks_first']:,}",
            f"{row['resident_first'] / 1e6:.1f}",
            f"{row['operations']:,}",
            f"{row['blocks']:,}",
            f"{row['resident'] / 1e6:.1f}",
        ]
        for variant, row in part["many"].items()
    ]
    head = [
        "after",
        "operations",
        "blocks allocated",
        "resident, MB",
        "operations",
        "blocks allocated",
        "resident, MB",
    ]
    return markdown(head, rows)


def attempts(part: dict[str, Any]) -> str:
    found = part["attempts"]
    columns = list(dict.fromkeys(number for row in found.values() for number in row if number.isdigit()))
    rows = [
        [VARIANTS[variant].title, *(thousand(row[number]) if number in row else "" for number in columns)]
        for variant, row in found.items()
    ]
    return markdown(
        [
            "insert_one, thousand instructions in all",
            *(f"{each} attempts" if each != "1" else "1 attempt" for each in columns),
        ],
        rows,
    )


def numbers(part: dict[str, Any]) -> str:
    rows = []
    for what, found in part["numbers"].items():
        for case, plain in found["plain"].items():
            number = case.rpartition("=")[2]
            added = found["recording"][case] - plain
            rows.append(
                [
                    f"{number} {what if number != '1' else what.removesuffix('s')}",
                    thousand(plain),
                    f"+{thousand(added)}",
                ]
            )
    return markdown(["insert_one, thousand instructions", "plain PyMongo", "recording adds"], rows)


def workers(part: dict[str, Any]) -> str:
    measured = {variant for found in part["workers"].values() for variant in found}
    shown = [variant for variant in VARIANTS if variant in measured]
    rows = []
    for case, found in part["workers"].items():
        _, flavour, number = case.split("/")
        unit = "task" if flavour == "async" else "thread"
        title = f"{flavour}, {number} {unit}{'' if number == '1' else 's'}"
        rows.append([title, *(time(found.get(variant), "cpu") for variant in shown)])
    head = "insert_one, µs of client CPU, replayed replies"
    return markdown([head, *(VARIANTS[variant].title for variant in shown)], rows)
