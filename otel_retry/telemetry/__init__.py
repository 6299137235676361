"""Observers of the engine: spans and metrics, by the OpenTelemetry API only.

With no SDK configured nothing is built and nothing listens to PyMongo's events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.context import get_current
from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.metrics import Meter, get_meter, get_meter_provider
from opentelemetry.trace import get_tracer, get_tracer_provider

from otel_retry import semconv
from otel_retry.config import RETRIED
from otel_retry.telemetry.commands import SessionIds
from otel_retry.telemetry.hooks import Hooks
from otel_retry.telemetry.names import Naming
from otel_retry.telemetry.spans import OperationTrace
from otel_retry.version import __version__

if TYPE_CHECKING:
    from typing import Any

    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from otel_retry.config import Settings
    from otel_retry.telemetry.metrics import Instruments
    from otel_retry.telemetry.names import OperationNames


class Telemetry:
    """What one client's operations report to.

    Invariant: while `awake` is False nobody would see a span or a metric, unless `wakes()` says that this has changed.
    """

    __slots__ = (
        "_providers",
        "_tracer_provider",
        "awake",
        "every_attempt",
        "hooks",
        "instruments",
        "naming",
        "policy",
        "query_text_max_length",
        "raw",
        "retired",
        "sessions",
        "tracer",
    )

    def __init__(
        self,
        *,
        settings: Settings,
        tracer: Tracer | None,
        instruments: Instruments | None,
        collected: bool,
        policy: str,
    ) -> None:
        """`collected`: somebody would see what the instruments record."""
        self.tracer = tracer
        self.retired = False
        """The client reports to another one from now on; operations under way end as they began."""
        self.policy = policy
        self.instruments = instruments
        self.query_text_max_length = settings.query_text_max_length
        self.raw = settings.query_text_raw
        self.every_attempt = settings.attempt_spans != RETRIED
        """False: only attempts of operations that failed or were retried have spans."""
        self.hooks = Hooks.of(settings)
        self.naming = Naming(policy=policy, most_collections=settings.max_collections)
        self.sessions = SessionIds()
        self._tracer_provider = settings.tracer_provider
        self._providers = (get_tracer_provider(), get_meter_provider())
        self.awake = self.records or collected

    @property
    def records(self) -> bool:
        """Whether the tracer is one of an SDK; the API's own make spans that nobody sees."""
        return self.tracer is not None and not type(self.tracer).__module__.startswith("opentelemetry.trace")

    def wakes(self) -> bool:
        """Whether an SDK has come since. Asked by each operation while there is none, so it only looks whether a
        global provider is another one now.
        """
        tracers, meters = self._providers
        if get_tracer_provider() is tracers and get_meter_provider() is meters:
            return False
        self._providers = (get_tracer_provider(), get_meter_provider())
        if self.tracer is not None:
            self.tracer = make_tracer(self._tracer_provider)
        # A meter of the API's own becomes the SDK's by itself, and its instruments with it.
        self.awake = self.records or (self.instruments is not None and get_meter_provider() is not meters)
        return self.awake

    def start(
        self,
        names: OperationNames,
        parent: Context | None = None,
        operation_id: int | None = None,
        *,
        ambient: bool = True,
    ) -> OperationTrace | None:
        """None: somebody suppresses instrumentation here."""
        context = get_current()
        if (
            context and not is_instrumentation_enabled()
        ):  # nothing is suppressed in a context with nothing in it
            return None
        return OperationTrace(
            self, names, context if parent is None else parent, operation_id, ambient=ambient
        )


def make_tracer(provider: Any) -> Tracer:
    return get_tracer(semconv.SCOPE, __version__, provider, schema_url=semconv.SCHEMA_URL)


def make_meter(provider: Any) -> Meter:
    return get_meter(semconv.SCOPE, __version__, provider, schema_url=semconv.SCHEMA_URL)
