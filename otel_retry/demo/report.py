"""The demo's HTML report: one file, no scripts, no network; plots and waterfalls are SVG drawn here."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_retry.demo.receiver import Sample, SeenSpan
    from otel_retry.demo.stage import Result

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 880, 190, 60, 26
_SHADES = ("#eef6ee", "#fdf1e3", "#f3ecf8")
_MOST_WATERFALLS = 6
_BARS = 350
"""Where the bars of a waterfall begin; before it stand the names."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; max-width: 920px; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } .note { color: #555 } svg { width: 100%; height: auto }
text { font: 12px system-ui, sans-serif; fill: #444 } .bad { color: #a30000; font-weight: 600 }
"""


def report(result: Result) -> str:
    scenes = "".join(
        f"<tr><td><b>{html.escape(s.name)}</b> <span class=note>{html.escape(s.text)}</span></td><td>{s.operations}</td>"
        f"<td>{s.retried}</td><td>{s.gave_up}</td><td>{s.slowest:.2f} s</td><td>{s.acknowledged}</td>"
        f"<td{' class=bad' if s.lost else ''}>{s.lost}</td></tr>"
        for s in result.scenes
    )
    samples = result.seen.samples if result.seen else []
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>otel_retry demo: {html.escape(result.policy)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>
<h1>A shop, three scenes, policy {html.escape(result.policy)}</h1>
<p class=note>A real replica set of three, a plain PyMongo application under opentelemetry-instrument. Seed {result.seed}.</p>
<table><tr><th>scene</th><th>operations</th><th>retried</th><th>gave up</th><th>slowest</th><th>orders acknowledged</th><th>lost</th></tr>
{scenes}</table>
<h2>Tokens left in the retry budget</h2>
{_plot(result, samples, [s.tokens for s in samples], "tokens", floor=False)}
<h2>Retries per second</h2>
{_plot(result, samples, _rates(samples, [s.retries for s in samples]), "retries/s")}
<h2>Time in backoff, seconds per second</h2>
{_plot(result, samples, _rates(samples, [s.backoff for s in samples]), "s/s")}
<h2>Operations per second</h2>
{_plot(result, samples, _rates(samples, [float(s.operations) for s in samples]), "operations/s")}
<h2>Retried operations, attempt by attempt</h2>
{"".join(_waterfall(spans) for spans in _traces(result)) or "<p class=note>None was retried.</p>"}
</body></html>
"""


def _rates(samples: Sequence[Sample], totals: Sequence[float]) -> list[float | None]:
    """Increase per second; nothing for the first."""
    rates: list[float | None] = [None]
    for before, after, low, high in zip(samples, samples[1:], totals, totals[1:], strict=False):
        rates.append(max(0.0, high - low) / max(after.at - before.at, 1e-3))
    return rates[: len(samples)]


def _plot(
    result: Result,
    samples: Sequence[Sample],
    values: Sequence[float | None],
    unit: str,
    *,
    floor: bool = True,
) -> str:
    points = [(s.at, v) for s, v in zip(samples, values, strict=False) if v is not None]
    if len(points) < 2 or not result.scenes:
        return "<p class=note>No data: this policy has none of it.</p>"
    start, end = result.scenes[0].began, max(points[-1][0], result.scenes[-1].ended)
    top = max(value for _, value in points)
    bottom = 0.0 if floor else min(value for _, value in points)
    if top <= bottom:
        top = bottom + 1

    def x(at: float) -> float:
        return _LEFT + (at - start) / max(end - start, 1e-6) * (_WIDTH - _LEFT - 10)

    def y(value: float) -> float:
        return 10 + (top - value) / (top - bottom) * (_HEIGHT - _BOTTOM - 10)

    shades = "".join(
        f'<rect x="{x(s.began):.1f}" y="10" width="{max(0.0, x(s.ended) - x(s.began)):.1f}" height="{_HEIGHT - _BOTTOM - 10}" '
        f'fill="{_SHADES[i % len(_SHADES)]}"/><text x="{x(s.began) + 6:.1f}" y="{_HEIGHT - 8}">{html.escape(s.name)}</text>'
        for i, s in enumerate(result.scenes)
    )
    line = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points if at >= start)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{unit}">{shades}'
        f'<text x="{_LEFT - 6}" y="18" text-anchor="end">{top:.4g}</text>'
        f'<text x="{_LEFT - 6}" y="{_HEIGHT - _BOTTOM}" text-anchor="end">{bottom:.4g}</text>'
        f'<polyline points="{line}" fill="none" stroke="#1f6f43" stroke-width="2"/></svg>'
    )


def _traces(result: Result) -> list[list[SeenSpan]]:
    spans = result.seen.spans if result.seen else []
    operations = [s for s in spans if s.attributes.get("mongodb.retry.attempts", 0) > 1]
    operations.sort(key=lambda s: (-int(s.attributes["mongodb.retry.attempts"]), s.start))
    chosen = operations[:_MOST_WATERFALLS]
    ids = {span.span_id for span in chosen}
    children: dict[str, list[SeenSpan]] = {}
    for span in spans:
        if span.parent_id in ids:
            children.setdefault(span.parent_id, []).append(span)
    return [[s, *sorted(children.get(s.span_id, []), key=lambda c: c.start)] for s in chosen]


def _waterfall(spans: list[SeenSpan]) -> str:
    operation = spans[0]
    length = max(operation.seconds, 1e-6)
    rows = []
    for index, span in enumerate(spans):
        top = 24 + index * 24
        left = _BARS + (span.start - operation.start) / length * (_WIDTH - _BARS - 10)
        width = max(2.0, span.seconds / length * (_WIDTH - _BARS - 10))
        colour = "#4a7fb0" if index == 0 else "#c0392b" if span.failed else "#2e8b57"
        number = span.attributes.get("mongodb.retry.attempt")
        delay = span.attributes.get("mongodb.retry.delay")
        label = (
            span.name if number is None else f"#{number} {span.name} {span.attributes.get('server.port', '')}"
        )
        wait = f" after {float(delay) * 1000:.0f} ms" if delay else ""
        error = f" ✗ {span.attributes.get('error.type', '')}" if span.failed else ""
        rows.append(
            f'<text x="{0 if index == 0 else 16}" y="{top + 12}">{html.escape(f"{label}{wait}{error}"[:52])}</text>'
            f'<rect x="{left:.1f}" y="{top}" width="{min(width, _WIDTH - left):.1f}" height="14" rx="2" fill="{colour}"/>'
        )
    outcome = operation.attributes.get("mongodb.retry.outcome", "")
    title = f"{operation.name}: {outcome}, {operation.seconds * 1000:.0f} ms, trace {operation.trace_id}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {30 + len(spans) * 24}" role="img"><text x="0" y="14" font-weight="600">'
        f"{html.escape(title)}</text>{''.join(rows)}</svg>"
    )
