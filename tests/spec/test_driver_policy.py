"""Policy `driver`: PyMongo's own loop decides, as if the plugin were not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pymongo.errors import PyMongoError

import otel_retry
from tests.flavours import OVERLOAD, Commands, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "find": lambda db: db.items.find_one({}),
    "insert": lambda db: db.items.insert_one({}),
    "update": lambda db: db.items.update_many({}, {"$set": {"n": 1}}),
    "ping": lambda db: db.command("ping"),
}

FAILURES: dict[str, dict[str, Any]] = {
    "overload": OVERLOAD,
    "retryable read error": {"errorCode": 6},
    "retryable write error": {"errorCode": 6, "errorLabels": ["RetryableWriteError"]},
    "RetryableError alone": {"errorCode": 8, "errorLabels": ["RetryableError"]},
}


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyMongo's own waits, from 4.17 on, take no time."""
    monkeypatch.setattr("random.random", lambda: 0.0)


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_there_are_as_many_attempts_as_without_the_plugin_and_the_error_is_the_same(
    mongo: Flavour,
    deployment: Deployment,
    instrument: Callable[..., None],
    database_name: str,
    no_jitter: None,
    delays: list[float],
    failure: dict[str, Any],
) -> None:
    async def outcome(command: str, times: int) -> tuple[Any, ...]:
        sent = Commands()
        database = mongo.client(deployment.uri, event_listeners=[sent])[database_name]
        deployment.fail_command(commands=[command], times=times, **failure)
        raised = None
        try:
            await resolve(OPERATIONS[command](database))
        except PyMongoError as error:
            raised = (type(error), error.code, otel_retry.attempts(error))
        return command, times, sent.count(command), raised

    cases = [(command, times) for command in OPERATIONS for times in (1, 5)]
    plain = [await outcome(*case) for case in cases]
    instrument("driver")
    watched = [await outcome(*case) for case in cases]
    assert watched == plain
    assert delays == []


async def test_a_closed_connection_is_pymongos_business_too(
    mongo: Flavour, deployment: Deployment, instrument: Callable[..., None], database_name: str
) -> None:
    counts = []
    for policy in (None, "driver"):
        if policy:
            instrument(policy)
        sent = Commands()
        database = mongo.client(deployment.uri, event_listeners=[sent])[database_name]
        deployment.fail_command(commands=["insert"], times=1, closeConnection=True)
        await resolve(database.items.insert_one({}))
        counts.append(sent.count("insert"))
    assert counts == [2, 2]


async def test_it_has_no_budget(
    mongo: Flavour, deployment: Deployment, instrument: Callable[..., None]
) -> None:
    instrument("driver")
    client = mongo.client(deployment.uri)
    await resolve(client.admin.command("ping"))
    assert otel_retry.budget(client) is None


async def test_its_clients_stay_out_of_other_clients_budgets(
    mongo: Flavour, deployment: Deployment, instrument: Callable[..., None], no_jitter: None
) -> None:
    instrument("backpressure")
    watched, retried = mongo.client(deployment.uri), mongo.client(deployment.uri)
    otel_retry.instrument_client(watched, policy="driver")
    deployment.fail_command(commands=["find"], times=1, errorCode=6)
    await resolve(watched.otel_retry_empty.items.find_one({}))
    assert otel_retry.budget(watched) is None
    assert otel_retry.budget(retried).tokens == 1000
