"""The two tests that MongoDB's OpenTelemetry specification gives in prose: switching on by environment variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.flavours import Flavour, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry.sdk.trace import ReadableSpan

    from otel_retry import mongod

ENABLED = "OTEL_PYTHON_INSTRUMENTATION_MONGODB_ENABLED"
MAX_LENGTH = "OTEL_PYTHON_INSTRUMENTATION_MONGODB_QUERY_TEXT_MAX_LENGTH"


class Tracing:
    """Instruments anew, as a program does that starts with today's environment, and says what one `find` emits."""

    def __init__(
        self, instrument: Callable[..., None], mongo: Flavour, deployment: mongod.Deployment, database: str
    ) -> None:
        self._instrument = instrument
        self._mongo = mongo
        self._uri = deployment.uri
        self._database = database
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    async def spans_of_a_find(self) -> tuple[ReadableSpan, ...]:
        self._exporter.clear()
        self._instrument(tracer_provider=self.provider)
        client = self._mongo.client(self._uri)
        await listed(client[self._database].test.find({"name": "Ada"}))
        return self._exporter.get_finished_spans()


@pytest.fixture
def tracing(
    instrument: Callable[..., None],
    mongo: Flavour,
    deployment: mongod.Deployment,
    database_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Tracing]:
    for variable in (ENABLED, MAX_LENGTH):
        monkeypatch.delenv(variable, raising=False)
    made = Tracing(instrument, mongo, deployment, database_name)
    yield made
    made.provider.shutdown()


async def test_1_tracing_is_enabled_and_disabled_by_environment_variable(
    tracing: Tracing, monkeypatch: pytest.MonkeyPatch, database_name: str
) -> None:
    monkeypatch.setenv(ENABLED, "false")
    assert await tracing.spans_of_a_find() == ()

    monkeypatch.setenv(ENABLED, "true")
    assert [span.name for span in await tracing.spans_of_a_find()] == ["find", f"find {database_name}.test"]


async def test_2_the_command_payload_is_emitted_by_environment_variable(
    tracing: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENABLED, "true")
    monkeypatch.setenv(MAX_LENGTH, "1024")
    command, operation = await tracing.spans_of_a_find()
    assert command.name == "find"
    assert command.attributes["db.query.text"]
    assert "db.query.text" not in operation.attributes

    monkeypatch.delenv(MAX_LENGTH)
    for span in await tracing.spans_of_a_find():
        assert "db.query.text" not in span.attributes
