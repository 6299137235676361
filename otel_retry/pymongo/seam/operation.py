"""PyMongo's retryable operation with its decision taken over: server selection, sessions, transaction numbers and
wire format stay PyMongo's, attempt by attempt; what follows a failure is the machine's.

PyMongo's `run()` still runs, for what it does before and after: our loop sits inside the one `_read()` or `_write()`
that it calls, and the final error leaves in an envelope that its own retry logic does not know.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pymongo import _csot

from otel_retry.drivers import run, run_async
from otel_retry.events import RETRYABLE_ERROR, Failure, OperationKind, Phase
from otel_retry.execution import OperationExecution
from otel_retry.machine import OperationFacts, Retry, Situation
from otel_retry.pymongo.classify import classify
from otel_retry.pymongo.seam import waiting
from otel_retry.pymongo.seam.bulk import ObservedBulks, PerCommand

if TYPE_CHECKING:
    from otel_retry.clients import ClientRegistry, ClientState
    from otel_retry.pymongo.seam.shape import Half

_TRANSACTION_ENDS = frozenset({"commitTransaction", "abortTransaction"})


class Envelope(Exception):  # noqa: N818 - a carrier, not an error
    """Takes the final error past PyMongo's `except PyMongoError`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class RetriedOperation(OperationExecution):
    """What the synchronous and the asynchronous operation share: everything but the waiting.

    It is mixed into PyMongo's class, so the underscored names below are PyMongo's own attributes.
    """

    otr_transaction_state: Any
    otr_unconditional: bool
    """The retry under way needs no support for retryable writes: the server said that nothing was executed."""

    _address: Any
    _always_retryable: bool
    _attempt_number: int
    _bulk: Any
    _client: Any
    _deprioritized_servers: Any
    _func: Any
    _is_read: bool
    _last_error: Any
    _operation: Any
    _retryable: Any
    _retrying: bool
    _server: Any
    _session: Any

    def otr_begin(self, bulks: ObservedBulks) -> None:
        self.otr_machine = None
        self.otr_unconditional = False
        self.otr_started = self.otr_attempt_started = time.monotonic()
        session = self._session
        self.otr_transaction_state = None if session is None else session._transaction.state
        if self._is_read:
            return
        state = cast("ClientState", self.otr_state)
        if not state.retry_writes and self._retryable and self.otr_kind() is OperationKind.WRITE:
            self._retryable = (
                False  # not asked for explicitly, under rules that want that: no txnNumber either
            )
        if self._bulk is not None:
            bulks.observe(self._bulk, self.otr_command_succeeded)
            if not self._retryable and state.retry_writes and session and not session.in_transaction:
                # PyMongo gives up on the whole bulk write if one of its operations is a multi; seed 003 wants
                # each command judged by itself.
                self._retryable = PerCommand(self._bulk)

    def otr_end(self, bulks: ObservedBulks) -> None:
        if self._bulk is not None:
            bulks.release(self._bulk)

    def otr_command_succeeded(self) -> None:
        machine = self.otr_machine
        now = self.otr_attempt_started = time.monotonic()
        if machine is not None:
            machine.command_succeeded(now)
        else:
            self.otr_deposit_first_success()

    def succeeded(self) -> None:
        if self._bulk is None:  # a bulk write has deposited for each of its commands already
            super().succeeded()

    def otr_name(self) -> str:
        return getattr(self._operation, "value", self._operation)  # type: ignore[no-any-return]

    def otr_kind(self) -> OperationKind:
        if getattr(self, "_is_run_command", False):
            return OperationKind.RUN_COMMAND
        if not self._is_read:
            return (
                OperationKind.TRANSACTION_END if self.otr_name() in _TRANSACTION_ENDS else OperationKind.WRITE
            )
        # An aggregation that ends in $out or $merge takes PyMongo's read path, but it is a write.
        command = getattr(self._func, "__self__", None)
        return OperationKind.WRITE if getattr(command, "_performs_write", False) else OperationKind.READ

    def otr_facts(self) -> OperationFacts:
        state = cast("ClientState", self.otr_state)
        return OperationFacts(
            name=self.otr_name(),
            kind=self.otr_kind(),
            started=self.otr_started,
            retry_reads=state.retry_reads,
            retry_writes=state.retry_writes,
        )

    def otr_failure(self, error: Exception) -> Failure:
        server = self._server
        if server is None:
            return classify(error, phase=Phase.SELECTION)
        phase = Phase.SENT if entered(self._func, error) else Phase.CONNECTION
        return classify(error, phase=phase, server=address_of(server))

    def otr_situation(self, now: float) -> Situation:
        session = self._session
        write_concern = closure(self._func, "write_concern")
        return Situation(
            now=now,
            remaining=_csot.remaining(),
            retryable=bool(self._retryable),
            in_transaction=session is not None and session.in_transaction,
            acknowledged=getattr(write_concern, "acknowledged", True),
            sharded=self._client.topology_description.topology_type_name == "Sharded",
        )

    def otr_restore(self, step: Retry) -> bool:
        """Bring PyMongo's own state in order for the next attempt. True: the session must be unpinned too."""
        failure = step.failure
        machine = self.otr_machine
        self._last_error = machine.error if machine is not None else failure.error
        self.otr_unconditional = not self._retryable or RETRYABLE_ERROR in failure.labels
        if hasattr(self, "_always_retryable"):
            self._always_retryable = self.otr_unconditional
        self._attempt_number = machine.total_retries if machine is not None else 1
        self._retrying = True
        if self._bulk is not None:
            self._bulk.retrying = True  # or the batch would be skipped
            self._retrying = False
            forget_stale_error(self._func)
        if step.deprioritise and self._server is not None:
            self._deprioritized_servers = [*(self._deprioritized_servers or ()), self._server]
        self._server = None
        session = self._session
        return session is not None and session.in_transaction and self._restore_transaction(failure)

    def _restore_transaction(self, failure: Failure) -> bool:
        transaction = self._session._transaction
        if not failure.overloaded:
            return True  # only commit and abort come here, and they may go to another mongos
        if self._session._starting_transaction or transaction.state is not self.otr_transaction_state:
            # The command that was rejected was the first: the transaction has not begun, on any server.
            transaction.state = self.otr_transaction_state
            return True
        if self.otr_kind() is OperationKind.TRANSACTION_END and transaction.attempt:
            # The rejected attempt does not count, but those before it do: once one has failed in any other way,
            # a commit goes on with w: majority.
            transaction.attempt -= 1
        return False  # in mid-transaction the pinned mongos is the only one that knows it

    def _check_last_error(self, check_csot: bool = False) -> None:
        """PyMongo asks this when the server it found cannot do retryable writes or reads."""
        if not self.otr_decides:
            super()._check_last_error(check_csot)  # type: ignore[misc]
        elif not check_csot and self.otr_machine is not None and not self.otr_unconditional:
            error = self.otr_machine.error
            if self.otr_machine.retries and error is not None:
                raise error


def entered(func: Any, error: BaseException) -> bool:
    """Whether `error` came out of `func`, that is, after a connection was there and a command may have been sent.

    Read off the traceback when something failed, so that an operation that succeeds pays nothing for it.
    """
    code = getattr(getattr(func, "__func__", func), "__code__", None)
    if code is None:
        return True
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return True
        traceback = traceback.tb_next
    return False


def closure(func: Any, name: str) -> Any:
    """A variable that PyMongo's callback closes over, or None."""
    code = getattr(func, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    try:
        return func.__closure__[code.co_freevars.index(name)].cell_contents
    except ValueError:  # not assigned yet
        return None


def forget_stale_error(func: Any) -> None:
    """A client bulk write keeps the error of a failed attempt and would raise it after the retry succeeded."""
    result = closure(func, "full_result")
    if isinstance(result, dict) and result.get("error") is not None:
        result["error"] = None


def address_of(server: Any) -> str:
    host, port = server.description.address
    return str(host) if port is None else f"{host}:{port}"


def operation_class(half: Half, registry: ClientRegistry) -> type[Any]:
    """PyMongo's class of this half, with the loop taken over."""
    base: Any = half.operation
    bulks = ObservedBulks()
    return _async_class(base, registry, bulks) if half.is_async else _sync_class(base, registry, bulks)


def _sync_class(base: Any, registry: ClientRegistry, bulks: ObservedBulks) -> type[Any]:
    class RetriedClientOperation(RetriedOperation, base):  # type: ignore[misc]
        def run(self) -> Any:
            self.otr_state = registry.of(self._client)
            if not self.otr_decides:
                return base.run(self)
            self.otr_begin(bulks)
            try:
                return base.run(self)
            except Envelope as envelope:
                error = envelope.error
            finally:
                self.otr_end(bulks)
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

        def _read(self) -> Any:
            return self.otr_attempts(base._read) if self.otr_decides else base._read(self)

        def _write(self) -> Any:
            return self.otr_attempts(base._write) if self.otr_decides else base._write(self)

        def otr_attempts(self, attempt: Any) -> Any:
            try:
                return run(self, partial(attempt, self), waiting.sleep)
            except Exception as error:
                raise Envelope(error) from None

        def prepare(self, step: Retry) -> None:
            if self.otr_restore(step):
                self._session._unpin()

    return RetriedClientOperation


def _async_class(base: Any, registry: ClientRegistry, bulks: ObservedBulks) -> type[Any]:
    class AsyncRetriedClientOperation(RetriedOperation, base):  # type: ignore[misc]
        async def run(self) -> Any:
            self.otr_state = registry.of(self._client)
            if not self.otr_decides:
                return await base.run(self)
            self.otr_begin(bulks)
            try:
                return await base.run(self)
            except Envelope as envelope:
                error = envelope.error
            finally:
                self.otr_end(bulks)
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

        async def _read(self) -> Any:
            return await (self.otr_attempts(base._read) if self.otr_decides else base._read(self))

        async def _write(self) -> Any:
            return await (self.otr_attempts(base._write) if self.otr_decides else base._write(self))

        async def otr_attempts(self, attempt: Any) -> Any:
            try:
                return await run_async(self, partial(attempt, self), waiting.sleep_async)
            except Exception as error:
                raise Envelope(error) from None

        async def prepare(self, step: Retry) -> None:
            if self.otr_restore(step):
                await self._session._unpin()

    return AsyncRetriedClientOperation
