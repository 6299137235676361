"""Four defects of PyMongo 4.19's own retry loop that the engine must not inherit, and the proof that they are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pymongo
import pytest
from pymongo import DeleteMany, InsertOne, UpdateMany
from pymongo.errors import PyMongoError

from tests.fakes.wire_server import FakeServer, error, sharded
from tests.flavours import OVERLOAD, Commands, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour

shows_the_defect = pytest.mark.skipif(
    pymongo.version_tuple[:2] != (4, 19), reason="looked at in PyMongo 4.19 only"
)
overload = error(462, labels=OVERLOAD["errorLabels"])


@pytest.fixture
def sent() -> Commands:
    return Commands()


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyMongo's own waits take no time."""
    monkeypatch.setattr("random.random", lambda: 0.0)


class TestBulkWriteOfSeveralCommands:
    """1. The attempts of a bulk write are never counted anew for its next command."""

    async def bulk_write_with_two_overloads_per_command(
        self, mongo: Flavour, deployment: Deployment, sent: Commands, database_name: str
    ) -> Any:
        database = mongo.client(deployment.uri, event_listeners=[sent])[database_name]

        def overload_the_next(event: Any = None) -> None:
            deployment.fail_command(commands=["insert", "update", "delete"], times=2, **OVERLOAD)

        sent.succeeded = overload_the_next
        overload_the_next()
        return await resolve(
            database.items.bulk_write(
                [InsertOne({"n": 0}), UpdateMany({}, {"$inc": {"n": 1}}), DeleteMany({"n": 1})]
            )
        )

    @pytest.mark.parametrize("policy", ["backpressure", "current"])
    async def test_two_overloads_before_each_of_three_commands_are_overcome(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        sent: Commands,
        policy: str,
    ) -> None:
        instrument(policy)
        result = await self.bulk_write_with_two_overloads_per_command(mongo, deployment, sent, database_name)
        assert (result.inserted_count, result.modified_count, result.deleted_count) == (1, 1, 1)
        assert [sent.count(command) for command in ("insert", "update", "delete")] == [3, 3, 3]

    async def test_the_backoff_starts_anew_with_each_command(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        sent: Commands,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("random.random", lambda: 1.0)
        instrument("backpressure")
        await self.bulk_write_with_two_overloads_per_command(mongo, deployment, sent, database_name)
        assert delays == [0.1, 0.2] * 3

    async def test_one_command_of_several_has_five_retries_and_no_more(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        sent: Commands,
    ) -> None:
        instrument("backpressure")
        database = mongo.client(deployment.uri, event_listeners=[sent])[database_name]
        deployment.fail_command(commands=["update"], **OVERLOAD)
        with pytest.raises(PyMongoError) as raised:
            await resolve(
                database.items.bulk_write(
                    [InsertOne({"n": 0}), UpdateMany({}, {"$inc": {"n": 1}}), InsertOne({})]
                )
            )
        assert raised.value.code == 462
        assert (sent.count("insert"), sent.count("update")) == (1, 6)

    @shows_the_defect
    async def test_pymongo_fails_in_the_second_command(
        self, mongo: Flavour, deployment: Deployment, database_name: str, no_jitter: None, sent: Commands
    ) -> None:
        with pytest.raises(PyMongoError):
            await self.bulk_write_with_two_overloads_per_command(mongo, deployment, sent, database_name)
        assert sent.count("insert") == 3
        assert sent.count("delete") == 0


class TestClientBulkWrite:
    """2. After an overload a client's bulk write of many succeeds on the server, and raises. Fake, for it needs 8.0."""

    MANY = (
        UpdateMany({}, {"$set": {"n": 1}}, namespace="db.items"),
        DeleteMany({}, namespace="db.items"),
    )

    @pytest.mark.parametrize("policy", ["backpressure", "current"])
    async def test_an_overload_is_overcome(
        self, mongo: Flavour, instrument: Callable[..., None], delays: list[float], policy: str
    ) -> None:
        instrument(policy)
        with FakeServer("primary") as server:
            server.reply("bulkWrite", overload, overload)
            result = await resolve(mongo.client(server.uri).bulk_write(list(self.MANY)))
            assert (result.modified_count, result.deleted_count) == (1, 1)
            assert len(server.commands("bulkWrite")) == 3
            await mongo.close()
        assert len(delays) == 2

    async def test_an_error_that_stays_is_raised(
        self, mongo: Flavour, instrument: Callable[..., None], delays: list[float]
    ) -> None:
        instrument("backpressure")
        with FakeServer("primary") as server:
            server.reply("bulkWrite", *[overload] * 6)
            with pytest.raises(PyMongoError) as raised:
                await resolve(mongo.client(server.uri).bulk_write(list(self.MANY)))
            assert raised.value.error.code == 462
            assert len(server.commands("bulkWrite")) == 6
            await mongo.close()

    @shows_the_defect
    async def test_pymongo_raises_although_the_retry_succeeded(self, mongo: Flavour, no_jitter: None) -> None:
        with FakeServer("primary") as server:
            server.reply("bulkWrite", overload)
            with pytest.raises(PyMongoError):
                await resolve(mongo.client(server.uri).bulk_write(list(self.MANY)))
            assert len(server.commands("bulkWrite")) == 2
            await mongo.close()


class TestCommit:
    """3. An overload makes a commit forget that an earlier attempt of it may have been applied."""

    async def committed(
        self,
        mongo: Flavour,
        deployment: Deployment,
        sent: Commands,
        database_name: str,
        *failures: dict[str, Any],
    ) -> list[Any]:
        """The write concern of each commitTransaction that was sent, when the first ones failed so."""
        client = mongo.client(deployment.uri, event_listeners=[sent])
        await resolve(client[database_name].create_collection("items"))
        session = await resolve(client.start_session())
        await resolve(session.start_transaction())
        await resolve(client[database_name].items.insert_one({}, session=session))
        following = iter(failures)

        def fail_next(event: Any = None) -> None:
            for failure in following:
                deployment.fail_command(commands=["commitTransaction"], times=1, **failure)
                return

        sent.failed = fail_next
        fail_next()
        try:
            await resolve(session.commit_transaction())
        except PyMongoError:
            deployment.clear_failpoints()
            await resolve(session.commit_transaction())  # or dropping the database would wait for a minute
            raise
        await resolve(session.end_session())
        assert await resolve(client[database_name].items.count_documents({})) == 1
        concerns = [event.command.get("writeConcern") for event in sent.named("commitTransaction")]
        return [None if concern is None else concern.get("w") for concern in concerns]

    @pytest.mark.parametrize("policy", ["backpressure", "current"])
    async def test_after_another_failure_it_keeps_w_majority_through_an_overload(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        sent: Commands,
        policy: str,
    ) -> None:
        instrument(policy)
        concerns = await self.committed(
            mongo, deployment, sent, database_name, {"errorCode": 10107}, OVERLOAD
        )
        assert concerns == [None, "majority", "majority"]

    async def test_overloads_alone_do_not_make_it_w_majority(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        sent: Commands,
    ) -> None:
        instrument("backpressure")
        concerns = await self.committed(mongo, deployment, sent, database_name, OVERLOAD, OVERLOAD)
        assert concerns == [None, None, None]

    async def test_a_failure_after_an_overload_makes_it_w_majority(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        sent: Commands,
    ) -> None:
        instrument("backpressure")
        concerns = await self.committed(
            mongo, deployment, sent, database_name, OVERLOAD, {"errorCode": 10107}
        )
        assert concerns == [None, None, "majority"]

    @shows_the_defect
    async def test_pymongo_loses_w_majority(
        self, mongo: Flavour, deployment: Deployment, database_name: str, no_jitter: None, sent: Commands
    ) -> None:
        concerns = await self.committed(
            mongo, deployment, sent, database_name, {"errorCode": 10107}, OVERLOAD
        )
        assert concerns == [None, "majority", None]


class TestPinnedMongos:
    """4. An overload makes a write leave the mongos that its transaction runs on. Fake, for there is no mongos."""

    async def attempts_in_mid_transaction(self, mongo: Flavour) -> list[int]:
        """Which mongos each attempt of the second insert went to; the transaction runs on number 0."""
        with sharded(2) as cluster:
            client = mongo.client(cluster.uri, localThresholdMS=5000)
            while len(client.nodes) < 2:
                await resolve(client.admin.command("ping"))
            session = await resolve(client.start_session())
            await resolve(session.start_transaction())
            await resolve(client.db.items.insert_one({}, session=session))
            pinned, other = sorted(cluster.servers, key=lambda server: -len(server.commands("insert")))
            assert (len(pinned.commands("insert")), len(other.commands("insert"))) == (1, 0)
            pinned.reply("insert", overload, overload)
            await resolve(client.db.items.insert_one({}, session=session))
            assert all("startTransaction" not in command for command in pinned.commands("insert")[1:])
            await resolve(session.commit_transaction())
            await resolve(session.end_session())
            await mongo.close()
            return [len(pinned.commands("insert")) - 1, len(other.commands("insert"))]

    @pytest.mark.parametrize("policy", ["backpressure", "current"])
    async def test_a_write_in_mid_transaction_stays_on_its_mongos(
        self, mongo: Flavour, instrument: Callable[..., None], delays: list[float], policy: str
    ) -> None:
        instrument(policy)
        assert await self.attempts_in_mid_transaction(mongo) == [3, 0]

    @pytest.mark.parametrize("policy", ["backpressure", "current"])
    async def test_the_first_command_may_start_the_transaction_on_another_mongos(
        self, mongo: Flavour, instrument: Callable[..., None], delays: list[float], policy: str
    ) -> None:
        instrument(policy)
        with sharded(2) as cluster:
            client = mongo.client(cluster.uri, localThresholdMS=5000)
            while len(client.nodes) < 2:
                await resolve(client.admin.command("ping"))
            first = Once(overload)
            for server in cluster.servers:
                server.reply("insert", first)
            session = await resolve(client.start_session())
            await resolve(session.start_transaction())
            await resolve(client.db.items.insert_one({}, session=session))
            inserts = [server.commands("insert") for server in cluster.servers]
            assert [len(commands) for commands in inserts] == [1, 1]
            assert all(command["startTransaction"] for commands in inserts for command in commands)
            assert inserts[0][0]["txnNumber"] == inserts[1][0]["txnNumber"]
            await resolve(session.commit_transaction())
            await resolve(session.end_session())
            await mongo.close()

    @shows_the_defect
    async def test_pymongo_leaves_the_mongos(self, mongo: Flavour, no_jitter: None) -> None:
        assert (await self.attempts_in_mid_transaction(mongo))[1] > 0


class Once:
    """An answer that only the first of several servers gives."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answers = [answer]

    def __call__(self, command: dict[str, Any]) -> dict[str, Any]:
        return self._answers.pop() if self._answers else {"n": 1}
