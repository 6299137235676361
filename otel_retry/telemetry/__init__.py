"""Observers of the engine: spans and metrics, by the OpenTelemetry API only.

With no SDK configured the API's own no-op objects are all that is called, and nothing listens to PyMongo's events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.metrics import Meter, get_meter
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, get_tracer

from otel_retry import semconv
from otel_retry.logs import warn_once
from otel_retry.telemetry.hooks import Hooks
from otel_retry.telemetry.names import Naming
from otel_retry.telemetry.spans import OperationTrace
from otel_retry.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Tracer

    from otel_retry.config import Settings
    from otel_retry.telemetry.metrics import Instruments


class Telemetry:
    """What one client's operations report to."""

    __slots__ = (
        "_naming",
        "hooks",
        "instruments",
        "policy",
        "query_text_max_length",
        "raw",
        "retired",
        "tracer",
    )

    def __init__(
        self, *, settings: Settings, tracer: Tracer | None, instruments: Instruments | None, policy: str
    ) -> None:
        self.tracer = tracer
        self.retired = False
        """The client reports to another one from now on; operations under way end as they began."""
        self.policy = policy
        self.instruments = instruments
        self.query_text_max_length = settings.query_text_max_length
        self.raw = settings.query_text_raw
        self.hooks = Hooks(
            request=settings.request_hook, response=settings.response_hook, failed=settings.failed_hook
        )
        self._naming = Naming(policy=policy, most_collections=settings.max_collections)

    @property
    def records(self) -> bool:
        """Whether the tracer is one of an SDK; the API's own make spans that nobody sees."""
        return self.tracer is not None and not type(self.tracer).__module__.startswith("opentelemetry.trace")

    def start(
        self,
        operation: str,
        database: str | None,
        collection: str | None,
        *,
        parent: Context | None = None,
        operation_id: int | None = None,
        ambient: bool = True,
    ) -> OperationTrace | None:
        """None: somebody suppresses instrumentation here, or telemetry itself failed."""
        try:
            if not is_instrumentation_enabled():
                return None
            names = self._naming.of(operation, database, collection)
            return OperationTrace(self, names, parent=parent, operation_id=operation_id, ambient=ambient)
        except Exception:
            warn_once(
                "start", "otel_retry failed to start a span; the operation goes on without", exc_info=True
            )
            return None

    def start_child(
        self,
        name: str,
        context: Context | None,
        attributes: dict[str, Any],
        *,
        links: list[Link] | None = None,
        start_time: int | None = None,
    ) -> Span:
        tracer = self.tracer
        if tracer is None:
            return INVALID_SPAN
        return tracer.start_span(name, context, SpanKind.CLIENT, attributes, links, start_time)


def make_tracer(provider: Any) -> Tracer:
    return get_tracer(semconv.SCOPE, __version__, provider, schema_url=semconv.SCHEMA_URL)


def make_meter(provider: Any) -> Meter:
    return get_meter(semconv.SCOPE, __version__, provider, schema_url=semconv.SCHEMA_URL)
