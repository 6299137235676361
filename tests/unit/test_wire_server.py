"""The mock server, seen by a plain PyMongo: what other tests take for granted about it."""

from __future__ import annotations

import socket
import struct
import threading

import bson
import pytest
from pymongo import AsyncMongoClient, InsertOne, MongoClient, ReadPreference, UpdateMany, WriteConcern
from pymongo.errors import AutoReconnect, DuplicateKeyError, OperationFailure
from pymongo.topology_description import TOPOLOGY_TYPE

from tests.fakes.wire_server import DROP, OP_MSG, FakeServer, error, sharded

SOON = {"serverSelectionTimeoutMS": 5000}


def connect(uri, **options):
    return MongoClient(uri, **SOON, **options)


def test_a_client_takes_it_for_a_sharded_cluster():
    with sharded(2) as (servers, uri), connect(uri) as client:
        assert client.db.things.insert_one({"_id": 1}).acknowledged
        assert client.topology_description.topology_type == TOPOLOGY_TYPE.Sharded
        (command,) = [command for server in servers for command in server.commands("insert")]
        assert command["documents"] == [{"_id": 1}]
        assert command["$db"] == "db"


def test_a_retried_write_arrives_twice_with_one_transaction_number():
    with FakeServer("mongos") as server, connect(server.uri) as client:
        server.reply("insert", error(91, labels=("RetryableWriteError",)))
        client.db.things.insert_one({"_id": 1})
        names = [name for name, _ in server.received]
        first, second = server.commands("insert")
        assert names == ["insert", "insert"]
        assert first["txnNumber"] == second["txnNumber"]
        assert first["lsid"] == second["lsid"]


async def test_an_async_client_retries_against_it_too():
    with FakeServer("mongos") as server:
        async with AsyncMongoClient(server.uri, **SOON) as client:
            server.reply("insert", error(91, labels=("RetryableWriteError",)))
            await client.db.things.insert_one({"_id": 1})
            assert await client.db.things.find({}).to_list() == []
        first, second = server.commands("insert")
        assert first["txnNumber"] == second["txnNumber"]


def test_a_client_bulk_write_works_as_on_mongodb_8():
    models = [
        InsertOne({"_id": 1}, namespace="db.things"),
        UpdateMany({}, {"$set": {"x": 1}}, namespace="db.others"),
    ]
    with FakeServer("primary", max_wire_version=25) as server, connect(server.uri) as client:
        summary = client.bulk_write(models)
        verbose = client.bulk_write(models, verbose_results=True)
        assert client.topology_description.topology_type == TOPOLOGY_TYPE.ReplicaSetWithPrimary
        assert (summary.inserted_count, summary.matched_count, summary.modified_count) == (1, 1, 1)
        assert verbose.update_results[1].modified_count == 1
        assert [ns["ns"] for ns in server.commands("bulkWrite")[0]["nsInfo"]] == ["db.things", "db.others"]
        assert len(server.commands("bulkWrite")[0]["ops"]) == 2


def test_a_dropped_connection_is_an_auto_reconnect():
    with FakeServer("mongos") as server, connect(server.uri, retryWrites=False) as client:
        server.reply("insert", DROP)
        with pytest.raises(AutoReconnect):
            client.db.things.insert_one({"_id": 1})
        assert client.db.things.insert_one({"_id": 1}).acknowledged


def test_scripted_answers_are_given_in_order_and_then_the_default():
    with FakeServer("standalone") as server, connect(server.uri) as client:
        duplicate = {"n": 0, "writeErrors": [{"index": 0, "code": 11000, "errmsg": "E11000"}]}
        server.reply("insert", duplicate, lambda command: error(2, f"no {command['insert']}"))
        with pytest.raises(DuplicateKeyError):
            client.db.things.insert_one({})
        with pytest.raises(OperationFailure, match="no things") as caught:
            client.db.things.insert_one({})
        assert caught.value.details["codeName"] == "BadValue"
        assert len(client.db.things.insert_many([{}, {}]).inserted_ids) == 2


def test_hello_cannot_be_scripted():
    with pytest.raises(ValueError, match="hello"):
        FakeServer().reply("hello", DROP)


def test_an_unacknowledged_write_is_recorded_and_not_answered():
    with FakeServer("mongos") as server, connect(server.uri) as client:
        server.reply("insert", error(2))
        things = client.db.get_collection("things", write_concern=WriteConcern(w=0))
        things.insert_one({"_id": 1})
        client.admin.command("ping")
        with pytest.raises(OperationFailure):
            client.db.things.insert_one({"_id": 2})
        assert [command["documents"][0]["_id"] for command in server.commands("insert")] == [1, 2]


def test_default_answers_suit_the_usual_commands():
    with FakeServer("mongos") as server, connect(server.uri) as client:
        things = client.db.things
        assert things.update_many({}, {"$set": {"x": 1}}).modified_count == 1
        assert things.delete_one({}).deleted_count == 1
        assert things.find_one_and_update({}, {"$set": {"x": 1}}) is None
        assert things.find_one({}) is None
        assert list(things.aggregate([])) == []
        assert things.count_documents({}) == 0
        assert things.estimated_document_count() == 0
        assert things.distinct("x") == []
        assert client.db.list_collection_names() == []
        assert client.list_database_names() == []


def test_a_cursor_can_be_scripted_over_two_batches():
    with FakeServer("mongos") as server, connect(server.uri) as client:
        server.reply("find", {"cursor": {"id": 7, "ns": "db.things", "firstBatch": [{"_id": 1}]}})
        server.reply("getMore", {"cursor": {"id": 0, "ns": "db.things", "nextBatch": [{"_id": 2}]}})
        assert [thing["_id"] for thing in client.db.things.find()] == [1, 2]


def test_a_transaction_stays_on_the_mongos_that_began_it():
    with sharded(3) as (servers, uri), connect(uri) as client:
        with client.start_session() as session, session.start_transaction():
            client.db.things.insert_one({}, session=session)
            client.db.things.insert_one({}, session=session)
        (busy,) = [server for server in servers if server.received]
        assert [name for name, _ in busy.received] == ["insert", "insert", "commitTransaction"]


def test_members_of_a_replica_set_name_each_other():
    with FakeServer("primary") as primary, FakeServer("secondary", peers=[primary]) as secondary:
        primary.peers.append(secondary)
        with connect(secondary.uri) as client:
            client.db.things.insert_one({})
            client.db.get_collection("things", read_preference=ReadPreference.SECONDARY).find_one()
        assert [name for name, _ in primary.received] == ["insert"]
        assert [name for name, _ in secondary.received] == ["find"]


def test_handshakes_are_kept_apart_and_clear_forgets_them():
    with FakeServer("mongos") as server, connect(server.uri, appname="seen") as client:
        client.admin.command("ping")
        assert {hello["client"]["application"]["name"] for hello in server.handshakes} == {"seen"}
        assert [name for name, _ in server.received] == ["ping"]
        server.clear()
        assert (server.received, server.handshakes) == ([], [])


def test_a_checksum_is_skipped_and_a_body_may_follow_a_sequence():
    documents = b"documents\0" + bson.encode({"_id": 1}) + bson.encode({"_id": 2})
    sequence = b"\1" + struct.pack("<i", 4 + len(documents)) + documents
    body = (
        struct.pack("<I", 1) + sequence + b"\0" + bson.encode({"insert": "things", "$db": "db"}) + b"\xff" * 4
    )
    with FakeServer() as server, socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(struct.pack("<iiii", 16 + len(body), 5, 0, OP_MSG) + body)
        answer = sock.recv(4096)
        assert struct.unpack_from("<iii", answer) == (len(answer), 5, 5)
        assert bson.decode(answer[21:]) == {"ok": 1, "n": 2}
        assert [name for name, _ in server.received] == ["insert"]


def test_nothing_is_left_running_even_when_a_client_is_still_connected():
    before = set(threading.enumerate())
    with socket.socket() as idle:
        with FakeServer() as server:
            idle.connect(("127.0.0.1", server.port))
        assert set(threading.enumerate()) <= before
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
