"""OpenTelemetry's own SDK in memory: what an application would export, and questions to it.

`Rig` holds both providers, whatever was finished and whatever was measured; nothing of otel_retry is used to read it,
so a name that is spelt wrong there is a test that fails here.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.flavours import Commands, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.sdk.trace.sampling import Sampler

    from tests.flavours import Flavour

ATTEMPT = "attempt"
TRANSACTION = "transaction"


class InFlight(SpanProcessor):
    """Spans that were started and not ended."""

    def __init__(self) -> None:
        self.started = 0
        self.open: dict[int, ReadableSpan] = {}

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.started += 1
        self.open[span.context.span_id] = span

    def on_end(self, span: ReadableSpan) -> None:
        del self.open[span.context.span_id]  # ended twice would be a KeyError


class Rig:
    """Both providers, in memory. Cumulative: what is counted stays counted."""

    def __init__(self, *, sampler: Sampler | None = None, **meter_options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.in_flight = InFlight()
        self.tracer_provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(self.in_flight)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self.reader], shutdown_on_exit=False, **meter_options)

    @property
    def providers(self) -> dict[str, Any]:
        """As `instrument()` takes them."""
        return {"tracer_provider": self.tracer_provider, "meter_provider": self.meter_provider}

    def shutdown(self) -> None:
        self.tracer_provider.shutdown()
        self.meter_provider.shutdown()

    # Spans.

    def clear(self) -> None:
        """Forget the spans so far; metrics stay."""
        self.exporter.clear()

    @property
    def spans(self) -> list[ReadableSpan]:
        """What was finished, in the order in which it began."""
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time)

    @property
    def open(self) -> list[ReadableSpan]:
        return list(self.in_flight.open.values())

    @property
    def operations(self) -> list[ReadableSpan]:
        return [span for span in self.spans if is_operation(span)]

    @property
    def commands(self) -> list[ReadableSpan]:
        return [span for span in self.spans if is_command(span)]

    @property
    def unsent(self) -> list[ReadableSpan]:
        """Attempts that sent no command."""
        return [span for span in self.spans if span.name == ATTEMPT]

    @property
    def transactions(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == TRANSACTION]

    def operation(self, name: str | None = None) -> ReadableSpan:
        """The only operation, or the only one of that name."""
        found = [each for each in self.operations if name in {None, each.attributes["db.operation.name"]}]
        assert len(found) == 1, f"not one operation {name}, but:\n{self.tree()}"
        return found[0]

    def command(self, name: str | None = None) -> ReadableSpan:
        found = [each for each in self.commands if name in {None, each.name}]
        assert len(found) == 1, f"not one command {name}, but:\n{self.tree()}"
        return found[0]

    def children(self, span: ReadableSpan) -> list[ReadableSpan]:
        return [each for each in self.spans if is_child(each, span)]

    def attempts(self, operation: ReadableSpan) -> list[tuple[str, int]]:
        """Name and attempt number of each child."""
        return [(each.name, each.attributes["mongodb.retry.attempt"]) for each in self.children(operation)]

    def names(self) -> list[Any]:
        """The forest: a name stands for a span without children, (name, [children]) for one with children."""
        spans = self.spans
        known = {span.context.span_id for span in spans}

        def below(span: ReadableSpan) -> Any:
            children = [below(each) for each in spans if is_child(each, span)]
            return (span.name, children) if children else span.name

        return [below(span) for span in spans if span.parent is None or span.parent.span_id not in known]

    def tree(self) -> str:
        """For people."""
        lines: list[str] = []

        def show(items: Iterable[Any], depth: int) -> None:
            for item in items:
                name, children = item if isinstance(item, tuple) else (item, ())
                lines.append("  " * depth + name)
                show(children, depth + 1)

        show(self.names(), 0)
        return "\n".join(lines) or "(no span)"

    # Metrics.

    def metrics(self) -> dict[str, Any]:
        """All that a collection gives now, by name."""
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def points(self, name: str, where: dict[str, Any] | None = None) -> list[Any]:
        """The data points of a metric that have at least these attributes."""
        metric = self.metrics().get(name)
        wanted = (where or {}).items()
        return [
            point
            for point in (metric.data.data_points if metric is not None else ())
            if all(point.attributes.get(key) == value for key, value in wanted)
        ]

    def total(self, name: str, where: dict[str, Any] | None = None) -> float:
        """The sum of a counter or gauge; of a histogram, how many values it has."""
        return sum(
            point.count if hasattr(point, "bucket_counts") else point.value
            for point in self.points(name, where)
        )

    def by(self, name: str, attribute: str) -> Counter[Any]:
        """The same, for each value of one attribute."""
        found: Counter[Any] = Counter()
        for point in self.points(name):
            value = point.count if hasattr(point, "bucket_counts") else point.value
            if value:
                found[point.attributes.get(attribute)] += value
        return found


def is_operation(span: ReadableSpan) -> bool:
    return "db.operation.name" in span.attributes


def is_command(span: ReadableSpan) -> bool:
    return "db.command.name" in span.attributes


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return (
        span.parent is not None
        and span.parent.span_id == parent.context.span_id
        and span.context.trace_id == parent.context.trace_id
    )


def events(span: ReadableSpan, name: str = "mongodb.retry") -> list[dict[str, Any]]:
    """The attributes of the span's events of one name, in order."""
    return [dict(event.attributes) for event in span.events if event.name == name]


def outcome(span: ReadableSpan) -> str:
    return span.attributes["mongodb.retry.outcome"]


class Interrupter(Commands):
    """Cancels an operation while its command is under way: as a timeout of asyncio does it, or Ctrl-C."""

    def __init__(self) -> None:
        super().__init__()
        self._armed: str | None = None
        self._timer: threading.Timer | None = None

    def started(self, event: Any) -> None:
        super().started(event)
        if event.command_name != self._armed:
            return
        self._armed = None
        try:
            task = asyncio.current_task()
            loop = asyncio.get_running_loop()
        except RuntimeError:
            task = None
        if task is not None and self._is_async:
            loop.call_later(0.02, task.cancel)
            return
        # To this thread and no other, so that the blocking call is what ends.
        self._timer = threading.Timer(0.02, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
        self._timer.start()

    async def interrupt(self, mongo: Flavour, operate: Callable[[], Any], command: str) -> None:
        """Run the operation in this very context; it must not answer before the interruption comes."""
        self._armed, self._is_async = command, mongo.is_async
        if mongo.is_async:
            with pytest.raises(asyncio.CancelledError):
                await operate()
            asyncio.current_task().uncancel()
            return

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                operate()
        finally:
            if self._timer is not None:
                self._timer.join()
            signal.signal(signal.SIGUSR1, before)


async def first_of(cursor: Any) -> Any:
    return await cursor.__anext__() if hasattr(cursor, "__anext__") else next(cursor)


def forget_sockets() -> None:
    """PyMongo's asynchronous client, cancelled while it connects, forgets the socket: nothing of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def discovered(client: Any, servers: int) -> None:
    """The client knows so many servers; until then a retry has nowhere else to go."""
    with suppress_instrumentation():
        await resolve(client.admin.command("ping"))
    await eventually(lambda: len(client.nodes) == servers, seconds=60)


async def eventually(condition: Callable[[], Any], *, seconds: float = 60.0) -> None:
    """Wait for what another thread or task does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)
