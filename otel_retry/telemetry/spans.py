"""One operation made visible: its span, a span for each command sent, a span for each attempt that sent none.

The trace belongs to the operation, so nothing is keyed by request id and nothing can be left behind: what is open
when the operation ends is ended with it. For a span that is not recorded nothing is built.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context

from otel_retry import semconv
from otel_retry.events import Reason
from otel_retry.logs import warn_once
from otel_retry.semconv import FIRST_TRY, OPERATION_ID, RETRY_ATTEMPTS, RETRY_OUTCOME
from otel_retry.telemetry.commands import collection_of, is_sensitive
from otel_retry.telemetry.errors import code_of, error_type, exception_attributes
from otel_retry.telemetry.names import namespace_attributes, server_attributes
from otel_retry.telemetry.query_text import query_text

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from otel_retry.events import Failure
    from otel_retry.telemetry import Telemetry
    from otel_retry.telemetry.metrics import Instruments
    from otel_retry.telemetry.names import Address, OperationNames

inherited_trace: ContextVar[OperationTrace | None] = ContextVar("otel_retry_trace", default=None)
"""The operation under way in this thread or task, while it is `open`; a background task inherits one that is over."""

_CLIENT = SpanKind.CLIENT
_LINK = {semconv.RETRY_LINK: semconv.PREVIOUS_ATTEMPT}


def inherited_context() -> Context | None:
    """For a command outside of any operation. A background task inherits the context of the operation that happened to
    start it: then nothing of it counts, and the command is the root of a trace of its own.
    """
    return None if inherited_trace.get() is None else Context()


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
        "_context_token",
        "_delay",
        "_epoch",
        "_previous",
        "_request_id",
        "_sent",
        "_token",
        "address",
        "attempt",
        "connection_id",
        "context",
        "names",
        "open",
        "operation_id",
        "outcome",
        "retries",
        "span",
        "telemetry",
    )

    def __init__(
        self,
        telemetry: Telemetry,
        names: OperationNames,
        parent: Context,
        operation_id: int | None,
        *,
        ambient: bool = True,
    ) -> None:
        self.telemetry = telemetry
        self.names = names
        self.operation_id = operation_id
        self.attempt = 1
        self.retries = 0
        self.outcome: str | None = None
        self.connection_id: int | None = None
        self.address: Address | None = None
        self._delay = 0.0
        self._command: Span | None = None
        self._previous: Span | None = None
        self._token: Token[OperationTrace | None] | None = None
        self._context_token: Token[Context] | None = None
        self.span: Span | None = None
        self.context = parent
        self.open = True
        self._sent = False
        tracer = telemetry.tracer
        if tracer is not None:
            started = time_ns()
            span = tracer.start_span(names.summary, parent, _CLIENT, names.attributes, None, started)
            if span.is_recording():
                self._epoch = started - int(perf_counter() * 1e9)
                self.span = span
                self.context = set_span_in_context(span, parent)
                if ambient:
                    self._context_token = attach(self.context)
        if ambient:
            self._token = inherited_trace.set(self)
        self._began = self._attempt_started = perf_counter()  # no attempt begins before its operation

    @property
    def recording(self) -> bool:
        return self.span is not None

    def _at(self, seconds: float) -> int:
        """An instant of `perf_counter` as spans want it. The wall clock is asked once, when the operation begins: if it
        is set while the operation runs, durations stay right and children inside of their parents.
        """
        return self._epoch + int(seconds * 1e9)

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
        now = perf_counter() if failed_at is None else failed_at
        self._attempt_failed(failure, now, retried=True)
        telemetry = self.telemetry
        if self.span is not None:
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
            self.span.add_event(semconv.RETRY_EVENT, attributes, self._at(now))
        if telemetry.instruments is not None:
            telemetry.instruments.operation_retried(
                operation=self.names.operation,
                reason=failure.reason,
                policy=telemetry.policy,
                delay=delay,
                context=self.context,
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
            self._end_attempt(perf_counter(), None)
        self.attempt = 1
        self._delay = 0.0
        self._previous = None
        self._sent = False
        self._attempt_started = perf_counter()

    @quietly
    def gave_up(self, failure: Failure, reason: Reason, *, failed_at: float | None = None) -> None:
        """The last attempt failed, and this is why no other follows."""
        self._attempt_failed(failure, perf_counter() if failed_at is None else failed_at)
        self.outcome = reason.value

    @quietly
    def ignored(self, failure: Failure, *, applied: bool) -> None:
        """The last attempt failed, and the operation reports success all the same. `applied`: because it is one."""
        if not applied:
            self._attempt_failed(failure, perf_counter())
            self.outcome = semconv.IGNORED

    def _attempt_failed(self, failure: Failure, now: float, *, retried: bool = False) -> None:
        tracer = self.telemetry.tracer
        if tracer is not None and self.span is not None and not self._sent:
            self._show_attempt(tracer, failure, now)
        if retried or self.attempt > 1:
            self._end_attempt(now, failure)

    def _show_attempt(self, tracer: Tracer, failure: Failure, now: float) -> None:
        """No command was sent, or nobody listened to it yet: no command span tells of this attempt."""
        attributes: dict[str, Any] = {semconv.DB_SYSTEM: semconv.MONGODB, semconv.RETRY_ATTEMPT: self.attempt}
        if not self.telemetry.every_attempt:
            attributes.update(namespace_attributes(self.names.database, self.names.collection))
        if self.operation_id is not None:
            attributes[semconv.OPERATION_ID] = self.operation_id
        if self._delay:
            attributes[semconv.RETRY_DELAY] = self._delay
        if failure.server is not None:
            host, _, port = failure.server.rpartition(":")
            attributes.update(
                server_attributes((host, int(port)) if host and port.isdigit() else (failure.server, None))
            )
        span = tracer.start_span(
            semconv.ATTEMPT_SPAN,
            self.context,
            _CLIENT,
            attributes,
            self._links(),
            self._at(self._attempt_started),
        )
        self._mark_failed(span, failure.error, failure.code, now)
        span.end(self._at(now))
        self._previous = span

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
            context=self.context,
        )

    def end(self, error: BaseException | None) -> None:
        """The operation is over, in whatever way."""
        self.open = False
        # The context first of all, so that nothing that fails later can leave our span current.
        context_token, token = self._context_token, self._token
        if context_token is not None:
            detach(context_token)
        if token is not None:
            try:
                inherited_trace.reset(token)
            except ValueError:
                inherited_trace.set(
                    None
                )  # ended in another context than it began: a coroutine that was thrown away
        try:
            self._report(error)
        except Exception:
            warn_once("trace", "otel_retry failed to report an operation", exc_info=True)

    def _report(self, error: BaseException | None) -> None:
        now = perf_counter()
        outcome = FIRST_TRY
        if error is not None or self.retries or self.outcome is not None:
            outcome = self._outcome(error)
        instruments = self.telemetry.instruments
        if instruments is not None:
            try:
                names, key = self.names, (self.address, None if error is None else error_type(error))
                instruments.operation_duration.record(
                    now - self._began, names.metrics.get(key) or names.metric_attributes(*key), self.context
                )
                if outcome is not FIRST_TRY:
                    self._measure_retries(instruments, now, outcome, error)
            except Exception:  # the span is to be ended all the same
                warn_once("trace: measure", "otel_retry failed to measure an operation", exc_info=True)
        if self._command is not None:
            self._abandon_command(error, now)
        span = self.span
        if span is not None:
            attributes: dict[str, Any] = {RETRY_ATTEMPTS: self.retries + 1, RETRY_OUTCOME: outcome}
            if self.operation_id is not None:
                attributes[OPERATION_ID] = self.operation_id
            span.set_attributes(attributes)
            if error is not None:
                self._mark_failed(span, error, None, now)
            span.end(self._at(now))

    def _outcome(self, error: BaseException | None) -> str:
        if self.outcome is not None:
            return self.outcome
        if error is None:
            return semconv.RETRIED
        return Reason.NOT_RETRYABLE.value if isinstance(error, Exception) else Reason.CANCELLED.value

    def _measure_retries(
        self, instruments: Instruments, now: float, outcome: str, error: BaseException | None
    ) -> None:
        if self.attempt > 1 and error is None and self.outcome is None:
            self._end_attempt(now, None)
        instruments.operation_ended(
            operation=self.names.operation,
            retries=self.retries,
            outcome=outcome,
            policy=self.telemetry.policy,
            failed=error is not None or outcome == semconv.IGNORED,
            context=self.context,
        )

    # What the CommandListener tells.

    def command_started(self, event: Any) -> None:
        telemetry = self.telemetry
        tracer = telemetry.tracer
        if tracer is None or self.span is None:
            return
        if self._command is not None:
            return  # of an operation inside this one that somebody suppresses: a listener of the application's own
        if not telemetry.every_attempt and not self.retries:
            return  # another operation is being retried, and for its sake all commands are heard
        self._sent = True
        name, command = event.command_name, event.command
        if is_sensitive(name, command):
            return
        attributes = self._command_attributes(name, command, event)
        self._request_id = attributes[semconv.REQUEST_ID] = event.request_id
        links = None
        if self.attempt != 1:
            attributes[semconv.RETRY_ATTEMPT] = self.attempt
            if self._delay:
                attributes[semconv.RETRY_DELAY] = self._delay
            links = self._links()
        self._command = self._previous = span = tracer.start_span(
            name, self.context, _CLIENT, attributes, links, self._at(perf_counter())
        )
        if telemetry.hooks is not None:
            telemetry.hooks.request(span, event)

    def _command_attributes(  # noqa: C901 - one question for each attribute
        self, name: str, command: Any, event: Any
    ) -> dict[str, Any]:
        names, telemetry = self.names, self.telemetry
        collection = names.collection
        database = command.get("$db") or event.database_name
        if collection is None or database != names.database:
            collection = collection_of(name, database, command)
        key = (name, database, collection, event.connection_id)
        attributes = (names.commands.get(key) or names.command_attributes(key)).copy()
        if self.operation_id is None:
            self.operation_id = event.operation_id
        if self.operation_id is not None:
            attributes[semconv.OPERATION_ID] = self.operation_id
        number = event.server_connection_id
        if isinstance(number, int):  # a server may say anything in its hello
            attributes[semconv.SERVER_CONNECTION_ID] = number
        if self.connection_id is not None:
            attributes[semconv.DRIVER_CONNECTION_ID] = self.connection_id
        lsid = command.get("lsid")
        if lsid is not None:
            session = telemetry.sessions.text(lsid)
            if session is not None:
                attributes[semconv.LSID] = session
            number = command.get("txnNumber")
            if isinstance(number, int):
                attributes[semconv.TXN_NUMBER] = int(number)  # not an Int64 of bson
        if name == "getMore" and isinstance(command["getMore"], int):
            attributes[semconv.CURSOR_ID] = int(command["getMore"])
        if telemetry.query_text_max_length:
            attributes[semconv.DB_QUERY_TEXT] = query_text(
                command, limit=telemetry.query_text_max_length, raw=telemetry.raw
            )
        return attributes

    def _links(self) -> list[Link] | None:
        if self.attempt == 1 or self._previous is None:
            return None
        return [Link(self._previous.get_span_context(), _LINK)]

    def command_succeeded(self, event: Any) -> None:
        span = self._command
        if span is None or event.request_id != self._request_id:
            return
        self._command = None
        cursor = event.reply.get("cursor")
        if cursor is not None and isinstance(cursor, Mapping):
            number = cursor.get("id")
            if number and isinstance(number, int):
                span.set_attribute(semconv.CURSOR_ID, int(number))
        if self.telemetry.hooks is not None:
            self.telemetry.hooks.response(span, event)
        span.end(self._at(perf_counter()))

    def command_failed(self, event: Any) -> None:
        span = self._command
        if span is None or event.request_id != self._request_id:
            return
        self._command = None
        # PyMongo publishes the failure while it handles the exception.
        self._mark_failed(span, sys.exception(), code_of(event.failure), perf_counter())
        if self.telemetry.hooks is not None:
            self.telemetry.hooks.failed(span, event)
        span.end(self._at(perf_counter()))

    def _abandon_command(self, error: BaseException | None, now: float) -> None:
        """Cancelled between the sending and the answer: PyMongo publishes neither success nor failure."""
        span, self._command = self._command, None
        if span is not None:
            if error is not None:  # otherwise it was only that nobody listened any more
                self._mark_failed(span, error, None, now)
            span.end(self._at(now))

    def _mark_failed(self, span: Span, error: BaseException | None, code: int | None, now: float) -> None:
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
            span.add_event(semconv.EXCEPTION_EVENT, exception, self._at(now))
        span.set_attributes(attributes)
        span.set_status(Status(StatusCode.ERROR, message))
