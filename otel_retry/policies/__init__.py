"""The policies that come with the package, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_retry.policies.backpressure import BackpressurePolicy
from otel_retry.policies.current import CurrentPolicy
from otel_retry.policies.datastax import DefaultRetryPolicy, FallthroughRetryPolicy
from otel_retry.policies.driver import DriverPolicy
from otel_retry.policies.idempotence_aware import IdempotenceAware
from otel_retry.policies.logging_policy import Logging
from otel_retry.policies.once import OncePolicy
from otel_retry.policies.persistent import PersistentPolicy
from otel_retry.policies.secondary_fallback import SecondaryFallbackPolicy

if TYPE_CHECKING:
    from otel_retry.policy import RetryPolicy

POLICIES: dict[str, type[RetryPolicy]] = {
    policy.name: policy
    for policy in (BackpressurePolicy, CurrentPolicy, OncePolicy, PersistentPolicy, DriverPolicy)
}

__all__ = [
    "POLICIES",
    "BackpressurePolicy",
    "CurrentPolicy",
    "DefaultRetryPolicy",
    "DriverPolicy",
    "FallthroughRetryPolicy",
    "IdempotenceAware",
    "Logging",
    "OncePolicy",
    "PersistentPolicy",
    "SecondaryFallbackPolicy",
]
