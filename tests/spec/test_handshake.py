"""Seed 001, "Handshake changes". On a fake server: a real one does not say what it was told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pymongo
import pytest

import otel_retry
from tests.fakes.wire_server import FakeServer
from tests.flavours import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.flavours import Flavour

SPEAKS_BY_ITSELF = pymongo.version_tuple >= (4, 17)
# From 4.18 PyMongo sends the version of the protocol that it speaks instead; both are true.
EXPECTED: Any = "2" if pymongo.version_tuple >= (4, 18) else True


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as started:
        yield started


async def ping(mongo: Flavour, server: FakeServer, **options: Any) -> None:
    await resolve(mongo.client(server.uri, **options).admin.command("ping"))


@pytest.mark.parametrize("policy", ["backpressure", "current", "once", "persistent"])
async def test_every_new_connection_says_that_this_client_knows_backpressure(
    mongo: Flavour, server: FakeServer, instrument: Callable[..., None], policy: str
) -> None:
    instrument(policy)
    await ping(mongo, server)
    await mongo.close()
    handshakes = server.handshakes
    assert len(handshakes) >= 2  # the monitor's and the operation's
    assert [hello.get("backpressure") for hello in handshakes] == [EXPECTED] * len(handshakes)


async def test_the_stable_api_handshake_says_so_too(
    mongo: Flavour, server: FakeServer, instrument: Callable[..., None]
) -> None:
    from pymongo.server_api import ServerApi

    instrument()
    await ping(mongo, server, server_api=ServerApi("1"))
    await mongo.close()
    assert all(hello.get("backpressure") == EXPECTED for hello in server.handshakes)
    assert all(hello["apiVersion"] == "1" for hello in server.handshakes)


async def test_a_client_that_is_instrumented_alone_says_so(mongo: Flavour, server: FakeServer) -> None:
    client = mongo.client(server.uri, connect=False)
    otel_retry.instrument_client(client)
    try:
        await resolve(client.admin.command("ping"))
    finally:
        otel_retry.uninstrument()
    await mongo.close()
    assert all(hello.get("backpressure") == EXPECTED for hello in server.handshakes)


async def test_a_client_older_than_instrument_says_so_on_its_next_connection(
    mongo: Flavour, server: FakeServer, instrument: Callable[..., None]
) -> None:
    client = mongo.client(server.uri, maxIdleTimeMS=1)
    await resolve(client.admin.command("ping"))
    server.clear()
    instrument()
    time.sleep(0.01)  # longer than the connection may be idle
    await resolve(client.admin.command("ping"))
    await mongo.close()
    assert server.handshakes
    assert all(hello.get("backpressure") == EXPECTED for hello in server.handshakes)


async def test_policy_driver_leaves_the_handshake_to_pymongo(
    mongo: Flavour, server: FakeServer, instrument: Callable[..., None]
) -> None:
    """Below 4.17 PyMongo's own loop knows no backpressure: to say otherwise would be a lie."""
    instrument("driver")
    await ping(mongo, server)
    await mongo.close()
    assert {hello.get("backpressure") for hello in server.handshakes} == {
        EXPECTED if SPEAKS_BY_ITSELF else None
    }


async def test_after_uninstrument_pymongo_says_what_it_said_before(
    mongo: Flavour, server: FakeServer
) -> None:
    await ping(mongo, server)
    await mongo.close()
    before = [hello.get("backpressure") for hello in server.handshakes]
    otel_retry.instrument()
    otel_retry.uninstrument()
    server.clear()
    await ping(mongo, server)
    await mongo.close()
    after = [hello.get("backpressure") for hello in server.handshakes]
    assert set(before) == set(after) == {EXPECTED if SPEAKS_BY_ITSELF else None}
