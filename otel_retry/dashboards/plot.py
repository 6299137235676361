"""Pictures for docs/dashboards.md: what Prometheus answered to a panel's queries, and a trace that Jaeger had, as SVG.

They are no imitation of Grafana or Jaeger: lines over time, bars for the values of an instant, a waterfall. Standard
library only.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _LINE = 64, 12, 34, 16
_COLOURS = ("#3274d9", "#e0752d", "#56a64b", "#a352cc", "#e02f44", "#8f8f8f", "#b8a100", "#37a2b4")
_MOST = 8

TRACE = "jaeger-retried-trace.svg"
"""The file for the picture of a trace."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """`points` are (seconds since the epoch, value); gaps are points that are not there or not finite."""

    name: str
    points: tuple[Point, ...]
    unit: str
    colour: str = _COLOURS[0]
    """Of its bar; lines have the colours in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A span: times in seconds, `depth` in the tree from 0, a `note` behind its name."""

    name: str
    note: str
    depth: int
    start: float
    end: float
    failed: bool


def picture(board: str, panel: str) -> str:
    """The file for a panel's picture, by the dashboard's file and the panel's title."""
    slug = re.sub(r"[^a-z0-9]+", "-", panel.lower()).strip("-")
    return f"{board.removesuffix('.json')}-{slug}.svg"


def lines(title: str, series: list[Series]) -> str:
    """The most telling series, by their highest value; all of one unit."""
    unit = series[0].unit if series else ""
    series = sorted(series, key=lambda each: -max((v for _, v in _finite(each)), default=0.0))[:_MOST]
    times = [time for each in series for time, _ in _finite(each)] or [0.0]
    first, last = min(times), max(times)
    top = _ceiling(max((value for each in series for _, value in _finite(each)), default=1.0))
    plot_height = _HEIGHT - _TOP - 30
    width = _WIDTH - _LEFT - _RIGHT

    def x(time: float) -> float:
        return _LEFT + (time - first) / ((last - first) or 1.0) * width

    def y(value: float) -> float:
        return _TOP + plot_height * (1 - value / top)

    parts: list[str] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = y(top * share)
        parts.extend(
            (
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#8884"/>',
                _text(_LEFT - 6, at + 4, _value(top * share, unit), anchor="end"),
            )
        )
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        seconds = (last - first) * share
        parts.append(_text(x(first + seconds), _TOP + plot_height + 16, f"{seconds:.0f} s", anchor=anchor))
    for number, each in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value in _finite(each))
        parts.extend(
            (
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>',
                *_legend(number, each.name, colour),
            )
        )
    return _page(title, _HEIGHT + len(series) * _LINE, parts)


def bars(title: str, series: list[Series]) -> str:
    """The last value of each, as they come; bars of one unit have one scale."""
    rows = [(each, _finite(each)[-1][1]) for each in series if _finite(each)][: 3 * _MOST]
    tops: dict[str, float] = {}
    for each, value in rows:
        tops[each.unit] = max(tops.get(each.unit, 0.0), _ceiling(value))
    left, room = 300, _WIDTH - 300 - 90
    parts: list[str] = []
    for number, (each, value) in enumerate(rows):
        at = _TOP + number * 22
        length = max(value / tops[each.unit] * room, 1.0)
        parts.extend(
            (
                _text(left - 8, at + 13, each.name, anchor="end"),
                f'<rect x="{left}" y="{at}" width="{length:.1f}" height="16" fill="{each.colour}"/>',
                _text(left + length + 6, at + 13, _value(value, each.unit)),
            )
        )
    return _page(title, _TOP + len(rows) * 22 + 10, parts)


def waterfall(title: str, spans: list[Bar]) -> str:
    """One row for each span, as they come; red is what failed."""
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    left, room = 330, _WIDTH - 330 - 70
    parts: list[str] = []
    for number, span in enumerate(spans):
        at = _TOP + number * 22
        x = left + (span.start - first) / ((last - first) or 1.0) * room
        length = max((span.end - span.start) / ((last - first) or 1.0) * room, 1.5)
        colour = _COLOURS[4] if span.failed else _COLOURS[2] if span.depth > 1 else _COLOURS[0]
        parts.extend(
            (
                _text(12 + span.depth * 14, at + 13, f"{span.name} {span.note}".strip()),
                f'<rect x="{x:.1f}" y="{at}" width="{length:.1f}" height="16" rx="2" fill="{colour}"/>',
                _text(x + length + 5, at + 13, _value(span.end - span.start, "s")),
            )
        )
    return _page(title, _TOP + len(spans) * 22 + 10, parts)


def _finite(series: Series) -> list[Point]:
    return [(time, value) for time, value in series.points if math.isfinite(value)]


def _ceiling(value: float) -> float:
    """The next of 1, 2, 5, 10, ... above."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= value * 0.999)


def _value(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
    if unit in {"ops", "cps"}:
        return f"{value:.3g} /s"
    return f"{value:.4g}{unit.removeprefix('suffix:') if unit.startswith('suffix:') else ''}"


def _legend(number: int, name: str, colour: str) -> tuple[str, str]:
    at = _HEIGHT + number * _LINE
    return (
        f'<rect x="{_LEFT}" y="{at - 3}" width="14" height="3" fill="{colour}"/>',
        _text(_LEFT + 20, at + 3, name),
    )


def _text(x: float, y: float, content: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="t">{escape(content)}</text>'


def _page(title: str, height: float, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title)}">\n'
        "<style>.t{font:11px sans-serif;fill:#888}.h{font:bold 13px sans-serif;fill:#888}</style>\n"
        f'<text x="12" y="20" class="h">{escape(title)}</text>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"
