"""What was tried, kept on the error that was raised in the end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_retry.events import Attempt

_ATTRIBUTE = "__otel_retry_attempts__"


class _Itself(Exception):  # noqa: N818 - a placeholder
    """There is one, also after pickling: errors travel between processes."""

    def __reduce__(self) -> str:
        return "_ITSELF"


_ITSELF = _Itself("the error that carries this history")


def attempts(error: BaseException) -> tuple[Attempt, ...]:
    """The attempts behind an error that PyMongo raised, oldest first: server, error, duration, delay, decision.

    Empty for an error that otel_retry has not seen.
    """
    return tuple(
        replace(attempt, failure=replace(attempt.failure, error=error))
        if attempt.failure.error is _ITSELF
        else attempt
        for attempt in getattr(error, _ATTRIBUTE, ())
    )


def attach(error: BaseException, history: tuple[Attempt, ...]) -> None:
    """Leave the history on the error, and notes for a plain traceback when there was more than one attempt.

    The error does not refer to itself, or every failed operation would wait for the garbage collector together
    with the frames that its traceback holds.
    """
    kept = tuple(
        replace(attempt, failure=replace(attempt.failure, error=_ITSELF))
        if attempt.error is error
        else attempt
        for attempt in history
    )
    setattr(error, _ATTRIBUTE, kept)
    if len(history) > 1:
        for attempt in history:
            error.add_note(describe(attempt))


def describe(attempt: Attempt) -> str:
    """One line, without the error's own text: that may be long, and may quote the user's data."""
    failure = attempt.failure
    name = type(failure.error).__name__
    what = name if failure.code is None else f"{name} (code {failure.code})"
    waited = f", after waiting {attempt.delay:.3g} s" if attempt.delay else ""
    return (
        f"otel_retry: attempt {attempt.number} on {failure.server or 'no server'} failed with {what} "
        f"after {attempt.duration:.3g} s{waited}: {attempt.decision}"
    )
