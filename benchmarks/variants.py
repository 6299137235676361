"""What is measured: PyMongo alone, otel_retry in each of its states, and its peers. A process switches one on, once.

Only the standard library is imported before a variant asks for more: some run in environments that have no OpenTelemetry.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager


class Unavailable(Exception):  # noqa: N818 - a finding for the table, not a failure of the benchmark
    """The variant cannot be had here, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`environment` names the virtual environment it needs, None for our own; `against` what its cost is added to.
    `early`: it must be switched on before PyMongo is imported. `around` is entered once for a block of operations: some
    peers see a database call only inside of a transaction of theirs.
    """

    name: str
    title: str
    switch_on: Callable[[], None]
    environment: str | None = None
    against: str = "plain"
    early: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _sdk(*, sampled: bool = True, metrics: bool = False) -> None:
    """The SDK as an application would have it, but with a processor that drops: exporting is nobody's hot path."""
    from opentelemetry import metrics as metrics_api
    from opentelemetry import trace as trace_api
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    provider = TracerProvider(sampler=ALWAYS_ON if sampled else ALWAYS_OFF)
    provider.add_span_processor(SpanProcessor())
    trace_api.set_tracer_provider(provider)
    if metrics:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        metrics_api.set_meter_provider(MeterProvider([InMemoryMetricReader()]))


def _nothing() -> None:
    pass


def _silent(interface: type) -> Any:
    """A listener that does nothing: what is left is PyMongo's own work of making its events."""
    methods = {name: lambda _self, _event: None for name in dir(interface) if not name.startswith("_")}
    return type("Silent", (interface,), methods)()


def _listener() -> None:
    from pymongo import monitoring

    monitoring.register(_silent(monitoring.CommandListener))


def _listeners() -> None:
    from pymongo import monitoring

    _listener()
    monitoring.register(_silent(monitoring.ConnectionPoolListener))


def _contrib(*, sampled: bool) -> Callable[[], None]:
    def switch_on() -> None:
        _sdk(sampled=sampled)
        from opentelemetry.instrumentation.pymongo import PymongoInstrumentor

        PymongoInstrumentor().instrument()

    return switch_on


def _ours(*, sdk: dict[str, bool] | None, **options: Any) -> Callable[[], None]:
    def switch_on() -> None:
        import otel_retry

        if sdk is not None:
            _sdk(**sdk)
        try:
            otel_retry.instrument(**options)
        except ValueError as error:
            raise Unavailable(str(error)) from None

    return switch_on


def _ddtrace() -> None:
    os.environ.update(DD_TRACE_ENABLED="true", DD_INSTRUMENTATION_TELEMETRY_ENABLED="false")
    from ddtrace import patch
    from ddtrace.trace import TraceFilter, tracer

    class Drop(TraceFilter):  # type: ignore[misc]
        def process_trace(self, trace: Any) -> None:
            """There is no agent here: whole traces are dropped, before they are encoded."""

    tracer.configure(trace_processors=[Drop()])
    patch(pymongo=True)


def _trace_of_ddtrace() -> Any:
    from ddtrace.trace import tracer

    return tracer.trace("bench")


def _logfire() -> None:
    import logfire

    logfire.configure(send_to_logfire=False, console=False, service_name="bench", inspect_arguments=False)
    logfire.instrument_pymongo()


def _sentry() -> None:
    import sentry_sdk
    from sentry_sdk.integrations.pymongo import PyMongoIntegration
    from sentry_sdk.transport import Transport

    class Drop(Transport):  # type: ignore[misc]
        def capture_envelope(self, envelope: Any) -> None:
            pass

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:9/1",
        traces_sample_rate=1.0,
        transport=Drop,
        default_integrations=False,
        integrations=[PyMongoIntegration()],
    )


def _transaction_of_sentry() -> Any:
    import sentry_sdk

    return sentry_sdk.start_transaction(op="bench", name="bench")


def _newrelic() -> None:
    os.environ.update(
        NEW_RELIC_LICENSE_KEY="0" * 40,
        NEW_RELIC_APP_NAME="bench",
        NEW_RELIC_DEVELOPER_MODE="true",
        NEW_RELIC_LOG="stderr",
        NEW_RELIC_LOG_LEVEL="critical",
    )
    import newrelic.agent

    newrelic.agent.initialize()
    newrelic.agent.register_application(timeout=10.0)


def _transaction_of_newrelic() -> Any:
    import newrelic.agent

    return newrelic.agent.BackgroundTask(newrelic.agent.application(), "bench")


_ALL = (
    Variant(name="plain", title="plain PyMongo", switch_on=_nothing),
    Variant(name="plain_again", title="plain PyMongo, once more (noise)", switch_on=_nothing),
    Variant(name="noop_listener", title="no-op CommandListener", switch_on=_listener),
    Variant(
        name="noop_listeners", title="no-op CommandListener and ConnectionPoolListener", switch_on=_listeners
    ),
    Variant(name="contrib_off", title="contrib, not sampled", switch_on=_contrib(sampled=False)),
    Variant(name="contrib", title="contrib, recording", switch_on=_contrib(sampled=True)),
    Variant(name="engine", title="otel_retry, engine only", switch_on=_ours(sdk=None, enabled=False)),
    Variant(name="no_sdk", title="otel_retry, no SDK", switch_on=_ours(sdk=None)),
    Variant(
        name="off",
        title="otel_retry, not sampled, metrics off",
        switch_on=_ours(sdk={"sampled": False}, metrics=False),
    ),
    Variant(
        name="off_metrics",
        title="otel_retry, not sampled, metrics on",
        switch_on=_ours(sdk={"sampled": False, "metrics": True}),
    ),
    Variant(
        name="recording",
        title="otel_retry, recording, metrics on",
        switch_on=_ours(sdk={"metrics": True}),
    ),
    Variant(
        name="recording_no_metrics",
        title="otel_retry, recording, metrics off",
        switch_on=_ours(sdk={}, metrics=False),
    ),
    Variant(
        name="retried",
        title='otel_retry, recording, attempt_spans="retried"',
        switch_on=_ours(sdk={"metrics": True}, attempt_spans="retried"),
    ),
    Variant(
        name="plain_old",
        title="plain PyMongo of ddtrace's version",
        switch_on=_nothing,
        environment="ddtrace",
        against="plain_old",
    ),
    Variant(
        name="ddtrace",
        title="ddtrace",
        switch_on=_ddtrace,
        environment="ddtrace",
        against="plain_old",
        around=_trace_of_ddtrace,
    ),
    Variant(name="logfire", title="logfire", switch_on=_logfire, environment="logfire"),
    Variant(
        name="sentry",
        title="sentry-sdk",
        switch_on=_sentry,
        environment="sentry",
        around=_transaction_of_sentry,
    ),
    Variant(
        name="newrelic",
        title="newrelic",
        switch_on=_newrelic,
        environment="newrelic",
        early=True,
        around=_transaction_of_newrelic,
    ),
)

VARIANTS = {variant.name: variant for variant in _ALL}


def with_measures(names: Iterable[str]) -> list[str]:
    """These, with what their cost is added to; plain PyMongo comes first."""
    wanted = {"plain", *names}
    wanted |= {VARIANTS[name].against for name in wanted if name in VARIANTS}
    known = [name for name in VARIANTS if name in wanted]
    return [*known, *(name for name in names if name not in VARIANTS)]


PEERS = ("plain_old", "ddtrace", "logfire", "sentry", "newrelic")
