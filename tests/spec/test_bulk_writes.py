"""Seeds 002 and 003 on bulk writes: one operation of several commands, each of which is judged by itself."""

from __future__ import annotations

import pymongo
import pytest
from pymongo import DeleteMany, DeleteOne, InsertOne, UpdateMany, UpdateOne
from pymongo.errors import AutoReconnect, BulkWriteError, PyMongoError

import otel_retry
from tests.fakes.wire_server import DROP, FakeServer
from tests.flavours import resolve
from tests.spec.rig import LABEL, NETWORK, server_error, transaction_id

INSERT = InsertOne({"_id": 4})
UPDATE = UpdateOne({"_id": 1}, {"$inc": {"x": 10}})
DELETE = DeleteOne({"_id": 2})
UPDATE_MANY = UpdateMany({}, {"$inc": {"x": 10}})
DELETE_MANY = DeleteMany({"_id": {"$gt": 0}})


@pytest.mark.parametrize("ordered", [True, False])
async def test_each_command_has_a_transaction_number_of_its_own(rig, instrument, ordered):
    instrument()
    at = rig()
    await at.seed()
    await resolve(at.collection.bulk_write([INSERT, UPDATE, DELETE], ordered=ordered))
    sent = [event for name in ("insert", "update", "delete") for event in at.commands.named(name)]
    numbers = [event.command["txnNumber"] for event in sent]
    assert numbers == sorted(set(numbers))
    assert len({event.command["lsid"]["id"] for event in sent}) == 1
    assert len({event.operation_id for event in sent}) == 1


async def test_each_batch_of_a_large_insert_has_a_transaction_number_of_its_own(rig, instrument, monkeypatch):
    """With the server's limit on a batch lowered in the client: a real batch holds 100,000 documents."""
    instrument()
    at = rig()
    await at.seed()
    monkeypatch.setattr("pymongo.hello.Hello.max_write_batch_size", property(lambda hello: 2))
    other = rig()
    await resolve(other.client.admin.command("ping"))
    other.fail("insert", **NETWORK)
    await resolve(other.collection.insert_many([{"_id": number} for number in range(10, 15)]))
    numbers = [event.command["txnNumber"] for event in other.commands.named("insert")]
    first, again, second, third = numbers
    assert first == again < second < third
    assert len(await other.data()) == 8


@pytest.mark.parametrize("command", ["insert", "update", "delete"])
@pytest.mark.parametrize("ordered", [True, False])
async def test_whichever_command_fails_is_the_one_that_is_sent_again(rig, instrument, ordered, command):
    instrument()
    at = rig()
    await at.seed()
    at.fail(command, **NETWORK)
    result = await resolve(at.collection.bulk_write([INSERT, UPDATE, DELETE], ordered=ordered))
    assert (result.inserted_count, result.modified_count, result.deleted_count) == (1, 1, 1)
    for name in ("insert", "update", "delete"):
        assert at.commands.count(name) == (2 if name == command else 1)
    first, second = at.commands.named(command)
    assert transaction_id(first) == transaction_id(second)


async def test_each_command_has_a_retry_of_its_own(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", **server_error(6, LABEL))
    at.commands.then(
        ("insert", "update"),
        [
            lambda: None,
            lambda: at.fail("update", **server_error(6, LABEL)),
            lambda: None,
            lambda: at.fail("delete", **server_error(6, LABEL)),
        ],
    )
    await resolve(at.collection.bulk_write([INSERT, UPDATE, DELETE]))
    assert [at.commands.count(name) for name in ("insert", "update", "delete")] == [2, 2, 2]


@pytest.mark.parametrize(
    ("multi", "name"), [(UPDATE_MANY, "update"), (DELETE_MANY, "delete")], ids=["update", "delete"]
)
@pytest.mark.parametrize("ordered", [True, False])
async def test_a_command_without_multi_is_retried_beside_one_that_has_it(
    rig, instrument, ordered, multi, name
):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", **NETWORK)
    await resolve(at.collection.bulk_write([INSERT, multi], ordered=ordered))
    first, second = at.commands.named("insert")
    assert transaction_id(first) == transaction_id(second)
    (event,) = at.commands.named(name)
    assert "txnNumber" not in event.command


@pytest.mark.parametrize("failure", [NETWORK, server_error(189)], ids=["network", "code"])
@pytest.mark.parametrize(
    ("multi", "name"), [(UPDATE_MANY, "update"), (DELETE_MANY, "delete")], ids=["update", "delete"]
)
@pytest.mark.parametrize("ordered", [True, False])
async def test_a_command_with_multi_is_not_retried(rig, instrument, ordered, multi, name, failure):
    instrument()
    at = rig()
    await at.seed()
    at.fail(name, **failure)
    with pytest.raises(PyMongoError) as raised:
        await resolve(at.collection.bulk_write([INSERT, multi], ordered=ordered))
    assert not raised.value.has_error_label(LABEL)
    (inserted,) = at.commands.named("insert")
    assert "txnNumber" in inserted.command
    (event,) = at.commands.named(name)
    assert "txnNumber" not in event.command


async def test_one_multi_makes_its_whole_command_unsupported(rig, instrument):
    """The commands are those that PyMongo makes anyway: nothing is split off to have more of them retryable."""
    instrument()
    at = rig()
    await at.seed()
    at.fail("update", **NETWORK)
    with pytest.raises(AutoReconnect):
        await resolve(at.collection.bulk_write([UPDATE, UPDATE_MANY, UPDATE]))
    (event,) = at.commands.named("update")
    assert len(event.command["updates"]) == 3
    assert "txnNumber" not in event.command


async def test_a_supported_command_after_a_multi_is_retried(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", **NETWORK)
    await resolve(at.collection.bulk_write([UPDATE_MANY, INSERT, DELETE_MANY]))
    assert [at.commands.count(name) for name in ("update", "insert", "delete")] == [1, 2, 1]


async def test_with_retry_writes_off_no_command_has_a_transaction_number(rig, instrument):
    instrument()
    at = rig(retryWrites=False)
    await at.seed()
    await resolve(at.collection.bulk_write([INSERT, UPDATE_MANY, DELETE]))
    assert not [event for event in at.commands.started_events if "txnNumber" in event.command]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_failed_retry_interrupts_the_rest_and_keeps_what_was_done(rig, instrument, ordered):
    instrument()
    at = rig()
    await at.seed()
    failure = {"writeConcernError": {"code": 91, "errmsg": "shutting down"}, "errorLabels": [LABEL]}
    at.fail("update", times=None, **failure)
    with pytest.raises(BulkWriteError) as raised:
        await resolve(at.collection.bulk_write([INSERT, UPDATE, DELETE], ordered=ordered))
    details = raised.value.details
    assert (details["nInserted"], details["nModified"], details["nRemoved"]) == (1, 1, 0)
    assert [each["code"] for each in details["writeConcernErrors"]] == [91]
    assert [at.commands.count(name) for name in ("insert", "update", "delete")] == [1, 2, 0]
    assert [attempt.decision for attempt in otel_retry.attempts(raised.value)] == ["retry", "limit"]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_network_error_on_the_retry_interrupts_the_rest(rig, instrument, ordered):
    """PyMongo raises the network error itself here, with or without otel_retry, and so without a partial result."""
    instrument()
    at = rig()
    await at.seed()
    at.fail("update", times=None, **NETWORK)
    with pytest.raises(AutoReconnect) as raised:
        await resolve(at.collection.bulk_write([INSERT, UPDATE, DELETE], ordered=ordered))
    assert raised.value.has_error_label(LABEL)
    assert [at.commands.count(name) for name in ("insert", "update", "delete")] == [1, 2, 0]


async def test_the_error_of_one_command_is_not_raised_for_the_next(rig, instrument):
    """The second command's retry wrote nothing: what is raised is the second command's own first error."""
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", **server_error(6, LABEL))
    at.commands.then(
        ("insert", "update"),
        [
            lambda: None,
            lambda: at.fail("update", **server_error(7, LABEL)),
            lambda: at.fail("update", **server_error(9001, LABEL, "NoWritesPerformed")),
        ],
    )
    with pytest.raises(PyMongoError) as raised:
        await resolve(at.collection.bulk_write([INSERT, UPDATE]))
    assert raised.value.code == 7


async def test_a_deadline_covers_all_commands_and_allows_many_retries_of_each(rig, instrument):
    instrument()
    at = rig()
    await at.seed()
    at.fail("insert", "update", times=6, **server_error(6, LABEL))
    with pymongo.timeout(10):
        await resolve(at.collection.bulk_write([INSERT, UPDATE]))
    assert at.commands.count("insert") == 7
    assert at.commands.count("update") == 1


MODELS = [
    InsertOne({"_id": 1}, namespace="db.things"),
    UpdateOne({"_id": 1}, {"$inc": {"x": 1}}, namespace="db.things"),
]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_client_bulk_write_is_retried_with_the_same_transaction_id(rig, serve, instrument, ordered):
    """With a scripted server: the command `bulkWrite` came with MongoDB 8.0, which is not to be had here."""
    instrument()
    server = serve(FakeServer("primary"))
    client = rig(server.uri).client
    server.reply("bulkWrite", DROP)
    result = await resolve(client.bulk_write(MODELS, ordered=ordered))
    first, second = server.commands("bulkWrite")
    assert result.inserted_count == 1
    assert first["txnNumber"] == second["txnNumber"]
    assert first["lsid"] == second["lsid"]


@pytest.mark.parametrize("multi", [UPDATE_MANY, DELETE_MANY], ids=["update", "delete"])
async def test_a_client_bulk_write_with_multi_is_not_retried(rig, serve, instrument, multi):
    instrument()
    kind = type(multi)
    many = (
        kind({}, {"$inc": {"x": 1}}, namespace="db.things")
        if kind is UpdateMany
        else kind({}, namespace="db.things")
    )
    server = serve(FakeServer("primary"))
    client = rig(server.uri).client
    server.reply("bulkWrite", DROP)
    with pytest.raises(PyMongoError):
        await resolve(client.bulk_write([*MODELS, many]))
    (command,) = server.commands("bulkWrite")
    assert "txnNumber" not in command
