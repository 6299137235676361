"""One operation made visible: its span, a span for each command sent, a span for each attempt that sent none.

The trace belongs to the operation, so nothing is keyed by request id and nothing can be left behind: what is open
when the operation ends is ended with it. For a span that is not recorded nothing is built.
"""

from __future__ import annotations

import functools
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context

from otel_retry import semconv
from otel_retry.events import Reason
from otel_retry.logs import warn_once
from otel_retry.telemetry.errors import error_type, exception_attributes
from otel_retry.telemetry.names import server_attributes
from otel_retry.telemetry.query_text import query_text

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from otel_retry.events import Failure
    from otel_retry.telemetry import Telemetry
    from otel_retry.telemetry.names import OperationNames

_current: ContextVar[OperationTrace | None] = ContextVar("otel_retry_trace", default=None)

_LINK = {semconv.RETRY_LINK: semconv.PREVIOUS_ATTEMPT}


def inherited_context() -> Context | None:
    """For a command outside of any operation. A background task inherits the context of the operation that happened to
    start it: then nothing of it counts, and the command is the root of a trace of its own.
    """
    return None if _current.get() is None else otel_context.Context()


def current_trace() -> OperationTrace | None:
    """The operation under way in this thread or task; a background task inherits one that is over."""
    trace = _current.get()
    return trace if trace is not None and trace.open else None


def quietly(method: Callable[..., None]) -> Callable[..., None]:
    """Telemetry that fails is reported once and never reaches the operation."""

    @functools.wraps(method)
    def quiet(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            warn_once(f"trace: {method.__name__}", "otel_retry failed to report an operation", exc_info=True)

    return quiet


class OperationTrace:
    """Invariant: after `end` every span that it started is ended, and the ambient context is what it was before."""

    __slots__ = (
        "__weakref__",
        "_attempt_started",
        "_began",
        "_command",
        "_context",
        "_context_token",
        "_delay",
        "_previous",
        "_request_id",
        "_sent",
        "_token",
        "address",
        "attempt",
        "connection_id",
        "names",
        "open",
        "operation_id",
        "outcome",
        "recording",
        "retries",
        "span",
        "telemetry",
    )

    def __init__(
        self,
        telemetry: Telemetry,
        names: OperationNames,
        *,
        parent: Context | None = None,
        operation_id: int | None = None,
        ambient: bool = True,
    ) -> None:
        self.telemetry = telemetry
        self.names = names
        self.operation_id = operation_id
        self.attempt = 1
        self.retries = 0
        self.open = True
        self.outcome: str | None = None
        self.connection_id: int | None = None
        self.address: tuple[str, int | None] | None = None
        self._delay = 0.0
        self._sent = False
        self._command: Span | None = None
        self._previous: Any = None
        self._request_id = 0
        self._context = parent
        self._token: Token[OperationTrace | None] | None = None
        self._context_token: Token[Context] | None = None
        self._began = self._attempt_started = time.perf_counter()
        self.span: Span | None = None
        self.recording = False
        if telemetry.tracer is not None:
            span = telemetry.tracer.start_span(names.summary, parent, SpanKind.CLIENT, names.attributes)
            if span.is_recording():
                self.span = span
                self.recording = True
                self._attempt_started = time.perf_counter()  # no attempt begins before its operation
                self._context = set_span_in_context(span, parent)
                if ambient:
                    self._context_token = otel_context.attach(self._context)
        if ambient:
            self._token = _current.set(self)

    # What the seam tells.

    @quietly
    def retrying(
        self,
        failure: Failure,
        *,
        delay: float,
        tokens: float | None,
        decision: str = "try_next_host",
        failed_at: float | None = None,
    ) -> None:
        """An attempt failed and another one follows, after `delay` seconds. `failed_at` (of `time.perf_counter`): the
        wait is over already.
        """
        now = time.perf_counter() if failed_at is None else failed_at
        self._attempt_failed(failure, now, retried=True)
        telemetry = self.telemetry
        if self.recording and self.span is not None:
            attributes: dict[str, Any] = {
                semconv.RETRY_ATTEMPT: self.attempt,
                semconv.RETRY_REASON: failure.reason,
                semconv.RETRY_DELAY: delay,
                semconv.RETRY_DECISION: decision,
                semconv.RETRY_POLICY: telemetry.policy,
                semconv.ERROR_TYPE: error_type(failure.error),
            }
            if failure.server is not None:
                attributes[semconv.RETRY_SERVER] = failure.server
            if tokens is not None:
                attributes[semconv.RETRY_TOKENS] = tokens
            self.span.add_event(semconv.RETRY_EVENT, attributes)
        if telemetry.instruments is not None:
            telemetry.instruments.operation_retried(
                operation=self.names.operation,
                reason=failure.reason,
                policy=telemetry.policy,
                delay=delay,
                context=self._context,
            )
        self.retries += 1
        self.attempt += 1
        self._delay = delay
        self._sent = False
        self._attempt_started = now + delay

    @quietly
    def command_done(self) -> None:
        """One command of a bulk write is done: the next begins with its first attempt."""
        if self.attempt > 1:
            self._end_attempt(time.perf_counter(), None)
        self.attempt = 1
        self._delay = 0.0
        self._previous = None
        self._sent = False
        self._attempt_started = time.perf_counter()

    @quietly
    def gave_up(self, failure: Failure, reason: Reason, *, failed_at: float | None = None) -> None:
        """The last attempt failed, and this is why no other follows."""
        self._attempt_failed(failure, time.perf_counter() if failed_at is None else failed_at)
        self.outcome = reason.value

    @quietly
    def ignored(self, failure: Failure, *, applied: bool) -> None:
        """The last attempt failed, and the operation reports success all the same. `applied`: because it is one."""
        if not applied:
            self._attempt_failed(failure, time.perf_counter())
            self.outcome = semconv.IGNORED

    def _attempt_failed(self, failure: Failure, now: float, *, retried: bool = False) -> None:
        if self.recording and not self._sent:
            self._show_attempt(failure, now)
        if retried or self.attempt > 1:
            self._end_attempt(now, failure)

    def _show_attempt(self, failure: Failure, now: float) -> None:
        """No command was sent, so no command span tells of this attempt."""
        attributes = {semconv.DB_SYSTEM: semconv.MONGODB, **self._attempt_attributes()}
        if failure.server is not None:
            host, _, port = failure.server.rpartition(":")
            attributes.update(
                server_attributes((host, int(port)) if host and port.isdigit() else (failure.server, None))
            )
        ended = time.time_ns() - int((time.perf_counter() - now) * 1e9)
        span = self.telemetry.start_child(
            semconv.ATTEMPT_SPAN,
            self._context,
            attributes,
            links=self._links(),
            start_time=ended - int((now - self._attempt_started) * 1e9),
        )
        self._mark_failed(span, failure.error, failure.code)
        span.end(ended)
        self._previous = span.get_span_context()

    def _end_attempt(self, now: float, failure: Failure | None) -> None:
        """The metric of attempts is only for operations with more than one."""
        instruments = self.telemetry.instruments
        if instruments is None:
            return
        instruments.attempt_ended(
            operation=self.names.operation,
            seconds=max(0.0, now - self._attempt_started),
            server={} if self.address is None else server_attributes(self.address),
            outcome="ok" if failure is None else "error",
            reason=None if failure is None else failure.reason,
            context=self._context,
        )

    def end(self, error: BaseException | None) -> None:
        """The operation is over, in whatever way."""
        self.open = False
        self._leave()
        try:
            self._report(error)
        except Exception:
            warn_once("trace", "otel_retry failed to report an operation", exc_info=True)

    def _leave(self) -> None:
        """First of all, so that nothing that fails later can leave our span current."""
        if self._context_token is not None:
            otel_context.detach(self._context_token)
        if self._token is not None:
            try:
                _current.reset(self._token)
            except ValueError:
                _current.set(None)  # ended in another context than it began: a coroutine that was thrown away

    def _report(self, error: BaseException | None) -> None:
        now = time.perf_counter()
        outcome = self.outcome
        if error is None:
            outcome = outcome or (semconv.RETRIED if self.retries else semconv.FIRST_TRY)
        elif outcome is None:
            outcome = Reason.NOT_RETRYABLE.value if isinstance(error, Exception) else Reason.CANCELLED.value
        self._measure(now, outcome, error)
        if self._command is not None:
            self._abandon_command(error)
        span = self.span
        if span is not None:
            attributes: dict[str, Any] = {
                semconv.RETRY_ATTEMPTS: self.retries + 1,
                semconv.RETRY_OUTCOME: outcome,
            }
            if self.operation_id is not None:
                attributes[semconv.OPERATION_ID] = self.operation_id
            span.set_attributes(attributes)
            if error is not None:
                self._mark_failed(span, error, None)
            span.end()

    @quietly
    def _measure(self, now: float, outcome: str, error: BaseException | None) -> None:
        instruments = self.telemetry.instruments
        if instruments is None:
            return
        instruments.operation_duration.record(
            now - self._began,
            self.names.metric_attributes(self.address, None if error is None else error_type(error)),
            self._context,
        )
        if self.attempt > 1 and error is None and self.outcome is None:
            self._end_attempt(now, None)
        failed = error is not None or outcome == semconv.IGNORED
        if self.retries or failed:
            instruments.operation_ended(
                operation=self.names.operation,
                retries=self.retries,
                outcome=outcome,
                policy=self.telemetry.policy,
                failed=failed,
                context=self._context,
            )

    # What the CommandListener tells.

    def command_started(self, event: Any) -> None:
        if self._command is not None:
            return  # of an operation inside this one that somebody suppresses: a listener of the application's own
        self._sent = True
        name = event.command_name
        if not self.recording or is_sensitive(name, event.command):
            return
        self._command = span = self.telemetry.start_child(
            name, self._context, self._command_attributes(event), links=self._links()
        )
        self._previous = span.get_span_context()
        self._request_id = event.request_id
        self.telemetry.hooks.request(span, event)

    def _command_attributes(self, event: Any) -> dict[str, Any]:
        names, command, name = self.names, event.command, event.command_name
        database = event.database_name
        collection = names.collection if database == names.database else None
        if collection is None:
            collection = collection_of(name, database, command)
        attributes = names.command_attributes(name, database, collection, event.connection_id).copy()
        attributes.update(self._attempt_attributes(event.operation_id))
        attributes[semconv.REQUEST_ID] = event.request_id
        if event.server_connection_id is not None:
            attributes[semconv.SERVER_CONNECTION_ID] = event.server_connection_id
        if self.connection_id is not None:
            attributes[semconv.DRIVER_CONNECTION_ID] = self.connection_id
        lsid = command.get("lsid")
        if lsid is not None:
            attributes[semconv.LSID] = session_id(lsid)
            number = command.get("txnNumber")
            if number is not None:
                attributes[semconv.TXN_NUMBER] = int(number)
        if name == "getMore":
            attributes[semconv.CURSOR_ID] = int(command["getMore"])
        limit = self.telemetry.query_text_max_length
        if limit:
            attributes[semconv.DB_QUERY_TEXT] = query_text(command, limit=limit, raw=self.telemetry.raw)
        return attributes

    def _attempt_attributes(self, operation_id: int | None = None) -> dict[str, Any]:
        attributes: dict[str, Any] = {semconv.RETRY_ATTEMPT: self.attempt}
        if self.operation_id is None:
            self.operation_id = operation_id
        if self.operation_id is not None:
            attributes[semconv.OPERATION_ID] = self.operation_id
        if self._delay:
            attributes[semconv.RETRY_DELAY] = self._delay
        return attributes

    def _links(self) -> list[Link] | None:
        if self.attempt == 1 or self._previous is None:
            return None
        return [Link(self._previous, _LINK)]

    def command_succeeded(self, event: Any) -> None:
        span = self._command
        if span is None or event.request_id != self._request_id:
            return
        self._command = None
        cursor = event.reply.get("cursor")
        if isinstance(cursor, Mapping) and cursor.get("id"):
            span.set_attribute(semconv.CURSOR_ID, int(cursor["id"]))
        self.telemetry.hooks.response(span, event)
        span.end()

    def command_failed(self, event: Any) -> None:
        span = self._command
        if span is None or event.request_id != self._request_id:
            return
        self._command = None
        # PyMongo publishes the failure while it handles the exception.
        self._mark_failed(span, sys.exception(), code_of(event.failure))
        self.telemetry.hooks.failed(span, event)
        span.end()

    def _abandon_command(self, error: BaseException | None) -> None:
        """Cancelled between the sending and the answer: PyMongo publishes neither success nor failure."""
        span, self._command = self._command, None
        if span is not None:
            if error is not None:  # otherwise it was only that nobody listened any more
                self._mark_failed(span, error, None)
            span.end()

    def _mark_failed(self, span: Span, error: BaseException | None, code: int | None) -> None:
        attributes: dict[str, Any] = {}
        if code is None and error is not None:
            code = code_of(getattr(error, "details", None))
        if code is not None:
            attributes[semconv.DB_STATUS_CODE] = str(code)
        message = None
        if error is not None:
            exception = exception_attributes(error, raw=self.telemetry.raw)
            message = exception[semconv.EXCEPTION_MESSAGE]
            attributes.update(exception)
            attributes[semconv.ERROR_TYPE] = error_type(error)
            span.add_event(semconv.EXCEPTION_EVENT, exception)
        span.set_attributes(attributes)
        span.set_status(Status(StatusCode.ERROR, message))


def is_sensitive(name: str, command: Any) -> bool:
    """No span for these. PyMongo empties the command of a hello that carries credentials."""
    lowered = name.lower()
    return lowered in semconv.SENSITIVE_COMMANDS or (not command and lowered in semconv.HELLO_COMMANDS)


def collection_of(name: str, database: str, command: Any) -> str | None:
    """The collection that a command names, for commands whose operation does not know it."""
    if database == "admin" or not (name in semconv.COLLECTION_COMMANDS or name == "getMore"):
        return None
    found = command.get("collection" if name == "getMore" else name)
    return found if isinstance(found, str) and not found.startswith("$cmd") else None


def session_id(lsid: Any) -> str:
    """The session's UUID as people write it."""
    value = lsid.get("id") if hasattr(lsid, "get") else lsid
    if isinstance(value, uuid.UUID):
        return str(value)
    try:
        return str(uuid.UUID(bytes=bytes(value)))
    except (TypeError, ValueError):
        return str(value)[:64]


def code_of(details: Any) -> int | None:
    code = details.get("code") if isinstance(details, dict) else None
    return code if isinstance(code, int) and not isinstance(code, bool) else None
