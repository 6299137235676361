"""Seed 001, policy `backpressure`: its six rules and its bucket, rule by rule, against a real mongod."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pymongo
import pytest
from pymongo import InsertOne, ReadPreference, UpdateMany, WriteConcern
from pymongo.errors import AutoReconnect, DuplicateKeyError, OperationFailure
from pymongo.monitoring import ConnectionPoolListener
from pymongo.operations import IndexModel

import otel_retry
from tests.fakes.wire_server import FakeServer, error
from tests.flavours import OVERLOAD, Commands, listed, resolve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from otel_retry.mongod import Deployment
    from otel_retry.pacing import TokenBucket
    from tests.flavours import Flavour

UNREACHABLE = {"errorCode": 6}
"""HostUnreachable: a read may be retried after it, and unlike a closed connection it does not upset the topology."""

LABELS_CONNECT_FAILURES = pymongo.version_tuple >= (4, 17)


@pytest.fixture
def sent() -> Commands:
    return Commands()


@pytest.fixture
def client(mongo: Flavour, deployment: Deployment, instrument: Callable[..., None], sent: Commands) -> Any:
    instrument("backpressure")
    return mongo.client(deployment.uri, event_listeners=[sent])


@pytest.fixture
def database(client: Any, database_name: str) -> Any:
    return client[database_name]


@pytest.fixture
def empty(client: Any) -> Any:
    """A database that nobody writes to, so that nobody has to drop it."""
    return client["otel_retry_empty"]


@pytest.fixture
def full_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest backoff that the rule allows, each time."""
    monkeypatch.setattr("random.random", lambda: 1.0)


@pytest.fixture
def on_wait(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What the test puts in here is called in place of each wait."""
    calls: list[Callable[[], Any]] = []

    def sleep(seconds: float) -> None:
        for call in calls:
            call()

    async def sleep_async(seconds: float) -> None:
        sleep(seconds)

    monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep", sleep)
    monkeypatch.setattr("otel_retry.pymongo.seam.waiting.sleep_async", sleep_async)
    return calls


def opened(client: Any, *, spent: int = 10) -> TokenBucket:
    """The client's bucket with room for deposits: a full one would hide them."""
    bucket = otel_retry.budget(client)
    assert bucket is not None
    for _ in range(spent):
        assert bucket.try_withdraw()
    return bucket


class TestDeposits:
    async def test_a_first_try_success_deposits_a_tenth_of_a_token(self, client: Any, database: Any) -> None:
        bucket = opened(client)
        await resolve(database.items.find_one({}))
        assert bucket.tokens == 990.1
        await resolve(database.items.insert_one({}))
        assert bucket.tokens == 990.2
        await resolve(database.command("ping"))
        assert bucket.tokens == 990.3

    async def test_a_success_after_one_retry_deposits_one_and_a_tenth(
        self, client: Any, empty: Any, deployment: Deployment, on_wait: list[Callable[[], Any]]
    ) -> None:
        bucket = opened(client)
        while_waiting: list[float] = []
        on_wait.append(lambda: while_waiting.append(bucket.tokens))
        deployment.fail_command(commands=["find"], times=1, **OVERLOAD)
        await resolve(empty.items.find_one({}))
        assert while_waiting == [989.0]
        assert bucket.tokens == 990.1

    async def test_a_success_after_three_retries_deposits_no_more_than_after_one(
        self, client: Any, database: Any, deployment: Deployment, delays: list[float]
    ) -> None:
        bucket = opened(client)
        deployment.fail_command(commands=["insert"], times=3, **OVERLOAD)
        await resolve(database.items.insert_one({}))
        assert bucket.tokens == 988.1  # 990 - 3 + 1.1

    async def test_a_retry_that_fails_without_overload_deposits_one_token(
        self, client: Any, database: Any, deployment: Deployment, delays: list[float]
    ) -> None:
        await resolve(database.items.insert_one({"_id": 1}))
        bucket = opened(client)
        deployment.fail_command(commands=["insert"], times=1, **OVERLOAD)
        with pytest.raises(DuplicateKeyError):
            await resolve(database.items.insert_one({"_id": 1}))
        assert bucket.tokens == 990.0  # 990 - 1 + 1

    async def test_a_retry_that_is_overloaded_deposits_nothing(
        self, client: Any, empty: Any, deployment: Deployment, delays: list[float]
    ) -> None:
        bucket = opened(client)
        deployment.fail_command(commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure):
            await resolve(empty.items.find_one({}))
        assert bucket.tokens == 985.0  # 990 - 5
        assert bucket.deposited == 0

    async def test_a_first_attempt_that_fails_deposits_nothing(
        self, client: Any, empty: Any, deployment: Deployment
    ) -> None:
        bucket = opened(client)
        with pytest.raises(OperationFailure):
            await resolve(empty.items.find_one({"$nonsense": 1}))
        assert bucket.tokens == 990.0

    async def test_each_command_of_a_bulk_write_deposits_by_itself(self, client: Any, database: Any) -> None:
        bucket = opened(client)
        await resolve(
            database.items.bulk_write([InsertOne({}), UpdateMany({}, {"$set": {"n": 1}}), InsertOne({})])
        )
        assert bucket.tokens == 990.3


class TestTokens:
    async def test_every_client_starts_with_a_full_bucket_of_a_thousand_of_its_own(
        self, mongo: Flavour, deployment: Deployment, instrument: Callable[..., None]
    ) -> None:
        instrument()
        one, other = mongo.client(deployment.uri), mongo.client(deployment.uri)
        assert otel_retry.budget(one).capacity == otel_retry.budget(one).tokens == 1000
        opened(one)
        assert otel_retry.budget(other).tokens == 1000

    async def test_a_success_never_lifts_the_bucket_above_its_capacity(self, client: Any, empty: Any) -> None:
        bucket = opened(client, spent=0)
        await resolve(empty.items.find_one({}))
        assert bucket.tokens == 1000

    async def test_a_retry_after_a_plain_network_error_takes_a_token_too(
        self, client: Any, empty: Any, deployment: Deployment, delays: list[float], sent: Commands
    ) -> None:
        await resolve(empty.items.find_one({}))
        bucket = opened(client)
        deployment.fail_command(commands=["find"], times=1, closeConnection=True)
        await resolve(empty.items.find_one({}))
        assert (bucket.consumed, bucket.tokens) == (11, 990.1)
        assert delays == []

    async def test_a_retry_after_a_retryable_write_error_takes_a_token_too(
        self, client: Any, database: Any, deployment: Deployment, delays: list[float]
    ) -> None:
        bucket = opened(client)
        deployment.fail_command(
            commands=["insert"], times=1, errorCode=6, errorLabels=["RetryableWriteError"]
        )
        await resolve(database.items.insert_one({}))
        assert (bucket.consumed, bucket.tokens) == (11, 990.1)
        assert delays == []

    async def test_the_token_is_taken_before_the_wait(
        self, client: Any, empty: Any, deployment: Deployment, on_wait: list[Callable[[], Any]]
    ) -> None:
        bucket = opened(client, spent=0)
        while_waiting: list[float] = []
        on_wait.append(lambda: while_waiting.append(bucket.tokens))
        deployment.fail_command(commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure):
            await resolve(empty.items.find_one({}))
        assert while_waiting == [999.0, 998.0, 997.0, 996.0, 995.0]

    async def test_the_retry_that_the_limit_refuses_costs_nothing(
        self, client: Any, empty: Any, deployment: Deployment, delays: list[float]
    ) -> None:
        bucket = opened(client, spent=0)
        deployment.fail_command(commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised:
            await resolve(empty.items.find_one({}))
        assert otel_retry.attempts(raised.value)[-1].decision == "limit"
        assert (bucket.consumed, bucket.denied) == (5, 0)

    async def test_an_error_that_is_not_retryable_costs_nothing(
        self, client: Any, database: Any, sent: Commands
    ) -> None:
        bucket = opened(client, spent=0)
        await resolve(database.items.insert_one({"_id": 1}))
        with pytest.raises(DuplicateKeyError):
            await resolve(database.items.insert_one({"_id": 1}))
        assert (bucket.consumed, sent.count("insert")) == (0, 2)

    @pytest.mark.parametrize("failure", [OVERLOAD, UNREACHABLE], ids=["overload", "plain error"])
    async def test_an_empty_bucket_denies_the_retry_and_the_error_at_hand_is_raised(
        self,
        client: Any,
        empty: Any,
        deployment: Deployment,
        delays: list[float],
        sent: Commands,
        failure: dict[str, Any],
    ) -> None:
        bucket = opened(client, spent=1000)
        deployment.fail_command(commands=["find"], **failure)
        with pytest.raises(OperationFailure) as raised:
            await resolve(empty.items.find_one({}))
        assert raised.value.code == failure["errorCode"]
        assert otel_retry.attempts(raised.value)[-1].decision == "budget"
        assert (sent.count("find"), delays) == (1, [])
        assert (bucket.tokens, bucket.denied) == (0.0, 1)

    async def test_nine_tenths_of_a_token_do_not_buy_a_retry_and_ten_do(
        self, client: Any, empty: Any, deployment: Deployment, delays: list[float], sent: Commands
    ) -> None:
        bucket = opened(client, spent=1000)
        for _ in range(9):
            await resolve(empty.items.find_one({}))
        assert bucket.tokens == 0.9
        sent.clear()
        deployment.fail_command(commands=["find"], times=1, **OVERLOAD)
        with pytest.raises(OperationFailure):
            await resolve(empty.items.find_one({}))
        assert sent.count("find") == 1
        await resolve(empty.items.find_one({}))
        assert bucket.tokens == 1.0
        sent.clear()
        deployment.fail_command(commands=["find"], times=1, **OVERLOAD)
        await resolve(empty.items.find_one({}))
        assert sent.count("find") == 2

    async def test_a_bucket_that_runs_dry_in_mid_operation_ends_it_there(
        self, client: Any, database: Any, deployment: Deployment, delays: list[float], sent: Commands
    ) -> None:
        opened(client, spent=998)
        deployment.fail_command(commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised:
            await resolve(database.items.find_one({}))
        assert sent.count("find") == 3
        assert [attempt.decision for attempt in otel_retry.attempts(raised.value)] == [
            "retry",
            "retry",
            "budget",
        ]


class TestLimit:
    @pytest.mark.parametrize(
        ("command", "operation"),
        [
            ("find", lambda db: db.items.find_one({})),
            ("insert", lambda db: db.items.insert_one({})),
            ("update", lambda db: db.items.update_many({}, {"$set": {"n": 1}})),
            ("ping", lambda db: db.command("ping")),
        ],
        ids=["find", "insert", "update_many", "command"],
    )
    async def test_five_retries_make_six_attempts(
        self,
        database: Any,
        deployment: Deployment,
        delays: list[float],
        sent: Commands,
        command: str,
        operation: Callable[[Any], Any],
    ) -> None:
        deployment.fail_command(commands=[command], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised:
            await resolve(operation(database))
        assert raised.value.code == 462
        assert sent.count(command) == 6
        assert len(delays) == 5

    async def test_the_sixth_attempt_may_succeed(
        self, database: Any, deployment: Deployment, delays: list[float], sent: Commands
    ) -> None:
        deployment.fail_command(commands=["insert"], times=5, **OVERLOAD)
        await resolve(database.items.insert_one({"_id": 1}))
        assert sent.count("insert") == 6
        assert await resolve(database.items.count_documents({})) == 1

    async def test_after_an_overload_the_limit_holds_for_other_errors_as_well(
        self, empty: Any, deployment: Deployment, on_wait: list[Callable[[], Any]], sent: Commands
    ) -> None:
        on_wait.append(lambda: deployment.fail_command(commands=["find"], times=9, **UNREACHABLE))
        deployment.fail_command(commands=["find"], times=1, **OVERLOAD)
        with pytest.raises(OperationFailure) as raised:
            await resolve(empty.items.find_one({}))
        assert raised.value.code == UNREACHABLE["errorCode"]
        assert sent.count("find") == 6

    async def test_the_limit_holds_under_a_deadline_too(
        self, empty: Any, deployment: Deployment, delays: list[float], sent: Commands
    ) -> None:
        deployment.fail_command(commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised, pymongo.timeout(60):
            await resolve(empty.items.find_one({}))
        assert otel_retry.attempts(raised.value)[-1].decision == "limit"
        assert sent.count("find") == 6

    async def test_under_a_deadline_an_overload_limits_what_follows_it_too(
        self, empty: Any, deployment: Deployment, on_wait: list[Callable[[], Any]], sent: Commands
    ) -> None:
        on_wait.append(lambda: deployment.fail_command(commands=["find"], times=9, **UNREACHABLE))
        deployment.fail_command(commands=["find"], times=1, **OVERLOAD)
        with pytest.raises(OperationFailure), pymongo.timeout(60):
            await resolve(empty.items.find_one({}))
        assert sent.count("find") == 6

    async def test_under_a_deadline_without_any_overload_there_is_no_such_limit(
        self, empty: Any, deployment: Deployment, delays: list[float], sent: Commands
    ) -> None:
        deployment.fail_command(commands=["find"], times=9, **UNREACHABLE)
        with pymongo.timeout(60):
            await resolve(empty.items.find_one({}))
        assert sent.count("find") == 10


class TestBackoff:
    async def test_the_delays_double_from_a_tenth_of_a_second(
        self,
        empty: Any,
        deployment: Deployment,
        full_jitter: None,
        delays: list[float],
    ) -> None:
        deployment.fail_command(commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised:
            await resolve(empty.items.find_one({}))
        assert delays == [0.1, 0.2, 0.4, 0.8, 1.6]
        assert [attempt.delay for attempt in otel_retry.attempts(raised.value)] == [0, *delays]

    async def test_the_jitter_is_drawn_anew_for_each_retry_and_scales_the_delay(
        self,
        empty: Any,
        deployment: Deployment,
        monkeypatch: pytest.MonkeyPatch,
        delays: list[float],
    ) -> None:
        jitter = iter([0.5, 0.25, 1.0, 0.125, 0.5])
        monkeypatch.setattr("random.random", lambda: next(jitter))
        deployment.fail_command(commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure):
            await resolve(empty.items.find_one({}))
        assert delays == [0.05, 0.05, 0.4, 0.1, 0.8]

    async def test_jitter_is_random_between_nothing_and_the_whole_delay(
        self, empty: Any, deployment: Deployment, delays: list[float]
    ) -> None:
        for _ in range(5):
            deployment.fail_command(commands=["find"], times=1, **OVERLOAD)
            await resolve(empty.items.find_one({}))
        assert all(0 <= delay < 0.1 for delay in delays)
        assert len(set(delays)) == 5

    async def test_the_wait_is_real(
        self, empty: Any, deployment: Deployment, full_jitter: None, sent: Commands
    ) -> None:
        deployment.fail_command(commands=["find"], times=2, **OVERLOAD)
        started = time.monotonic()
        await resolve(empty.items.find_one({}))
        assert time.monotonic() - started >= 0.3
        assert sent.count("find") == 3

    @pytest.mark.parametrize(
        "failure", [UNREACHABLE, {"closeConnection": True}], ids=["server error", "network error"]
    )
    async def test_errors_that_are_no_overload_are_retried_at_once(
        self,
        empty: Any,
        deployment: Deployment,
        full_jitter: None,
        delays: list[float],
        sent: Commands,
        failure: dict[str, Any],
    ) -> None:
        deployment.fail_command(commands=["find"], times=1, **failure)
        await resolve(empty.items.find_one({}))
        assert sent.count("find") == 2
        assert delays == []

    async def test_only_the_error_just_before_counts_for_the_backoff(
        self,
        empty: Any,
        deployment: Deployment,
        full_jitter: None,
        on_wait: list[Callable[[], Any]],
        sent: Commands,
    ) -> None:
        on_wait.append(lambda: deployment.fail_command(commands=["find"], times=1, **UNREACHABLE))
        deployment.fail_command(commands=["find"], times=1, **OVERLOAD)
        waits: list[None] = []
        on_wait.append(lambda: waits.append(None))
        await resolve(empty.items.find_one({}))
        assert sent.count("find") == 3
        assert len(waits) == 1

    async def test_the_exponent_counts_all_retries_not_only_those_after_overloads(
        self,
        empty: Any,
        deployment: Deployment,
        full_jitter: None,
        delays: list[float],
        sent: Commands,
    ) -> None:
        """Rule 5: "`i` is the retry attempt"."""

        def then_overload(event: Any) -> None:
            if event.command_name == "find" and sent.count("find") == 1:
                deployment.fail_command(commands=["find"], times=1, **OVERLOAD)

        sent.failed = then_overload
        deployment.fail_command(commands=["find"], times=1, **UNREACHABLE)
        await resolve(empty.items.find_one({}))
        assert sent.count("find") == 3
        assert delays == [0.2]

    async def test_the_connection_is_back_in_the_pool_before_the_wait(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        on_wait: list[Callable[[], Any]],
    ) -> None:
        instrument("backpressure")
        pool = CheckedOut()
        database = mongo.client(deployment.uri, maxPoolSize=1, event_listeners=[pool])[database_name]
        await resolve(database.items.insert_many([{} for _ in range(3)]))
        while_waiting: list[int] = []
        on_wait.append(lambda: while_waiting.append(pool.now))
        for command, operation in {
            "find": lambda: database.items.find_one({}),
            "getMore": lambda: listed(database.items.find({}, batch_size=2)),
            "insert": lambda: database.items.insert_one({}),
            "update": lambda: database.items.bulk_write([UpdateMany({}, {"$set": {"n": 1}})]),
            "create": lambda: database.create_collection("other"),
            "ping": lambda: database.command("ping"),
        }.items():
            deployment.fail_command(commands=[command], times=1, **OVERLOAD)
            await resolve(operation())
        assert while_waiting == [0] * 6
        assert pool.most == 1


class CheckedOut(ConnectionPoolListener):
    """How many connections are out of the pool."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def connection_checked_out(self, event: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)

    def connection_checked_in(self, event: Any) -> None:
        self.now -= 1

    def _other(self, event: Any) -> None:
        pass

    pool_created = pool_ready = pool_cleared = pool_closed = _other
    connection_created = connection_ready = connection_closed = _other
    connection_check_out_started = connection_check_out_failed = _other


class TestDeadline:
    async def test_a_backoff_that_would_pass_the_deadline_is_not_slept_and_costs_no_token(
        self,
        client: Any,
        empty: Any,
        deployment: Deployment,
        full_jitter: None,
        delays: list[float],
        sent: Commands,
    ) -> None:
        await resolve(empty.items.find_one({}))
        sent.clear()
        bucket = opened(client)
        deployment.fail_command(commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised, pymongo.timeout(1.5):
            await resolve(empty.items.find_one({}))
        # The fifth delay, 1.6 s, is the first that does not fit; the others were not slept either, here.
        assert raised.value.code == 462
        assert delays == [0.1, 0.2, 0.4, 0.8]
        assert sent.count("find") == 5
        assert bucket.tokens == 986.0
        assert otel_retry.attempts(raised.value)[-1].decision == "deadline"

    async def test_a_write_is_bound_by_the_deadline_as_well(
        self,
        client: Any,
        database: Any,
        deployment: Deployment,
        full_jitter: None,
        delays: list[float],
        sent: Commands,
    ) -> None:
        await resolve(database.items.insert_one({}))
        sent.clear()
        deployment.fail_command(commands=["update"], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised, pymongo.timeout(1.5):
            await resolve(database.items.update_many({}, {"$set": {"n": 1}}))
        assert raised.value.code == 462
        assert delays == [0.1, 0.2, 0.4, 0.8]
        assert sent.count("update") == 5

    async def test_timeout_ms_of_the_client_is_such_a_deadline(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        full_jitter: None,
        delays: list[float],
        sent: Commands,
    ) -> None:
        instrument("backpressure")
        client = mongo.client(deployment.uri, timeoutMS=1500, event_listeners=[sent])
        await resolve(client[database_name].items.find_one({}))
        sent.clear()
        deployment.fail_command(commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure):
            await resolve(client[database_name].items.find_one({}))
        assert delays == [0.1, 0.2, 0.4, 0.8]
        assert sent.count("find") == 5


class TestRetargeting:
    @pytest.mark.parametrize(
        ("command", "operation"),
        [
            ("find", lambda db: db.items.find_one({})),
            ("ping", lambda db: db.command("ping", read_preference=ReadPreference.NEAREST)),
        ],
        ids=["find", "command"],
    )
    async def test_no_retry_goes_to_a_node_that_was_overloaded_while_there_is_another(
        self,
        mongo: Flavour,
        three_nodes: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        command: str,
        operation: Callable[[Any], Any],
    ) -> None:
        instrument("backpressure")
        sent = Commands()
        client = mongo.client(
            three_nodes.uri, readPreference="nearest", localThresholdMS=5000, event_listeners=[sent]
        )
        await everybody_known(client, 3)
        healthy, *overloaded = three_nodes.nodes
        for node in overloaded:
            three_nodes.fail_command(node, commands=[command], **OVERLOAD)
        retried = 0
        for _ in range(15):
            sent.clear()
            await resolve(operation(client[database_name]))
            servers = [address(event) for event in sent.named(command)]
            assert servers[-1] == healthy.address
            assert len(set(servers)) == len(servers)
            retried += len(servers) > 1
        assert retried  # chance has it fail once in 3 ** 15 runs

    async def test_when_every_node_is_overloaded_they_are_tried_again(
        self,
        mongo: Flavour,
        three_nodes: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
    ) -> None:
        instrument("backpressure")
        sent = Commands()
        client = mongo.client(
            three_nodes.uri, readPreference="nearest", localThresholdMS=5000, event_listeners=[sent]
        )
        await everybody_known(client, 3)
        three_nodes.fail_command("all", commands=["find"], **OVERLOAD)
        with pytest.raises(OperationFailure) as raised:
            await resolve(client[database_name].items.find_one({}))
        servers = [attempt.server for attempt in otel_retry.attempts(raised.value)]
        assert len(servers) == sent.count("find") == 6
        assert set(servers[:3]) == {node.address for node in three_nodes.nodes}

    async def test_a_write_goes_back_to_the_only_primary_there_is(
        self,
        mongo: Flavour,
        three_nodes: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
    ) -> None:
        instrument("backpressure")
        sent = Commands()
        client = mongo.client(three_nodes.uri, event_listeners=[sent])
        three_nodes.fail_command(commands=["insert"], times=2, **OVERLOAD)
        await resolve(client[database_name].items.insert_one({}))
        primary = three_nodes.primary().address
        assert [address(event) for event in sent.named("insert")] == [primary] * 3


async def everybody_known(client: Any, count: int) -> None:
    await resolve(client.admin.command("ping"))
    while len(client.nodes) < count:
        await resolve(client.admin.command("ping"))


def address(event: Any) -> str:
    host, port = event.connection_id
    return f"{host}:{port}"


async def drain(cursor: Any) -> list[Any]:
    return await listed(await resolve(cursor))


async def watch_and_close(database: Any) -> None:
    stream = await resolve(database.items.watch())
    await resolve(stream.close())


async def insert_in_a_transaction(database: Any) -> None:
    session = await resolve(database.client.start_session())
    await resolve(session.start_transaction())
    await resolve(database.items.insert_one({}, session=session))
    await resolve(session.commit_transaction())
    await resolve(session.end_session())


# (what the application calls, the command that is rejected, how to call it)
EVERY_COMMAND: list[tuple[str, str, Callable[[Any], Awaitable[Any]]]] = [
    ("insert_one", "insert", lambda db: resolve(db.items.insert_one({}))),
    ("insert_many", "insert", lambda db: resolve(db.items.insert_many([{}, {}]))),
    ("update_one", "update", lambda db: resolve(db.items.update_one({}, {"$set": {"n": 9}}))),
    ("update_many", "update", lambda db: resolve(db.items.update_many({}, {"$set": {"n": 9}}))),
    ("replace_one", "update", lambda db: resolve(db.items.replace_one({}, {"n": 9}))),
    ("delete_one", "delete", lambda db: resolve(db.items.delete_one({}))),
    ("delete_many", "delete", lambda db: resolve(db.items.delete_many({}))),
    ("find_one_and_delete", "findAndModify", lambda db: resolve(db.items.find_one_and_delete({}))),
    (
        "bulk_write of many",
        "update",
        lambda db: resolve(db.items.bulk_write([InsertOne({}), UpdateMany({}, {"$set": {"n": 9}})])),
    ),
    (
        "unordered bulk_write of many",
        "update",
        lambda db: resolve(
            db.items.bulk_write([UpdateMany({}, {"$set": {"n": 9}}), InsertOne({})], ordered=False)
        ),
    ),
    ("find", "find", lambda db: listed(db.items.find({}))),
    ("getMore", "getMore", lambda db: listed(db.items.find({}, batch_size=2))),
    ("getMore of an aggregation", "getMore", lambda db: drain(db.items.aggregate([], batchSize=2))),
    ("aggregate", "aggregate", lambda db: drain(db.items.aggregate([{"$match": {}}]))),
    ("aggregate of a database", "aggregate", lambda db: drain(db.aggregate([{"$documents": [{"n": 1}]}]))),
    ("aggregate $out", "aggregate", lambda db: drain(db.items.aggregate([{"$out": "copy"}]))),
    ("aggregate $merge", "aggregate", lambda db: drain(db.items.aggregate([{"$merge": {"into": "copy"}}]))),
    ("count_documents", "aggregate", lambda db: resolve(db.items.count_documents({}))),
    ("estimated_document_count", "count", lambda db: resolve(db.items.estimated_document_count())),
    ("distinct", "distinct", lambda db: resolve(db.items.distinct("n"))),
    ("watch", "aggregate", watch_and_close),
    ("create_collection", "create", lambda db: resolve(db.create_collection("fresh"))),
    ("create_index", "createIndexes", lambda db: resolve(db.items.create_index("m"))),
    ("create_indexes", "createIndexes", lambda db: resolve(db.items.create_indexes([IndexModel("m")]))),
    ("drop_index", "dropIndexes", lambda db: resolve(db.items.drop_index("n_1"))),
    ("drop_indexes", "dropIndexes", lambda db: resolve(db.items.drop_indexes())),
    ("index_information", "listIndexes", lambda db: resolve(db.items.index_information())),
    ("list_indexes", "listIndexes", lambda db: drain(db.items.list_indexes())),
    ("options", "listCollections", lambda db: resolve(db.items.options())),
    ("rename", "renameCollection", lambda db: resolve(db.items.rename("renamed"))),
    ("drop", "drop", lambda db: resolve(db.items.drop())),
    ("drop_collection", "drop", lambda db: resolve(db.drop_collection("items"))),
    ("list_collections", "listCollections", lambda db: drain(db.list_collections())),
    ("list_collection_names", "listCollections", lambda db: resolve(db.list_collection_names())),
    ("validate_collection", "validate", lambda db: resolve(db.validate_collection("items"))),
    ("command", "dbStats", lambda db: resolve(db.command("dbStats"))),
    ("command that writes", "insert", lambda db: resolve(db.command("insert", "items", documents=[{}]))),
    ("cursor_command", "find", lambda db: drain(db.cursor_command("find", "items"))),
    ("drop_database", "dropDatabase", lambda db: resolve(db.client.drop_database(db.name))),
    ("list_databases", "listDatabases", lambda db: drain(db.client.list_databases())),
    ("list_database_names", "listDatabases", lambda db: resolve(db.client.list_database_names())),
    ("server_info", "buildinfo", lambda db: resolve(db.client.server_info())),
    ("commit_transaction", "commitTransaction", insert_in_a_transaction),
]


class TestEveryCommand:
    """Seed 001: "expands the driver's retry ability to all commands"; below 4.17 not even PyMongo's own path has them."""

    @pytest.mark.parametrize(
        ("command", "operation"),
        [case[1:] for case in EVERY_COMMAND],
        ids=[case[0] for case in EVERY_COMMAND],
    )
    async def test_every_command_is_repeated_when_the_server_is_overloaded(
        self,
        database: Any,
        deployment: Deployment,
        delays: list[float],
        sent: Commands,
        command: str,
        operation: Callable[[Any], Awaitable[Any]],
    ) -> None:
        await resolve(database.items.insert_many([{"n": n} for n in range(3)]))
        await resolve(database.items.create_index("n"))
        sent.clear()
        deployment.fail_command(commands=[command], times=2, **OVERLOAD)
        await operation(database)
        assert sent.count(command) == 3
        assert len(delays) == 2

    @pytest.mark.parametrize(
        ("command", "operation"),
        [
            ("createSearchIndexes", lambda items: items.create_search_index({"definition": {}})),
            ("updateSearchIndex", lambda items: items.update_search_index("name", {})),
            ("dropSearchIndex", lambda items: items.drop_search_index("name")),
        ],
        ids=["create_search_index", "update_search_index", "drop_search_index"],
    )
    async def test_search_index_commands_are_repeated_on_a_fake_server_since_this_one_has_none(
        self,
        mongo: Flavour,
        instrument: Callable[..., None],
        delays: list[float],
        command: str,
        operation: Callable[[Any], Any],
    ) -> None:
        instrument("backpressure")
        with FakeServer() as server:
            overload = error(462, labels=OVERLOAD["errorLabels"])
            server.reply(command, overload, overload, {"indexesCreated": [{"name": "name"}]})
            await resolve(operation(mongo.client(server.uri).anything.items))
            assert len(server.commands(command)) == 3
            await mongo.close()
        assert len(delays) == 2

    async def test_what_is_repeated_is_applied_once(
        self, database: Any, deployment: Deployment, delays: list[float]
    ) -> None:
        await resolve(database.items.insert_many([{"n": 0}, {"n": 0}]))
        deployment.fail_command(commands=["update"], times=3, **OVERLOAD)
        result = await resolve(database.items.update_many({}, {"$inc": {"n": 1}}))
        assert result.modified_count == 2
        assert await resolve(database.items.distinct("n")) == [1]


class TestGates:
    @pytest.mark.parametrize(
        ("options", "attempts"),
        [
            ({"retryReads": False}, {"find": 1, "insert": 2, "update": 2, "createIndexes": 2, "ping": 1}),
            ({"retryWrites": False}, {"find": 2, "insert": 1, "update": 1, "createIndexes": 1, "ping": 1}),
            (
                {"retryReads": False, "retryWrites": False},
                {"find": 1, "insert": 1, "update": 1, "createIndexes": 1, "ping": 1},
            ),
        ],
        ids=["no reads", "no writes", "neither"],
    )
    async def test_reads_need_retry_reads_writes_retry_writes_and_commands_both(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        sent: Commands,
        options: dict[str, Any],
        attempts: dict[str, int],
    ) -> None:
        instrument("backpressure")
        database = mongo.client(deployment.uri, event_listeners=[sent], **options)[database_name]
        operations = {
            "find": lambda: database.items.find_one({}),
            "insert": lambda: database.items.insert_one({}),
            "update": lambda: database.items.update_many({}, {"$set": {"n": 1}}),
            "createIndexes": lambda: database.items.create_index("n"),
            "ping": lambda: database.command("ping"),
        }
        for command, expected in attempts.items():
            deployment.fail_command(commands=[command], times=1, **OVERLOAD)
            if expected == 1:
                with pytest.raises(OperationFailure):
                    await resolve(operations[command]())
            else:
                await resolve(operations[command]())
            assert (command, sent.count(command)) == (command, expected)

    @pytest.mark.parametrize(
        "stage", [{"$out": "copy"}, {"$merge": {"into": "copy"}}], ids=["$out", "$merge"]
    )
    async def test_an_aggregation_that_writes_needs_retry_writes(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
        sent: Commands,
        stage: dict[str, Any],
    ) -> None:
        instrument("backpressure")
        for options, expected in (({"retryWrites": False}, 1), ({"retryReads": False}, 2)):
            database = mongo.client(deployment.uri, event_listeners=[sent], **options)[database_name]
            await resolve(database.items.insert_one({}))
            sent.clear()
            deployment.fail_command(commands=["aggregate"], times=1, **OVERLOAD)
            if expected == 1:
                with pytest.raises(OperationFailure):
                    await drain(database.items.aggregate([stage]))
                deployment.clear_failpoints()
            else:
                await drain(database.items.aggregate([stage]))
            assert sent.count("aggregate") == expected

    async def test_a_refusal_by_a_gate_costs_no_token(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        delays: list[float],
    ) -> None:
        instrument("backpressure")
        client = mongo.client(deployment.uri, retryReads=False)
        bucket = opened(client)
        deployment.fail_command(commands=["find"], times=1, **OVERLOAD)
        with pytest.raises(OperationFailure):
            await resolve(client[database_name].items.find_one({}))
        assert bucket.tokens == 990.0


class TestLabels:
    async def test_overload_without_the_retryable_label_is_raised_by_an_operation_that_is_not_retryable(
        self, client: Any, database: Any, deployment: Deployment, delays: list[float], sent: Commands
    ) -> None:
        bucket = opened(client)
        deployment.fail_command(
            commands=["update"], times=1, errorCode=462, errorLabels=["SystemOverloadedError"]
        )
        with pytest.raises(OperationFailure):
            await resolve(database.items.update_many({}, {"$set": {"n": 1}}))
        assert (sent.count("update"), delays, bucket.tokens) == (1, [], 990.0)

    async def test_overload_without_the_retryable_label_is_backed_off_from_where_the_error_is_retryable_anyway(
        self,
        database: Any,
        deployment: Deployment,
        full_jitter: None,
        delays: list[float],
        sent: Commands,
    ) -> None:
        deployment.fail_command(
            commands=["find"], times=2, errorCode=6, errorLabels=["SystemOverloadedError"]
        )
        await resolve(database.items.find_one({}))
        assert (sent.count("find"), delays) == (3, [0.1, 0.2])

    @pytest.mark.parametrize(
        ("command", "operation"),
        [
            ("update", lambda db: db.items.update_many({}, {"$set": {"n": 1}})),
            ("create", lambda db: db.create_collection("other")),
            ("ping", lambda db: db.command("ping")),
        ],
        ids=["update_many", "create_collection", "command"],
    )
    async def test_the_retryable_label_alone_makes_a_command_repeatable_without_backoff(
        self,
        database: Any,
        deployment: Deployment,
        delays: list[float],
        sent: Commands,
        command: str,
        operation: Callable[[Any], Any],
    ) -> None:
        deployment.fail_command(commands=[command], times=1, errorCode=8, errorLabels=["RetryableError"])
        await resolve(operation(database))
        assert (sent.count(command), delays) == (2, [])

    async def test_an_error_without_labels_does_not_make_a_command_repeatable(
        self, database: Any, deployment: Deployment, delays: list[float], sent: Commands
    ) -> None:
        deployment.fail_command(commands=["update"], times=1, errorCode=462, errorLabels=[])
        with pytest.raises(OperationFailure):
            await resolve(database.items.update_many({}, {"$set": {"n": 1}}))
        assert sent.count("update") == 1


class TestConnecting:
    """A server that limits new connections closes them during the handshake: an error before any command."""

    @pytest.fixture
    async def database(
        self,
        mongo: Flavour,
        deployment: Deployment,
        instrument: Callable[..., None],
        database_name: str,
        sent: Commands,
    ) -> Any:
        """Each operation needs a new connection, and nobody else says hello meanwhile."""
        instrument("backpressure")
        client = mongo.client(
            deployment.uri, maxIdleTimeMS=1, heartbeatFrequencyMS=60_000, event_listeners=[sent]
        )
        await resolve(client.admin.command("ping"))
        sent.clear()
        return client[database_name]

    @pytest.mark.parametrize(
        ("command", "operation"),
        [
            ("find", lambda db: db.items.find_one({})),
            ("insert", lambda db: db.items.insert_one({})),
        ],
        ids=["read", "write"],
    )
    async def test_a_connection_closed_in_the_handshake_is_retried(
        self,
        database: Any,
        deployment: Deployment,
        delays: list[float],
        sent: Commands,
        command: str,
        operation: Callable[[Any], Any],
    ) -> None:
        bucket = opened(database.client)
        with refused_handshakes(deployment, database.client, times=1):
            await resolve(operation(database))
        assert sent.count(command) == 1
        assert (bucket.consumed, bucket.tokens) == (11, 990.1)
        assert len(delays) == (1 if LABELS_CONNECT_FAILURES else 0)

    @pytest.mark.skipif(
        not LABELS_CONNECT_FAILURES,
        reason="PyMongo labels errors of the handshake as overload from 4.17 on; before, only what is retryable is retried",
    )
    async def test_a_connection_closed_in_the_handshake_counts_as_overload_for_every_command(
        self, database: Any, deployment: Deployment, full_jitter: None, delays: list[float], sent: Commands
    ) -> None:
        with refused_handshakes(deployment, database.client, times=3):
            await resolve(database.items.update_many({}, {"$set": {"n": 1}}))
        assert (sent.count("update"), delays) == (1, [0.1, 0.2, 0.4])

    async def test_an_unacknowledged_write_is_never_repeated(
        self, database: Any, deployment: Deployment, delays: list[float], sent: Commands
    ) -> None:
        bucket = opened(database.client)
        unacknowledged = database.get_collection("items", write_concern=WriteConcern(w=0))
        with refused_handshakes(deployment, database.client, times=1):
            with pytest.raises(AutoReconnect):
                await resolve(unacknowledged.insert_one({}))
        assert (sent.count("insert"), delays, bucket.tokens) == (0, [], 990.0)


def refused_handshakes(deployment: Deployment, client: Any, *, times: int) -> Any:
    return deployment.fail_command(
        commands=["hello", "isMaster", "ismaster"],
        times=times,
        closeConnection=True,
        appName=client.options.pool_options.appname,
    )
