"""An operation as telemetry sees it: its names, its trace from begin to end, and what PyMongo's own loop does where
that one decides.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pymongo.errors import BulkWriteError, ClientBulkWriteException

from otel_retry.events import Failure, Kind, OperationKind, Reason
from otel_retry.execution import OperationExecution
from otel_retry.logs import warn_once
from otel_retry.pymongo.seam.closures import closure
from otel_retry.pymongo.seam.listening import hear_retry, is_heard, listen
from otel_retry.pymongo.seam.namespace import target_of
from otel_retry.pymongo.seam.private import randint
from otel_retry.pymongo.seam.transactions import transaction_context

if TYPE_CHECKING:
    from otel_retry.clients import ClientState
    from otel_retry.pymongo.seam.listening import RetryHeard
    from otel_retry.telemetry import Telemetry
    from otel_retry.telemetry.names import OperationNames
    from otel_retry.telemetry.spans import OperationTrace

_TRANSACTION_ENDS = frozenset({"commitTransaction", "abortTransaction"})
_CURSOR_COMMAND = "Database.cursor_command.<locals>.inner"


class ObservedOperation(OperationExecution):
    """Mixed into PyMongo's class like `RetriedOperation`: the underscored names are PyMongo's own attributes."""

    _bulk: Any
    _client: Any
    _func: Any
    _is_read: bool
    _operation: Any
    _operation_id: int | None
    _server: Any
    _session: Any

    # Class attributes, so that an operation of a client that is not instrumented costs nothing more.
    otr_trace: OperationTrace | None = None
    otr_heard: RetryHeard | None = None
    """Commands are heard for the sake of this operation, since it is being retried."""
    otr_pending: tuple[Failure, float] | None = None
    """Under policy `driver`: the last failure, until it is clear whether another attempt follows."""

    def otr_observe(self, state: ClientState) -> OperationTrace | None:
        """None: nobody would see anything, somebody suppresses instrumentation here, or telemetry itself failed."""
        telemetry = state.telemetry
        if telemetry is None:
            return None
        trace = None
        try:
            if not telemetry.awake and not is_heard(self._client, state, telemetry):
                return None
            trace = telemetry.start(
                self.otr_names(telemetry), transaction_context(self._session), self._operation_id
            )
            if state.commands is None and trace is not None and trace.span is not None:
                self.otr_first_seen(state, telemetry, trace)
        except Exception:
            if trace is not None:
                trace.end(None)
            warn_once(
                "start", "otel_retry failed to start a span; the operation goes on without", exc_info=True
            )
            return None
        return trace

    def otr_first_seen(self, state: ClientState, telemetry: Telemetry, trace: OperationTrace) -> None:
        """The first operation whose span is recorded: from here on it is worth to listen."""
        listen(self._client, state, telemetry)
        if self._operation_id is None and telemetry.every_attempt:
            self._operation_id = trace.operation_id = randint()

    def otr_observed(self, trace: OperationTrace, error: BaseException | None) -> None:
        server = self._server
        if server is not None:
            trace.address = server.description.address
        if error is not None and self.otr_pending is not None:
            failure, failed_at = self.otr_pending
            if failure.kind is Kind.NO_SERVER:
                reason = Reason.NO_SERVER
            else:
                reason = Reason.LIMIT if trace.retries else Reason.NOT_RETRYABLE
            trace.gave_up(failure, reason, failed_at=failed_at)
        if error is None and self._bulk is not None:
            error = self.otr_failed_in_part()
        trace.end(error)
        if self.otr_heard is not None:
            self.otr_heard.release(self._client)

    def otr_retry_heard(self) -> None:
        """Another attempt follows. Where commands are not listened to all the time, they are from here on."""
        trace, state = self.otr_trace, self.otr_state
        if trace is None or state is None or self.otr_heard is not None:
            return
        self.otr_heard = hear_retry(self._client, state, trace)
        if self.otr_heard is not None and self._operation_id is None:
            self._operation_id = trace.operation_id = randint()

    def otr_driver_attempt(self) -> None:
        """PyMongo's own loop begins an attempt; if one failed before, it was retried."""
        if self.otr_pending is not None and self.otr_trace is not None:
            failure, failed_at = self.otr_pending
            self.otr_pending = None
            delay = max(0.0, time.perf_counter() - failed_at)
            self.otr_trace.retrying(failure, delay=delay, tokens=None, failed_at=failed_at)
            self.otr_retry_heard()

    def otr_driver_failure(self, error: Exception) -> None:
        if self.otr_trace is not None:
            self.otr_pending = (self.otr_failure(error), time.perf_counter())

    def otr_names(self, telemetry: Telemetry) -> OperationNames:
        name = self.otr_display_name()
        try:
            target = target_of(self._func, self._bulk)
        except Exception:
            warn_once("namespace", "otel_retry failed to find an operation's namespace", exc_info=True)
            target = (None, None)
        if type(target) is tuple:
            return telemetry.naming.of(name, *target)
        return telemetry.naming.of_collection(name, target)

    def otr_display_name(self) -> str:
        name = self.otr_name()
        if self._is_read:
            return "runCommand" if self.otr_is_run_command() and name != "dropDatabase" else name
        if self._bulk is not None and name == "insert" and any(kind for kind, _ in self._bulk.ops):
            return "bulkWrite"  # PyMongo calls every bulk write of a collection an insert
        return name

    def otr_name(self) -> str:
        name: str = getattr(self._operation, "_value_", self._operation)
        if name == "abortTransaction":
            # PyMongo up to 4.13 gives this name to a commit too.
            return closure(self._func, "command_name") or name
        return name

    def otr_is_run_command(self) -> bool:
        """Generic commands take PyMongo's read path, whatever they do; it marks those of `command`, and no others."""
        return self._is_read and (
            getattr(self, "_is_run_command", False)
            or getattr(self._func, "__qualname__", "").endswith(_CURSOR_COMMAND)
        )

    def otr_kind(self) -> OperationKind:
        if self.otr_is_run_command():
            return OperationKind.RUN_COMMAND
        if not self._is_read:
            return (
                OperationKind.TRANSACTION_END if self.otr_name() in _TRANSACTION_ENDS else OperationKind.WRITE
            )
        # An aggregation that ends in $out or $merge takes PyMongo's read path, but it is a write.
        command = getattr(self._func, "__self__", None)
        return OperationKind.WRITE if getattr(command, "_performs_write", False) else OperationKind.READ

    def otr_command_seen(self) -> None:
        """One command of a bulk write is done, whoever's loop it was."""
        trace = self.otr_trace
        if trace is not None:
            if self._server is not None:
                trace.address = self._server.description.address
            trace.command_done()

    def otr_failed_in_part(self) -> Exception | None:
        """PyMongo raises the errors of single statements when a bulk write has returned already."""
        result = closure(self._func, "full_result")
        if not isinstance(result, dict):
            return None
        if result.get("error") or result.get("writeErrors") or result.get("writeConcernErrors"):
            if hasattr(self._bulk, "collection"):
                return BulkWriteError(result)
            return ClientBulkWriteException(result, self._bulk.verbose_results)
        return None
