"""What an error tells of the attempts behind it."""

from __future__ import annotations

import copy
import gc
import pickle
import traceback
import weakref

import pytest
from pymongo.errors import AutoReconnect, BulkWriteError, OperationFailure

from otel_retry.events import Attempt, Failure, Kind, Phase
from otel_retry.history import attach, attempts, describe


def attempt(error: BaseException, number: int = 1, *, decision: str = "retry", **facts) -> Attempt:
    facts = {"server": "h:1", "kind": Kind.SERVER_ERROR, **facts}
    delay = facts.pop("delay", 0.0)
    return Attempt(
        number=number,
        started=100.0 + number,
        duration=0.25,
        delay=delay,
        failure=Failure(error=error, **facts),
        decision=decision,
    )


def test_an_error_that_otel_retry_has_not_seen_has_no_attempts():
    assert attempts(ValueError("x")) == ()
    assert attempts(OperationFailure("x")) == ()


def test_the_attempts_come_back_in_order_and_whole():
    first, second, last = AutoReconnect("a"), OperationFailure("b", 91), OperationFailure("c", 462)
    history = (
        attempt(first, 1, server="h:1", kind=Kind.NETWORK),
        attempt(second, 2, server="h:2", code=91, delay=0.1),
        attempt(last, 3, server=None, phase=Phase.SELECTION, delay=0.2, decision="limit"),
    )

    attach(last, history)

    assert attempts(last) == history
    assert [one.error for one in attempts(last)] == [first, second, last]
    assert [one.server for one in attempts(last)] == ["h:1", "h:2", None]
    assert [one.delay for one in attempts(last)] == [0.0, 0.1, 0.2]
    assert attempts(last)[-1].decision == "limit"


def test_the_error_raised_may_be_an_earlier_one():
    """NoWritesPerformed: the error before is raised, and it is the first of the attempts."""
    first, last = OperationFailure("may have written", 91), OperationFailure("wrote nothing", 91)

    attach(first, (attempt(first, 1), attempt(last, 2, decision="limit")))

    assert [one.error for one in attempts(first)] == [first, last]
    assert attempts(last) == ()


def test_a_second_attach_replaces_the_first():
    error = OperationFailure("x")
    attach(error, (attempt(AutoReconnect("a"), 1), attempt(error, 2)))

    attach(error, (attempt(error, 1),))

    assert [one.number for one in attempts(error)] == [1]


def test_a_single_attempt_leaves_no_note():
    error = OperationFailure("x")

    attach(error, (attempt(error, decision="not_retryable"),))

    assert len(attempts(error)) == 1
    assert not hasattr(error, "__notes__")


def test_several_attempts_are_in_the_plain_traceback_one_line_each():
    first, last = AutoReconnect("a"), OperationFailure("b", 462)

    attach(
        last,
        (
            attempt(first, 1, server="h:1", kind=Kind.NETWORK),
            attempt(last, 2, server="h:2", code=462, delay=0.125, decision="limit"),
        ),
    )

    notes = [
        "otel_retry: attempt 1 on h:1 failed with AutoReconnect after 0.25 s: retry",
        "otel_retry: attempt 2 on h:2 failed with OperationFailure (code 462) after 0.25 s, after waiting 0.125 s: limit",
    ]
    assert last.__notes__ == notes
    assert "".join(traceback.format_exception(last)).rstrip().endswith("\n".join(notes))


def test_an_attempt_without_a_server_says_so():
    assert "on no server" in describe(attempt(AutoReconnect("x"), server=None))


def test_a_note_never_quotes_the_error_s_own_text():
    secret = "user 4711 has the password hunter2"
    first = OperationFailure(secret, 91, {"errmsg": secret, "keyValue": {"x": secret}})
    last = OperationFailure("other", 91)

    attach(last, (attempt(first, 1, code=91), attempt(last, 2)))

    assert secret in str(first)
    assert not [note for note in last.__notes__ if "4711" in note]


def test_an_error_does_not_refer_to_itself():
    gc.collect()
    gc.disable()
    try:
        error = OperationFailure("x")
        attach(error, (attempt(AutoReconnect("a"), 1), attempt(error, 2)))
        assert len(attempts(error)) == 2
        gone = weakref.ref(error)
        del error
        assert gone() is None
    finally:
        gc.enable()


def test_asking_does_not_make_it_refer_to_itself():
    error = OperationFailure("x")
    attach(error, (attempt(error),))
    gc.collect()
    gc.disable()
    try:
        assert attempts(error)[0].error is error
        assert attempts(error)[0].error is error
        gone = weakref.ref(error)
        del error
        assert gone() is None
    finally:
        gc.enable()


def test_what_was_answered_stays_right_when_the_error_is_attached_elsewhere():
    """A placeholder for `itself` must not come back as the error of another one."""
    first, last = OperationFailure("a"), OperationFailure("b")
    attach(first, (attempt(first),))
    attach(last, (attempts(first)[0], attempt(last, 2)))

    assert [one.error for one in attempts(last)] == [first, last]


def test_a_bulk_write_error_carries_the_history_and_keeps_its_details():
    details = {"writeErrors": [], "writeConcernErrors": [{"code": 91, "errmsg": "x"}], "nInserted": 2}
    first, error = AutoReconnect("lost"), BulkWriteError(details)
    attach(
        error, (attempt(first, 1, kind=Kind.NETWORK), attempt(error, 1, code=65, decision="not_retryable"))
    )

    assert [one.error for one in attempts(error)] == [first, error]
    assert error.details is details
    assert error.code == 65
    assert error.__notes__[-1].startswith("otel_retry: attempt 1 on h:1 failed with BulkWriteError (code 65)")


@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "error", [OperationFailure("x"), BulkWriteError({"nInserted": 0, "writeErrors": []})]
)
def test_an_error_with_a_history_can_be_copied_and_pickled_as_without(duplicate, error):
    """Task queues send errors between processes."""
    duplicate(error)  # or it says nothing about ours

    attach(error, (attempt(AutoReconnect("lost"), 1), attempt(error, 2)))

    copied = duplicate(error)
    assert type(copied) is type(error)
    assert str(copied) == str(error)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_the_history_of_a_pickled_error_ends_with_that_error(duplicate):
    error = OperationFailure("x")
    attach(error, (attempt(AutoReconnect("lost"), 1), attempt(error, 2)))

    copied = duplicate(error)

    assert attempts(copied)[-1].error is copied
