"""The CommandListener: started, succeeded and failed of each command, told to the operation that sent it."""

from __future__ import annotations

import sys
import threading
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from opentelemetry.context import get_current
from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from pymongo.monitoring import CommandListener

from otel_retry.logs import warn_once
from otel_retry.telemetry.commands import collection_of, is_sensitive
from otel_retry.telemetry.spans import OperationTrace, inherited_context, inherited_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.telemetry import Telemetry

_orphan: ContextVar[OperationTrace | None] = ContextVar("otel_retry_orphan", default=None)


class CommandEvents(CommandListener):
    """One client's command events. PyMongo prints what a listener raises, so nothing may be raised here.

    Some commands are sent outside of any operation: killCursors, endSessions, a getMore on a pinned connection, an
    unacknowledged bulk write. They get an operation span of their own, so that the tree looks the same everywhere.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._orphans: weakref.WeakValueDictionary[int, OperationTrace] = weakref.WeakValueDictionary()
        """By identity; weak, since nobody is told of the end of one that is cancelled."""
        self._stopped = False
        self._lock = threading.RLock()
        """Held for commands outside of any operation: whoever switches off ends what others have begun."""

    def renew_lock(self) -> None:
        """After a fork another thread's hold on the lock would never end."""
        self._lock = threading.RLock()

    def stop(self) -> None:
        """No other event will come, or only one that is on its way already."""
        with self._lock:
            self._stopped = True
            for reference in self._orphans.valuerefs():
                orphan = reference()
                if orphan is not None and orphan.open:
                    orphan.end(None)

    def started(self, event: Any) -> None:
        try:
            trace = inherited_trace.get()
            if (
                trace is not None
                and trace.open
                and (trace.telemetry is self._telemetry or trace.telemetry.retired)
            ):
                # Suppressed: a listener of the application's own asks the database. Not in the operation's own context.
                if trace.context is get_current() or is_instrumentation_enabled():
                    trace.command_started(event)
            elif is_instrumentation_enabled():
                self._orphan_started(event)
        except Exception:
            self._complain()

    def succeeded(self, event: Any) -> None:
        try:
            trace = inherited_trace.get()
            if (
                trace is not None
                and trace.open
                and (trace.telemetry is self._telemetry or trace.telemetry.retired)
            ):
                trace.command_succeeded(event)
                return
            self._orphan_ended(OperationTrace.command_succeeded, event, None)
        except Exception:
            self._complain()

    def failed(self, event: Any) -> None:
        try:
            trace = inherited_trace.get()
            if (
                trace is not None
                and trace.open
                and (trace.telemetry is self._telemetry or trace.telemetry.retired)
            ):
                trace.command_failed(event)
                return
            self._orphan_ended(OperationTrace.command_failed, event, sys.exception())
        except Exception:
            self._complain()

    def _orphan_started(self, event: Any) -> None:
        with self._lock:
            trace = None if self._stopped else self._adopt(event)
            if trace is not None:
                trace.command_started(event)

    def _orphan_ended(
        self, tell: Callable[[OperationTrace, Any], None], event: Any, error: BaseException | None
    ) -> None:
        orphan = _orphan.get()
        if orphan is None:
            return
        with self._lock:
            if orphan.open:
                tell(orphan, event)
            self._release(orphan, error)

    def _adopt(self, event: Any) -> OperationTrace | None:
        left = _orphan.get()
        if left is not None:
            self._release(left, None)  # its command was cancelled, and nobody was told
        name = event.command_name
        telemetry = self._telemetry
        if is_sensitive(name, event.command) or not telemetry.every_attempt:
            return None
        database = event.database_name
        trace = telemetry.start(
            telemetry.naming.of(name, database, collection_of(name, database, event.command)),
            parent=inherited_context(),
            operation_id=event.operation_id,
            ambient=False,
        )
        if trace is not None:
            trace.address = event.connection_id
            self._orphans[id(trace)] = trace
            _orphan.set(trace)
        return trace

    @staticmethod
    def _release(orphan: OperationTrace, error: BaseException | None) -> None:
        _orphan.set(None)
        if orphan.open:
            orphan.end(error)

    @staticmethod
    def _complain() -> None:
        warn_once("listener", "otel_retry failed to report a command", exc_info=True)
