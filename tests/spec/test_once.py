"""Policy `once`: seed 002, the text of 2018. One retry, writes only on request, overload unheard of."""

from __future__ import annotations

import pymongo
import pytest
from pymongo import DeleteOne, InsertOne, UpdateMany, UpdateOne
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError, WaitQueueTimeoutError

import otel_retry
from otel_retry.policies import OncePolicy
from tests.flavours import OVERLOAD, resolve
from tests.spec.rig import LABEL, NETWORK, NO_WRITES, WRITES, Waiting, ids, server_error, transaction_id


@pytest.fixture(autouse=True)
def _once(instrument):
    instrument(policy="once")


@pytest.mark.parametrize("write", WRITES.values(), ids=ids)
async def test_by_default_writes_are_as_if_there_were_no_retries(rig, write):
    at = rig()
    await at.seed()
    at.fail(write.command, **NETWORK)
    with pytest.raises(AutoReconnect) as raised:
        await write.run(at)
    (event,) = at.commands.named(write.command)
    assert "txnNumber" not in event.command
    assert not raised.value.has_error_label(LABEL)


@pytest.mark.parametrize("how", ["uri", "argument"])
@pytest.mark.parametrize("value", [True, False])
async def test_an_explicit_retry_writes_is_heeded(rig, how, value):
    probe = rig()
    if how == "uri":
        at = rig(f"{probe.deployment.uri}&retryWrites={str(value).lower()}")
    else:
        at = rig(retryWrites=value)
    await at.seed()
    at.fail("insert", **NETWORK)
    if value:
        await resolve(at.collection.insert_one({}))
    else:
        with pytest.raises(AutoReconnect):
            await resolve(at.collection.insert_one({}))
    events = at.commands.named("insert")
    assert len(events) == (2 if value else 1)
    assert all(("txnNumber" in event.command) is value for event in events)


@pytest.mark.parametrize("write", WRITES.values(), ids=ids)
async def test_on_request_a_write_is_retried_once(rig, write):
    at = rig(retryWrites=True)
    await at.seed()
    at.fail(write.command, times=None, **NETWORK)
    with pytest.raises(AutoReconnect) as raised:
        await write.run(at)
    first, second = at.commands.named(write.command)
    assert transaction_id(first) == transaction_id(second)
    assert [attempt.decision for attempt in otel_retry.attempts(raised.value)] == ["retry", "limit"]


@pytest.mark.parametrize("operation", ["find", "insert"])
async def test_a_deadline_does_not_allow_a_second_retry(rig, operation):
    """With the same transaction ID never more than once: the text knows no deadline."""
    at = rig(retryWrites=True)
    await at.seed()
    at.fail(operation, times=None, **server_error(189, LABEL))
    with pymongo.timeout(10), pytest.raises(PyMongoError):
        if operation == "find":
            await resolve(at.collection.find_one({}))
        else:
            await resolve(at.collection.insert_one({}))
    assert at.commands.count(operation) == 2


async def test_reads_are_retried_without_being_asked_for(rig):
    at = rig()
    await at.seed()
    at.fail("find", **NETWORK)
    assert len(await at.data()) == 3
    assert at.commands.count("find") == 2


@pytest.mark.parametrize("operation", ["find", "insert"])
async def test_an_overloaded_server_is_not_tried_again(rig, operation):
    at = rig(retryWrites=True)
    await at.seed()
    at.fail(operation, **OVERLOAD)
    with pytest.raises(OperationFailure):
        if operation == "find":
            await resolve(at.collection.find_one({}))
        else:
            await resolve(at.collection.insert_one({}))
    assert at.commands.count(operation) == 1


@pytest.mark.parametrize("code", [11600, 11602, 10107, 13435, 13436, 189, 91])
async def test_not_primary_and_recovering_are_retryable(rig, code):
    at = rig(retryWrites=True)
    await at.seed()
    at.fail("insert", errorCode=code)
    await resolve(at.collection.insert_one({}))
    assert at.commands.count("insert") == 2


async def test_a_second_retryable_error_is_raised_instead_of_the_first(rig):
    at = rig(retryWrites=True)
    await at.seed()
    at.fail_in_turn("insert", server_error(91, LABEL), server_error(189, LABEL))
    with pytest.raises(PyMongoError) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.details["code"] == 189


async def test_any_other_error_of_the_server_is_raised_from_the_retry(rig):
    at = rig(retryWrites=True)
    await at.seed()
    at.fail_in_turn("insert", server_error(91, LABEL), server_error(2))
    with pytest.raises(OperationFailure) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.code == 2


async def test_a_later_rule_holds_here_too_a_retry_that_wrote_nothing_hides_no_error(rig):
    """Seed 003's rule is for every policy: the label did not exist in 2018, so nothing here contradicts it."""
    at = rig(retryWrites=True)
    await at.seed()
    at.fail_in_turn("insert", server_error(91, LABEL), server_error(10107, LABEL, NO_WRITES))
    with pytest.raises(PyMongoError) as raised:
        await resolve(at.collection.insert_one({}))
    assert raised.value.details["code"] == 91


class UnhurriedOnce(Waiting, OncePolicy):
    pass


async def test_an_error_of_the_driver_on_the_retry_hides_behind_the_original(rig, instrument, monkeypatch):
    instrument(policy=UnhurriedOnce())
    at = rig(maxPoolSize=1, waitQueueTimeoutMS=200, retryWrites=True)
    await at.seed()
    at.hold_retries(monkeypatch, until="sleep")
    at.fail("insert", **server_error(6, LABEL))
    with pytest.raises(OperationFailure) as raised:
        await at.lose_the_only_connection("insert", lambda: at.collection.insert_one({}))
    assert raised.value.code == 6
    assert isinstance(raised.value.__cause__, WaitQueueTimeoutError)
    assert at.commands.count("insert") == 1


async def test_an_unsupported_command_of_a_bulk_write_has_no_transaction_id(rig):
    at = rig(retryWrites=True)
    await at.seed()
    await resolve(at.collection.bulk_write([InsertOne({"_id": 4}), UpdateMany({}, {"$inc": {"x": 1}})]))
    assert "txnNumber" in at.commands.named("insert")[0].command
    assert "txnNumber" not in at.commands.named("update")[0].command


async def test_each_command_of_a_bulk_write_has_its_own_single_retry(rig):
    at = rig(retryWrites=True)
    await at.seed()
    at.fail("insert", **server_error(6, LABEL))
    at.commands.then(("insert",), [lambda: None, lambda: at.fail("delete", **server_error(6, LABEL))])
    await resolve(
        at.collection.bulk_write(
            [InsertOne({"_id": 4}), UpdateOne({"_id": 1}, {"$inc": {"x": 1}}), DeleteOne({"_id": 2})]
        )
    )
    assert [at.commands.count(name) for name in ("insert", "update", "delete")] == [2, 1, 2]
