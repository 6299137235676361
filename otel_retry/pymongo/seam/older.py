"""What PyMongo gained between 4.9 and 4.18, added to the versions before.

- below 4.17 some operations bypass the retryable path: they are repeated whole, which is safe for what makes them
  repeatable, an overload rejection;
- below 4.17 the handshake does not speak of backpressure;
- below 4.18 each attempt of an operation publishes an operation id of its own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo import monitoring
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.synchronous.client_session import ClientSession
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database

from otel_retry.drivers import run, run_async
from otel_retry.events import Failure, OperationKind, Phase, Reason
from otel_retry.execution import OperationExecution
from otel_retry.history import attempts
from otel_retry.logs import warn_once
from otel_retry.machine import OperationFacts, Raise, Retry, Situation, Step
from otel_retry.pymongo.classify import classify
from otel_retry.pymongo.seam import waiting
from otel_retry.pymongo.seam.listening import hear_retry, is_heard, listen
from otel_retry.pymongo.seam.operation import address_of
from otel_retry.pymongo.seam.private import apply_timeout, randint, remaining
from otel_retry.pymongo.seam.transactions import transaction_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_retry.clients import ClientRegistry, ClientState
    from otel_retry.pymongo.seam.listening import RetryHeard
    from otel_retry.pymongo.seam.namespace import Namespace
    from otel_retry.pymongo.seam.shape import Half, Shape
    from otel_retry.telemetry.spans import OperationTrace

# The methods that check out a connection by themselves, innermost first: repeating one repeats one command.
# (module, class, method, operation, kind)
_BYPASSING = (
    ("database", "Database", "command", None, OperationKind.RUN_COMMAND),
    ("database", "Database", "cursor_command", None, OperationKind.RUN_COMMAND),
    ("database", "Database", "_drop_helper", "drop", OperationKind.WRITE),
    ("collection", "Collection", "_create", "create", OperationKind.WRITE),
    ("collection", "Collection", "_create_indexes", "createIndexes", OperationKind.WRITE),
    ("collection", "Collection", "_drop_index", "dropIndexes", OperationKind.WRITE),
    ("collection", "Collection", "_create_search_indexes", "createSearchIndexes", OperationKind.WRITE),
    ("collection", "Collection", "drop_search_index", "dropSearchIndex", OperationKind.WRITE),
    ("collection", "Collection", "update_search_index", "updateSearchIndex", OperationKind.WRITE),
    ("collection", "Collection", "rename", "renameCollection", OperationKind.WRITE),
    ("mongo_client", "MongoClient", "drop_database", "dropDatabase", OperationKind.WRITE),
)

# Asked by class: a Database and a Collection have an attribute of every name.
_SESSIONS = (ClientSession, AsyncClientSession)

_under_way: ContextVar[BypassingOperation | None] = ContextVar("otel_retry_bypassing", default=None)
_operation_id: ContextVar[int | None] = ContextVar("otel_retry_operation_id", default=None)


class BypassingOperation(OperationExecution):
    """A call of a method that checks out its own connection."""

    otr_state: ClientState

    def __init__(
        self, *, state: ClientState, client: Any, name: str, kind: OperationKind, session: Any
    ) -> None:
        self.otr_state = state
        self.otr_decides = state.decides
        self.otr_machine = None
        self.otr_started = self.otr_attempt_started = time.monotonic()
        self._client = client
        self._name = name
        self._kind = kind
        self._session = session
        self._transaction_state = None if session is None else session._transaction.state
        self.server: Any = None
        self.deprioritised: list[Any] = []
        self.otr_trace = None
        self._heard: RetryHeard | None = None
        """Commands are heard for the sake of this operation, since it is being retried."""

    @contextmanager
    def under_way(self, namespace: Namespace) -> Iterator[None]:
        """For the time of the call: known to server selection and to listeners, and a span if there is telemetry."""
        here = _under_way.set(self)
        identity = _operation_id.set(randint())
        trace = self.otr_trace = self._observe(namespace)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            _operation_id.reset(identity)
            _under_way.reset(here)
            self.otr_machine = None  # it holds errors whose tracebacks hold this object
            if trace is not None:
                self._observed(trace, error)
            del error  # its traceback holds this frame

    def _observe(self, namespace: Namespace) -> OperationTrace | None:
        telemetry = self.otr_state.telemetry
        if telemetry is None:
            return None
        name = "runCommand" if self._kind is OperationKind.RUN_COMMAND else self._name
        trace = None
        try:
            if not is_heard(self._client, self.otr_state, telemetry):
                return None
            trace = telemetry.start(
                telemetry.naming.of(name, *namespace),
                parent=transaction_context(self._session),
                operation_id=_operation_id.get(),
            )
            if trace is not None and trace.recording and self.otr_state.commands is None:
                listen(self._client, self.otr_state, telemetry)
        except Exception:
            if trace is not None:
                trace.end(None)
            warn_once(
                "start", "otel_retry failed to start a span; the operation goes on without", exc_info=True
            )
            return None
        return trace

    def _observed(self, trace: OperationTrace, error: BaseException | None) -> None:
        if self.server is not None:
            trace.address = self.server.description.address
        if isinstance(error, Exception) and not self.otr_decides:
            trace.gave_up(self.otr_failure(error), Reason.NOT_RETRYABLE)
        trace.end(error)
        if self._heard is not None:
            self._heard.release(self._client)

    def failed(self, error: Exception) -> Step:
        if attempts(error):
            # It comes from an operation inside this call that has had its retries: they must not multiply.
            return Raise(error=error, reason=attempts(error)[-1].decision)  # type: ignore[arg-type]
        return super().failed(error)

    def otr_facts(self) -> OperationFacts:
        return OperationFacts(
            name=self._name,
            kind=self._kind,
            started=self.otr_started,
            retry_reads=self.otr_state.retry_reads,
            retry_writes=self.otr_state.retry_writes,
        )

    def otr_failure(self, error: Exception) -> Failure:
        if self.server is None:
            return classify(error, phase=Phase.SELECTION)
        return classify(error, server=address_of(self.server))

    def otr_situation(self, now: float) -> Situation:
        return Situation(
            now=now,
            remaining=remaining(),
            in_transaction=self._session is not None and self._session.in_transaction,
            sharded=self._client.topology_description.topology_type_name == "Sharded",
        )

    def otr_restore(self, step: Retry) -> bool:
        if step.deprioritise and self.server is not None:
            self.deprioritised = [*self.deprioritised, self.server]
        self.server = None
        if self._heard is None:
            self._heard = hear_retry(self._client, self.otr_state, self.otr_trace)
        session = self._session
        if session is None or not session.in_transaction:
            return False
        transaction = session._transaction
        if transaction.state is self._transaction_state:
            return False
        transaction.state = self._transaction_state
        return True


class SyncBypassingOperation(BypassingOperation):
    def prepare(self, step: Retry) -> None:
        if self.otr_restore(step):
            self._session._unpin()


class AsyncBypassingOperation(BypassingOperation):
    async def prepare(self, step: Retry) -> None:
        if self.otr_restore(step):
            await self._session._unpin()


def patches(shape: Shape, registry: ClientRegistry) -> Iterator[tuple[Any, str, Any]]:
    """What to put where: (owner, attribute, replacement)."""
    if not shape.shared_operation_id:
        for method in ("publish_command_start", "publish_command_success", "publish_command_failure"):
            original = getattr(monitoring._EventListeners, method)
            yield monitoring._EventListeners, method, _with_operation_id(original)
    if shape.own_overload_retry:
        return
    for half in shape.halves:
        yield from _bypassing_methods(half, registry)
        yield half.client, "_select_server", _remember_server(half)
        connection = _class_of(half, "pool", "Connection")
        yield connection, "hello_cmd", _speak_of_backpressure(connection.hello_cmd, registry)


def _class_of(half: Half, module: str, name: str) -> Any:
    found = importlib.import_module(f"pymongo.{half.name}.{module}")
    return getattr(found, f"Async{name}" if half.is_async else name)


def _bypassing_methods(half: Half, registry: ClientRegistry) -> Iterator[tuple[Any, str, Any]]:
    for module, cls, method, name, kind in _BYPASSING:
        owner = _class_of(half, module, cls)
        original = owner.__dict__.get(method)
        if original is not None:
            wrap = _repeating_async if half.is_async else _repeating
            yield owner, method, wrap(original, Bypass(registry, name, kind, _CLIENT_OF[module]))


_CLIENT_OF: dict[str, Callable[[Any], Any]] = {
    "collection": lambda collection: collection.database.client,
    "database": lambda database: database.client,
    "mongo_client": lambda client: client,
}


@dataclass(frozen=True, slots=True)
class Bypass:
    """What is known of a bypassing method before it is called."""

    registry: ClientRegistry
    name: str | None
    """None: the name of the command that is passed in."""
    kind: OperationKind
    client_of: Callable[[Any], Any]

    def namespace(self, target: Any, args: tuple[Any, ...]) -> Namespace:
        if isinstance(target, (Collection, AsyncCollection)):
            return target.database.name, target.name
        named = getattr(args[0], "name", args[0]) if args else None
        if isinstance(target, (Database, AsyncDatabase)):
            is_drop = self.kind is not OperationKind.RUN_COMMAND and isinstance(named, str)
            return target.name, named if is_drop else None
        return named if isinstance(named, str) else None, None

    def begin(
        self, cls: type[BypassingOperation], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """None: nothing of ours to do here."""
        client = self.client_of(target)
        state = self.registry.of(client)
        if state is None or _under_way.get() is not None:
            return None
        session = kwargs.get("session") or next((a for a in args if isinstance(a, _SESSIONS)), None)
        name = self.name
        if name is None:
            command = kwargs.get("command") or (args[0] if args else "")
            name = command if isinstance(command, str) else str(next(iter(command), ""))
        return cls(state=state, client=client, name=name, kind=self.kind, session=session)


def _repeating(original: Any, bypass: Bypass) -> Any:
    @apply_timeout  # before the first attempt: timeoutMS is for all of them
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        operation = bypass.begin(SyncBypassingOperation, self, args, kwargs)
        if operation is None:
            return original(self, *args, **kwargs)
        with operation.under_way(bypass.namespace(self, args)):
            if not operation.otr_decides:
                return original(self, *args, **kwargs)
            return run(operation, functools.partial(original, self, *args, **kwargs), waiting.sleep)

    return method


def _repeating_async(original: Any, bypass: Bypass) -> Any:
    @apply_timeout  # before the first attempt: timeoutMS is for all of them
    @functools.wraps(original)
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        operation = bypass.begin(AsyncBypassingOperation, self, args, kwargs)
        if operation is None:
            return await original(self, *args, **kwargs)
        with operation.under_way(bypass.namespace(self, args)):
            if not operation.otr_decides:
                return await original(self, *args, **kwargs)
            return await run_async(
                operation, functools.partial(original, self, *args, **kwargs), waiting.sleep_async
            )

    return method


def _remember_server(half: Half) -> Any:
    """Server selection that tells a bypassing operation which server it got, and keeps it from overloaded ones."""
    original = half.client.__dict__["_select_server"]

    def note(operation: BypassingOperation | None, kwargs: dict[str, Any]) -> None:
        if operation is not None and operation.deprioritised:
            kwargs.setdefault("deprioritized_servers", operation.deprioritised)

    def remember(operation: BypassingOperation | None, server: Any) -> Any:
        if operation is not None:
            operation.server = server
        return server

    @functools.wraps(original)
    def select(self: Any, *args: Any, **kwargs: Any) -> Any:
        operation = _under_way.get()
        note(operation, kwargs)
        return remember(operation, original(self, *args, **kwargs))

    @functools.wraps(original)
    async def select_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        operation = _under_way.get()
        note(operation, kwargs)
        return remember(operation, await original(self, *args, **kwargs))

    return select_async if half.is_async else select


def _speak_of_backpressure(original: Any, registry: ClientRegistry) -> Any:
    """A connection does not know its client: it speaks so where any client has a policy that decides."""

    @functools.wraps(original)
    def hello_cmd(self: Any) -> Any:
        command = original(self)
        if registry.decides:
            command["backpressure"] = True  # seed 001, "Handshake changes"
        return command

    return hello_cmd


def _with_operation_id(original: Any) -> Any:
    position = list(inspect.signature(original).parameters).index("op_id") - 1  # not counting self

    @functools.wraps(original)
    def publish(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) <= position and kwargs.get("op_id") is None:
            kwargs["op_id"] = _operation_id.get()
        original(self, *args, **kwargs)

    return publish


def identified(cls: type[Any], *, is_async: bool) -> type[Any]:
    """An operation whose attempts all publish one operation id."""

    def identity_of(operation: Any) -> int:
        """Kept on the operation too, so that spans and events say the same."""
        if operation._operation_id is None:
            operation._operation_id = randint()
        identity: int = operation._operation_id
        return identity

    class Identified(cls):  # type: ignore[misc]
        def run(self) -> Any:
            token = _operation_id.set(identity_of(self))
            try:
                return super().run()
            finally:
                _operation_id.reset(token)

    class AsyncIdentified(cls):  # type: ignore[misc]
        async def run(self) -> Any:
            token = _operation_id.set(identity_of(self))
            try:
                return await super().run()
            finally:
                _operation_id.reset(token)

    return AsyncIdentified if is_async else Identified
