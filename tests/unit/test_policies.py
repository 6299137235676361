"""The ready-made policies and wrappers, by themselves."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from otel_retry import (
    BackpressurePolicy,
    CurrentPolicy,
    DefaultRetryPolicy,
    FallthroughRetryPolicy,
    IdempotenceAware,
    Logging,
    RetryContext,
    RetryDecision,
    SecondaryFallbackPolicy,
)
from otel_retry.events import Attempt, Failure, Kind, OperationKind, Phase

OVERLOADED = frozenset({"SystemOverloadedError", "RetryableError"})


def context(
    kind: Kind = Kind.NETWORK, operation: OperationKind = OperationKind.READ, **given: Any
) -> RetryContext:
    facts = {key: given.pop(key) for key in ("labels", "phase", "code", "server") if key in given}
    failure = Failure(error=OSError(kind), kind=kind, **facts)
    return RetryContext(
        operation="op", kind=operation, failure=failure, **{"attempt": 1, "retryable": True, **given}
    )


def failed_on(server: str) -> Attempt:
    failure = Failure(error=OSError(), kind=Kind.NETWORK, server=server)
    return Attempt(number=1, started=0.0, duration=0.0, delay=0.0, failure=failure, decision="retry")


def test_default_tries_each_host_once() -> None:
    policy = DefaultRetryPolicy()
    assert policy.on_request_error(context(server="a:1")).action == "try_next_host"
    second = context(server="b:1", attempt=2, history=(failed_on("a:1"),))
    assert policy.on_request_error(second).action == "try_next_host"
    again = context(server="a:1", attempt=2, history=(failed_on("a:1"),))
    assert policy.on_unavailable(again).action == "rethrow"


def test_default_gives_a_slow_read_one_more_try_on_the_same_host() -> None:
    assert DefaultRetryPolicy().on_read_timeout(context()).action == "retry"
    assert DefaultRetryPolicy().on_read_timeout(context(attempt=2)).action == "rethrow"


def test_default_repeats_a_slow_write_only_if_mongodb_makes_it_safe() -> None:
    write = OperationKind.WRITE
    assert DefaultRetryPolicy().on_write_timeout(context(operation=write)).action == "retry"
    assert (
        DefaultRetryPolicy().on_write_timeout(context(operation=write, retryable=False)).action == "rethrow"
    )


def test_default_raises_when_there_is_no_server() -> None:
    assert (
        DefaultRetryPolicy().on_unavailable(context(Kind.NO_SERVER, phase=Phase.SELECTION)).action
        == "rethrow"
    )


def test_fallthrough_raises_everything() -> None:
    policy = FallthroughRetryPolicy()
    for method in (
        policy.on_unavailable,
        policy.on_read_timeout,
        policy.on_write_timeout,
        policy.on_request_error,
    ):
        assert method(context()).action == "rethrow"


@pytest.mark.parametrize("kind", [Kind.NETWORK, Kind.NETWORK_TIMEOUT, Kind.NOT_PRIMARY])
@pytest.mark.parametrize("method", ["on_request_error", "on_write_timeout"])
def test_aware_repeats_what_is_idempotent_and_refuses_what_is_not(kind: Kind, method: str) -> None:
    ask = getattr(IdempotenceAware(BackpressurePolicy()), method)
    write: dict[str, Any] = {"operation": OperationKind.WRITE, "retryable": False}
    assert ask(context(kind, **write, idempotent=True)).action == "try_next_host"
    assert ask(context(kind, **write, idempotent=False)).action == "rethrow"
    assert ask(context(kind, **write, idempotent=None)).action == "rethrow"


def test_aware_leaves_writes_with_a_txnnumber_and_overloads_to_the_policy() -> None:
    aware = IdempotenceAware(BackpressurePolicy())
    labelled = context(
        operation=OperationKind.WRITE, labels=frozenset({"RetryableWriteError"}), idempotent=False
    )
    assert aware.on_request_error(labelled).action == "try_next_host"
    rejected = context(operation=OperationKind.WRITE, retryable=False, labels=OVERLOADED, idempotent=False)
    assert aware.on_request_error(rejected).action == "try_next_host"


def test_aware_does_not_repeat_forever() -> None:
    write = context(operation=OperationKind.WRITE, retryable=False, idempotent=True, attempt=2)
    assert IdempotenceAware(BackpressurePolicy()).on_request_error(write).action == "rethrow"


def test_secondary_fallback_is_for_the_first_retry_of_a_read_outside_of_transactions() -> None:
    policy = SecondaryFallbackPolicy()
    gone = {"kind": Kind.NO_SERVER, "phase": Phase.SELECTION}
    assert policy.on_unavailable(context(**gone)).read_preference == "secondaryPreferred"
    assert policy.on_request_error(context()).read_preference == "secondaryPreferred"
    assert policy.on_unavailable(context(**gone, in_transaction=True)).action == "rethrow"
    assert policy.on_unavailable(context(**gone, operation=OperationKind.WRITE)).action == "rethrow"
    assert policy.on_request_error(context(attempt=2)).read_preference is None
    assert policy.on_request_error(context(Kind.SERVER_ERROR, labels=OVERLOADED)).read_preference is None


def test_wrappers_keep_the_rules_of_what_they_wrap() -> None:
    for wrapper in (IdempotenceAware, Logging, SecondaryFallbackPolicy):
        assert wrapper(CurrentPolicy()).rules is CurrentPolicy.rules
        assert "current" in str(wrapper(CurrentPolicy()))


def test_logging_says_what_was_decided_and_nothing_of_the_error(caplog: pytest.LogCaptureFixture) -> None:
    policy = Logging(BackpressurePolicy())
    with caplog.at_level(logging.INFO, "otel_retry.policy"):
        for method in ("on_unavailable", "on_read_timeout", "on_write_timeout", "on_request_error"):
            decision = getattr(policy, method)(context(server="a:1"))
            assert isinstance(decision, RetryDecision)
    assert len(caplog.records) == 4
    assert "a:1" in caplog.text
    assert "try_next_host" in caplog.text
