"""opentelemetry-instrumentation-pymongo beside us would make a second span of every command: it is switched off."""

from __future__ import annotations

import sys

from otel_retry.logs import warn_once

_MODULE = "opentelemetry.instrumentation.pymongo"


def mute_contrib() -> None:
    """By its own public switch, and only if something has loaded it already."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return
    try:
        instrumentor = module.PymongoInstrumentor()
        if instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.uninstrument()
            warn_once(
                "contrib",
                "opentelemetry-instrumentation-pymongo is active too: it was switched off, since otel_retry makes the "
                "same spans and more. To keep it from loading: OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=pymongo",
            )
    except Exception:
        warn_once(
            "contrib", "otel_retry could not switch off %s: expect double spans", _MODULE, exc_info=True
        )
