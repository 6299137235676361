"""Policy `persistent`: seed 000 in its version of 2022. Retry until it works, until it cannot work, or until two
socket timeouts; here for reads and writes alike.
"""

from __future__ import annotations

import asyncio

import pymongo
import pytest
from pymongo.errors import NetworkTimeout, OperationFailure, PyMongoError

import otel_retry
from tests.flavours import OVERLOAD, resolve
from tests.spec.rig import LABEL, NETWORK, READS, WRITES, ids, server_error, transaction_id


@pytest.fixture(autouse=True)
def _persistent(instrument):
    instrument(policy="persistent")


OPERATIONS = [READS["find"], READS["aggregate"], WRITES["insert_one"], WRITES["find_one_and_update"]]


@pytest.mark.parametrize("operation", OPERATIONS, ids=ids)
async def test_it_goes_on_until_it_succeeds(rig, delays, operation):
    at = rig()
    await at.seed()
    at.fail(operation.command, times=4, **NETWORK)
    await operation.run(at)
    assert at.commands.count(operation.command) == 5
    assert delays == []


@pytest.mark.parametrize("operation", OPERATIONS, ids=ids)
async def test_it_pauses_longer_and_longer_after_five_immediate_retries(rig, delays, operation):
    """The seed sets no pace; a busy loop against a server in trouble is not what it can have meant."""
    at = rig()
    await at.seed()
    at.fail(operation.command, times=16, **server_error(6, LABEL))
    await operation.run(at)
    assert at.commands.count(operation.command) == 17
    assert delays == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1, 1, 1, 1])


async def test_all_attempts_of_a_write_have_one_transaction_id(rig, delays):
    at = rig()
    await at.seed()
    at.fail("insert", times=7, **server_error(6, LABEL))
    await resolve(at.collection.insert_one({}))
    events = at.commands.named("insert")
    assert len({transaction_id(event) for event in events}) == 1
    assert len({event.request_id for event in events}) == 8
    assert len({event.operation_id for event in events}) == 1


@pytest.mark.parametrize("operation", [READS["find"], WRITES["insert_one"]], ids=ids)
async def test_an_error_that_is_not_retryable_ends_it(rig, operation):
    at = rig()
    await at.seed()
    retryable = server_error(6, LABEL)
    at.fail_in_turn(operation.command, retryable, retryable, retryable, server_error(2), retryable)
    with pytest.raises(OperationFailure) as raised:
        await operation.run(at)
    assert raised.value.code == 2
    assert at.commands.count(operation.command) == 4
    assert len(otel_retry.attempts(raised.value)) == 4


BLOCKED = {"blockConnection": True, "blockTimeMS": 500}


@pytest.mark.parametrize("operation", [READS["find"], WRITES["update_one"]], ids=ids)
async def test_two_socket_timeouts_end_it_even_with_other_errors_between(rig, operation):
    at = rig(socketTimeoutMS=200)
    await at.seed()
    at.fail_in_turn(
        operation.command, BLOCKED, server_error(6, LABEL), server_error(7, LABEL), BLOCKED, BLOCKED
    )
    with pytest.raises(NetworkTimeout) as raised:
        await operation.run(at)
    assert at.commands.count(operation.command) == 4
    history = otel_retry.attempts(raised.value)
    assert history[-1].error is raised.value
    assert history[0].error is not raised.value
    assert history[-1].decision == "limit"


async def test_other_network_errors_do_not_count_as_timeouts(rig):
    at = rig(socketTimeoutMS=300)
    await at.seed()
    at.fail_in_turn("find", BLOCKED, NETWORK, NETWORK)
    assert len(await at.data()) == 3
    assert at.commands.count("find") == 4


async def test_timeouts_by_a_deadline_do_not_count(rig):
    """Under CSOT socketTimeoutMS does not set the timeouts, the deadline does."""
    at = rig(socketTimeoutMS=1000)
    await at.seed()
    at.fail("find", times=3, blockConnection=True, blockTimeMS=1500)
    with pymongo.timeout(60):
        assert len(await at.data()) == 3


@pytest.mark.parametrize("operation", [READS["find"], WRITES["insert_one"]], ids=ids)
async def test_a_deadline_ends_it(rig, operation):
    at = rig()
    await at.seed()
    at.fail(operation.command, times=None, **server_error(6, LABEL))
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pymongo.timeout(0.5), pytest.raises(PyMongoError):
        await operation.run(at)
    assert 0.2 < loop.time() - began < 30
    assert at.commands.count(operation.command) > 5


@pytest.mark.parametrize("operation", [READS["find"], WRITES["insert_one"]], ids=ids)
async def test_an_overloaded_server_is_not_tried_again(rig, operation):
    at = rig()
    await at.seed()
    at.fail(operation.command, **OVERLOAD)
    with pytest.raises(OperationFailure):
        await operation.run(at)
    assert at.commands.count(operation.command) == 1


async def test_a_bucket_holds_it_back_in_the_end(rig, delays):
    """Each retry costs a token: an error that stays cannot be retried for ever by all operations of a client."""
    at = rig()
    await at.seed()
    before = otel_retry.budget(at.client).consumed
    at.fail("find", times=10, **server_error(6))
    await resolve(at.collection.find_one({}))
    assert otel_retry.budget(at.client).consumed - before == 10
