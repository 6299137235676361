"""What the backends answered, drawn for docs/dashboards.md: `OTEL_RETRY_PICTURES=docs/images`, or `make pictures`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from otel_retry import semconv
from otel_retry.dashboards.plot import Bar, waterfall

if TYPE_CHECKING:
    from tests.e2e.stack import Span, Trace

FOLDER_VARIABLE = "OTEL_RETRY_PICTURES"


def keep(name: str, picture: str) -> None:
    """Written where pictures are wanted; otherwise it was only drawn."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(picture, encoding="utf-8")


def draw(trace: Trace) -> str:
    """The tree from its root, with what a person looks for behind each name."""
    bars: list[Bar] = []

    def add(span: Span, depth: int) -> None:
        bars.append(
            Bar(
                name=span.name,
                note=_note(span),
                depth=depth,
                start=span.start / 1e9,
                end=span.end / 1e9,
                failed=span.failed,
            )
        )
        for child in trace.children(span):
            add(child, depth + 1)

    add(trace.root, 0)
    return waterfall(f"Trace {trace.root.trace_id}", bars)


def _note(span: Span) -> str:
    seen = span.attributes
    parts = []
    if semconv.RETRY_OUTCOME in seen:
        parts.append(f"{seen[semconv.RETRY_OUTCOME]}, {seen[semconv.RETRY_ATTEMPTS]} attempts")
    if semconv.RETRY_ATTEMPT in seen:
        parts.append(f"attempt {seen[semconv.RETRY_ATTEMPT]}")
    if seen.get(semconv.RETRY_DELAY):
        parts.append(f"after {seen[semconv.RETRY_DELAY] * 1000:.0f} ms")
    if span.failed and semconv.DB_STATUS_CODE in seen:
        parts.append(f"code {seen[semconv.DB_STATUS_CODE]}")
    return ", ".join(parts)
