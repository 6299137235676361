"""What the tests of telemetry share: an SDK in memory, a client to watch, ways to make it fail."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.instrumentation.utils import suppress_instrumentation
from pymongo import MongoClient, common

from tests.fakes.proxy import Proxy
from tests.integration.telemetry_rig import Rig, forget_sockets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from otel_retry import mongod
    from tests.flavours import Flavour


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Both providers in memory; shut down after the test."""
    made = Rig()
    yield made
    made.shutdown()


@pytest.fixture
def watch(rig: Rig, instrument: Callable[..., None]) -> Callable[..., None]:
    """`otel_retry.instrument` that reports to `rig`."""

    def switch_on(**options: Any) -> None:
        instrument(**{**rig.providers, **options})

    return switch_on


@pytest.fixture
def quick_rediscovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some errors a retry waits for the next heartbeat, and PyMongo leaves half a second between two."""
    monkeypatch.setattr(common, "MIN_HEARTBEAT_INTERVAL", 0.02)


@pytest.fixture(scope="session")
def shared_database(deployment: mongod.Deployment) -> Iterator[str]:
    """One database for all tests, a collection for each: to drop a database after each test takes too long."""
    name = f"telemetry_{uuid.uuid4().hex[:8]}"
    yield name
    with MongoClient(deployment.uri) as client:
        client.drop_database(name)


@pytest.fixture
def things(shared_database: str) -> Callable[[Any], Any]:
    """The test's own collection, of the client it is given."""
    name = f"things_{uuid.uuid4().hex[:8]}"
    return lambda client: client[shared_database][name]


@pytest.fixture
def connect(mongo: Flavour, deployment: mongod.Deployment, quick_rediscovery: None) -> Callable[..., Any]:
    """A client of the shared node."""

    def make(uri: str | None = None, **options: Any) -> Any:
        return mongo.client(uri or deployment.uri, **options)

    return make


@pytest.fixture
def fail(deployment: mongod.Deployment) -> Callable[..., Any]:
    """Makes one client's commands fail: `fail(client, "find", times=1, errorCode=6)`."""

    def arm(client: Any, *commands: str, **data: Any) -> Any:
        name = client.options.pool_options.appname
        with suppress_instrumentation():  # the client that sets the failpoint is instrumented as well
            return deployment.fail_command(commands=list(commands), appName=name, **data)

    return arm


@pytest.fixture
async def dying(mongo: Flavour) -> AsyncIterator[None]:
    """For tests whose server dies while clients connect to it."""
    yield
    await mongo.close()
    forget_sockets()


@pytest.fixture
def proxy(deployment: mongod.Deployment) -> Iterator[Proxy]:
    """In front of the shared node."""
    with MongoClient(deployment.uri) as client:
        client.admin.command("ping")
        address = client.address
    with Proxy(address) as started:
        yield started
