"""OpenTelemetry's names as Prometheus spells them when it receives OTLP.

This is what Prometheus does with `translation_strategy: UnderscoreEscapingWithSuffixes`, its default, for the units and
kinds that this package uses; it is no general translation.
"""

from __future__ import annotations

import re
from enum import Enum

# Prometheus translates more; a unit that is missing here is an error rather than a wrong name.
_UNITS = {"s": "seconds", "ms": "milliseconds", "By": "bytes"}


class Kind(Enum):
    """What an instrument becomes: a counter has `_total`, a gauge nothing, a histogram three series."""

    COUNTER = "counter"
    GAUGE = "gauge"
    """Also an up-down counter: Prometheus has nothing else for a sum that may fall."""
    HISTOGRAM = "histogram"


def label(attribute: str) -> str:
    """`db.operation.name` → `db_operation_name`."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", attribute)


def series(name: str, unit: str, kind: Kind) -> list[str]:
    """The names of all series of one metric: `db.client.operation.duration`, `s` →
    `db_client_operation_duration_seconds_bucket`, `..._sum`, `..._count`.
    """
    base = label(name)
    suffix = _unit_suffix(unit, kind)
    if suffix and not base.endswith(f"_{suffix}"):
        base = f"{base}_{suffix}"
    if kind is Kind.HISTOGRAM:
        return [f"{base}_bucket", f"{base}_sum", f"{base}_count"]
    if kind is Kind.COUNTER and not base.endswith("_total"):
        return [f"{base}_total"]
    return [base]


def _unit_suffix(unit: str, kind: Kind) -> str:
    if not unit or unit.startswith("{"):
        return ""
    if unit == "1":
        return "ratio" if kind is Kind.GAUGE else ""
    return _UNITS[unit]
