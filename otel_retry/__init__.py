"""Retryable execution for PyMongo, made visible with OpenTelemetry."""

from otel_retry.config import SettingError
from otel_retry.events import Attempt, Failure, Kind, OperationKind, Phase, Reason
from otel_retry.history import attempts
from otel_retry.idempotence import idempotent
from otel_retry.instrumentor import budget, instrument, instrument_client, setup_otlp, uninstrument
from otel_retry.policies import (
    BackpressurePolicy,
    CurrentPolicy,
    DefaultRetryPolicy,
    DriverPolicy,
    FallthroughRetryPolicy,
    IdempotenceAware,
    Logging,
    OncePolicy,
    PersistentPolicy,
    SecondaryFallbackPolicy,
)
from otel_retry.policy import RULES, RetryContext, RetryDecision, RetryPolicy
from otel_retry.version import __version__

__all__ = [
    "RULES",
    "Attempt",
    "BackpressurePolicy",
    "CurrentPolicy",
    "DefaultRetryPolicy",
    "DriverPolicy",
    "Failure",
    "FallthroughRetryPolicy",
    "IdempotenceAware",
    "Kind",
    "Logging",
    "OncePolicy",
    "OperationKind",
    "PersistentPolicy",
    "Phase",
    "Reason",
    "RetryContext",
    "RetryDecision",
    "RetryPolicy",
    "SecondaryFallbackPolicy",
    "SettingError",
    "__version__",
    "attempts",
    "budget",
    "idempotent",
    "instrument",
    "instrument_client",
    "setup_otlp",
    "uninstrument",
]
