"""For tests of applications: instant and capped retries, failures without a faulty server, and what was attempted.

    pytest_plugins = ["otel_retry.testing"]

    def test_an_order_survives_an_overload(client, retries):
        retries.fail(client, retries.overloaded(), retries.overloaded())
        place_order(client)
        assert retries.attempts(client) == [3]

Nothing here is for production: it changes how every instrumented client in the process waits.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from pymongo.errors import AutoReconnect, NetworkTimeout, OperationFailure, ServerSelectionTimeoutError

from otel_retry import instrumentor
from otel_retry.pymongo.seam import waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Faults:
    """Errors that attempts of one client raise in the place of being made, in order; and how often each operation
    was attempted.
    """

    def __init__(self) -> None:
        self._errors: list[tuple[str | None, Exception]] = []
        self._lock = threading.Lock()
        self.attempts: list[int] = []

    def add(self, errors: tuple[Exception, ...], operation: str | None) -> None:
        with self._lock:
            self._errors.extend((operation, error) for error in errors)

    @property
    def left(self) -> int:
        """Failures that no attempt has met yet."""
        return len(self._errors)

    def before(self, attempt: Callable[..., Any], operation: str) -> Callable[..., Any]:
        """The attempt as the loop is to make it: each call first looks whether it has to fail."""
        with self._lock:
            index = len(self.attempts)
            self.attempts.append(0)

        def scripted(execution: Any) -> Any:
            with self._lock:
                self.attempts[index] += 1
                error = self._next(operation)
            execution.otr_scripted = error
            if error is not None:
                raise error
            return attempt(execution)

        return scripted

    def _next(self, operation: str) -> Exception | None:
        for position, (wanted, error) in enumerate(self._errors):
            if wanted is None or wanted == operation:
                del self._errors[position]
                return error
        return None


class Retries:
    """What a test does with retries. Made by the fixture `retries` or by `instant_retries()`."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        """How long each wait would have been, in seconds."""
        self._states: list[Any] = []

    def fail(self, client: Any, *errors: Exception, operation: str | None = None) -> None:
        """The next attempts of this client, or of one operation of it (`find`, `insert`...), raise these errors."""
        self._faults(client).add(errors, operation)

    def attempts(self, client: Any) -> list[int]:
        """Attempts of each operation since the client was first mentioned here, in order: [1, 3] is one that
        succeeded at once and one that needed three.
        """
        return list(self._faults(client).attempts)

    def all_failures_met(self, client: Any) -> bool:
        """Whether each failure that was scripted was met by an attempt."""
        return self._faults(client).left == 0

    @staticmethod
    def overloaded() -> OperationFailure:
        """A server rejects the command because it has too much to do."""
        details = {"code": 462, "errorLabels": ["SystemOverloadedError", "RetryableError"]}
        return OperationFailure("scripted: overloaded", 462, details)

    @staticmethod
    def not_primary() -> OperationFailure:
        """The server is no longer the primary; a write with a txnNumber may be repeated."""
        return OperationFailure(
            "scripted: not primary", 10107, {"code": 10107, "errorLabels": ["RetryableWriteError"]}
        )

    @staticmethod
    def connection_lost() -> AutoReconnect:
        """The connection broke."""
        return AutoReconnect("scripted: connection lost", {"errorLabels": ["RetryableWriteError"]})

    @staticmethod
    def timed_out() -> NetworkTimeout:
        """No answer came in time."""
        return NetworkTimeout("scripted: timed out", {"errorLabels": ["RetryableWriteError"]})

    @staticmethod
    def no_server() -> ServerSelectionTimeoutError:
        """No suitable server was found in time."""
        return ServerSelectionTimeoutError("scripted: no server")

    @staticmethod
    def server_error(code: int, *labels: str) -> OperationFailure:
        return OperationFailure(f"scripted: code {code}", code, {"code": code, "errorLabels": list(labels)})

    def _faults(self, client: Any) -> Faults:
        state = instrumentor.state_of(client)
        if state is None:
            raise RuntimeError("this client is not instrumented: call otel_retry.instrument() first")
        if state.faults is None:
            state.faults = Faults()
            self._states.append(state)
        found: Faults = state.faults
        return found

    def forget(self) -> None:
        for state in self._states:
            state.faults = None


@contextmanager
def instant_retries(*, max_waits: int = 1000) -> Iterator[Retries]:
    """Waits take no time, and a loop that would never end is stopped after `max_waits` of them."""
    retries = Retries()

    def wait(seconds: float) -> None:
        retries.waits.append(seconds)
        if len(retries.waits) > max_waits:
            raise AssertionError(f"more than {max_waits} waits: does this retry ever end?")

    async def wait_async(seconds: float) -> None:
        wait(seconds)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(waiting, "sleep", wait))
        stack.enter_context(mock.patch.object(waiting, "sleep_async", wait_async))
        stack.callback(retries.forget)
        yield retries


@pytest.fixture(name="retries")
def retries_fixture() -> Iterator[Retries]:
    """Instant retries, scripted failures, and how often each operation was attempted."""
    with instant_retries() as retries:
        yield retries
