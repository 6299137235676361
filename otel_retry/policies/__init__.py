"""The policies that come with the package, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_retry.policies.backpressure import BackpressurePolicy
from otel_retry.policies.current import CurrentPolicy
from otel_retry.policies.driver import DriverPolicy
from otel_retry.policies.once import OncePolicy
from otel_retry.policies.persistent import PersistentPolicy

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
    "DriverPolicy",
    "OncePolicy",
    "PersistentPolicy",
]
