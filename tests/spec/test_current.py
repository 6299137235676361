"""Policy `current`: MongoDB's specification as of 2026, which is what PyMongo 4.19 does by itself."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pymongo
import pytest
from pymongo import UpdateMany
from pymongo.errors import OperationFailure

import otel_retry
from tests.fakes.wire_server import FakeServer, error
from tests.flavours import OVERLOAD, Commands, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour

HAS_OVERLOAD_OPTIONS = pymongo.version_tuple >= (4, 17)
needs_overload_options = pytest.mark.skipif(
    not HAS_OVERLOAD_OPTIONS,
    reason="PyMongo takes maxAdaptiveRetries and enableOverloadRetargeting from 4.17 on",
)

OPERATIONS = {
    "find": lambda db: db.items.find_one({}),
    "insert": lambda db: db.items.insert_one({}),
    "update": lambda db: db.items.update_many({}, {"$set": {"n": 1}}),
    "ping": lambda db: db.command("ping"),
    "createIndexes": lambda db: db.items.create_index("n"),
}


@pytest.fixture
def sent() -> Commands:
    return Commands()


@pytest.fixture
def database(
    mongo: Flavour,
    deployment: Deployment,
    instrument: Callable[..., None],
    database_name: str,
    sent: Commands,
) -> Any:
    instrument("current")
    return mongo.client(deployment.uri, event_listeners=[sent])[database_name]


@pytest.fixture
def full_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 1.0)


async def test_there_is_no_bucket(database: Any, deployment: Deployment, delays: list[float]) -> None:
    deployment.fail_command(commands=["find"], times=1, **OVERLOAD)
    await resolve(database.items.find_one({}))
    assert otel_retry.budget(database.client) is None


async def test_an_overload_is_retried_twice_after_two_and_four_tenths_of_a_second(
    database: Any, deployment: Deployment, full_jitter: None, delays: list[float], sent: Commands
) -> None:
    for command, operation in OPERATIONS.items():
        delays.clear()
        deployment.fail_command(commands=[command], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised:
            await resolve(operation(database))
        assert raised.value.code == 462
        assert (command, sent.count(command), delays) == (command, 3, [0.2, 0.4])


async def test_the_third_attempt_may_succeed(
    database: Any, deployment: Deployment, delays: list[float], sent: Commands
) -> None:
    for command, operation in OPERATIONS.items():
        deployment.fail_command(commands=[command], times=2, **OVERLOAD)
        await resolve(operation(database))
        assert (command, sent.count(command)) == (command, 3)


@pytest.mark.skipif(
    pymongo.version_tuple < (4, 19), reason="it is PyMongo 4.19 that `current` must behave as"
)
@pytest.mark.parametrize(
    "failure",
    [
        OVERLOAD,
        {"errorCode": 6},
        {"errorCode": 6, "errorLabels": ["RetryableWriteError"]},
        {"errorCode": 462, "errorLabels": ["SystemOverloadedError"]},
        {"errorCode": 6, "errorLabels": ["SystemOverloadedError"]},
        {"errorCode": 8, "errorLabels": ["RetryableError"]},
        {"errorCode": 8},
    ],
    ids=[
        "overload",
        "retryable read error",
        "retryable write error",
        "overload alone",
        "overload and retryable code",
        "RetryableError alone",
        "other",
    ],
)
async def test_it_makes_the_attempts_and_the_waits_that_pymongo_makes(
    mongo: Flavour,
    deployment: Deployment,
    database_name: str,
    instrument: Callable[..., None],
    full_jitter: None,
    delays: list[float],
    monkeypatch: pytest.MonkeyPatch,
    failure: dict[str, Any],
) -> None:
    own_waits: list[float] = []

    async def sleep_async(seconds: float) -> None:
        own_waits.append(seconds)

    half = f"pymongo.{'asynchronous' if mongo.is_async else 'synchronous'}.mongo_client"
    name = "asyncio" if mongo.is_async else "time"
    module = getattr(pytest.importorskip(half), name)
    monkeypatch.setattr(
        f"{half}.{name}", Sleepless(module, sleep_async if mongo.is_async else own_waits.append)
    )

    async def outcome(command: str, operation: Callable[[Any], Any]) -> tuple[Any, ...]:
        sent = Commands()
        database = mongo.client(deployment.uri, event_listeners=[sent])[database_name]
        deployment.fail_command(commands=[command], times=4, **failure)
        with pytest.raises(OperationFailure) as raised:
            await resolve(operation(database))
        return sent.count(command), raised.value.code

    for command, operation in OPERATIONS.items():
        plain = await outcome(command, operation)
        instrument("current")
        ours = await outcome(command, operation)
        otel_retry.uninstrument()
        assert (command, *ours) == (command, *plain)
        assert (command, delays) == (command, own_waits)
        delays.clear()
        own_waits.clear()


class Sleepless:
    """A module with another `sleep`."""

    def __init__(self, module: Any, sleep: Any) -> None:
        self._module = module
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


async def test_the_retryable_label_alone_does_not_make_a_command_repeatable(
    database: Any, deployment: Deployment, delays: list[float], sent: Commands
) -> None:
    deployment.fail_command(commands=["update"], times=1, errorCode=8, errorLabels=["RetryableError"])
    with pytest.raises(OperationFailure):
        await resolve(database.items.update_many({}, {"$set": {"n": 1}}))
    assert sent.count("update") == 1


async def test_the_limit_holds_under_a_deadline_too(
    database: Any, deployment: Deployment, delays: list[float], sent: Commands
) -> None:
    deployment.fail_command(commands=["find"], **OVERLOAD)
    with pytest.raises(OperationFailure), pymongo.timeout(60):
        await resolve(database.items.find_one({}))
    assert sent.count("find") == 3


async def test_a_backoff_that_would_pass_the_deadline_is_not_slept(
    database: Any, deployment: Deployment, full_jitter: None, delays: list[float], sent: Commands
) -> None:
    await resolve(database.items.find_one({}))
    sent.clear()
    deployment.fail_command(commands=["find"], **OVERLOAD)
    with pytest.raises(OperationFailure) as raised, pymongo.timeout(0.39):
        await resolve(database.items.find_one({}))
    assert otel_retry.attempts(raised.value)[-1].decision == "deadline"
    assert delays == [0.2]


@needs_overload_options
@pytest.mark.parametrize("retries", [0, 1, 4])
async def test_max_adaptive_retries_of_the_client_is_the_limit(
    mongo: Flavour,
    deployment: Deployment,
    instrument: Callable[..., None],
    delays: list[float],
    sent: Commands,
    retries: int,
) -> None:
    instrument("current")
    client = mongo.client(deployment.uri, maxAdaptiveRetries=retries, event_listeners=[sent])
    deployment.fail_command(commands=["find"], **OVERLOAD)
    with pytest.raises(OperationFailure):
        await resolve(client.otel_retry_empty.items.find_one({}))
    assert sent.count("find") == retries + 1
    assert len(delays) == retries


@needs_overload_options
async def test_max_adaptive_retries_has_no_say_under_backpressure(
    mongo: Flavour,
    deployment: Deployment,
    instrument: Callable[..., None],
    delays: list[float],
    sent: Commands,
) -> None:
    """Seed 001: MAX_ATTEMPTS is "non-configurable"."""
    instrument("backpressure")
    client = mongo.client(deployment.uri, maxAdaptiveRetries=1, event_listeners=[sent])
    deployment.fail_command(commands=["find"], **OVERLOAD)
    with pytest.raises(OperationFailure):
        await resolve(client.otel_retry_empty.items.find_one({}))
    assert sent.count("find") == 6


@needs_overload_options
async def test_with_enable_overload_retargeting_the_retry_goes_to_another_node(
    mongo: Flavour, three_nodes: Deployment, instrument: Callable[..., None], delays: list[float]
) -> None:
    instrument("current")
    retried = await retried_servers(mongo, three_nodes, enableOverloadRetargeting=True)
    assert retried
    assert all(second != first for first, second, *_ in retried)


async def test_without_enable_overload_retargeting_the_retry_may_go_to_the_same_node(
    mongo: Flavour, three_nodes: Deployment, instrument: Callable[..., None], delays: list[float]
) -> None:
    instrument("current")
    retried = await retried_servers(mongo, three_nodes)
    # One in three, each time: chance has this fail once in (3/2) ** 40 runs.
    assert any(second == first for first, second, *_ in retried)


async def retried_servers(mongo: Flavour, three_nodes: Deployment, **options: Any) -> list[list[Any]]:
    """Where the attempts of operations went that had more than one; every node is overloaded once."""
    sent = Commands()
    client = mongo.client(
        three_nodes.uri, readPreference="nearest", localThresholdMS=5000, event_listeners=[sent], **options
    )
    while len(client.nodes) < 3:
        await resolve(client.admin.command("ping"))
    three_nodes.fail_command("all", commands=["find"], times=15, **OVERLOAD)
    servers = []
    for _ in range(15):
        sent.clear()
        with contextlib.suppress(OperationFailure):
            await resolve(client.otel_retry_empty.items.find_one({}))
        servers.append([event.connection_id for event in sent.named("find")])
    return [attempts for attempts in servers if len(attempts) > 1]


@pytest.mark.parametrize(
    ("hint", "expected"),
    [(50, [0.1, 0.2]), (1000, [2.0, 4.0]), (60_000, [10.0, 10.0]), (0, [0.2, 0.4]), ("soon", [0.2, 0.4])],
)
async def test_base_backoff_ms_of_the_server_takes_the_place_of_the_base(
    mongo: Flavour,
    instrument: Callable[..., None],
    full_jitter: None,
    delays: list[float],
    hint: Any,
    expected: list[float],
) -> None:
    """On a fake server: a failCommand failpoint cannot add fields to the error it sends."""
    instrument("current")
    with FakeServer() as server:
        overload = {**error(462, labels=OVERLOAD["errorLabels"]), "baseBackoffMS": hint}
        server.reply("find", overload, overload)
        await resolve(mongo.client(server.uri).anything.items.find_one({}))
        await mongo.close()
    assert delays == expected


async def test_base_backoff_ms_has_no_say_under_backpressure(
    mongo: Flavour, instrument: Callable[..., None], full_jitter: None, delays: list[float]
) -> None:
    """Seed 001: "baseBackoff is constant 100ms". On a fake server, as above."""
    instrument("backpressure")
    with FakeServer() as server:
        overload = {**error(462, labels=OVERLOAD["errorLabels"]), "baseBackoffMS": 5000}
        server.reply("find", overload, overload)
        await resolve(mongo.client(server.uri).anything.items.find_one({}))
        await mongo.close()
    assert delays == [0.1, 0.2]


async def test_a_bulk_write_has_its_two_retries_for_each_of_its_commands(
    database: Any, deployment: Deployment, delays: list[float], sent: Commands
) -> None:
    """Unlike PyMongo 4.19, whose count runs on from command to command: a defect that is not copied."""

    def overload_again(event: Any) -> None:
        if event.command_name == "update" and sent.count("update") == 3:
            deployment.fail_command(commands=["delete"], times=2, **OVERLOAD)

    sent.succeeded = overload_again
    deployment.fail_command(commands=["update"], times=2, **OVERLOAD)
    await resolve(database.items.bulk_write([UpdateMany({}, {"$set": {"n": 1}}), pymongo.DeleteMany({})]))
    assert (sent.count("update"), sent.count("delete")) == (3, 3)
