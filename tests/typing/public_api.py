"""The public API as a typed application uses it. Never run: `mypy --strict` must accept every line of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from pymongo.errors import PyMongoError
from pymongo.read_preferences import Nearest

import otel_retry
from otel_retry import (
    RULES,
    Attempt,
    BackpressurePolicy,
    CurrentPolicy,
    DefaultRetryPolicy,
    DriverPolicy,
    Failure,
    FallthroughRetryPolicy,
    IdempotenceAware,
    Kind,
    Logging,
    OncePolicy,
    OperationKind,
    PersistentPolicy,
    Phase,
    Reason,
    RetryContext,
    RetryDecision,
    RetryPolicy,
    SecondaryFallbackPolicy,
    SettingError,
)

if TYPE_CHECKING:
    from pymongo import AsyncMongoClient, MongoClient


class Mine(RetryPolicy):
    name = "mine"
    rules = RULES["current"]

    def __init__(self, *, attempts: int = 3) -> None:
        self._attempts = attempts

    def on_unavailable(self, context: RetryContext) -> RetryDecision:
        assert_type(context.attempt, int)
        assert_type(context.retries, int)
        assert_type(context.failure, Failure)
        assert_type(context.kind, OperationKind)
        assert_type(context.history, tuple[Attempt, ...])
        assert_type(context.remaining, float | None)
        assert_type(context.tokens, float | None)
        assert_type(context.idempotent, bool | None)
        assert_type(context.server, str | None)
        assert_type(context.is_read, bool)
        if context.attempt >= self._attempts:
            return RetryDecision.rethrow(Reason.LIMIT)
        return RetryDecision.try_next_host(delay=0.1 * context.retries)

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:
        return RetryDecision.retry(delay=1, read_preference=Nearest())

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:
        if context.idempotent:
            return RetryDecision.retry()
        return RetryDecision.rethrow()

    def on_request_error(self, context: RetryContext) -> RetryDecision:
        failure = context.failure
        assert_type(failure.code, int | None)
        assert_type(failure.labels, frozenset[str])
        assert_type(failure.base_backoff, float | None)
        assert_type(failure.overloaded, bool)
        if failure.kind is Kind.NETWORK and failure.phase is Phase.CONNECTION:
            return RetryDecision.try_next_host()
        return RetryDecision.ignore() if failure.code == 43 else super().on_request_error(context)


def switch_on_and_off() -> None:
    otel_retry.instrument()
    otel_retry.instrument("current")
    otel_retry.instrument(policy=Mine(attempts=2))
    try:
        otel_retry.instrument(policy="nonsense")
    except SettingError as error:
        assert_type(error, SettingError)
    otel_retry.instrument(tracer_provider=None, meter_provider=None, metrics=False)
    otel_retry.setup_otlp(service_name="shop")
    otel_retry.setup_otlp("shop", policy=Mine())
    otel_retry.uninstrument()


def ready_made() -> list[RetryPolicy]:
    return [
        BackpressurePolicy(),
        CurrentPolicy(),
        OncePolicy(),
        PersistentPolicy(),
        DriverPolicy(),
        DefaultRetryPolicy(),
        FallthroughRetryPolicy(),
        SecondaryFallbackPolicy(),
        Logging(IdempotenceAware(Mine())),
    ]


def vouched(client: MongoClient[dict[str, Any]]) -> None:
    with otel_retry.idempotent():
        client.db.coll.update_many({}, {"$inc": {"n": 1}})
    with otel_retry.idempotent(False):
        client.db.coll.delete_many({})


def one_client(client: MongoClient[dict[str, Any]], asynchronous: AsyncMongoClient[dict[str, Any]]) -> None:
    otel_retry.instrument_client(client, policy=Mine())
    otel_retry.instrument_client(asynchronous, "driver")
    bucket = otel_retry.budget(client)
    if bucket is not None:
        assert_type(bucket.tokens, float)
        assert_type(bucket.capacity, float)
        assert_type(bucket.consumed, float)
        assert_type(bucket.deposited, float)
        assert_type(bucket.denied, int)


def what_was_tried(client: MongoClient[dict[str, Any]]) -> list[str]:
    try:
        client.db.coll.find_one({})
    except PyMongoError as error:
        history = otel_retry.attempts(error)
        assert_type(history, tuple[Attempt, ...])
        return [line(attempt) for attempt in history]
    return []


def line(attempt: Attempt) -> str:
    assert_type(attempt.number, int)
    assert_type(attempt.duration, float)
    assert_type(attempt.delay, float)
    assert_type(attempt.decision, str)
    assert_type(attempt.server, str | None)
    assert_type(attempt.error, BaseException)
    return f"{attempt.number} {attempt.server} {type(attempt.error).__name__}"


def version() -> str:
    return otel_retry.__version__
