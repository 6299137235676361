"""`otel-retry`: the commands and their options. What they do is in the modules beside this one."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from otel_retry.cli import doctor as doctoring
from otel_retry.cli.catalogue import ERRORS, LABELS, OPERATIONS, ErrorShape
from otel_retry.cli.dashboards_command import dashboards
from otel_retry.cli.demo_command import demo
from otel_retry.cli.explaining import MOST_ATTEMPTS, Case, Round, explain
from otel_retry.cli.operations_page import page, rows
from otel_retry.config import SettingError, parse_policy, shown
from otel_retry.events import Kind, Phase
from otel_retry.machine import Ignore, Raise, Retry
from otel_retry.policies import POLICIES, DriverPolicy
from otel_retry.version import __version__

if TYPE_CHECKING:
    from otel_retry.policy import RetryPolicy

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all well, 1 something is wrong, 2 the call itself was wrong.",
)
@click.version_option(__version__, prog_name="otel-retry")
def cli() -> None:
    """See what retries of PyMongo do, and why."""


cli.add_command(demo)
cli.add_command(dashboards)


@cli.command()
@click.option("--uri", help="Also ask this deployment whether it can do retryable writes.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def doctor(uri: str | None, as_json: bool) -> None:
    r"""Look at the installation: versions, PyMongo's shape, collisions, settings, the OTLP endpoint, the server.

    \b
    otel-retry doctor
    otel-retry doctor --uri mongodb://localhost:27017 --json
    """
    findings = doctoring.examine(uri)
    if as_json:
        click.echo(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            table.add_row(MARKS[finding.state], f"[bold]{finding.what}[/]", escape(finding.text))
            if finding.fix:
                table.add_row("", "", f"→ {escape(finding.fix)}")
        _console().print(table)
    sys.exit(any(finding.state == "fail" for finding in findings))


@cli.command(name="explain")
@click.argument("operation", required=False)
@click.argument("error", required=False)
@click.option("--policy", default="backpressure", show_default=True, help=f"One of {', '.join(POLICIES)}.")
@click.option("--code", type=int, help="A server error with this code, in the place of a named error.")
@click.option(
    "--label", "labels", multiple=True, type=click.Choice(LABELS), help="An error label; may be repeated."
)
@click.option("--kind", type=click.Choice([kind.value for kind in Kind]), help="What sort of error it is.")
@click.option("--timeout", type=float, help="timeoutMS of the operation, in seconds.")
@click.option(
    "--tokens", type=click.IntRange(0, 1000), default=1000, show_default=True, help="Left in the bucket."
)
@click.option("--idempotent", is_flag=True, help="The write is known to be idempotent.")
@click.option("--no-retry-reads", is_flag=True, help="As with retryReads=false.")
@click.option("--no-retry-writes", is_flag=True, help="As with retryWrites=false.")
@click.option("--table", "as_table", is_flag=True, help="All operations and errors, for this policy.")
@click.option("--page", "as_page", is_flag=True, help="The page docs/operations.md, for all policies.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def explain_command(
    operation: str | None,
    error: str | None,
    policy: str,
    as_table: bool,
    as_page: bool,
    as_json: bool,
    **options: Any,
) -> None:
    r"""Say step by step what follows an error, and which rule of which text says so.

    It is the machine that runs in your application, given an error again and again until it gives up. Waits are
    shown at their longest: the real ones are a random share of it.

    \b
    otel-retry explain insert_one overload
    otel-retry explain update_many network --policy current
    otel-retry explain find --code 91 --timeout 2
    otel-retry explain --table --policy persistent
    """
    if as_page:
        click.echo(page(), nl=False)
        return
    chosen = _policy(policy)
    if as_table:
        _print_matrix(policy, as_json=as_json)
        return
    if operation is None:
        raise click.UsageError(f"name an operation: {', '.join(OPERATIONS)}")
    case = Case(
        policy=chosen,
        operation=_known(OPERATIONS, operation, "operation"),
        error=_error(error, options),
        timeout=options["timeout"],
        tokens=options["tokens"],
        idempotent=options["idempotent"] or None,
        retry_reads=not options["no_retry_reads"],
        retry_writes=not options["no_retry_writes"],
    )
    rounds = explain(case)
    if as_json:
        click.echo(json.dumps([_as_dict(each) for each in rounds], indent=2))
    else:
        _tell(case, rounds)


def _policy(name: str) -> RetryPolicy:
    try:
        found = parse_policy(name)
    except SettingError as error:
        raise click.BadParameter(f"{shown(name)}: {error}", param_hint="--policy") from None
    if isinstance(found, DriverPolicy):
        raise click.BadParameter(
            "under 'driver' PyMongo's own loop decides; 'current' is what it does", param_hint="--policy"
        )
    return found


def _known(table: dict[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise click.BadParameter(f"{name!r} is no {what} that I know; there are: {', '.join(table)}")
    return table[name]


def _error(name: str | None, options: dict[str, Any]) -> ErrorShape:
    code, labels, kind = options["code"], frozenset(options["labels"]), options["kind"]
    if name is not None:
        return _known(ERRORS, name, "error")  # type: ignore[no-any-return]
    if code is None and not labels and kind is None:
        raise click.UsageError(
            f"name an error ({', '.join(ERRORS)}) or describe one with --code, --label, --kind"
        )
    found = Kind(kind) if kind else _kind_of(code)
    return ErrorShape(
        name=f"code {code}" if code is not None else found.value,
        kind=found,
        phase=Phase.SELECTION if found is Kind.NO_SERVER else Phase.SENT,
        code=code,
        labels=labels,
    )


def _kind_of(code: int | None) -> Kind:
    """As the real classification has it."""
    from pymongo.errors import OperationFailure  # noqa: PLC0415

    from otel_retry.pymongo.classify import classify  # noqa: PLC0415

    return classify(OperationFailure("", code, {"code": code})).kind


def _tell(case: Case, rounds: list[Round]) -> None:
    console = _console()
    console.print(
        f"[bold]{case.operation.name}[/] fails with [bold]{case.error.name}[/], policy [bold]{case.policy}[/]"
    )
    for each in rounds:
        console.print(f"\nattempt {each.attempt} fails; the policy's {each.method} is the one to ask")
        for rule, holds, note in each.questions:
            mark = "[green]✓[/]" if holds else "[red]✗[/]"
            because = f" [dim]({note})[/]" if note else ""
            console.print(f"  {mark} {rule.question}  [dim]{rule.citation}[/]{because}", highlight=False)
        console.print(f"  [bold]{_verdict(each)}[/]", highlight=False)
    if len(rounds) == MOST_ATTEMPTS and rounds[-1].outcome == "retry":
        console.print("\n... and so on, until it succeeds or fails in another way")


def _verdict(each: Round) -> str:
    step = each.step
    if isinstance(step, Retry):
        wait = f"after at most {step.delay:g} s" if step.delay else "at once"
        where = (
            "on the same host"
            if step.same_host
            else "on another host if there is one"
            if step.deprioritise
            else "wherever the driver selects"
        )
        tokens = "" if each.tokens is None else f"; {each.tokens:g} tokens left"
        return f"→ again, {wait}, {where}{tokens}"
    if isinstance(step, Raise):
        return f"→ raised: {step.reason}"
    return "→ ignored: an empty result" if isinstance(step, Ignore) else ""


def _as_dict(each: Round) -> dict[str, Any]:
    step = each.step
    return {
        "attempt": each.attempt,
        "method": each.method,
        "outcome": each.outcome,
        "delay": step.delay if isinstance(step, Retry) else None,
        "tokens": each.tokens,
        "questions": [
            {
                "rule": rule.name,
                "citation": rule.citation,
                "question": rule.question,
                "holds": holds,
                "note": note,
            }
            for rule, holds, note in each.questions
        ],
    }


def _print_matrix(policy: str, *, as_json: bool) -> None:
    found = rows(policy)
    if as_json:
        click.echo(json.dumps({row[0]: dict(zip(ERRORS, row[1:], strict=True)) for row in found}, indent=2))
        return
    table = Table("operation", *ERRORS, title=f"Retries under {policy}")
    for row in found:
        table.add_row(*row)
    _console().print(table)


def _console() -> Console:
    """Colours and the terminal's width for a person; plain and wide where the output is piped."""
    return Console() if sys.stdout.isatty() else Console(width=240, no_color=True, highlight=False)
