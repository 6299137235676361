"""Programs that do not start under `opentelemetry-instrument`: one call sets up export, or none does and the engine
works by itself. Each test runs such a program, since OpenTelemetry lets a process set its providers only once.
"""

from __future__ import annotations

import json
import sys
import textwrap
import uuid
from typing import TYPE_CHECKING

import pytest

import otel_retry
from otel_retry import otlp, semconv
from tests.fakes.otlp_receiver import Ended, OtlpReceiver, environment, run_program
from tests.flavours import OVERLOAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[..., Ended]

EXIT_SECONDS = 25.0
"""A program whose endpoint is no good may take this long to end once its work is done."""


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as started:
        yield started


@pytest.fixture
def run(tmp_path) -> Run:
    """Runs a program's text with this environment and these arguments."""

    def run(text: str, variables: dict[str, str], *arguments: str) -> Ended:
        path = tmp_path / f"program_{uuid.uuid4().hex}.py"
        path.write_text(textwrap.dedent(text))
        return run_program([sys.executable, path, *arguments], variables, folder=tmp_path)

    return run


SHOP = """
    import sys
    import otel_retry
    from pymongo import MongoClient

    uri, name, database = sys.argv[1:]
    otel_retry.setup_otlp(service_name="shop")
    with MongoClient(uri, appname=name, heartbeatFrequencyMS=500) as client:
        print(client[database].orders.find_one())
"""
SHOP_WITH_A_CLOCK = f"""{SHOP}
    import time
    print(time.time())
"""


@pytest.mark.parametrize(
    ("protocol", "variables", "service"),
    [
        ("grpc", {}, "shop"),
        (
            "http/protobuf",
            {"OTEL_SERVICE_NAME": "billing", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"},
            "billing",
        ),
    ],
    ids=["grpc", "http, OTEL_SERVICE_NAME"],
)
def test_one_call_exports_spans_and_metrics(
    run, receiver, deployment, database_name, protocol, variables, service
):
    with deployment.fail_command(commands=["find"], times=1, appName="setup_otlp", **OVERLOAD):
        ended = run(
            SHOP, environment(receiver, protocol, **variables), deployment.uri, "setup_otlp", database_name
        )

    assert (ended.stdout, ended.stderr, ended.code) == ("None\n", "", 0)
    spans, metrics = receiver.spans, receiver.metrics
    assert sorted(span.name for span in spans if "find" in span.name) == [
        "find",
        "find",
        f"find {database_name}.orders",
    ]
    assert receiver.latest("db.client.operation.duration").points
    assert [point.value for point in receiver.latest("mongodb.retry.attempts").points] == [1]
    (instance,) = {one.resource["service.instance.id"] for one in [*spans, *metrics]}
    assert uuid.UUID(instance)
    for one in [*spans, *metrics]:
        assert one.resource["service.name"] == service
        assert (one.scope, one.version) == (semconv.SCOPE, otel_retry.__version__)


@pytest.mark.parametrize(
    ("variables", "service"),
    [
        ({}, "shop"),
        ({"OTEL_SERVICE_NAME": "billing"}, "billing"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=billing,service.instance.id=7"}, "billing"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=fruit"}, "shop"),
    ],
)
def test_the_code_s_name_counts_where_the_environment_has_none(monkeypatch, variables, service):
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    attributes = otlp._resource("shop").attributes

    assert attributes["service.name"] == service
    given = variables.get("OTEL_RESOURCE_ATTRIBUTES", "")
    assert attributes["service.instance.id"]
    assert (attributes["service.instance.id"] == "7") == ("instance.id=7" in given)
    assert attributes.get("team") == ("fruit" if "team" in given else None)


REFUSED = """
    import json
    import pymongo.synchronous.mongo_client as driver
    import otel_retry
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    class Mine(MeterProvider):
        pass

    found = driver._ClientConnectionRetryable
    errors = []

    def attempt():
        try:
            otel_retry.setup_otlp(service_name="shop")
        except otel_retry.SettingError as error:
            errors.append(str(error))

    mine = Mine()
    metrics.set_meter_provider(mine)
    attempt()
    theirs = TracerProvider()
    trace.set_tracer_provider(theirs)
    attempt()
    print(json.dumps({
        "errors": errors,
        "kept": metrics.get_meter_provider() is mine and trace.get_tracer_provider() is theirs,
        "untouched": driver._ClientConnectionRetryable is found,
    }))
    otel_retry.instrument()
"""


def test_it_refuses_to_replace_providers_and_says_what_to_call_instead(run, receiver):
    ended = run(REFUSED, environment(receiver, "grpc"))

    assert (ended.stderr, ended.code) == ("", 0)
    said = json.loads(ended.stdout)
    meters, tracers = said["errors"]
    assert "__main__.Mine" in meters
    assert "MeterProvider" in meters
    assert "opentelemetry.sdk.trace.TracerProvider" in tracers
    for error in (meters, tracers):
        assert "otel_retry.instrument()" in error
    assert said["kept"]
    assert said["untouched"]
    assert receiver.requests == 0


WRONG = """
    import json
    import os
    import sys
    import threading
    import pymongo.synchronous.mongo_client as driver
    import otel_retry
    from opentelemetry import metrics, trace

    found = driver._ClientConnectionRetryable
    variable, value, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    os.environ[variable] = value
    try:
        otel_retry.setup_otlp(service_name="shop", **options)
    except otel_retry.SettingError as error:
        said = str(error)
    print(json.dumps({
        "error": said,
        "providers": [type(trace.get_tracer_provider()).__module__, type(metrics.get_meter_provider()).__module__],
        "threads": [thread.name for thread in threading.enumerate()],
        "untouched": driver._ClientConnectionRetryable is found,
    }))
"""


@pytest.mark.parametrize(
    ("variable", "options", "takes"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", {}, ["grpc", "http/protobuf"]),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", {}, ["grpc", "http/protobuf"]),
        ("OTEL_RETRY_POLICY", {}, ["backpressure", "driver"]),
        ("OTEL_RETRY_METRICS", {"policy": "once"}, ["true", "false"]),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it_and_nothing_is_left_behind(
    run, receiver, variable, options, takes
):
    ended = run(WRONG, environment(receiver, "grpc"), variable, "carrier-pigeon", json.dumps(options))

    assert (ended.stderr, ended.code) == ("", 0)
    said = json.loads(ended.stdout)
    assert said["error"].startswith(f"{variable} is 'carrier-pigeon': ")
    assert all(word in said["error"] for word in takes)
    assert said["providers"] == ["opentelemetry.trace", "opentelemetry.metrics._internal"]
    assert said["untouched"]
    assert said["threads"] == ["MainThread"]


def test_a_signal_that_the_environment_does_not_want_is_not_exported(
    run, receiver, deployment, database_name
):
    """Jaeger takes traces only; this is how everybody tells an SDK so."""
    variables = environment(receiver, "grpc", OTEL_METRICS_EXPORTER="none")
    ended = run(SHOP, variables, deployment.uri, "setup_otlp", database_name)

    assert (ended.stdout, ended.stderr, ended.code) == ("None\n", "", 0)
    assert receiver.spans
    assert receiver.metrics == []


# The end of the program


def seconds_to_end(ended: Ended) -> float:
    found, clock = ended.stdout.splitlines()
    assert found == "None"
    return ended.at - float(clock)


@pytest.mark.parametrize(
    ("mode", "protocol"),
    [("refuse", "http/protobuf"), ("hang", "grpc"), ("hang", "http/protobuf")],
)
def test_the_program_ends_by_itself_in_the_exporters_time(run, deployment, database_name, mode, protocol):
    with OtlpReceiver(mode) as receiver:
        variables = environment(receiver, protocol, OTEL_EXPORTER_OTLP_TIMEOUT="1")
        ended = run(SHOP_WITH_A_CLOCK, variables, deployment.uri, "setup_otlp", database_name)
        called = receiver.requests

    assert ended.code == 0, ended.stderr
    assert seconds_to_end(ended) < EXIT_SECONDS
    assert called or mode == "refuse"
    assert "Traceback" not in ended.stderr


def test_with_nobody_at_the_endpoint_the_program_ends_soon_without_any_setting(
    run, deployment, database_name
):
    with OtlpReceiver("refuse") as receiver:
        ended = run(
            SHOP_WITH_A_CLOCK, environment(receiver, "grpc"), deployment.uri, "setup_otlp", database_name
        )

    assert ended.code == 0, ended.stderr
    assert seconds_to_end(ended) < EXIT_SECONDS


# No SDK at all

NO_SDK = """
    import asyncio
    import json
    import sys
    import otel_retry
    from pymongo import AsyncMongoClient, MongoClient

    uri, name, database = sys.argv[1:]
    otel_retry.instrument()

    def facts(client):
        events = client._event_listeners
        return {
            "tokens": otel_retry.budget(client).tokens,
            "commands": events.enabled_for_commands,
            "pools": events.enabled_for_cmap,
        }

    async def main():
        async with AsyncMongoClient(uri, appname=name, heartbeatFrequencyMS=500) as client:
            await client[database].orders.find_one()
            return facts(client)

    with MongoClient(uri, appname=name, heartbeatFrequencyMS=500) as client:
        client[database].orders.find_one()
        halves = [facts(client)]
    halves.append(asyncio.run(main()))
    loaded = [module for module in sys.modules
              if module.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "grpc", "google"))]
    print(json.dumps([halves, loaded]))
"""


def test_with_no_sdk_configured_the_engine_works_and_nobody_listens(run, receiver, deployment, database_name):
    # All of them meet the first of the two clients.
    with deployment.fail_command(commands=["find"], times=3, appName="no-sdk", **OVERLOAD):
        ended = run(NO_SDK, environment(receiver, "grpc"), deployment.uri, "no-sdk", database_name)

    assert (ended.stderr, ended.code) == ("", 0)
    (sync, asynchronous), loaded = json.loads(ended.stdout)
    for half in (sync, asynchronous):
        assert half["commands"] is False
        assert half["pools"] is False
    # Three tokens for three retries, of which 1.1 came back for the success.
    assert sync["tokens"] == pytest.approx(1000 - 3 + 1.1)
    assert asynchronous["tokens"] == 1000
    assert loaded == []
    assert receiver.requests == 0
