"""Fixtures around a real mongod. Without one the tests that need it fail: a missing server is an error, not a skip."""

from __future__ import annotations

import os
import signal
import uuid
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from pymongo import MongoClient

import otel_retry
from otel_retry import mongod
from tests.flavours import Flavour

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

_DEPLOYMENTS = ("deployment", "three_nodes")

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell that starts a suite in the background lets it ignore Ctrl-C, and so would all programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _or_fail(start: Callable[[], mongod.Deployment]) -> mongod.Deployment:
    try:
        return start()
    except mongod.MongodError as error:
        message = str(error)
    # Out here, so that the message stands alone, without the error that it repeats.
    pytest.fail(message, pytrace=False)


@pytest.fixture(scope="session")
def deployment() -> Iterator[mongod.Deployment]:
    """One node that is a replica set, or the deployment of `MONGODB_URI`; shared, and healed after each test."""
    with _or_fail(mongod.deployment) as started:
        yield started


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[mongod.Deployment]:
    """A replica set of three, started when the first test asks for it; shared, and healed after each test."""
    if os.environ.get(mongod.URI_VARIABLE):
        pytest.skip(f"{mongod.URI_VARIABLE} is set: its nodes cannot be killed or suspended")
    with _or_fail(lambda: mongod.start(3)) as started:
        yield started


@pytest.fixture(autouse=True)
def _healed(request: pytest.FixtureRequest) -> Iterator[None]:
    """No failpoint, dead node or missing primary is left to the next test; costs nothing where no server is used."""
    used = [request.getfixturevalue(name) for name in _DEPLOYMENTS if name in request.fixturenames]
    yield
    for each in used:
        each.heal()


@pytest.fixture
def database_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name that no other test uses; the database is dropped afterwards, on each deployment that the test uses."""
    names = [name for name in _DEPLOYMENTS if name in request.fixturenames] or ["deployment"]
    used: list[mongod.Deployment] = [request.getfixturevalue(name) for name in names]
    database = f"test_{uuid.uuid4().hex}"
    yield database
    for each in used:
        # First, since a failpoint or a missing primary would make the drop fail.
        each.heal()
        with MongoClient(each.uri, appname="tests/conftest.py") as client:
            client.drop_database(database)


@pytest.fixture(params=["sync", "async"])
async def mongo(request: pytest.FixtureRequest) -> AsyncIterator[Flavour]:
    """Makes clients; the test runs once with each driver."""
    flavour = Flavour(request.param)
    yield flavour
    await flavour.close()


@pytest.fixture
def instrument() -> Iterator[Callable[..., None]]:
    """`otel_retry.instrument`, undone after the test."""
    yield otel_retry.instrument
    otel_retry.uninstrument()


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes every wait of the retry loops instant, and records how long it would have been."""
    recorded: list[float] = []

    async def sleep_async(seconds: float) -> None:
        recorded.append(seconds)

    monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep", recorded.append)
    monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep_async", sleep_async)
    return recorded
