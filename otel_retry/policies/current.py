"""MongoDB's specification as of 2026, which is what PyMongo 4.19 does: no bucket, two overload retries."""

from __future__ import annotations

from otel_retry.events import Kind
from otel_retry.policies.specified import SpecifiedPolicy
from otel_retry.policy import CURRENT


class CurrentPolicy(SpecifiedPolicy):
    name = "current"
    rules = CURRENT
    # PyMongo counts a pool that had no connection in time among the connection failures of a read.
    read_kinds = SpecifiedPolicy.read_kinds | {Kind.POOL_EXHAUSTED}
