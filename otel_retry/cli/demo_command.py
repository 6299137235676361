"""`otel-retry demo`: plays it and shows what was seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from otel_retry.demo.report import report
from otel_retry.demo.stage import DemoError, Result, play
from otel_retry.demo.waterfall import waterfall
from otel_retry.policies import POLICIES

_WIDE = 140


@click.command()
@click.option("--policy", type=click.Choice(list(POLICIES)), default="backpressure", show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Makes the shop's choices repeatable.")
@click.option(
    "--duration", type=click.FloatRange(6, 3600), default=45.0, show_default=True, help="Seconds, all scenes."
)
@click.option(
    "--html", "html_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here."
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here."
)
@click.option(
    "--svg", "svg_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the waterfall here."
)
@click.option("--keep", is_flag=True, help="Leave servers running at the end and print their addresses.")
def demo(
    policy: str,
    seed: int,
    duration: float,
    html_path: Path | None,
    json_path: Path | None,
    svg_path: Path | None,
    keep: bool,
) -> None:
    r"""Watch a shop live through calm, an overload and a failover, on a real MongoDB of three nodes.

    \b
    otel-retry demo
    otel-retry demo --policy driver      the same with PyMongo's own loop, to compare
    otel-retry demo --html report.html   waterfalls and plots, in one file

    With OTEL_EXPORTER_OTLP_ENDPOINT set, or a collector on localhost:4318, the traces go there too.
    """
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    try:
        result = play(console, policy=policy, seed=seed, duration=duration, keep=keep)
    except DemoError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        sys.exit(130)
    _show(console, result)
    if html_path is not None:
        html_path.write_text(report(result), encoding="utf-8")
        console.print(f"report: {html_path.resolve()}")
    if json_path is not None:
        json_path.write_text(json.dumps(result.as_dict(), indent=2), encoding="utf-8")
    if svg_path is not None:
        _draw(svg_path, result)
    sys.exit(any(scene.lost for scene in result.scenes))


def _show(console: Console, result: Result) -> None:
    console.print()
    if result.shown:
        console.print(waterfall(result.shown))
    else:
        console.print("No operation was retried: there is no waterfall to show.")
    if result.jaeger is not None:
        console.print(f"in Jaeger: {result.jaeger}")
    console.print()
    table = Table(title=f"policy {result.policy}")
    for column in ("scene", "operations", "retried", "gave up", "slowest", "orders acknowledged", "lost"):
        table.add_column(column, justify="left" if column == "scene" else "right")
    for scene in result.scenes:
        table.add_row(
            scene.name,
            str(scene.operations),
            str(scene.retried),
            str(scene.gave_up),
            f"{scene.slowest:.2f} s",
            str(scene.acknowledged),
            str(scene.lost),
        )
    console.print(table)


def _draw(path: Path, result: Result) -> None:
    with path.with_suffix(".tmp").open("w") as nowhere:
        recorder = Console(record=True, width=_WIDE, file=nowhere)
        if result.shown:
            recorder.print(waterfall(result.shown))
    path.with_suffix(".tmp").unlink()
    recorder.save_svg(str(path), title="one operation, every attempt")
