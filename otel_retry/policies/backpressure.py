"""Seed 001: every command is repeated when the server rejects it for overload, held back by bucket and backoff."""

from __future__ import annotations

from otel_retry.policies.specified import SpecifiedPolicy
from otel_retry.policy import BACKPRESSURE


class BackpressurePolicy(SpecifiedPolicy):
    name = "backpressure"
    rules = BACKPRESSURE
