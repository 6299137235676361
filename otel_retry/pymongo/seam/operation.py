"""PyMongo's retryable operation with its decision taken over: server selection, sessions, transaction numbers and
wire format stay PyMongo's, attempt by attempt; what follows a failure is the machine's.

PyMongo's `run()` still runs, for what it does before and after: our loop sits inside the one `_read()` or `_write()`
that it calls, and the final error leaves in an envelope that its own retry logic does not know.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pymongo.errors import DuplicateKeyError, ServerSelectionTimeoutError
from pymongo.read_preferences import make_read_preference, read_pref_mode_from_name

from otel_retry.drivers import run, run_async
from otel_retry.events import RETRYABLE_ERROR, Failure, OperationKind, Phase
from otel_retry.execution import OperationExecution
from otel_retry.idempotence import insert_is_recognisable, is_idempotent, vouched
from otel_retry.machine import OperationFacts, Retry, Situation
from otel_retry.pymongo.classify import classify
from otel_retry.pymongo.seam import waiting
from otel_retry.pymongo.seam.bulk import ObservedBulks, PerCommand
from otel_retry.pymongo.seam.closures import closure, entered
from otel_retry.pymongo.seam.ignoring import can_ignore, empty_result
from otel_retry.pymongo.seam.namespace import namespace_of
from otel_retry.pymongo.seam.observing import ObservedOperation
from otel_retry.pymongo.seam.private import remaining
from otel_retry.pymongo.seam.statements import statements_of

if TYPE_CHECKING:
    from otel_retry.clients import ClientRegistry, ClientState
    from otel_retry.idempotence import Statement
    from otel_retry.pymongo.seam.shape import Half


class Envelope(Exception):  # noqa: N818 - a carrier, not an error
    """Takes the final error past PyMongo's `except PyMongoError`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class RetriedOperation(ObservedOperation):
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
    _read_pref: Any
    _server_selector: Any
    _operation: Any
    _operation_id: int | None
    _retryable: Any
    _retrying: bool
    _server: Any
    _session: Any

    # Class attributes, so that an operation of a client that is not instrumented costs nothing more.
    otr_state: ClientState | None = None
    otr_decides = False
    otr_own_address = False
    """The address was set by us, for a retry on the same host, and not by PyMongo for a cursor."""
    otr_scripted: Exception | None = None
    """The error that `otel_retry.testing` raised in the place of the attempt: it counts as one of a server."""

    def otr_begin(self, state: ClientState, bulks: ObservedBulks) -> None:
        self.otr_machine = None
        self.otr_unconditional = False
        self.otr_started = self.otr_attempt_started = time.monotonic()
        session = self._session
        self.otr_transaction_state = None if session is None else session._transaction.state
        if self._is_read:
            return
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
        # The tracebacks of earlier errors hold this object: it must not hold those errors in turn.
        self.otr_machine = self._last_error = None
        if self._bulk is not None:
            bulks.release(self._bulk)

    def otr_command_succeeded(self) -> None:
        machine = self.otr_machine
        now = self.otr_attempt_started = time.monotonic()
        if self._session is not None:
            # If this command began a transaction, the next one must not begin it again.
            self.otr_transaction_state = self._session._transaction.state
        if machine is not None:
            machine.command_succeeded(now)
        else:
            self.otr_deposit_first_success()
        self.otr_command_seen()

    def succeeded(self) -> None:
        if self._bulk is None:  # a bulk write has deposited for each of its commands already
            OperationExecution.succeeded(self)

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
        if error is self.otr_scripted:
            found = isinstance(error, ServerSelectionTimeoutError)
            return classify(error, phase=Phase.SELECTION if found else Phase.SENT, server="scripted")
        if self.otr_trace is not None:
            self.otr_trace.address = None if server is None else server.description.address
        if server is None:
            return classify(error, phase=Phase.SELECTION)
        phase = Phase.SENT if entered(self._func, error) else Phase.CONNECTION
        return classify(error, phase=phase, server=address_of(server))

    def otr_situation(self, now: float) -> Situation:
        session = self._session
        write_concern = closure(self._func, "write_concern")
        return Situation(
            now=now,
            remaining=remaining(),
            retryable=bool(self._retryable),
            idempotent=self.otr_idempotent(),
            in_transaction=session is not None and session.in_transaction,
            acknowledged=getattr(write_concern, "acknowledged", True),
            sharded=self._client.topology_description.topology_type_name == "Sharded",
        )

    def otr_idempotent(self) -> bool | None:
        """The caller's word, or what the command itself says; a read that MongoDB repeats needs neither."""
        said = vouched()
        if said is not None:
            return said
        if self._retryable or self.otr_kind() is not OperationKind.WRITE:
            return None
        statements = statements_of(self._func, self._bulk, self.otr_name())
        # In a bulk write a duplicate is an error of a statement, which PyMongo raises when we are done: not to be mended.
        single = len(statements) == 1 and self._bulk is None
        return is_idempotent(statements) or (single and self.otr_recognisable(statements[0]))

    @staticmethod
    def otr_recognisable(statement: Statement) -> bool:
        return statement.verb == "insert" and insert_is_recognisable(statement.document)

    def otr_already_applied(self, error: Exception) -> bool:
        """A repeated insert met its own document: the attempt before, whose answer was lost, has done it."""
        machine = self.otr_machine
        if machine is None or not machine.may_have_been_applied or not isinstance(error, DuplicateKeyError):
            return False
        statements = statements_of(self._func, self._bulk, self.otr_name())
        if len(statements) != 1 or not self.otr_recognisable(statements[0]):
            return False
        details = error.details or {}
        return details.get("keyPattern") == {"_id": 1} and details.get("keyValue") == {
            "_id": statements[0].document["_id"]
        }

    def otr_can_ignore(self) -> bool:
        return can_ignore(self)

    def otr_empty_result(self, *, is_async: bool) -> Any:
        return empty_result(self, is_async=is_async, namespace=namespace_of(self._func, self._bulk))

    def otr_aim(self, step: Retry) -> None:
        """Same host, other read preference: what a policy may ask of the next attempt.

        The same host only while the topology shows it usable, or the attempt would wait for a host that is gone.
        """
        if self.otr_own_address:
            self._address = None
            self.otr_own_address = False
        session = self._session
        if self._address is not None or (session is not None and session.in_transaction):
            return
        if step.same_host and self._server is not None:
            address = self._server.description.address
            seen = self._client.topology_description.server_descriptions().get(address)
            usable = seen is not None and (seen.is_readable if self._is_read else seen.is_writable)
            if usable:
                self._address = address
                self.otr_own_address = True
        if step.read_preference is not None and self._is_read:
            self._read_pref = self._server_selector = as_read_preference(step.read_preference)

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
            if getattr(self._bulk, "current_run", self._bulk) is not None:
                self._bulk.retrying = True  # or the batch would be skipped
            # Otherwise no command was begun, and a flag of a retry would make PyMongo stop after the first of them.
            self._retrying = False
            forget_stale_error(self._func)
        forget_index_names(self._func)
        if step.deprioritise and self._server is not None:
            self._deprioritized_servers = [*(self._deprioritized_servers or ()), self._server]
        self.otr_aim(step)
        self._server = None
        self.otr_retry_heard()
        session = self._session
        return session is not None and session.in_transaction and self._restore_transaction(failure)

    def _restore_transaction(self, failure: Failure) -> bool:
        transaction = self._session._transaction
        if self.otr_kind() is OperationKind.TRANSACTION_END:
            if not failure.overloaded:
                return True  # it may go to another mongos
            # The rejected attempt does not count, but those before it do: once one has failed in any other way,
            # a commit goes on with w: majority.
            transaction.attempt = max(0, transaction.attempt - 1)
            return False
        if self._session._starting_transaction or transaction.state is not self.otr_transaction_state:
            # The command that was rejected was the first: the transaction has not begun, on any server.
            transaction.state = self.otr_transaction_state
            return True
        return False  # in mid-transaction the pinned mongos is the only one that knows it

    def _check_last_error(self, check_csot: bool = False) -> None:
        """PyMongo asks this when the server it found cannot do retryable writes or reads."""
        if not self.otr_decides:
            super()._check_last_error(check_csot)  # type: ignore[misc]
        elif not check_csot and self.otr_machine is not None and not self.otr_unconditional:
            error = self.otr_machine.error
            if self.otr_machine.retries and error is not None:
                raise error


def forget_index_names(func: Any) -> None:
    """PyMongo (4.17 to 4.19) appends the names of the indexes once more for each attempt of create_indexes."""
    names = closure(func, "names")
    if isinstance(names, list):
        names.clear()


def forget_stale_error(func: Any) -> None:
    """A client bulk write keeps the error of a failed attempt and would raise it after the retry succeeded."""
    result = closure(func, "full_result")
    if isinstance(result, dict) and result.get("error") is not None:
        result["error"] = None


def as_read_preference(value: Any) -> Any:
    """A policy may name a mode, so that it need not import PyMongo."""
    if not isinstance(value, str):
        return value
    return make_read_preference(read_pref_mode_from_name(value), None)


def address_of(server: Any) -> str:
    host, port = server.description.address
    return str(host) if port is None else f"{host}:{port}"


def operation_class(half: Half, registry: ClientRegistry) -> type[Any]:
    """PyMongo's class of this half, with the loop taken over."""
    base: Any = half.operation
    bulks = ObservedBulks()
    return _async_class(base, registry, bulks) if half.is_async else _sync_class(base, registry, bulks)


def _sync_class(  # noqa: C901 - a whole class, method by method
    base: Any, registry: ClientRegistry, bulks: ObservedBulks
) -> type[Any]:
    class RetriedClientOperation(RetriedOperation, base):  # type: ignore[misc]
        def run(self) -> Any:
            state = self.otr_state = registry.of(self._client)
            if state is None:
                return base.run(self)
            self.otr_decides = state.decides
            trace = self.otr_observe(state)
            if trace is None:
                return self.otr_run(state)
            self.otr_trace = trace
            try:
                result = self.otr_run(state)
            except BaseException as error:
                self.otr_observed(trace, error)
                raise
            self.otr_observed(trace, None)
            return result

        def otr_run(self, state: ClientState) -> Any:
            if not state.decides:
                return self.otr_watch(bulks)
            self.otr_begin(state, bulks)
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

        def otr_watch(self, bulks: ObservedBulks) -> Any:
            if self._bulk is None or self.otr_trace is None:
                return base.run(self)
            bulks.observe(self._bulk, self.otr_command_seen)
            try:
                return base.run(self)
            finally:
                bulks.release(self._bulk)

        def _read(self) -> Any:
            return self.otr_attempts(base._read)

        def _write(self) -> Any:
            return self.otr_attempts(base._write)

        def otr_attempts(self, attempt: Any) -> Any:
            if self.otr_decides:
                faults = self.otr_state.faults  # type: ignore[union-attr] # it decides, so there is one
                if faults is not None:  # a test has scripted failures for this client
                    attempt = faults.before(attempt, self.otr_name())
                try:
                    return run(self, partial(attempt, self), waiting.sleep)
                except Exception as error:
                    raise Envelope(error) from None
            self.otr_driver_attempt()
            try:
                return attempt(self)
            except Exception as error:
                self.otr_driver_failure(error)
                raise

        def prepare(self, step: Retry) -> None:
            if self.otr_restore(step):
                self._session._unpin()

        def ignored(self) -> Any:
            return self.otr_empty_result(is_async=False)

    return RetriedClientOperation


def _async_class(  # noqa: C901 - a whole class, method by method
    base: Any, registry: ClientRegistry, bulks: ObservedBulks
) -> type[Any]:
    class AsyncRetriedClientOperation(RetriedOperation, base):  # type: ignore[misc]
        async def run(self) -> Any:
            state = self.otr_state = registry.of(self._client)
            if state is None:
                return await base.run(self)
            self.otr_decides = state.decides
            trace = self.otr_observe(state)
            if trace is None:
                return await self.otr_run(state)
            self.otr_trace = trace
            try:
                result = await self.otr_run(state)
            except BaseException as error:
                self.otr_observed(trace, error)
                raise
            self.otr_observed(trace, None)
            return result

        async def otr_run(self, state: ClientState) -> Any:
            if not state.decides:
                return await self.otr_watch(bulks)
            self.otr_begin(state, bulks)
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

        async def otr_watch(self, bulks: ObservedBulks) -> Any:
            if self._bulk is None or self.otr_trace is None:
                return await base.run(self)
            bulks.observe(self._bulk, self.otr_command_seen)
            try:
                return await base.run(self)
            finally:
                bulks.release(self._bulk)

        async def _read(self) -> Any:
            return await self.otr_attempts(base._read)

        async def _write(self) -> Any:
            return await self.otr_attempts(base._write)

        async def otr_attempts(self, attempt: Any) -> Any:
            if self.otr_decides:
                faults = self.otr_state.faults  # type: ignore[union-attr] # it decides, so there is one
                if faults is not None:  # a test has scripted failures for this client
                    attempt = faults.before(attempt, self.otr_name())
                try:
                    return await run_async(self, partial(attempt, self), waiting.sleep_async)
                except Exception as error:
                    raise Envelope(error) from None
            self.otr_driver_attempt()
            try:
                return await attempt(self)
            except Exception as error:
                self.otr_driver_failure(error)
                raise

        async def prepare(self, step: Retry) -> None:
            if self.otr_restore(step):
                await self._session._unpin()

        async def ignored(self) -> Any:
            return self.otr_empty_result(is_async=True)

    return AsyncRetriedClientOperation
