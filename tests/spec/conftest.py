"""Fixtures of the tests that prove the rules of the seeds."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import MongoClient, common

from otel_retry import mongod
from tests.fakes.proxy import Proxy
from tests.spec.rig import Rig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.flavours import Flavour


@pytest.fixture
def quick_rediscovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some errors a retry waits for the next heartbeat, and PyMongo leaves half a second between two."""
    monkeypatch.setattr(common, "MIN_HEARTBEAT_INTERVAL", 0.02)


@pytest.fixture
def slow_rediscovery(quick_rediscovery: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers that stay away: see `Rig.close`, which must find the monitor asleep."""
    monkeypatch.setattr(common, "MIN_HEARTBEAT_INTERVAL", 0.3)


@pytest.fixture(scope="session")
def database_of_all(deployment: mongod.Deployment) -> Iterator[str]:
    """One database, with one collection, for all tests: to make and drop one for each would take longer than they do."""
    name = f"spec_{uuid.uuid4().hex}"
    yield name
    with MongoClient(deployment.uri) as client:
        client.drop_database(name)


@pytest.fixture
def serve() -> Iterator[Callable[[AbstractContextManager[Any]], Any]]:
    """Keeps a scripted server or a proxy alive until the rigs that talk to it are closed."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
async def rig(
    mongo: Flavour,
    deployment: mongod.Deployment,
    database_of_all: str,
    quick_rediscovery: None,
    serve: Callable[[AbstractContextManager[Any]], Any],
) -> AsyncIterator[Callable[..., Rig]]:
    """Makes a client, with options, together with what a test wants to know and to break about it."""
    made: list[Rig] = []

    def make(uri: str | None = None, **options: Any) -> Rig:
        made.append(Rig(mongo, deployment, uri or deployment.uri, database_of_all, options))
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.fixture
def proxy(deployment: mongod.Deployment, serve: Callable[[AbstractContextManager[Any]], Any]) -> Proxy:
    """In front of the single node."""
    with MongoClient(deployment.uri) as client:
        client.admin.command("ping")  # before that some versions know no address
        return serve(Proxy(client.address))


@pytest.fixture(scope="session")
def standalone() -> Iterator[mongod.Deployment]:
    """A mongod that is no replica set: no retryable writes, no transactions."""
    with mongod.start(standalone=True) as started:
        yield started
