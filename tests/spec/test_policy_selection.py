"""Who decides for which client: by name, by environment, by instance, client by client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pymongo.errors import OperationFailure

import otel_retry
from otel_retry import RetryContext, RetryDecision, RetryPolicy, SettingError
from tests.flavours import OVERLOAD, Commands, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_retry.mongod import Deployment
    from tests.flavours import Flavour

POLICIES = ("backpressure", "current", "once", "persistent", "driver")


@pytest.fixture(autouse=True)
def _uninstrumented(monkeypatch: pytest.MonkeyPatch, delays: list[float]) -> Iterator[None]:
    monkeypatch.delenv("OTEL_RETRY_POLICY", raising=False)
    # PyMongo's own waits, where its loop decides, take no time.
    monkeypatch.setattr("random.random", lambda: 0.0)
    yield
    otel_retry.uninstrument()


async def attempts_of(client: Any, deployment: Deployment, sent: Commands) -> int:
    """How often a find is sent to a server that stays overloaded: tells the policies apart."""
    sent.clear()
    with deployment.fail_command(commands=["find"], **OVERLOAD), pytest.raises(OperationFailure):
        await resolve(client.otel_retry_empty.items.find_one({}))
    return sent.count("find")


@pytest.mark.parametrize(
    ("policy", "expected"), [("backpressure", 6), ("current", 3), ("once", 1), ("persistent", 1)]
)
async def test_a_policy_is_chosen_by_its_name(
    mongo: Flavour, deployment: Deployment, policy: str, expected: int
) -> None:
    sent = Commands()
    otel_retry.instrument(policy)
    assert (
        await attempts_of(mongo.client(deployment.uri, event_listeners=[sent]), deployment, sent) == expected
    )


async def test_backpressure_is_the_default(mongo: Flavour, deployment: Deployment) -> None:
    sent = Commands()
    otel_retry.instrument()
    client = mongo.client(deployment.uri, event_listeners=[sent])
    assert await attempts_of(client, deployment, sent) == 6
    assert otel_retry.budget(client).capacity == 1000


@pytest.mark.parametrize("spelling", ["current", "CURRENT", "  Current "])
async def test_the_environment_names_the_policy(
    mongo: Flavour, deployment: Deployment, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.setenv("OTEL_RETRY_POLICY", spelling)
    sent = Commands()
    otel_retry.instrument()
    assert await attempts_of(mongo.client(deployment.uri, event_listeners=[sent]), deployment, sent) == 3


@pytest.mark.parametrize("value", ["", "  "])
async def test_an_empty_variable_counts_as_none(
    mongo: Flavour, deployment: Deployment, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("OTEL_RETRY_POLICY", value)
    sent = Commands()
    otel_retry.instrument()
    assert await attempts_of(mongo.client(deployment.uri, event_listeners=[sent]), deployment, sent) == 6


async def test_what_is_passed_in_wins_over_the_environment(
    mongo: Flavour, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RETRY_POLICY", "driver")
    sent = Commands()
    otel_retry.instrument("backpressure")
    assert await attempts_of(mongo.client(deployment.uri, event_listeners=[sent]), deployment, sent) == 6


async def test_clients_have_policies_of_their_own_without_instrument(
    mongo: Flavour, deployment: Deployment
) -> None:
    counts = {}
    for policy in ("backpressure", "current"):
        sent = Commands()
        client = mongo.client(deployment.uri, event_listeners=[sent])
        otel_retry.instrument_client(client, policy=policy)
        counts[policy] = (client, sent)
    one, other = counts["backpressure"], counts["current"]
    assert await attempts_of(one[0], deployment, one[1]) == 6
    assert await attempts_of(other[0], deployment, other[1]) == 3
    assert otel_retry.budget(one[0]).tokens == 995
    assert otel_retry.budget(other[0]) is None


async def test_without_instrument_other_clients_stay_pymongos(mongo: Flavour, deployment: Deployment) -> None:
    sent = Commands()
    plain = mongo.client(deployment.uri, event_listeners=[sent])
    before = await attempts_of(plain, deployment, sent)
    otel_retry.instrument_client(mongo.client(deployment.uri))
    assert await attempts_of(plain, deployment, sent) == before
    assert otel_retry.budget(plain) is None


async def test_a_client_keeps_its_own_policy_beside_instrument(
    mongo: Flavour, deployment: Deployment
) -> None:
    sent = Commands()
    otel_retry.instrument("backpressure")
    special = mongo.client(deployment.uri, event_listeners=[sent])
    common = mongo.client(deployment.uri, event_listeners=[sent])
    otel_retry.instrument_client(special, policy="once")
    assert await attempts_of(special, deployment, sent) == 1
    assert await attempts_of(common, deployment, sent) == 6


async def test_a_client_that_is_older_than_instrument_is_covered(
    mongo: Flavour, deployment: Deployment
) -> None:
    sent = Commands()
    client = mongo.client(deployment.uri, event_listeners=[sent])
    await resolve(client.admin.command("ping"))
    otel_retry.instrument("backpressure")
    assert await attempts_of(client, deployment, sent) == 6


async def test_a_second_instrument_replaces_the_first_and_the_bucket_is_full_again(
    mongo: Flavour, deployment: Deployment
) -> None:
    sent = Commands()
    otel_retry.instrument("backpressure")
    client = mongo.client(deployment.uri, event_listeners=[sent])
    await attempts_of(client, deployment, sent)
    otel_retry.instrument("current")
    assert await attempts_of(client, deployment, sent) == 3
    otel_retry.instrument("backpressure")
    assert otel_retry.budget(client).tokens == 1000


async def test_after_uninstrument_pymongo_decides_again(mongo: Flavour, deployment: Deployment) -> None:
    sent = Commands()
    client = mongo.client(deployment.uri, event_listeners=[sent])
    before = await attempts_of(client, deployment, sent)
    otel_retry.instrument("backpressure")
    assert await attempts_of(client, deployment, sent) == 6
    otel_retry.uninstrument()
    assert await attempts_of(client, deployment, sent) == before
    assert otel_retry.budget(client) is None


async def test_a_policy_of_ones_own_is_asked(mongo: Flavour, deployment: Deployment) -> None:
    asked: list[RetryContext] = []

    class Twice(RetryPolicy):
        def on_request_error(self, context: RetryContext) -> RetryDecision:
            asked.append(context)
            return RetryDecision.try_next_host() if context.retries < 2 else RetryDecision.rethrow()

    sent = Commands()
    otel_retry.instrument(Twice())
    assert await attempts_of(mongo.client(deployment.uri, event_listeners=[sent]), deployment, sent) == 3
    assert [context.attempt for context in asked] == [1, 2, 3]
    assert [context.tokens for context in asked] == [1000, 999, 998]


@pytest.mark.parametrize("policy", ["backpressure", "current", "persistent"])
@pytest.mark.parametrize("gate", ["retryReads", "retryWrites"])
async def test_every_policy_honours_retry_reads_and_retry_writes(
    mongo: Flavour, deployment: Deployment, database_name: str, policy: str, gate: str
) -> None:
    otel_retry.instrument(policy)
    sent = Commands()
    database = mongo.client(deployment.uri, event_listeners=[sent], **{gate: False})[database_name]
    closed = {"retryReads": "find", "retryWrites": "insert"}[gate]
    for command, operation in (
        ("find", lambda: database.items.find_one({})),
        ("insert", lambda: database.items.insert_one({})),
    ):
        labels = ["RetryableWriteError"] if command == "insert" else []
        with deployment.fail_command(commands=[command], times=1, errorCode=6, errorLabels=labels):
            if command == closed:
                with pytest.raises(OperationFailure):
                    await resolve(operation())
            else:
                await resolve(operation())
        assert (command, sent.count(command)) == (command, 1 if command == closed else 2)


class TestErrors:
    """No server is needed to say what cannot be."""

    def test_an_unknown_name_is_answered_with_those_there_are(self) -> None:
        with pytest.raises(SettingError) as raised:
            otel_retry.instrument("agressive")
        message = str(raised.value)
        assert "'agressive'" in message
        assert all(policy in message for policy in POLICIES)

    def test_an_unknown_name_in_the_environment_is_answered_with_the_variables_name(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_RETRY_POLICY", "agressive")
        with pytest.raises(SettingError) as raised:
            otel_retry.instrument()
        message = str(raised.value)
        assert "OTEL_RETRY_POLICY" in message
        assert "'agressive'" in message
        assert all(policy in message for policy in POLICIES)

    def test_an_unknown_option_is_answered_with_those_there_are(self) -> None:
        with pytest.raises(SettingError) as raised:
            otel_retry.instrument(polizy="current")
        assert "'polizy'" in str(raised.value)
        assert "policy" in str(raised.value)

    @pytest.mark.parametrize("value", [3, ["current"], object()])
    def test_a_value_of_another_type_is_answered_with_what_is_taken(self, value: Any) -> None:
        with pytest.raises(SettingError) as raised:
            otel_retry.instrument(value)
        assert repr(value) in str(raised.value)
        assert "RetryPolicy" in str(raised.value)
        assert all(policy in str(raised.value) for policy in POLICIES)

    def test_a_class_instead_of_an_instance_is_told_apart(self) -> None:
        class Mine(RetryPolicy):
            pass

        with pytest.raises(SettingError, match=r"policy=Mine\(\)"):
            otel_retry.instrument(Mine)

    def test_rules_that_are_not_among_those_there_are_are_refused(self) -> None:
        class Lawless(RetryPolicy):
            rules = None

        with pytest.raises(SettingError) as raised:
            otel_retry.instrument(Lawless())
        assert all(name in str(raised.value) for name in otel_retry.RULES)

    def test_a_wrong_setting_leaves_what_was_set_before(self) -> None:
        otel_retry.instrument("current")
        with pytest.raises(SettingError):
            otel_retry.instrument("agressive")
        from pymongo import MongoClient

        with MongoClient("mongodb://localhost:1/", connect=False) as client:
            assert otel_retry.budget(client) is None  # `current` has none, the default would

    async def test_a_client_is_not_instrumented_by_a_call_that_failed(
        self, mongo: Flavour, deployment: Deployment
    ) -> None:
        client = mongo.client(deployment.uri)
        with pytest.raises(SettingError):
            otel_retry.instrument_client(client, policy="agressive")
        assert otel_retry.budget(client) is None


def test_what_is_expected_here_are_all_the_policies_there_are() -> None:
    from otel_retry.policies import POLICIES as THERE

    assert set(POLICIES) == set(THERE)


async def test_clients_that_pymongo_calls_equal_have_a_bucket_each(
    mongo: Flavour, deployment: Deployment, instrument: Callable[..., None]
) -> None:
    instrument("backpressure")
    one, other = mongo.client(deployment.uri), mongo.client(deployment.uri)
    assert one == other  # PyMongo compares seeds
    assert otel_retry.budget(one) is not otel_retry.budget(other)
