"""`attempt_spans="retried"`: an operation that succeeds at once is one span; one that fails shows all its attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.trace import StatusCode
from pymongo.errors import DuplicateKeyError, OperationFailure

from otel_retry import instrumentor
from otel_retry.pymongo.seam import waiting
from tests.flavours import OVERLOAD, Commands, resolve
from tests.integration.telemetry_rig import is_child

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def sparing(watch: Callable[..., None]) -> Callable[..., None]:
    def switch_on(**options: Any) -> None:
        watch(attempt_spans="retried", **options)

    return switch_on


def published(client: Any) -> bool:
    """Whether PyMongo makes events of this client's commands."""
    return bool(client._event_listeners.enabled_for_commands)


async def test_an_operation_that_succeeds_at_once_is_one_span_and_no_event(connect, things, sparing, rig):
    sparing()
    client = connect()
    collection = things(client)
    await resolve(collection.insert_one({"_id": 1}))
    await resolve(collection.find_one({}))

    assert [span.attributes["db.operation.name"] for span in rig.spans] == ["insert", "find"]
    assert all(span.attributes["mongodb.retry.outcome"] == "first_try" for span in rig.spans)
    assert not published(client)
    assert rig.total("db.client.operation.duration") == 2
    assert rig.total("db.client.connection.use_time") >= 1


async def test_a_retried_operation_shows_its_first_attempt_and_the_commands_after_it(
    connect, things, sparing, rig, fail, delays
):
    sparing()
    client = connect()
    collection = things(client)
    await resolve(collection.find_one({}))
    rig.clear()
    fail(client, "insert", times=2, **OVERLOAD)
    await resolve(collection.insert_one({"_id": 1}))

    operation, [first] = rig.operation(), rig.unsent
    second, third = rig.commands
    assert all(is_child(span, operation) for span in (first, second, third))
    assert [span.attributes["mongodb.retry.attempt"] for span in (first, second, third)] == [1, 2, 3]
    assert first.status.status_code is second.status.status_code is StatusCode.ERROR
    assert third.status.status_code is StatusCode.UNSET
    assert first.attributes["db.collection.name"] == collection.name
    assert first.attributes["db.namespace"] == collection.database.name
    assert first.attributes["db.response.status_code"] == "462"
    assert first.attributes["server.port"] == second.attributes["server.port"]
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert [link.context.span_id for link in third.links] == [second.context.span_id]
    identities = {span.attributes["mongodb.operation_id"] for span in (operation, second, third)}
    assert len(identities) == 1
    assert operation.attributes["mongodb.retry.attempts"] == 3
    assert operation.attributes["mongodb.retry.outcome"] == "retried"


async def test_events_are_published_only_while_an_operation_is_retried(
    connect, things, sparing, rig, fail, delays
):
    sparing()
    client = connect()
    collection = things(client)
    fail(client, "insert", times=1, **OVERLOAD)
    await resolve(collection.insert_one({"_id": 1}))
    assert not published(client)
    assert not instrumentor._registry.of(client).retried_under_way
    rig.clear()
    await resolve(collection.find_one({}))

    assert [span.attributes["db.operation.name"] for span in rig.spans] == ["find"]


async def test_an_operation_that_fails_without_a_retry_shows_its_attempt(connect, things, sparing, rig):
    sparing()
    client = connect()
    collection = things(client)
    await resolve(collection.insert_one({"_id": 1}))
    rig.clear()
    with pytest.raises(DuplicateKeyError):
        await resolve(collection.insert_one({"_id": 1}))

    [attempt] = rig.unsent
    assert is_child(attempt, rig.operation())
    assert attempt.attributes["mongodb.retry.attempt"] == 1
    assert attempt.attributes["error.type"] == "DuplicateKeyError"
    assert not rig.commands
    assert not published(client)


async def test_what_pymongo_retries_itself_is_shown_too(connect, things, sparing, rig, fail):
    sparing(policy="driver")
    client = connect()
    collection = things(client)
    await resolve(collection.find_one({}))
    rig.clear()
    fail(client, "insert", times=1, errorCode=189, errorLabels=["RetryableWriteError"])
    await resolve(collection.insert_one({"_id": 1}))

    operation, [first], second = rig.operation(), rig.unsent, rig.command()
    assert is_child(first, operation)
    assert is_child(second, operation)
    assert second.attributes["mongodb.retry.attempt"] == 2
    assert not published(client)


async def test_a_command_that_bypasses_the_retryable_path_is_shown_when_it_is_retried(
    connect, things, sparing, rig, fail, delays
):
    sparing()
    client = connect()
    database = things(client).database
    await resolve(database.command("ping"))
    rig.clear()
    fail(client, "ping", times=1, **OVERLOAD)
    await resolve(database.command("ping"))

    assert [span.attributes["mongodb.retry.attempt"] for span in rig.children(rig.operation())] == [1, 2]
    assert [span.name for span in rig.children(rig.operation())] == ["attempt", "ping"]
    assert not published(client)


async def test_an_operation_beside_a_retried_one_stays_one_span(
    connect, things, sparing, rig, fail, monkeypatch
):
    """While one operation is retried all commands are published; those of other operations are left alone."""
    sparing()
    client = connect()
    collection = things(client)
    heard: list[bool] = []

    # The wait between two attempts is where another operation of the same client comes in.
    def wait(_: float) -> None:
        heard.append(published(client))
        collection.find_one({})

    async def wait_async(_: float) -> None:
        heard.append(published(client))
        await collection.find_one({})

    monkeypatch.setattr(waiting, "sleep", wait)
    monkeypatch.setattr(waiting, "sleep_async", wait_async)
    fail(client, "insert", times=1, **OVERLOAD)
    await resolve(collection.insert_one({}))

    assert heard == [True]
    assert [span.name for span in rig.commands] == ["insert"]
    assert {span.attributes["db.operation.name"] for span in rig.operations} == {"insert", "find"}
    assert not published(client)


async def test_the_applications_own_listener_stays_where_it_was(connect, things, sparing, rig, fail, delays):
    heard = Commands()
    sparing()
    client = connect(event_listeners=[heard])
    collection = things(client)
    fail(client, "find", times=1, **OVERLOAD)
    await resolve(collection.find_one({}))
    await resolve(collection.find_one({}))

    assert len(heard.named("find")) == 3
    assert client._event_listeners.enabled_for_commands
    assert len(rig.commands) == 1


async def test_retries_that_end_in_an_error_stop_the_listening_too(
    connect, things, sparing, rig, fail, delays
):
    sparing()
    client = connect()
    collection = things(client)
    fail(client, "find", times=6, **OVERLOAD)
    with pytest.raises(OperationFailure):
        await resolve(collection.find_one({}))

    assert [span.attributes["mongodb.retry.attempt"] for span in rig.children(rig.operation())] == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip
    assert not published(client)


async def test_all_attempts_have_spans_by_default(connect, things, watch, rig):
    watch()
    await resolve(things(connect()).find_one({}))

    assert [span.name for span in rig.commands] == ["find"]
