"""What chaos has found: each defect with a small test of its own, on a real server, and without any chance in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pymongo
import pytest
from bson import ObjectId
from pymongo import InsertOne, MongoClient, UpdateOne
from pymongo.errors import AutoReconnect
from pymongo.monitoring import ConnectionPoolListener

import otel_retry
from otel_retry import IdempotenceAware, mongod
from otel_retry.policies import BackpressurePolicy
from tests.fakes.proxy import Proxy
from tests.flavours import listed, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.flavours import Flavour

shows_the_defect = pytest.mark.skipif(
    pymongo.version_tuple[:2] != (4, 19), reason="looked at in PyMongo 4.19 only"
)


class RefusesTheFirst(ConnectionPoolListener):
    """The first connection that the pool makes is closed by the server before its handshake."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.refused = 0

    def connection_created(self, event: Any) -> None:
        if not self.refused:
            self.refused += 1
            self._proxy.refuse()

    def pool_created(self, event: Any) -> None: ...
    def pool_ready(self, event: Any) -> None: ...
    def pool_cleared(self, event: Any) -> None: ...
    def pool_closed(self, event: Any) -> None: ...
    def connection_ready(self, event: Any) -> None: ...
    def connection_closed(self, event: Any) -> None: ...
    def connection_check_out_started(self, event: Any) -> None: ...
    def connection_check_out_failed(self, event: Any) -> None: ...
    def connection_checked_out(self, event: Any) -> None: ...
    def connection_checked_in(self, event: Any) -> None: ...


@pytest.fixture
def proxy(deployment: mongod.Deployment) -> Iterator[Proxy]:
    with MongoClient(deployment.uri) as client:
        client.admin.command("ping")
        address = client.address
    with Proxy(address) as started:
        yield started


@pytest.mark.parametrize("ordered", [True, False])
class TestBulkWriteWhoseFirstAttemptGotNoConnection:
    """PyMongo acknowledges statements that it never sent: its retry takes the first run for the last."""

    STATEMENTS = (
        InsertOne({"_id": 1, "n": 0}),
        UpdateOne({"_id": 1}, {"$inc": {"n": 1}}),
        InsertOne({"_id": 2, "n": 5}),
    )

    async def written(
        self,
        mongo: Flavour,
        deployment: mongod.Deployment,
        proxy: Proxy,
        database_name: str,
        *,
        ordered: bool,
    ) -> list[dict[str, Any]]:
        """What is there after the bulk write was acknowledged."""
        # Polling: no second connection of the monitor can be refused in the place of the pool's.
        refuses = RefusesTheFirst(proxy)
        client = mongo.client(proxy.uri, serverMonitoringMode="poll", event_listeners=[refuses])
        await resolve(client[database_name].items.bulk_write(list(self.STATEMENTS), ordered=ordered))
        assert refuses.refused == 1
        await mongo.close()
        with MongoClient(deployment.uri) as plain:
            return list(plain[database_name].items.find(sort=[("_id", 1)]))

    @pytest.mark.parametrize("policy", ["backpressure", "current"])
    async def test_sends_every_statement(
        self,
        mongo: Flavour,
        deployment: mongod.Deployment,
        proxy: Proxy,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        policy: str,
        ordered: bool,
    ) -> None:
        instrument(policy)
        assert await self.written(mongo, deployment, proxy, database_name, ordered=ordered) == [
            {"_id": 1, "n": 1},
            {"_id": 2, "n": 5},
        ]

    @shows_the_defect
    async def test_pymongo_forgets_all_but_the_first_run(
        self,
        mongo: Flavour,
        deployment: mongod.Deployment,
        proxy: Proxy,
        database_name: str,
        monkeypatch: pytest.MonkeyPatch,
        ordered: bool,
    ) -> None:
        monkeypatch.setattr("random.random", lambda: 0.0)
        found = await self.written(mongo, deployment, proxy, database_name, ordered=ordered)
        assert found != [{"_id": 1, "n": 1}, {"_id": 2, "n": 5}]


@pytest.fixture(scope="module")
def standalone() -> Iterator[mongod.Deployment]:
    """No replica set, so no txnNumber: as PyMongo sees a node for a moment when somebody else's error made it unknown."""
    with mongod.start(standalone=True) as started:
        yield started


async def test_an_insert_of_a_bulk_write_is_not_taken_for_one_that_recognises_its_own_document(
    mongo: Flavour, standalone: mongod.Deployment, instrument: Callable[..., None], delays: list[float]
) -> None:
    """Without a txnNumber a repeated insert_one that meets its own document has succeeded, and says so. A bulk write
    gets the same answer as an error of a statement, which nobody can take back: it must not be repeated.
    """
    instrument(IdempotenceAware(BackpressurePolicy()))
    first, second = ObjectId(), ObjectId()
    node = standalone.nodes[0]
    with Proxy((node.host, node.port)) as proxy:
        items = mongo.client(proxy.uri)[f"{mongo.name}_bulk"].items
        proxy.cut_reply("insert")
        with pytest.raises(AutoReconnect) as raised:
            await resolve(items.bulk_write([InsertOne({"_id": first})]))
        assert len(otel_retry.attempts(raised.value)) == 1
        proxy.cut_reply("insert")
        await resolve(items.insert_one({"_id": second}))
        assert proxy.pending == 0
        assert [each["_id"] for each in await listed(items.find(sort=[("_id", 1)]))] == [first, second]
        await mongo.close()
