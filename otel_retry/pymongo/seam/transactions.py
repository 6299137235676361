"""The span of a transaction: begins with start_transaction, holds the operations, ends with commit or abort.

It is kept on the session, as PyMongo keeps the transaction itself.
"""

from __future__ import annotations

import functools
import time
import weakref
from typing import TYPE_CHECKING, Any

from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context

from otel_retry import semconv
from otel_retry.logs import warn_once
from otel_retry.telemetry.errors import error_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.context import Context

    from otel_retry.clients import ClientRegistry
    from otel_retry.pymongo.seam.shape import Half

_CONTEXT = "_otel_retry_transaction"
_EPOCH = "_otel_retry_transaction_epoch"
"""What to add to `perf_counter_ns` for the time of day, as it was when the transaction began."""
_open: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Sessions whose transaction has a span that has not ended, by identity. Not a WeakSet: other threads begin and end
transactions while it is gone through, and `valuerefs` is a copy.
"""

_ATTRIBUTES = {semconv.DB_SYSTEM: semconv.MONGODB}


def transaction_context(session: Any) -> Context | None:
    """Where the operations of this session's transaction belong. A commit that is tried again still does."""
    if session is None or _CONTEXT not in session.__dict__ or not session.in_transaction:
        return None
    context: Context = session.__dict__[_CONTEXT]
    return context


def patches(half: Half, registry: ClientRegistry) -> Iterator[tuple[Any, str, Any]]:
    session = half.session
    start, finish = (_starting_async, _finishing_async) if half.is_async else (_starting, _finishing)
    yield session, "start_transaction", start(session.__dict__["start_transaction"], registry)
    for method in ("commit_transaction", "abort_transaction"):
        yield session, method, finish(session.__dict__[method])


def _begin(session: Any, registry: ClientRegistry) -> None:
    session.__dict__.pop(_CONTEXT, None)
    try:
        state = registry.of(session.client)
        telemetry = None if state is None else state.telemetry
        if telemetry is None or telemetry.tracer is None or not is_instrumentation_enabled():
            return
        started, clock = time.time_ns(), time.perf_counter_ns()
        span = telemetry.tracer.start_span(
            semconv.TRANSACTION_SPAN, None, SpanKind.CLIENT, _ATTRIBUTES, start_time=started
        )
        if span.is_recording():
            session.__dict__[_EPOCH] = started - clock
            session.__dict__[_CONTEXT] = set_span_in_context(span)
            _open[id(session)] = session
            if registry.of(session.client) is None:
                _end(session, None)  # switched off just now: nobody would hear of its end
    except Exception:
        warn_once("transaction", "otel_retry failed to start a transaction span", exc_info=True)


def _end(session: Any, error: BaseException | None) -> None:
    context = session.__dict__.get(_CONTEXT)
    if context is None:
        return
    try:
        _open.pop(id(session), None)
        span = get_current_span(context)
        if not span.is_recording():
            return  # a commit that is tried again: the span has ended with the first
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error_type(error)))
        # Not by the wall clock, which may have been set meanwhile.
        span.end(session.__dict__[_EPOCH] + time.perf_counter_ns())
    except Exception:
        warn_once("transaction", "otel_retry failed to end a transaction span", exc_info=True)


def end_open_transactions() -> None:
    """Nobody will hear of their commit or abort any more."""
    for reference in _open.valuerefs():
        session = reference()
        if session is not None:
            _end(session, None)


def _starting(original: Any, registry: ClientRegistry) -> Any:
    @functools.wraps(original)
    def start_transaction(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = original(self, *args, **kwargs)
        _begin(self, registry)
        return started

    return start_transaction


def _starting_async(original: Any, registry: ClientRegistry) -> Any:
    @functools.wraps(original)
    async def start_transaction(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = await original(self, *args, **kwargs)
        _begin(self, registry)
        return started

    return start_transaction


def _finishing(original: Any) -> Any:
    @functools.wraps(original)
    def finish(self: Any) -> Any:
        try:
            done = original(self)
        except BaseException as error:
            _end(self, error)
            raise
        _end(self, None)
        return done

    return finish


def _finishing_async(original: Any) -> Any:
    @functools.wraps(original)
    async def finish(self: Any) -> Any:
        try:
            done = await original(self)
        except BaseException as error:
            _end(self, error)
            raise
        _end(self, None)
        return done

    return finish
