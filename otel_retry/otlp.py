"""One call for programs that do not start under `opentelemetry-instrument`: SDK providers, OTLP exporters, instrument.

The only module of the library proper that touches the SDK, and it is imported only when `setup_otlp` is called.
"""

from __future__ import annotations

import atexit
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from otel_retry.config import SettingError, Settings, otlp_protocol, otlp_wanted
from otel_retry.instrumentor import switch_on
from otel_retry.logs import logger

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter

_EXIT_SECONDS = 5.0


def setup_otlp(service_name: str, **options: Any) -> None:
    """See `otel_retry.setup_otlp`."""
    settings = Settings.load(options)
    _refuse_to_replace(trace.get_tracer_provider(), "TracerProvider", "opentelemetry.trace")
    _refuse_to_replace(metrics.get_meter_provider(), "MeterProvider", "opentelemetry.metrics")
    # The whole environment is read before anything is made: an error leaves no thread and no exporter behind.
    protocols = {signal: otlp_protocol(signal) for signal in ("TRACES", "METRICS") if otlp_wanted(signal)}
    resource = _resource(service_name)
    tracer_provider = meter_provider = None
    if "TRACES" in protocols:
        tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracer_provider.add_span_processor(BatchSpanProcessor(_span_exporter(protocols["TRACES"])))
        trace.set_tracer_provider(tracer_provider)
    if "METRICS" in protocols:
        reader = PeriodicExportingMetricReader(_metric_exporter(protocols["METRICS"]))
        meter_provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        metrics.set_meter_provider(meter_provider)
    _flush_at_exit(tracer_provider, meter_provider)
    switch_on(settings)


def _flush_at_exit(tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
    """Both at once, and for a bounded time. The SDK's own way is one after the other, each for as long as its exporter
    tries: with nobody at the endpoint a program would end 13 s late.
    """
    ending = threading.Event()

    def end_traces() -> None:
        ending.wait()
        if tracer_provider is not None:
            tracer_provider.shutdown()

    # Started now: from Python 3.12 on no thread can be started while the interpreter ends.
    thread = threading.Thread(target=end_traces, name="otel_retry-exit", daemon=True)
    thread.start()

    def end() -> None:
        deadline = time.monotonic() + _EXIT_SECONDS
        ending.set()
        if meter_provider is not None:
            meter_provider.shutdown(timeout_millis=_EXIT_SECONDS * 1000)
        if not thread.is_alive():
            end_traces()  # it is done already, which does no harm, or this is a forked child, which has no threads
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            logger.warning(
                "the OTLP endpoint did not take everything within %g s: the rest is lost", _EXIT_SECONDS
            )

    atexit.register(end)


def _refuse_to_replace(provider: Any, what: str, api: str) -> None:
    """OpenTelemetry lets a provider be set once; a second one would be dropped with a warning that nobody reads."""
    if not type(provider).__module__.startswith(api):
        found = f"{type(provider).__module__}.{type(provider).__qualname__}"
        raise SettingError(
            f"setup_otlp would replace the {what} that is already set ({found}). Call otel_retry.instrument() instead: "
            "it reports to the providers that are there"
        )


def _resource(service_name: str) -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over what the code says, as operators expect."""
    found = Resource.create()
    missing: dict[str, str] = {}
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        missing[SERVICE_NAME] = service_name
    if SERVICE_INSTANCE_ID not in found.attributes:
        missing[SERVICE_INSTANCE_ID] = str(uuid.uuid4())  # without it all instances are one in Prometheus
    return found.merge(Resource(missing))


def _span_exporter(protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        return OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter as HTTPSpanExporter,
    )

    return HTTPSpanExporter()


def _metric_exporter(protocol: str) -> MetricExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: PLC0415

        return OTLPMetricExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
        OTLPMetricExporter as HTTPMetricExporter,
    )

    return HTTPMetricExporter()
