"""What the hostile tests share: a server that answers what it is told, one client that is watched, one that is not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import common

import otel_retry
from tests.fakes.wire_server import FakeServer
from tests.hostile.bench import Logged
from tests.integration.telemetry_rig import Rig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.flavours import Flavour


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Both providers in memory; shut down after the test."""
    made = Rig()
    yield made
    made.shutdown()


@pytest.fixture
def logged() -> Iterator[Logged]:
    """All that this package says in logs, at any level, as a formatter writes it; and what OpenTelemetry complains of."""
    handler = Logged()
    names = {"otel_retry": logging.DEBUG, "opentelemetry": logging.WARNING}
    before = {name: logging.getLogger(name).level for name in names}
    for name, level in names.items():
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level)
    yield handler
    for name, level in before.items():
        logging.getLogger(name).removeHandler(handler)
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def quick_rediscovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some errors a retry waits for the next heartbeat, and PyMongo leaves half a second between two."""
    monkeypatch.setattr(common, "MIN_HEARTBEAT_INTERVAL", 0.01)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A real mongod cannot be made to answer garbage; this one answers anything."""
    with FakeServer("primary") as started:
        yield started


@pytest.fixture
async def watched(
    mongo: Flavour, rig: Rig, server: FakeServer, delays: list[float], quick_rediscovery: None
) -> AsyncIterator[Callable[..., Any]]:
    """Makes a client of `server` that is instrumented and reports to `rig`; waits are recorded and take no time."""

    def connect(
        uri: str | None = None, *, client_options: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        client = mongo.client(uri or server.uri, **(client_options or {}))
        otel_retry.instrument_client(client, **{**rig.providers, **options})
        return client

    yield connect
    otel_retry.uninstrument()
    server.always.clear()
    await mongo.close()  # while the server is still there: a client says goodbye
