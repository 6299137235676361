"""The profile of all hostile tests, and ways to look at everything that leaves the process."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hypothesis.strategies import SearchStrategy

    from tests.integration.telemetry_rig import Rig

hostile = settings(
    derandomize=True,  # the same examples on every run: what passes here passes elsewhere
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)


def examples_of(strategy: SearchStrategy[Any], count: int) -> list[Any]:
    """For tests with a client: the examples first, then one loop over them, in whichever event loop it may be."""
    drawn: list[Any] = []

    @settings(hostile, max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def draw(example: Any) -> None:
        drawn.append(example)

    draw()
    return drawn


LONGEST_WAIT = 10.0
"""Seconds: the cap of every backoff (seed 001)."""

MOST_ATTEMPTS = 6

LONGEST_TEXT = 8192
"""Characters of the longest attribute there may be: a stack trace."""


class Logged(logging.Handler):
    """Keeps records as text, with whatever a formatter would print behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    @property
    def complaints(self) -> list[str]:
        """Faults of ours, and attributes that OpenTelemetry refused."""
        return [line for line in self.lines if " WARNING " in line or " ERROR " in line]


def texts(value: Any) -> Iterator[str]:
    """Every piece of text in a value, however nested; of what is no text, how it would be written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from texts(key)
            yield from texts(each)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from texts(each)
    else:
        yield repr(value)


def in_spans(rig: Rig) -> Iterator[tuple[str, str]]:
    """All text of spans (names, attributes, events, status, links, resource), by where it stands."""
    for span in rig.spans:
        for text in texts(json.loads(span.to_json())):
            yield f"span {span.name[:80]}", text


def in_metrics(rig: Rig) -> Iterator[tuple[str, str]]:
    """The same of metrics, with their attributes and exemplars."""
    data = rig.reader.get_metrics_data()
    if data is not None:
        for text in texts(json.loads(data.to_json())):
            yield "metrics", text


def where(planted: str, rig: Rig, logged: Logged) -> list[str]:
    """Where a value that was planted in the data has come out."""
    found = [place for place, text in (*in_spans(rig), *in_metrics(rig)) if planted in text]
    return found + [f"log {line[:300]}" for line in logged.lines if planted in line]


async def outcome(operate: Callable[[], Any], resolve: Callable[[Any], Any]) -> Exception | None:
    """The error that an operation raises, if any."""
    try:
        await resolve(operate())
    except Exception as error:
        return error
    return None
