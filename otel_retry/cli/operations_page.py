"""docs/operations.md: which operations are retried and under which conditions, told by the machine itself."""

from __future__ import annotations

from otel_retry.cli.catalogue import ERRORS, OPERATIONS
from otel_retry.cli.explaining import Case, explain, summary
from otel_retry.policies import POLICIES, DriverPolicy

_HEAD = """# Operations

Which operations are retried, and after which errors. Made by `otel-retry explain --page` from the machine that runs, so it
cannot be out of date; a test compares.

Reads need `retryReads`, writes `retryWrites`, generic commands both; both are on by default. The tables are for a client
without `timeoutMS`; under a deadline `backpressure` and `current` repeat as often as fits, unless the server was overloaded.
What is repeated is sent with the same txnNumber, or the server said that nothing was executed: a write is applied at most once.

`mapReduce` is not retried by itself, and as a generic command only after an overload rejection. All operations are retried on
server overload under `backpressure` and `current`, except unacknowledged writes.

With retry loops of your own around these calls the attempts multiply.
"""


def page() -> str:
    parts = [_HEAD]
    for name, policy in POLICIES.items():
        if policy is DriverPolicy:
            continue
        parts.append(f"\n## {name}\n\n{matrix(name)}")
    notes = [f"- `{o.name}`: {o.note}." for o in OPERATIONS.values() if o.note]
    errors = [f"- `{e.name}`: {e.note}." for e in ERRORS.values() if e.note]
    parts.append("\n## What the names mean\n\n" + "\n".join(notes) + "\n\n" + "\n".join(errors) + "\n")
    parts.append(
        "\n## driver\n\nPyMongo's own loop decides; from 4.17 on it is nearly `current`, before that it retries once "
        "and does not know overload.\n"
    )
    return "".join(parts)


def rows(policy: str) -> list[list[str]]:
    """One row an operation, one column an error."""
    found = []
    for operation in OPERATIONS.values():
        row = [operation.name]
        for error in ERRORS.values():
            rounds = explain(Case(policy=POLICIES[policy](), operation=operation, error=error))
            row.append(summary(rounds))
        found.append(row)
    return found


def matrix(policy: str) -> str:
    lines = [f"| operation | {' | '.join(ERRORS)} |", "| --- |" + " --- |" * len(ERRORS)]
    lines += [f"| `{row[0]}` | {' | '.join(row[1:])} |" for row in rows(policy)]
    return "\n".join(lines) + "\n"
