"""Others that trace PyMongo: one span for each command all the same, and one line that says why."""

from __future__ import annotations

import logging

import pytest
from pymongo import monitoring

import otel_retry
from tests.flavours import resolve

try:
    from opentelemetry.instrumentation.pymongo import PymongoInstrumentor
except ImportError:
    PymongoInstrumentor = None

needs_contrib = pytest.mark.skipif(
    PymongoInstrumentor is None,
    reason="pip install opentelemetry-instrumentation-pymongo",
)


@pytest.fixture
def contrib(rig):
    """contrib's instrumentor, and its global listener taken away again: it leaves that behind itself."""
    before = list(monitoring._LISTENERS.command_listeners)
    instrumentor = PymongoInstrumentor()

    def switch_on() -> None:
        instrumentor.instrument(tracer_provider=rig.tracer_provider)

    yield switch_on
    if instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()
    monitoring._LISTENERS.command_listeners[:] = before
    PymongoInstrumentor._commandtracer_instance = instrumentor._commandtracer_instance = None


def scopes(rig) -> dict[str, int]:
    found: dict[str, int] = {}
    for span in rig.spans:
        found[span.instrumentation_scope.name] = found.get(span.instrumentation_scope.name, 0) + 1
    return found


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "otel_retry"]


@needs_contrib
async def test_contrib_alone_would_make_spans(connect, things, rig, contrib):
    """What the other tests rely on."""
    contrib()
    await resolve(things(connect()).find_one({}))

    assert scopes(rig) == {"opentelemetry.instrumentation.pymongo": 1}


@needs_contrib
async def test_contrib_that_was_there_before_is_switched_off(connect, things, watch, rig, contrib, caplog):
    contrib()
    earlier = connect()
    with caplog.at_level(logging.INFO, "otel_retry"):
        watch()
        for client in (earlier, connect()):
            await resolve(things(client).find_one({}))

    assert scopes(rig) == {"otel_retry": 4}
    [line] = lines(caplog)
    assert "opentelemetry-instrumentation-pymongo" in line
    assert "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS" in line


@needs_contrib
async def test_contrib_that_comes_after_is_switched_off(connect, things, watch, rig, contrib, caplog):
    with caplog.at_level(logging.INFO, "otel_retry"):
        watch()
        earlier = connect()
        await resolve(things(earlier).find_one({}))
        contrib()
        for client in (earlier, connect(), connect()):
            await resolve(things(client).find_one({}))

    assert scopes(rig) == {"otel_retry": 8}
    assert len(lines(caplog)) == 1


@needs_contrib
async def test_nothing_is_said_where_contrib_is_installed_and_not_active(connect, things, watch, rig, caplog):
    with caplog.at_level(logging.INFO, "otel_retry"):
        watch()
        await resolve(things(connect()).find_one({}))

    assert scopes(rig) == {"otel_retry": 2}
    assert not lines(caplog)


@pytest.mark.parametrize("tracing", [{"enabled": True}, True], ids=["a document", "a flag"])
async def test_a_client_that_traces_itself_has_no_spans_of_ours_and_keeps_its_metrics(
    connect, things, watch, rig, caplog, tracing
):
    watch()
    client, other = connect(), connect()
    client.options.tracing = tracing
    with caplog.at_level(logging.INFO, "otel_retry"):
        for _ in range(3):
            await resolve(things(client).find_one({}))

    assert not rig.spans
    assert rig.total("db.client.operation.duration") == 3
    assert otel_retry.budget(client) is not None
    [line] = lines(caplog)
    assert "tracing" in line
    await resolve(things(other).find_one({}))
    assert scopes(rig) == {"otel_retry": 2}


async def test_a_client_whose_tracing_is_off_has_our_spans(connect, things, watch, rig):
    watch()
    client = connect()
    client.options.tracing = {"enabled": False}
    await resolve(things(client).find_one({}))

    assert scopes(rig) == {"otel_retry": 2}
