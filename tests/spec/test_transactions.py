"""Transactions: nothing in them is retried but their end (seed 000 2a; seed 003, "Retryable Writes Within Transactions")."""

from __future__ import annotations

import pytest
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError

import otel_retry
from tests.flavours import resolve
from tests.spec.rig import LABEL, NETWORK, POLICIES, READS, SINGLE_RETRY, WRITES, ids, server_error

IN_TRANSACTION = [
    *(READS[name] for name in ("find", "find_one", "aggregate", "distinct", "count_documents")),
    *(write for write in WRITES.values() if "bulk" not in write.name or write.command == "insert"),
]
TRANSIENT = "TransientTransactionError"


@pytest.mark.parametrize("operation", IN_TRANSACTION, ids=ids)
async def test_an_operation_in_a_transaction_is_not_retried_after_a_network_error(rig, instrument, operation):
    instrument()
    at = rig()
    await at.seed()
    async with at.transaction() as session:
        at.fail(operation.command, **NETWORK)
        with pytest.raises(AutoReconnect) as raised:
            await operation.run(at, session=session)
    assert at.commands.count(operation.command) == 1
    assert raised.value.has_error_label(TRANSIENT)
    assert not raised.value.has_error_label(LABEL)
    (attempt,) = otel_retry.attempts(raised.value)
    assert attempt.decision == "not_retryable"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("operation", [READS["find"], WRITES["update_one"]], ids=ids)
async def test_nor_after_an_error_that_is_retryable_elsewhere(rig, instrument, operation, policy):
    instrument(policy=policy)
    at = rig(retryWrites=True)
    await at.seed()
    async with at.transaction() as session:
        at.fail(operation.command, **server_error(189, TRANSIENT))
        with pytest.raises(PyMongoError) as raised:
            await operation.run(at, session=session)
    assert at.commands.count(operation.command) == 1
    assert not raised.value.has_error_label(LABEL)


async def test_nor_does_a_label_of_the_server_make_it_retryable(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    async with at.transaction() as session:
        at.fail("update", **server_error(6, LABEL))
        with pytest.raises(OperationFailure):
            await WRITES["update_one"].run(at, session=session)
    assert at.commands.count("update") == 1


async def test_a_second_operation_in_a_transaction_is_not_retried_either(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    async with at.transaction() as session:
        await resolve(at.collection.insert_one({}, session=session))
        at.fail("insert", **NETWORK)
        with pytest.raises(AutoReconnect) as raised:
            await resolve(at.collection.insert_one({}, session=session))
    assert at.commands.count("insert") == 2
    assert not raised.value.has_error_label(LABEL)


@pytest.mark.parametrize(
    ("policy", "failure", "retry_writes"),
    [
        ("backpressure", NETWORK, True),
        ("backpressure", NETWORK, False),
        ("backpressure", server_error(6, LABEL), True),
        ("backpressure", server_error(6, LABEL), False),
        ("current", NETWORK, False),
        ("once", NETWORK, False),
        ("persistent", NETWORK, False),
    ],
)
async def test_a_commit_is_retried_whatever_retry_writes_says(rig, instrument, policy, failure, retry_writes):
    instrument(policy=policy)
    at = rig(retryWrites=retry_writes)
    await at.seed()
    async with at.transaction() as session:
        await resolve(at.collection.insert_one({"_id": 4}, session=session))
        at.fail("commitTransaction", **failure)
        await resolve(session.commit_transaction())
    first, second = at.commands.named("commitTransaction")
    (insert,) = at.commands.named("insert")
    assert first.command["txnNumber"] == second.command["txnNumber"] == insert.command["txnNumber"]
    assert first.command["lsid"] == second.command["lsid"]
    assert first.request_id != second.request_id
    assert second.command["writeConcern"]["w"] == "majority"
    assert len(await at.data()) == 4


@pytest.mark.parametrize("policy", SINGLE_RETRY)
async def test_a_commit_is_retried_once(rig, instrument, policy):
    instrument(policy=policy)
    at = rig()
    await at.seed()
    async with at.transaction() as session:
        await resolve(at.collection.insert_one({"_id": 4}, session=session))
        at.fail("commitTransaction", times=None, **NETWORK)
        with pytest.raises(AutoReconnect) as raised:
            await resolve(session.commit_transaction())
    assert at.commands.count("commitTransaction") == 2
    assert raised.value.has_error_label("UnknownTransactionCommitResult")


@pytest.mark.parametrize(
    ("policy", "failure", "retry_writes"),
    [
        ("backpressure", NETWORK, True),
        ("backpressure", NETWORK, False),
        ("backpressure", server_error(6, LABEL), True),
        ("backpressure", server_error(6, LABEL), False),
        ("current", NETWORK, False),
        ("once", NETWORK, False),
        ("persistent", NETWORK, False),
    ],
)
async def test_an_abort_is_retried_whatever_retry_writes_says(rig, instrument, policy, failure, retry_writes):
    instrument(policy=policy)
    at = rig(retryWrites=retry_writes)
    await at.seed()
    async with at.transaction() as session:
        await resolve(at.collection.insert_one({"_id": 4}, session=session))
        at.fail("abortTransaction", **failure)
        await resolve(session.abort_transaction())
    first, second = at.commands.named("abortTransaction")
    assert first.command["txnNumber"] == second.command["txnNumber"]
    assert first.request_id != second.request_id
    assert len(await at.data()) == 3


@pytest.mark.parametrize("policy", SINGLE_RETRY)
async def test_an_abort_is_retried_once_and_its_error_is_nobodys(rig, instrument, policy):
    instrument(policy=policy)
    at = rig()
    await at.seed()
    async with at.transaction() as session:
        await resolve(at.collection.insert_one({"_id": 4}, session=session))
        at.fail("abortTransaction", times=None, **NETWORK)
        await resolve(session.abort_transaction())
    assert at.commands.count("abortTransaction") == 2


@pytest.mark.parametrize("ending", ["commit_transaction", "abort_transaction"])
async def test_an_end_is_not_retried_after_an_error_without_the_label(rig, instrument, ending):
    instrument()
    at = rig()
    await at.seed()
    command = "commitTransaction" if ending == "commit_transaction" else "abortTransaction"
    async with at.transaction() as session:
        await resolve(at.collection.insert_one({"_id": 4}, session=session))
        at.fail(command, **server_error(8000))
        if ending == "commit_transaction":
            with pytest.raises(OperationFailure):
                await resolve(session.commit_transaction())
        else:
            await resolve(session.abort_transaction())
    assert at.commands.count(command) == 1


async def test_a_commit_whose_answer_was_lost_is_applied_once(rig, instrument, proxy):
    """The server has committed when the connection is cut: the retry learns of it and changes nothing."""
    instrument()
    at = rig(proxy.uri)
    await at.seed()
    async with at.transaction() as session:
        await resolve(at.collection.update_one({"_id": 1}, {"$inc": {"x": 10}}, session=session))
        proxy.cut_reply("commitTransaction")
        await resolve(session.commit_transaction())
    assert at.commands.count("commitTransaction") == 2
    assert (await at.data())[0]["x"] == 11
