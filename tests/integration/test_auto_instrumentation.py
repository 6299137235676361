"""On at start-up, with no code change: programs that import nothing of ours, run by `opentelemetry-instrument`.

What left them is read from real OTLP protobufs; what they print, and how they end, must be their own. Then: every
switch and setting by environment, the peer that makes the same spans, and what is logged.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
import textwrap
import uuid
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymongo.asynchronous.mongo_client
import pymongo.synchronous.mongo_client
import pytest
from opentelemetry.trace import NoOpTracerProvider
from pymongo import MongoClient
from pymongo.errors import OperationFailure

import otel_retry
from otel_retry import instrumentor, semconv
from otel_retry.config import SettingError, Settings
from otel_retry.policies import POLICIES
from tests.fakes.otlp_receiver import (
    PROTOCOLS,
    Ended,
    Metric,
    OtlpReceiver,
    Span,
    environment,
    run_program,
)
from tests.flavours import OVERLOAD, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTRIB = "opentelemetry.instrumentation.pymongo"
SCRIPT = Path(sys.executable).with_name("opentelemetry-instrument")
ALONE = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "pymongo"}
"""The peer is kept out, if it is installed, by the very variable that our line about it names."""

# Prints what it gets, and ends with a code of its own: both must be the same with and without instrumentation.
APPS = {
    "sync": """
        import sys
        from pymongo import MongoClient

        uri, name, database = sys.argv[1:]
        with MongoClient(uri, appname=name, heartbeatFrequencyMS=500) as client:
            orders = client[database].orders
            print("inserted", orders.insert_one({"_id": 1, "item": "pear"}).inserted_id)
            print("found", orders.find_one({"_id": 1}))
            print("deleted", orders.delete_one({"_id": 1}).deleted_count)
        sys.exit(7)
    """,
    "async": """
        import asyncio
        import sys
        from pymongo import AsyncMongoClient

        async def main(uri, name, database):
            async with AsyncMongoClient(uri, appname=name, heartbeatFrequencyMS=500) as client:
                orders = client[database].orders
                print("inserted", (await orders.insert_one({"_id": 1, "item": "pear"})).inserted_id)
                print("found", await orders.find_one({"_id": 1}))
                print("deleted", (await orders.delete_one({"_id": 1})).deleted_count)

        asyncio.run(main(*sys.argv[1:]))
        sys.exit(7)
    """,
}
PRINTED = "inserted 1\nfound {'_id': 1, 'item': 'pear'}\ndeleted 1\n"

MORE_THAN_THE_DRIVER_RETRIES = 4
"""PyMongo gives up after two retries for overload, or makes none at all; policy `backpressure` makes five."""


@pytest.fixture(scope="module", autouse=True)
def _entry_point():
    """It is found by what is installed, not by the path: a bare checkout would test nothing."""
    names = {each.name for each in importlib.metadata.entry_points(group="opentelemetry_instrumentor")}
    if "otel_retry" not in names or not SCRIPT.exists():
        pytest.fail(
            f"otel_retry is not installed for {sys.executable}: pip install -e '.[test]'", pytrace=False
        )


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as started:
        yield started


@pytest.fixture
def _off():
    yield
    otel_retry.uninstrument()


class Programs:
    """Writes programs to a folder and runs them there, against one database that is theirs."""

    def __init__(self, deployment: Any, folder: Path) -> None:
        self.deployment = deployment
        self.folder = folder
        self.name = f"shop-{uuid.uuid4().hex[:12]}"
        self.database = f"test_{self.name}"

    def write(self, text: str) -> Path:
        path = self.folder / f"app_{uuid.uuid4().hex}.py"
        path.write_text(textwrap.dedent(text))
        return path

    def overloaded(self, times: int, command: str = "insert") -> Any:
        """Only for clients of these programs."""
        return self.deployment.fail_command(commands=[command], times=times, appName=self.name, **OVERLOAD)

    def plain(self, app: str, variables: dict[str, str], *arguments: str) -> Ended:
        return self._run([sys.executable], app, variables, arguments)

    def instrumented(self, app: str, variables: dict[str, str], *arguments: str) -> Ended:
        return self._run([SCRIPT, sys.executable], app, variables, arguments)

    def _run(
        self, command: list[Any], app: str, variables: dict[str, str], arguments: tuple[str, ...]
    ) -> Ended:
        arguments = arguments or (self.deployment.uri, self.name, self.database)
        return run_program([*command, self.write(app), *arguments], variables, folder=self.folder)

    def clean(self) -> None:
        self.deployment.heal()
        with MongoClient(self.deployment.uri) as client:
            client.drop_database(self.database)


@pytest.fixture
def programs(deployment, tmp_path) -> Iterator[Programs]:
    made = Programs(deployment, tmp_path)
    yield made
    made.clean()


def ours(receiver: OtlpReceiver) -> list[Span]:
    return [span for span in receiver.spans if span.scope == semconv.SCOPE]


def named(spans: list[Span], name: str) -> list[Span]:
    """In the order in which they began."""
    return sorted(
        (span for span in spans if span.name == name), key=lambda span: span.proto.start_time_unix_nano
    )


# What leaves the program


@dataclass(frozen=True)
class Seen:
    """One run of one of the applications, whose insert failed once: what it did, and what the receiver got."""

    programs: Programs
    ended: Ended
    receiver: OtlpReceiver
    operation: str
    """The name of the insert's operation span."""

    @property
    def spans(self) -> list[Span]:
        return self.receiver.spans

    @property
    def metrics(self) -> list[Metric]:
        return self.receiver.metrics


@pytest.fixture(
    scope="module",
    params=[(app, protocol) for app in APPS for protocol in PROTOCOLS],
    ids="-".join,
)
def seen(request, deployment, tmp_path_factory) -> Iterator[Seen]:
    app, protocol = request.param
    programs = Programs(deployment, tmp_path_factory.mktemp("seen"))
    with OtlpReceiver() as receiver, programs.overloaded(1):
        ended = programs.instrumented(
            APPS[app], environment(receiver, protocol, OTEL_SERVICE_NAME="shop", **ALONE)
        )
        yield Seen(programs, ended, receiver, f"insert {programs.database}.orders")
    programs.clean()


def test_the_program_prints_and_ends_as_it_would_without(seen):
    assert (seen.ended.stdout, seen.ended.stderr, seen.ended.code) == (PRINTED, "", 7)


@pytest.mark.parametrize("app", APPS)
def test_without_instrumentation_it_prints_and_ends_the_same(programs, receiver, app):
    ended = programs.plain(APPS[app], environment(receiver, "grpc"))

    assert (ended.stdout, ended.stderr, ended.code) == (PRINTED, "", 7)
    assert receiver.requests == 0


def test_everything_carries_the_service_s_name_and_our_scope_with_its_version(seen):
    assert seen.spans
    assert seen.metrics
    for one in [*seen.spans, *seen.metrics]:
        assert one.resource["service.name"] == "shop"
        assert one.resource["telemetry.sdk.language"] == "python"
        assert (one.scope, one.version) == ("otel_retry", otel_retry.__version__)
        assert one.schema_url == semconv.SCHEMA_URL


def test_the_retried_insert_is_one_operation_span_with_a_command_span_for_each_attempt(seen):
    (operation,) = named(seen.spans, seen.operation)
    first, second = named(seen.spans, "insert")

    assert operation.parent_id == ""
    assert operation.proto.kind == operation.proto.SPAN_KIND_CLIENT
    assert not operation.failed
    assert (
        operation.attributes
        | {
            "db.system.name": "mongodb",
            "db.operation.name": "insert",
            "db.namespace": seen.programs.database,
            "db.collection.name": "orders",
            "mongodb.retry.attempts": 2,
            "mongodb.retry.outcome": "retried",
            "mongodb.retry.policy": "backpressure",
        }
        == operation.attributes
    )
    for attempt, span in enumerate((first, second), 1):
        assert (span.trace_id, span.parent_id) == (operation.trace_id, operation.span_id)
        assert span.proto.kind == span.proto.SPAN_KIND_CLIENT
        assert span.attributes["db.command.name"] == "insert"
        assert span.attributes["mongodb.retry.attempt"] == attempt
        assert span.attributes["mongodb.operation_id"] == operation.attributes["mongodb.operation_id"]
        assert isinstance(span.attributes["mongodb.request_id"], int)
        assert isinstance(span.attributes["server.port"], int)
    assert first.failed
    assert first.attributes["db.response.status_code"] == "462"
    assert first.attributes["error.type"] == "OperationFailure"
    assert not second.failed


def test_the_second_attempt_links_to_the_first_and_tells_its_wait(seen):
    first, second = named(seen.spans, "insert")
    (operation,) = named(seen.spans, seen.operation)
    (retry,) = [event for event in operation.events if event.name == "mongodb.retry"]

    assert first.links == []
    (link,) = second.links
    assert (link.trace_id, link.span_id) == (first.trace_id, first.span_id)
    assert link.attributes == {"mongodb.retry.link": "previous_attempt"}
    assert retry.attributes["mongodb.retry.attempt"] == 1
    assert retry.attributes["mongodb.retry.tokens"] == 999.0
    assert retry.attributes["error.type"] == "OperationFailure"
    assert 0 < second.attributes["mongodb.retry.delay"] <= 0.1
    assert retry.attributes["mongodb.retry.delay"] == second.attributes["mongodb.retry.delay"]
    waited = (second.proto.start_time_unix_nano - first.proto.end_time_unix_nano) / 1e9
    assert waited >= second.attributes["mongodb.retry.delay"]


def test_what_needed_no_retry_is_one_operation_span_with_one_command_span(seen):
    database = seen.programs.database
    for name in ("find", "delete"):
        (operation,) = named(seen.spans, f"{name} {database}.orders")
        (command,) = named(seen.spans, name)
        assert operation.attributes["mongodb.retry.outcome"] == "first_try"
        assert operation.attributes["mongodb.retry.attempts"] == 1
        assert command.parent_id == operation.span_id
        assert command.links == []
        assert command.attributes["mongodb.retry.attempt"] == 1
        assert "mongodb.retry.delay" not in command.attributes


def test_each_operation_is_a_trace_of_its_own_and_every_parent_arrived(seen):
    ids = {(span.trace_id, span.span_id) for span in seen.spans}

    assert len(ids) == len(seen.spans)
    for span in seen.spans:
        assert not span.parent_id or (span.trace_id, span.parent_id) in ids
    roots = [span.trace_id for span in seen.spans if not span.parent_id]
    assert len(set(roots)) == len(roots)


def test_the_same_facts_arrive_as_metrics(seen):
    receiver = seen.receiver
    duration = receiver.latest("db.client.operation.duration")
    assert (duration.unit, duration.kind) == ("s", "histogram")
    counts = {point.attributes["db.operation.name"]: point.count for point in duration.points}
    assert counts | {"insert": 1, "find": 1, "delete": 1} == counts
    (insert,) = [point for point in duration.points if point.attributes["db.operation.name"] == "insert"]
    assert insert.attributes["db.collection.name"] == "orders"
    assert list(insert.proto.explicit_bounds) == list(semconv.DURATION_BOUNDARIES)

    attempts = receiver.latest("mongodb.retry.attempts")
    assert (attempts.unit, attempts.kind) == ("{attempt}", "sum")
    (point,) = attempts.points
    assert point.value == 1
    assert point.attributes["db.operation.name"] == "insert"
    assert "mongodb.retry.reason" in point.attributes

    backoff = receiver.latest("mongodb.retry.backoff")
    assert (backoff.unit, backoff.kind) == ("s", "histogram")
    (point,) = backoff.points
    (_, second) = named(seen.spans, "insert")
    assert point.count == 1
    assert point.value == pytest.approx(second.attributes["mongodb.retry.delay"])

    for name, kind, value in (
        ("mongodb.retry.budget.capacity", "gauge", 1000),
        ("mongodb.retry.budget.consumed", "sum", 1),
        ("mongodb.retry.budget.denied", "sum", 0),
    ):
        metric = receiver.latest(name)
        assert (metric.unit, metric.kind) == ("{token}", kind)
        assert [point.value for point in metric.points] == [value]
    assert receiver.latest("mongodb.client.attempt.duration").points
    assert receiver.latest("mongodb.client.operation.retries").points
    assert "mongodb.retry.gave_up" not in receiver.metric_names()


def test_exemplars_of_the_metrics_point_at_the_traces(seen):
    operation_ids = {span.span_id for span in named(seen.spans, seen.operation)}
    (point,) = seen.receiver.latest("mongodb.retry.attempts").points

    assert {exemplar.span_id.hex() for exemplar in point.proto.exemplars} == operation_ids


FAILING = """
    import sys
    from pymongo import MongoClient

    uri, name, database = sys.argv[1:]
    with MongoClient(uri, appname=name, heartbeatFrequencyMS=500) as client:
        print("before", flush=True)
        client[database].orders.insert_one({"_id": 1})
        print("never")
"""


def test_a_program_that_dies_of_the_error_dies_as_before_and_its_telemetry_still_leaves(programs, receiver):
    with programs.overloaded(1000):
        ended = programs.instrumented(
            FAILING, environment(receiver, "grpc", OTEL_RETRY_POLICY="current", **ALONE)
        )

    assert (ended.stdout, ended.code) == ("before\n", 1)
    assert ended.stderr.count("Traceback (most recent call last):") == 1
    assert "pymongo.errors.OperationFailure" in ended.stderr
    (operation,) = named(ours(receiver), f"insert {programs.database}.orders")
    commands = named(ours(receiver), "insert")
    assert operation.failed
    assert operation.attributes["mongodb.retry.outcome"] == "limit"
    assert [span.attributes["mongodb.retry.attempt"] for span in commands] == [1, 2, 3]
    assert [len(span.links) for span in commands] == [0, 1, 1]
    assert all(span.failed for span in commands)
    (point,) = receiver.latest("mongodb.retry.gave_up").points
    assert point.value == 1
    assert point.attributes["db.operation.name"] == "insert"
    assert point.attributes["mongodb.retry.reason"] == "limit"


# Switches


def test_switched_off_there_are_no_spans_and_metrics_but_our_policy_holds(programs, receiver):
    variables = environment(receiver, "grpc", OTEL_PYTHON_INSTRUMENTATION_MONGODB_ENABLED="false", **ALONE)
    with programs.overloaded(MORE_THAN_THE_DRIVER_RETRIES):
        ended = programs.instrumented(APPS["sync"], variables)

    assert (ended.stdout, ended.stderr, ended.code) == (PRINTED, "", 7)
    assert receiver.spans == []
    assert receiver.metrics == []


def test_with_the_sdk_disabled_nothing_is_exported_and_the_engine_works(programs, receiver):
    with programs.overloaded(MORE_THAN_THE_DRIVER_RETRIES):
        ended = programs.instrumented(
            APPS["async"], environment(receiver, "http/protobuf", OTEL_SDK_DISABLED="true", **ALONE)
        )

    assert (ended.stdout, ended.stderr, ended.code) == (PRINTED, "", 7)
    assert receiver.requests == 0


SHOWS_LISTENERS = """
    import sys
    from pymongo import MongoClient

    uri, name, database = sys.argv[1:]
    with MongoClient(uri, appname=name) as client:
        client[database].orders.find_one()
        events = client._event_listeners
        print(events.enabled_for_commands, events.enabled_for_cmap)
"""


def test_with_the_sdk_disabled_nobody_listens_to_the_driver(programs, receiver):
    ended = programs.instrumented(
        SHOWS_LISTENERS, environment(receiver, "grpc", OTEL_SDK_DISABLED="true", **ALONE)
    )

    assert ended.stdout == "False False\n"


SHOWS_THE_DRIVER = """
    import sys
    import pymongo.asynchronous.mongo_client
    import pymongo.synchronous.mongo_client
    from pymongo import MongoClient

    uri, name, database = sys.argv[1:]
    for half in (pymongo.synchronous.mongo_client, pymongo.asynchronous.mongo_client):
        print(half._ClientConnectionRetryable.__module__)
    print("otel_retry" in sys.modules, flush=True)
    with MongoClient(uri, appname=name, heartbeatFrequencyMS=500) as client:
        client[database].orders.insert_one({"_id": 1})
"""


def test_disabled_as_an_instrumentation_the_driver_is_untouched(programs, receiver):
    variables = environment(receiver, "grpc", OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="otel_retry, pymongo")
    with programs.overloaded(MORE_THAN_THE_DRIVER_RETRIES):
        ended = programs.instrumented(SHOWS_THE_DRIVER, variables)

    assert ended.stdout == "pymongo.synchronous.mongo_client\npymongo.asynchronous.mongo_client\nFalse\n"
    # So the four failures of the other tests are more than the driver bears by itself.
    assert ended.code == 1
    assert "pymongo.errors.OperationFailure" in ended.stderr
    assert "otel_retry" not in ended.stderr
    assert receiver.spans == []
    assert receiver.metrics == []


@pytest.mark.usefixtures("_off")
def test_enabled_the_driver_s_class_is_another():
    """Or the test before this one would see nothing."""
    otel_retry.instrument()

    for half in (pymongo.synchronous.mongo_client, pymongo.asynchronous.mongo_client):
        assert half._ClientConnectionRetryable.__module__.startswith("otel_retry.")


# Settings

BY_ENVIRONMENT = {
    item.metadata["variable"]: item for item in fields(Settings) if item.metadata["variable"] is not None
}
TAKES = {
    "OTEL_RETRY_POLICY": list(POLICIES),
    "OTEL_PYTHON_INSTRUMENTATION_MONGODB_ENABLED": ["true", "false"],
    "OTEL_RETRY_METRICS": ["true", "false"],
    "OTEL_RETRY_ATTEMPT_SPANS": ["all", "retried"],
    "OTEL_PYTHON_INSTRUMENTATION_MONGODB_QUERY_TEXT_MAX_LENGTH": ["whole number"],
    "OTEL_RETRY_QUERY_TEXT_RAW": ["true", "false"],
    "OTEL_RETRY_MAX_COLLECTIONS": ["whole number"],
}
"""What the message must say. A new variable must come here, and is then tested."""


def test_every_variable_is_tested_here():
    assert TAKES.keys() == BY_ENVIRONMENT.keys()


def check_line(line: str, variable: str) -> None:
    assert line.startswith(f"{variable} is 'nonsense': ")
    for word in TAKES[variable]:
        assert word in line
    assert line.endswith("the default is used")


def test_a_wrong_policy_is_one_line_and_the_program_runs_by_the_default(programs, receiver):
    with programs.overloaded(MORE_THAN_THE_DRIVER_RETRIES):
        ended = programs.instrumented(
            APPS["sync"], environment(receiver, "grpc", OTEL_RETRY_POLICY="nonsense", **ALONE)
        )

    assert (ended.stdout, ended.code) == (PRINTED, 7)
    (line,) = ended.stderr.splitlines()
    check_line(line, "OTEL_RETRY_POLICY")
    (operation,) = named(ours(receiver), f"insert {programs.database}.orders")
    assert operation.attributes["mongodb.retry.policy"] == "backpressure"
    assert operation.attributes["mongodb.retry.attempts"] == 1 + MORE_THAN_THE_DRIVER_RETRIES


def test_every_wrong_setting_is_one_line_and_all_defaults_hold(programs, receiver):
    wrong = dict.fromkeys(BY_ENVIRONMENT, "nonsense")
    ended = programs.instrumented(APPS["async"], environment(receiver, "grpc", **wrong, **ALONE))

    assert (ended.stdout, ended.code) == (PRINTED, 7)
    lines = ended.stderr.splitlines()
    assert len(lines) == len(wrong)
    for variable in wrong:
        (line,) = [line for line in lines if line.startswith(f"{variable} ")]
        check_line(line, variable)
    (operation,) = named(ours(receiver), f"find {programs.database}.orders")
    (command,) = named(ours(receiver), "find")
    assert operation.attributes["mongodb.retry.policy"] == "backpressure"
    assert "db.query.text" not in command.attributes
    assert receiver.latest("db.client.operation.duration").points


@pytest.mark.parametrize("variable", BY_ENVIRONMENT)
def test_the_same_value_raises_for_whoever_calls_and_nothing_is_switched_on(monkeypatch, variable):
    classes = (
        pymongo.synchronous.mongo_client._ClientConnectionRetryable,
        pymongo.asynchronous.mongo_client._ClientConnectionRetryable,
    )
    item = BY_ENVIRONMENT[variable]
    with pytest.raises(SettingError, match=f"^option {item.name} is 'nonsense': "):
        otel_retry.instrument(**{item.name: "nonsense"})
    monkeypatch.setenv(variable, "nonsense")
    with pytest.raises(SettingError, match=f"^{variable} is 'nonsense': "):
        otel_retry.instrument()
    with pytest.raises(SettingError, match=variable), MongoClient(connect=False) as client:
        otel_retry.instrument_client(client)

    assert classes == (
        pymongo.synchronous.mongo_client._ClientConnectionRetryable,
        pymongo.asynchronous.mongo_client._ClientConnectionRetryable,
    )
    assert instrumentor._registry.empty


def test_policy_and_query_text_are_set_by_environment(programs, receiver):
    variables = environment(
        receiver,
        "http/protobuf",
        OTEL_RETRY_POLICY=" Current ",
        OTEL_RETRY_METRICS="off",
        OTEL_RETRY_QUERY_TEXT_RAW="yes",
        OTEL_PYTHON_INSTRUMENTATION_MONGODB_QUERY_TEXT_MAX_LENGTH="60",
        **ALONE,
    )
    ended = programs.instrumented(APPS["sync"], variables)

    assert (ended.stdout, ended.stderr) == (PRINTED, "")
    (operation,) = named(ours(receiver), f"find {programs.database}.orders")
    (command,) = named(ours(receiver), "insert")
    assert operation.attributes["mongodb.retry.policy"] == "current"
    assert 0 < len(command.attributes["db.query.text"]) <= 60
    assert receiver.metric_names(semconv.SCOPE) == set()


MANY_COLLECTIONS = """
    import sys
    from pymongo import MongoClient

    uri, name, database = sys.argv[1:]
    with MongoClient(uri, appname=name) as client:
        for number in range(5):
            client[database][f"c{number}"].find_one({"secret": "plum"})
"""


def test_collections_told_apart_and_redacted_text_are_set_by_environment(programs, receiver):
    variables = environment(
        receiver,
        "grpc",
        OTEL_RETRY_MAX_COLLECTIONS="2",
        OTEL_PYTHON_INSTRUMENTATION_MONGODB_QUERY_TEXT_MAX_LENGTH="1000",
        **ALONE,
    )
    ended = programs.instrumented(MANY_COLLECTIONS, variables)

    assert (ended.stdout, ended.stderr, ended.code) == ("", "", 0)
    finds = [
        point
        for point in receiver.latest("db.client.operation.duration").points
        if point.attributes["db.operation.name"] == "find"
    ]
    counts = Counter({point.attributes["db.collection.name"]: point.count for point in finds})
    assert counts == {"c0": 1, "c1": 1, semconv.OTHER: 3}
    texts = [span.attributes["db.query.text"] for span in named(ours(receiver), "find")]
    assert len(texts) == 5
    assert all("?" in text and "plum" not in text for text in texts)


# The peer that makes spans of the same commands

needs_the_peer = pytest.mark.skipif(
    importlib.util.find_spec(CONTRIB) is None,
    reason="opentelemetry-instrumentation-pymongo is not installed here",
)


def explains(stderr: str) -> None:
    (line,) = stderr.splitlines()
    assert "opentelemetry-instrumentation-pymongo" in line
    assert "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=pymongo" in line


@needs_the_peer
def test_beside_the_peer_there_is_one_span_for_each_command_and_one_line_that_explains(programs, receiver):
    with programs.overloaded(1):
        ended = programs.instrumented(APPS["sync"], environment(receiver, "grpc"))

    assert (ended.stdout, ended.code) == (PRINTED, 7)
    explains(ended.stderr)
    assert {span.scope for span in receiver.spans} == {semconv.SCOPE}
    assert [len(named(receiver.spans, name)) for name in ("insert", "find", "delete")] == [2, 1, 1]


@needs_the_peer
def test_with_our_spans_switched_off_the_peer_makes_its_own(programs, receiver):
    variables = environment(receiver, "grpc", OTEL_PYTHON_INSTRUMENTATION_MONGODB_ENABLED="false")
    ended = programs.instrumented(APPS["sync"], variables)

    assert (ended.stdout, ended.stderr, ended.code) == (PRINTED, "", 7)
    assert {span.scope for span in receiver.spans} == {CONTRIB}


BESIDE_THE_PEER = """
    import sys
    import otel_retry
    from opentelemetry import trace
    from opentelemetry.instrumentation.pymongo import PymongoInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from pymongo import MongoClient

    uri, order = sys.argv[1:]
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    for step in order.split():
        if step == "peer":
            PymongoInstrumentor().instrument()
        elif step == "ours":
            otel_retry.instrument()
        elif step == "client":
            client = MongoClient(uri)
        else:
            client.test.c.find_one()
    client.close()
    print(sorted(f"{s.instrumentation_scope.name}: {s.name}" for s in spans.get_finished_spans()
                 if "find" in s.name))
"""


@needs_the_peer
@pytest.mark.parametrize(
    "order",
    [
        "peer ours client find",
        "ours peer client find",
        "peer client ours find",
        "ours client find peer client find",
    ],
)
def test_whoever_comes_first_the_peer_makes_no_spans(programs, receiver, order):
    ended = programs.plain(BESIDE_THE_PEER, environment(receiver, "grpc"), programs.deployment.uri, order)

    assert ended.code == 0, ended.stderr
    explains(ended.stderr)
    finds = order.split().count("find")
    expected = sorted(["otel_retry: find", "otel_retry: find test.c"] * finds)
    assert ended.stdout == f"{expected}\n"


# What is logged

SECRET = "correct-horse-battery"


@pytest.fixture
def user(deployment) -> Iterator[str]:
    """Somebody with a password; the URI to come as them."""
    if "@" in deployment.uri:
        pytest.skip("MONGODB_URI has credentials of its own")
    name = f"user_{uuid.uuid4().hex[:12]}"
    with MongoClient(deployment.uri) as client:
        client.admin.command("createUser", name, pwd=SECRET, roles=["root"])
        yield deployment.uri.replace("mongodb://", f"mongodb://{name}:{SECRET}@", 1)
        client.admin.command("dropUser", name)


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.partition(".")[0] == "otel_retry"]


@pytest.mark.usefixtures("_off")
async def test_a_retry_is_a_line_at_debug(deployment, mongo, database_name, delays, caplog):
    caplog.set_level(logging.DEBUG, "otel_retry")
    otel_retry.instrument()
    client = mongo.client(deployment.uri)
    name = client.options.pool_options.appname
    with deployment.fail_command(commands=["find"], times=2, appName=name, **OVERLOAD):
        await resolve(client[database_name].c.find_one())

    logged = records(caplog)
    assert [record.levelname for record in logged] == ["DEBUG", "DEBUG"]
    for number, (record, delay) in enumerate(zip(logged, delays, strict=True), 1):
        message = record.getMessage()
        assert message.startswith(f"find: attempt {number} on 127.0.0.1:")
        assert f"next one in {delay:.3f} s" in message
        assert record.exc_info is None


@pytest.mark.usefixtures("_off")
async def test_giving_up_is_a_line_at_info_with_the_history(deployment, mongo, database_name, delays, caplog):
    caplog.set_level(logging.INFO, "otel_retry")
    otel_retry.instrument()
    client = mongo.client(deployment.uri)
    name = client.options.pool_options.appname
    with (
        deployment.fail_command(commands=["insert"], appName=name, **OVERLOAD),
        pytest.raises(OperationFailure) as caught,
    ):
        await resolve(client[database_name].c.insert_one({}))

    (record,) = records(caplog)
    assert record.levelname == "INFO"
    assert record.exc_info is None
    head, _, history = record.getMessage().partition(": ")
    assert head == "insert gave up (limit) after 6 attempts"
    attempts = otel_retry.attempts(caught.value)
    assert len(attempts) == 6
    assert history.split("; ") == [
        f"{attempt.server} {attempt.failure.reason}, {attempt.duration:.3f} s" for attempt in attempts
    ]


@pytest.mark.usefixtures("_off")
async def test_an_error_that_is_not_retried_is_not_logged(deployment, mongo, database_name, caplog):
    caplog.set_level(logging.DEBUG, "otel_retry")
    otel_retry.instrument()
    client = mongo.client(deployment.uri)
    await resolve(client[database_name].c.insert_one({"_id": 1}))
    for _ in range(3):
        with pytest.raises(OperationFailure):
            await resolve(client[database_name].c.insert_one({"_id": 1}))

    assert records(caplog) == []


class BrokenTracers(NoOpTracerProvider):
    """Gives tracers that raise whenever they are used."""

    def get_tracer(self, *args: Any, **kwargs: Any) -> Any:
        class Broken:
            def start_span(self, *args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("the tracer is broken")

        return Broken()


@pytest.mark.usefixtures("_off")
async def test_a_fault_of_telemetry_that_repeats_is_one_line_with_one_stack_trace(
    deployment, mongo, database_name, delays, caplog
):
    caplog.set_level(logging.INFO, "otel_retry")
    otel_retry.instrument(tracer_provider=BrokenTracers())
    for _ in range(3):
        client = mongo.client(deployment.uri)
        name = client.options.pool_options.appname
        with deployment.fail_command(commands=["find"], times=3, appName=name, **OVERLOAD):
            for _ in range(20):
                assert await resolve(client[database_name].c.find_one()) is None

    (record,) = records(caplog)
    assert record.levelname == "WARNING"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)


LOGS_ALL = """
    import logging
    import sys
    from pymongo import MongoClient
    from pymongo.errors import OperationFailure

    logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("otel_retry").setLevel("DEBUG")
    uri, name, database = sys.argv[1:]
    with MongoClient(uri, appname=name, heartbeatFrequencyMS=500) as client:
        try:
            client[database].orders.insert_one({"_id": 1})
        except OperationFailure as error:
            print(error.code)
"""


@pytest.mark.parametrize("right", [True, False], ids=["right password", "wrong password"])
def test_a_password_is_in_no_log_line_no_span_and_no_metric(programs, receiver, user, right):
    secret = SECRET if right else f"{SECRET}-no-more"
    variables = environment(
        receiver,
        "grpc",
        OTEL_RETRY_POLICY="current",
        OTEL_RETRY_QUERY_TEXT_RAW="true",
        OTEL_PYTHON_INSTRUMENTATION_MONGODB_QUERY_TEXT_MAX_LENGTH="100000",
        **ALONE,
    )
    with programs.overloaded(1000):
        ended = programs.instrumented(
            LOGS_ALL, variables, user.replace(SECRET, secret), programs.name, programs.database
        )

    assert ended.stdout == ("462\n" if right else "18\n")
    lines = ended.stderr.splitlines()
    assert all(line.startswith("otel_retry ") for line in lines)
    levels = [line.split()[1] for line in lines]
    assert levels == (["DEBUG", "DEBUG", "INFO"] if right else [])
    assert SECRET not in ended.stderr
    spans = ours(receiver)
    assert spans
    everything = "".join(str(one.proto) + str(one.resource) for one in [*spans, *receiver.metrics])
    assert SECRET not in everything
    assert not [span.name for span in spans if span.name.lower().startswith("sasl")]
