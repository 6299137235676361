"""One retried operation as a picture in the terminal: operation, attempts, waits, servers, errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from otel_retry.demo.receiver import SeenSpan

_WIDTH = 44


def waterfall(spans: list[SeenSpan]) -> Table:
    """The operation first, then its attempts in their order."""
    operation = spans[0]
    length = max(operation.seconds, 1e-6)
    table = Table(title=f"trace {operation.trace_id}", title_justify="left", box=None, pad_edge=False)
    table.add_column("span")
    table.add_column("server")
    table.add_column("waited", justify="right")
    table.add_column("took", justify="right")
    table.add_column(f"{length * 1000:.0f} ms".rjust(_WIDTH))
    table.add_column("")
    for index, span in enumerate(spans):
        attributes = span.attributes
        number = attributes.get("mongodb.retry.attempt")
        branch = "" if index == 0 else "└ " if index == len(spans) - 1 else "├ "
        name = f"{branch}{span.name}" + (f" #{number}" if number else "")
        delay = attributes.get("mongodb.retry.delay")
        table.add_row(
            Text(name, style="bold" if index == 0 else ""),
            _server(span),
            f"{delay * 1000:.0f} ms" if delay else "",
            f"{span.seconds * 1000:.1f} ms",
            _bar(span, operation.start, length, is_operation=index == 0),
            _ending(span),
        )
    return table


def _server(span: SeenSpan) -> str:
    host, port = span.attributes.get("server.address"), span.attributes.get("server.port")
    return "" if host is None else f"{host}:{port}" if port else str(host)


def _bar(span: SeenSpan, start: float, length: float, *, is_operation: bool) -> Text:
    left = min(_WIDTH - 1, int((span.start - start) / length * _WIDTH))
    size = max(1, min(_WIDTH - left, round(span.seconds / length * _WIDTH)))
    style = "cyan" if is_operation else "red" if span.failed else "green"
    return Text(" " * left + "━" * size, style=style)


def _ending(span: SeenSpan) -> Text:
    outcome = span.attributes.get("mongodb.retry.outcome")
    if outcome is not None:
        return Text(f"{outcome}, {span.attributes.get('mongodb.retry.attempts')} attempts", style="bold")
    if not span.failed:
        return Text("✓", style="green")
    code = span.attributes.get("db.response.status_code")
    return Text(f"✗ {span.attributes.get('error.type', '')}" + (f" {code}" if code else ""), style="red")
