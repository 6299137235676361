"""What the log shows of a fault: the fault, and never the application's error that it happened upon."""

from __future__ import annotations

import logging

import pytest
from pymongo.errors import OperationFailure

from otel_retry.logs import forget_warnings, warn_once

PLANTED = "planted-in-a-document"


@pytest.fixture(autouse=True)
def _said_nothing_yet():
    forget_warnings()


def fail_upon(error: Exception, fault: Exception, cause: Exception | None = None) -> None:
    try:
        raise error
    except Exception:
        try:
            raise fault from cause
        except Exception:
            warn_once("key", "%s failed", "something", exc_info=True)


def formatted(caplog: pytest.LogCaptureFixture) -> str:
    [record] = caplog.records
    return logging.Formatter("%(message)s").format(record)


@pytest.mark.parametrize("cause", [None, OperationFailure(PLANTED)], ids=["in passing", "on purpose"])
def test_a_fault_is_shown_without_the_error_that_it_happened_upon(caplog, cause):
    fail_upon(OperationFailure(f"dup key: {PLANTED}"), ZeroDivisionError("our own fault"), cause)

    assert "something failed" in formatted(caplog)
    assert "our own fault" in formatted(caplog)
    assert "test_logs.py" in formatted(caplog)
    assert PLANTED not in formatted(caplog)


def test_of_an_error_of_a_server_only_the_type_is_shown(caplog):
    error = OperationFailure(f"dup key: {PLANTED}")
    fail_upon(error, error)

    assert "something failed (OperationFailure)" in formatted(caplog)
    assert PLANTED not in formatted(caplog)


def test_the_application_s_error_keeps_its_own_chain():
    cause = ValueError("before")
    error = OperationFailure("after")
    error.__cause__ = cause
    fail_upon(error, ZeroDivisionError())

    assert error.__cause__ is cause


def test_a_fault_is_said_once(caplog):
    for _ in range(3):
        warn_once("key", "it failed")

    assert formatted(caplog) == "it failed"
