"""The ledger of telemetry: what the clients did, counted apart from otel_retry, against what otel_retry reported.

Nothing is kept for each operation but a duration: spans are counted when they end and let go.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from pymongo.monitoring import CommandListener

from otel_retry import semconv

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.context import Context

OUTSIDE = ("killCursors", "endSessions")
"""Commands that PyMongo sends outside of any operation; they have an operation span of their own."""


class Commands(CommandListener):
    """The commands that PyMongo publishes, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.started_by_name: Counter[str] = Counter()
        self.in_overload = 0
        self.overloaded = threading.Event()

    def started(self, event: Any) -> None:
        with self._lock:
            self.started_by_name[event.command_name] += 1
            if self.overloaded.is_set():
                self.in_overload += 1

    def succeeded(self, event: Any) -> None: ...
    def failed(self, event: Any) -> None: ...


class Operations:
    """Each operation of the watched clients, where it enters PyMongo: how long it took, and whether it succeeded.

    PyMongo has no public place where all of them pass, so this wraps a private method, on the client at hand only.
    """

    def __init__(self) -> None:
        self.overloaded = threading.Event()
        self.succeeded = array("d")
        self.failed = array("d")
        self.overload_succeeded = array("d")
        self.overload_failed = array("d")
        self.cancelled = 0
        self.changed_context = 0
        """Operations that left another ambient context than they found."""

    @property
    def count(self) -> int:
        return len(self.succeeded) + len(self.failed)

    def watch(self, client: Any, *, is_async: bool) -> None:
        execute = client._retry_internal

        def watched(*args: Any, **kwargs: Any) -> Any:
            before, began = otel_context.get_current(), time.perf_counter()
            try:
                result = execute(*args, **kwargs)
            except BaseException:
                self._ended(began, before, succeeded=False)
                raise
            self._ended(began, before, succeeded=True)
            return result

        async def watched_async(*args: Any, **kwargs: Any) -> Any:
            before, began = otel_context.get_current(), time.perf_counter()
            try:
                result = await execute(*args, **kwargs)
            except BaseException:
                self._ended(began, before, succeeded=False)
                raise
            self._ended(began, before, succeeded=True)
            return result

        client._retry_internal = watched_async if is_async else watched

    def _ended(self, began: float, before: Context, *, succeeded: bool) -> None:
        seconds = time.perf_counter() - began
        # An array's append is atomic; a count of our own would need a lock.
        (self.succeeded if succeeded else self.failed).append(seconds)
        if self.overloaded.is_set():
            (self.overload_succeeded if succeeded else self.overload_failed).append(seconds)
        if otel_context.get_current() is not before:
            self.changed_context += 1


@dataclass(slots=True)
class Reported:
    """What otel_retry said, in spans and in metrics."""

    started: int = 0
    ended: int = 0
    operation_spans: int = 0
    command_spans: int = 0
    attempt_spans: int = 0
    transaction_spans: int = 0
    retries_by_operation: int = 0
    """Attempts after the first, as the operation spans say."""
    retry_events: int = 0
    retry_spans: int = 0
    """Command and attempt spans that are attempts after the first."""
    cancelled: int = 0
    tokens_out_of_range: int = 0
    retries_by_metric: int = 0
    durations_by_metric: int = 0
    backoff_seconds: float = 0.0
    budgets: dict[str, dict[str, float]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)


class Spans(SpanProcessor):
    """Counts spans into a `Reported` as they start and end, and keeps none."""

    def __init__(self, reported: Reported, *, capacity: float) -> None:
        self._reported = reported
        self._capacity = capacity
        self._lock = threading.Lock()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        with self._lock:
            self._reported.started += 1

    def on_end(self, span: ReadableSpan) -> None:
        attributes = span.attributes or {}
        reported = self._reported
        with self._lock:
            reported.ended += 1
            if semconv.DB_OPERATION_SUMMARY in attributes:
                reported.operation_spans += 1
                reported.retries_by_operation += attributes[semconv.RETRY_ATTEMPTS] - 1
                outcome = attributes[semconv.RETRY_OUTCOME]
                reported.outcomes[outcome] += 1
                reported.cancelled += outcome == "cancelled"
                if span.events:
                    self._see_events(span.events)
                return
            if span.name == semconv.TRANSACTION_SPAN:
                reported.transaction_spans += 1
                return
            if semconv.DB_COMMAND in attributes:
                reported.command_spans += 1
            else:
                reported.attempt_spans += 1
            reported.retry_spans += attributes[semconv.RETRY_ATTEMPT] > 1

    def _see_events(self, events: Iterable[Any]) -> None:
        for event in events:
            if event.name == semconv.RETRY_EVENT:
                self._reported.retry_events += 1
                tokens = event.attributes.get(semconv.RETRY_TOKENS)
                if tokens is not None and not 0 <= tokens <= self._capacity:
                    self._reported.tokens_out_of_range += 1


class Telemetry:
    """An SDK of the run's own: spans are counted, metrics are read once at the end."""

    def __init__(self, *, capacity: float = 1000) -> None:
        self.reported = Reported()
        self.operations = Operations()
        self.commands = Commands()
        self.reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider(shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(Spans(self.reported, capacity=capacity))
        self.meter_provider = MeterProvider([self.reader], shutdown_on_exit=False)

    @property
    def providers(self) -> dict[str, Any]:
        return {"tracer_provider": self.tracer_provider, "meter_provider": self.meter_provider}

    def overload(self, on: threading.Event) -> None:
        """Count apart what happens while `on` is set."""
        self.operations.overloaded = self.commands.overloaded = on

    def read_metrics(self) -> None:
        reported = self.reported
        for name, point in self._points():
            if name == semconv.RETRY_ATTEMPTS_COUNTER:
                reported.retries_by_metric += point.value
            elif name == semconv.OPERATION_DURATION:
                reported.durations_by_metric += point.count
            elif name == semconv.RETRY_BACKOFF:
                reported.backoff_seconds += point.sum
            elif name.startswith("mongodb.retry.budget."):
                budget = reported.budgets.setdefault(point.attributes[semconv.CLIENT], {})
                budget[name.rpartition(".")[2]] = point.value

    def _points(self) -> Iterable[tuple[str, Any]]:
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        yield metric.name, point

    def close(self) -> None:
        self.tracer_provider.shutdown()
        self.meter_provider.shutdown()


def judge(
    reported: Reported, *, operations: int, commands: Counter[str], changed_context: int, decides: bool
) -> list[str]:
    """What does not add up. `decides`: the policy is one of the engine's, not PyMongo's own loop."""
    outside = sum(commands[name] for name in OUTSIDE)
    equal = {
        "spans ended = spans started": (reported.ended, reported.started),
        "operation spans = operations": (reported.operation_spans, operations + outside),
        "durations measured = operation spans": (reported.durations_by_metric, reported.operation_spans),
        "command spans = commands published": (reported.command_spans, commands.total()),
        "retries by metric = retries by operation span": (
            reported.retries_by_metric,
            reported.retries_by_operation,
        ),
        "retry events = retries by operation span": (reported.retry_events, reported.retries_by_operation),
        "operations that left another context": (changed_context, 0),
        "events with tokens out of range": (reported.tokens_out_of_range, 0),
    }
    complaints = [f"{rule}: {left} and {right}" for rule, (left, right) in equal.items() if left != right]
    # A cancelled operation may have decided on an attempt that it never began.
    if not 0 <= reported.retries_by_metric - reported.retry_spans <= reported.cancelled:
        complaints.append(
            "attempts after the first by span = retries by metric: "
            f"{reported.retry_spans} and {reported.retries_by_metric}, {reported.cancelled} cancelled"
        )
    return complaints + (judge_budgets(reported) if decides else [])


def judge_budgets(reported: Reported) -> list[str]:
    """Each bucket: tokens = start + deposits - withdrawals, between empty and full; one token for each retry."""
    complaints = []
    for client, budget in reported.budgets.items():
        tokens, capacity = budget["tokens"], budget["capacity"]
        expected = capacity + budget["deposited"] - budget["consumed"]
        if round(10 * (tokens - expected)):
            complaints.append(f"{client} has {tokens} tokens, not {expected}: {budget}")
        if not 0 <= tokens <= capacity:
            complaints.append(f"{client} has {tokens} tokens of {capacity}")
    consumed = sum(budget["consumed"] for budget in reported.budgets.values())
    if reported.budgets and round(consumed) != reported.retries_by_metric:
        complaints.append(f"{consumed} tokens were taken for {reported.retries_by_metric} retries")
    return complaints
