"""The entities of one test in the unified format: clients under observation, and what is made from them.

Everything is written once for both drivers: coroutines that await what `resolve` makes of a call. With the
synchronous driver nothing in them ever suspends, so that they run without an event loop: see `completed`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

from gridfs import AsyncGridFSBucket, GridFSBucket
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from pymongo import monitoring
from pymongo.asynchronous import client_session as asynchronous
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import make_read_preference, read_pref_mode_from_name
from pymongo.server_api import ServerApi
from pymongo.synchronous import client_session as synchronous
from pymongo.write_concern import WriteConcern

import otel_retry
from tests.conformance.matching import Matcher
from tests.flavours import Flavour, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span

WAIT_SECONDS = 10.0
"""What the format gives `waitForEvent`, `waitForThread` and `waitForPrimaryChange`."""

QUERY_TEXT_CHARACTERS = 1_000_000


class RunnerError(Exception):
    """About the test or the runner, so never what an operation of the test was expected to raise."""


class MismatchError(RunnerError):
    """Something is not as the file expects."""


class UnsupportedError(RunnerError):
    """The file asks for what this runner does not know; the message names it."""


class RemovedError(RunnerError):
    """The file asks for an API that PyMongo 4 no longer has."""


def completed(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends, as those are that only call the synchronous driver."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("the synchronous driver had something to wait for")


def only_known(what: str, document: Mapping[str, Any], known: set[str]) -> None:
    """Nothing that a file says may be passed over in silence: it could be an assertion."""
    if unknown := sorted(document.keys() - known):
        raise UnsupportedError(f"{what} has {', '.join(unknown)}, which this runner does not know")


class SpanRecorder(SpanProcessor):
    """The spans of one client. Those begun in a `with` block on it are the runner's own, and left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[int, Span] = {}
        self._ended: list[ReadableSpan] = []
        self._paused = False

    def __enter__(self) -> None:
        self._paused = True

    def __exit__(self, *_error: object) -> None:
        self._paused = False

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if not self._paused:
            with self._lock:
                self._started[span.context.span_id] = span

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            if self._started.pop(span.context.span_id, None):
                self._ended.append(span)

    def ended(self) -> list[ReadableSpan]:
        with self._lock:
            return list(self._ended)

    def open(self) -> list[str]:
        with self._lock:
            return [span.name for span in self._started.values()]


_KINDS = {
    "command": monitoring._CommandEvent,
    "cmap": (monitoring._ConnectionEvent, monitoring._PoolEvent),
    "sdam": (monitoring._ServerEvent, monitoring.TopologyEvent, monitoring._ServerHeartbeatEvent),
}


class EventRecorder(
    monitoring.CommandListener,
    monitoring.ConnectionPoolListener,
    monitoring.ServerListener,
    monitoring.ServerHeartbeatListener,
    monitoring.TopologyListener,
):
    """The events of one client that its `observeEvents` names, and how many connections it has."""

    def __init__(self, *, observed: list[str], ignored: list[str], sensitive: bool) -> None:
        self._observed = {event_class(name) for name in observed}
        self._ignored = {"configurefailpoint", *(name.lower() for name in ignored)}
        self._sensitive = sensitive
        self._events: list[Any] = []
        self.checked_out = 0
        self.ready = 0

    def events(self, kind: str | None = None) -> list[Any]:
        events = list(self._events)
        if kind is None:
            return events
        if kind not in _KINDS:
            raise UnsupportedError(f"eventType {kind!r}")
        return [event for event in events if isinstance(event, _KINDS[kind])]

    def _record(self, event: Any) -> None:
        if type(event) in self._observed:
            self._events.append(event)

    def _record_command(self, event: Any, *, redacted: bool = False) -> None:
        name = event.command_name.lower()
        sensitive = name in monitoring._SENSITIVE_COMMANDS or redacted
        if name not in self._ignored and (self._sensitive or not sensitive):
            self._record(event)

    def started(self, event: Any) -> None:
        if isinstance(event, monitoring.CommandStartedEvent):
            self._record_command(event, redacted=not event.command)
        else:
            self._record(event)

    def succeeded(self, event: Any) -> None:
        if isinstance(event, monitoring.CommandSucceededEvent):
            self._record_command(event, redacted=not event.reply)
        else:
            self._record(event)

    def failed(self, event: Any) -> None:
        if isinstance(event, monitoring.CommandFailedEvent):
            self._record_command(event)
        else:
            self._record(event)

    def connection_ready(self, event: Any) -> None:
        self.ready += 1
        self._record(event)

    def connection_checked_out(self, event: Any) -> None:
        self.checked_out += 1
        self._record(event)

    def connection_checked_in(self, event: Any) -> None:
        self.checked_out -= 1
        self._record(event)

    opened = closed = description_changed = _record
    pool_created = pool_ready = pool_cleared = pool_closed = _record
    connection_created = connection_closed = _record
    connection_check_out_started = connection_check_out_failed = _record


def event_class(name: str) -> type[Any]:
    """`commandStartedEvent` → CommandStartedEvent."""
    spelled = {"topologyOpeningEvent": "TopologyOpenedEvent"}.get(name, name[:1].upper() + name[1:])
    found = getattr(monitoring, spelled, None)
    if found is None:
        raise UnsupportedError(f"event {name!r}")
    return found


def event_problems(matcher: Matcher, expected: Mapping[str, Any], event: Any) -> Iterator[str]:
    """Where an event is not the expected one."""
    ((name, fields),) = expected.items()
    if type(event) is not event_class(name):
        yield f"expected {name}, got {event!r}"
        return
    for field, value in fields.items():
        match field:
            case "command" | "reply":
                yield from matcher.problems(value, getattr(event, field), f"{name} {field}", root=True)
            case "hasServiceId" | "hasServerConnectionId":
                found = event.service_id if field == "hasServiceId" else event.server_connection_id
                if bool(found) is not value:
                    yield f"{name}: {field} should be {value}, got {found!r}"
            case "previousDescription" | "newDescription":
                only_known(field, value, {"type"})
                description = (
                    event.previous_description if field == "previousDescription" else event.new_description
                )
                found = getattr(description, "server_type_name", None) or description.topology_type_name
                if "type" in value and found != value["type"]:
                    yield f"{name}: {field} should be {value['type']}, got {found}"
            case "commandName" | "databaseName" | "reason" | "awaited" | "interruptInUseConnections":
                attribute = {
                    "commandName": "command_name",
                    "databaseName": "database_name",
                    "interruptInUseConnections": "interrupt_connections",
                }.get(field, field)
                if (found := getattr(event, attribute)) != value:
                    yield f"{name}: {field} should be {value!r}, got {found!r}"
            case _:
                raise UnsupportedError(f"{field} of {name}")


class SyncThread:
    """A thread entity for the synchronous driver: one operation after the other, beside the test."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._under_way: list[Future[Any]] = []

    def schedule(self, operation: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._under_way.append(self._executor.submit(lambda: completed(operation())))

    async def finish(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        for future in self._under_way:
            future.result(timeout=max(0.0, deadline - time.monotonic()))

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class AsyncThread:
    """The same as a chain of tasks."""

    def __init__(self) -> None:
        self._last: asyncio.Task[Any] | None = None

    def schedule(self, operation: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        previous = self._last

        async def in_turn() -> None:
            if previous is not None:
                await previous
            await operation()

        self._last = asyncio.create_task(in_turn())

    async def finish(self) -> None:
        if self._last is not None:
            await asyncio.wait_for(self._last, WAIT_SECONDS)

    async def close(self) -> None:
        if self._last is not None and not self._last.done():
            self._last.cancel()


class HeldCursor:
    """A find cursor whose first batch is fetched already; the document taken for that is the first one served."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self._held: list[Any] = []

    async def fetch(self) -> None:
        document = await self._next()
        if document is not None:
            self._held.append(document)

    @property
    def alive(self) -> bool:
        return bool(self._held) or self._cursor.alive

    async def try_next(self) -> Any:
        return self._held.pop() if self._held else await self._next()

    async def close(self) -> None:
        await resolve(self._cursor.close())

    async def _next(self) -> Any:
        if hasattr(self._cursor, "__anext__"):
            return await anext(self._cursor, None)
        return next(self._cursor, None)


class Entities:
    """What the test calls by name. Invariant: a name is given once, and all that was opened is closed by `close`."""

    _numbers = itertools.count()

    def __init__(self, flavour: Flavour, uri: str, *, cluster_time: Any = None) -> None:
        self.flavour = flavour
        self.matcher = Matcher(entity=self.get, lsid=self.lsid)
        self._uri = uri
        self._cluster_time = cluster_time
        self._entities: dict[str, tuple[str, Any]] = {}
        self._lsids: dict[str, Any] = {}
        self._events: dict[str, EventRecorder] = {}
        self._spans: dict[str, SpanRecorder] = {}
        self._providers: list[TracerProvider] = []

    def add(self, name: str, kind: str, value: Any) -> None:
        if name in self._entities:
            raise UnsupportedError(f"two entities named {name!r}")
        self._entities[name] = (kind, value)

    def kind(self, name: str) -> str:
        return self._entities[name][0] if name in self._entities else self._unknown(name)

    def get(self, name: str, *kinds: str) -> Any:
        kind = self.kind(name)
        if kinds and kind not in kinds:
            raise UnsupportedError(f"{name!r} should be a {' or '.join(kinds)} and is a {kind}")
        return self._entities[name][1]

    def lsid(self, name: str) -> Any:
        self.get(name, "session")
        return self._lsids[name]

    def events(self, client: str) -> EventRecorder:
        self.get(client, "client")
        return self._events[client]

    def spans(self, client: str) -> SpanRecorder:
        self.get(client, "client")
        if client not in self._spans:
            raise UnsupportedError(f"spans are expected of {client!r}, which has no observeTracingMessages")
        return self._spans[client]

    def observed(self) -> dict[str, SpanRecorder]:
        return dict(self._spans)

    async def sleep(self, seconds: float) -> None:
        if self.flavour.is_async:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    async def wait_until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise MismatchError(f"{what}: not within {seconds:g} s")
            await self.sleep(0.01)

    async def create(self, entities: list[Mapping[str, Any]]) -> None:
        for entity in entities:
            ((kind, spec),) = entity.items()
            maker = getattr(self, f"_create_{kind}", None)
            if maker is None:
                raise UnsupportedError(f"entity {kind!r}")
            self.add(spec["id"], kind, await maker(spec))

    async def close(self) -> None:
        """Streams and cursors before sessions, sessions before clients: each needs the next one."""
        for kinds in (("thread",), ("changeStream", "cursor"), ("session",), ("client",)):
            for name, (kind, value) in self._entities.items():
                if kind in kinds:
                    try:
                        await resolve(value.end_session() if kind == "session" else value.close())
                    except Exception as error:
                        raise RunnerError(f"closing {name} raised {error!r}") from error
        for provider in self._providers:
            provider.shutdown()

    async def _create_client(self, spec: Mapping[str, Any]) -> Any:
        only_known(
            "client",
            spec,
            {
                "id",
                "uriOptions",
                "useMultipleMongoses",
                "observeEvents",
                "ignoreCommandMonitoringEvents",
                "observeSensitiveCommands",
                "observeTracingMessages",
                "serverApi",
                "awaitMinPoolSizeMS",
            },
        )
        events = EventRecorder(
            observed=spec.get("observeEvents", []),
            ignored=spec.get("ignoreCommandMonitoringEvents", []),
            sensitive=spec.get("observeSensitiveCommands", False),
        )
        uri_options = dict(spec.get("uriOptions", {}))
        given = {name.lower() for name in uri_options}
        # After some errors a retry waits for the next heartbeat; a name lets a failpoint aim at this client alone.
        defaults = {
            "heartbeatFrequencyMS": 500,
            "serverSelectionTimeoutMS": 10_000,
            "appname": f"otel_spec-{next(self._numbers)}",
        }
        options: dict[str, Any] = {
            name: value for name, value in defaults.items() if name.lower() not in given
        }
        if api := spec.get("serverApi"):
            only_known("serverApi", api, {"version", "strict", "deprecationErrors"})
            options["server_api"] = ServerApi(
                api["version"], strict=api.get("strict"), deprecation_errors=api.get("deprecationErrors")
            )
        client = self.flavour.client_class(self._uri, event_listeners=[events], **uri_options, **options)
        self._events[spec["id"]] = events
        if "observeTracingMessages" in spec:
            self._observe(client, spec["id"], spec["observeTracingMessages"] or {})
        if self.flavour.is_async:
            await client.aconnect()
        smallest = uri_options.get("minPoolSize", 0)
        if "awaitMinPoolSizeMS" in spec and smallest:
            await self.wait_until(
                lambda: events.ready >= smallest,
                f"{smallest} connections",
                spec["awaitMinPoolSizeMS"] / 1000,
            )
        return client

    def _observe(self, client: Any, name: str, options: Mapping[str, Any]) -> None:
        only_known("observeTracingMessages", options, {"enableCommandPayload"})
        recorder = SpanRecorder()
        provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
        provider.add_span_processor(recorder)
        otel_retry.instrument_client(
            client,
            policy="current",  # promises to retry as the driver does, which is what the files were written for
            # Spelled out, so that no variable of the environment changes what is tested.
            enabled=True,
            tracer_provider=provider,
            query_text_max_length=QUERY_TEXT_CHARACTERS if options.get("enableCommandPayload") else 0,
            query_text_raw=True,
        )
        self._spans[name] = recorder
        self._providers.append(provider)

    async def _create_database(self, spec: Mapping[str, Any]) -> Any:
        only_known("database", spec, {"id", "client", "databaseName", "databaseOptions"})
        client = self.get(spec["client"], "client")
        return client.get_database(spec["databaseName"], **common_options(spec.get("databaseOptions", {})))

    async def _create_collection(self, spec: Mapping[str, Any]) -> Any:
        only_known("collection", spec, {"id", "database", "collectionName", "collectionOptions"})
        database = self.get(spec["database"], "database")
        options = common_options(spec.get("collectionOptions", {}))
        return database.get_collection(spec["collectionName"], **options)

    async def _create_session(self, spec: Mapping[str, Any]) -> Any:
        only_known("session", spec, {"id", "client", "sessionOptions"})
        given = dict(spec.get("sessionOptions", {}))
        only_known(
            "sessionOptions",
            given,
            {"causalConsistency", "snapshot", "snapshotTime", "defaultTransactionOptions"},
        )
        options: dict[str, Any] = {}
        if "causalConsistency" in given:
            options["causal_consistency"] = given["causalConsistency"]
        if "snapshot" in given:
            options["snapshot"] = given["snapshot"]
        if "snapshotTime" in given:
            options["snapshot_time"] = self.get(given["snapshotTime"])
        if "defaultTransactionOptions" in given:
            sessions = asynchronous if self.flavour.is_async else synchronous
            options["default_transaction_options"] = sessions.TransactionOptions(
                **transaction_options(given["defaultTransactionOptions"])
            )
        session = self.get(spec["client"], "client").start_session(**options)
        if self._cluster_time is not None:
            session.advance_cluster_time(self._cluster_time)
        # Kept, since a session that has ended no longer tells.
        self._lsids[spec["id"]] = dict(session.session_id)
        return session

    async def _create_bucket(self, spec: Mapping[str, Any]) -> Any:
        only_known("bucket", spec, {"id", "database", "bucketOptions"})
        given = dict(spec.get("bucketOptions", {}))
        options: dict[str, Any] = {}
        for name, keyword in (("bucketName", "bucket_name"), ("chunkSizeBytes", "chunk_size_bytes")):
            if name in given:
                options[keyword] = given.pop(name)
        options |= common_options(given)
        if options.pop("read_concern", None):
            raise UnsupportedError("readConcern of a bucket")
        kind = AsyncGridFSBucket if self.flavour.is_async else GridFSBucket
        return kind(self.get(spec["database"], "database"), **options)

    async def _create_thread(self, spec: Mapping[str, Any]) -> Any:
        only_known("thread", spec, {"id"})
        return AsyncThread() if self.flavour.is_async else SyncThread()

    def _unknown(self, name: str) -> NoReturn:
        raise UnsupportedError(f"no entity is named {name!r}")


def common_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """`readConcern`, `readPreference` and `writeConcern` as PyMongo's objects, under PyMongo's names."""
    only_known("options", given, {"readConcern", "readPreference", "writeConcern"})
    options: dict[str, Any] = {}
    if "readConcern" in given:
        options["read_concern"] = ReadConcern(**given["readConcern"])
    if "readPreference" in given:
        options["read_preference"] = read_preference(given["readPreference"])
    if "writeConcern" in given:
        options["write_concern"] = write_concern(given["writeConcern"])
    return options


def transaction_options(given: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(given)
    limit = rest.pop("maxCommitTimeMS", None)
    return common_options(rest) | ({} if limit is None else {"max_commit_time_ms": limit})


def read_preference(given: Mapping[str, Any]) -> Any:
    only_known("readPreference", given, {"mode", "tagSets", "maxStalenessSeconds", "hedge"})
    mode = given["mode"]
    number = read_pref_mode_from_name(mode[:1].lower() + mode[1:])
    preference = make_read_preference(number, given.get("tagSets"), given.get("maxStalenessSeconds", -1))
    return (
        type(preference)(preference.tag_sets, preference.max_staleness, given["hedge"])
        if "hedge" in given
        else preference
    )


def write_concern(given: Mapping[str, Any]) -> WriteConcern:
    only_known("writeConcern", given, {"journal", "w", "wtimeoutMS"})
    names = {"journal": "j", "w": "w", "wtimeoutMS": "wtimeout"}
    return WriteConcern(**{names[name]: value for name, value in given.items()})
