"""otel_retry.testing, used as its users do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pymongo.errors import OperationFailure

import otel_retry
from otel_retry.testing import Retries, instant_retries, retries_fixture
from tests.flavours import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour

_ = retries_fixture  # the fixture `retries`


@pytest.fixture
def client(mongo: Flavour, deployment: Deployment, instrument: Callable[..., None]) -> Any:
    instrument()
    return mongo.client(deployment.uri)


async def test_an_order_survives_two_overloads(client: Any, retries: Retries, database_name: str) -> None:
    retries.fail(client, retries.overloaded(), retries.overloaded(), operation="insert")
    await resolve(client[database_name].orders.insert_one({"sku": "abc"}))
    assert retries.attempts(client) == [3]
    assert len(retries.waits) == 2
    assert retries.all_failures_met(client)
    assert otel_retry.budget(client).tokens == 999.1  # type: ignore[union-attr]


async def test_a_failure_of_one_operation_waits_for_it(
    client: Any, retries: Retries, database_name: str
) -> None:
    retries.fail(client, retries.connection_lost(), operation="update")
    await resolve(client[database_name].c.find_one())
    assert not retries.all_failures_met(client)
    await resolve(client[database_name].c.update_one({}, {"$set": {"a": 1}}))
    assert retries.attempts(client) == [1, 2]


@pytest.mark.parametrize("failure", ["overloaded", "not_primary", "connection_lost", "timed_out"])
async def test_each_ready_made_failure_is_retried_for_a_read_and_a_write(
    client: Any, retries: Retries, database_name: str, failure: str
) -> None:
    for call in (client[database_name].c.find_one, lambda: client[database_name].c.insert_one({})):
        retries.fail(client, getattr(retries, failure)())
        await resolve(call())
    assert retries.attempts(client) == [2, 2]


async def test_the_scripted_error_is_the_one_raised_with_its_history(
    client: Any, retries: Retries, database_name: str
) -> None:
    retries.fail(client, *(retries.overloaded() for _ in range(6)))
    with pytest.raises(OperationFailure, match="scripted") as caught:
        await resolve(client[database_name].c.find_one())
    assert len(otel_retry.attempts(caught.value)) == 6


async def test_a_retry_that_never_ends_is_stopped(
    mongo: Flavour, deployment: Deployment, instrument: Callable[..., None]
) -> None:
    instrument(policy="persistent")
    client = mongo.client(deployment.uri)
    with instant_retries(max_waits=5) as retries:
        retries.fail(client, *(retries.server_error(89) for _ in range(50)))
        with pytest.raises(AssertionError, match="more than 5 waits"):
            await resolve(client.db.c.find_one())


def test_a_client_that_is_not_instrumented_is_an_error_that_says_so(deployment: Deployment) -> None:
    from pymongo import MongoClient

    with MongoClient(deployment.uri) as client, instant_retries() as retries:
        with pytest.raises(RuntimeError, match=r"otel_retry\.instrument\(\)"):
            retries.attempts(client)


async def test_afterwards_everything_is_as_before(client: Any, database_name: str) -> None:
    with instant_retries() as retries:
        retries.fail(client, retries.overloaded())
    await resolve(client[database_name].c.find_one())
    assert otel_retry.budget(client).consumed == 0  # type: ignore[union-attr]
