"""Settings: who wins, and what is said about a value that cannot be."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import otel_retry
from otel_retry import instrumentor
from otel_retry.config import SettingError, Settings
from otel_retry.policies import POLICIES, BackpressurePolicy, CurrentPolicy, OncePolicy
from otel_retry.policy import RULES, RetryPolicy, Rules

VARIABLE = "OTEL_RETRY_POLICY"


class Mine(RetryPolicy):
    name = "mine"


class OwnRules(RetryPolicy):
    rules = Rules(name="mine", bucket=False, overload_retries=1_000_000)


class Unrelated:
    def __repr__(self) -> str:
        return "<some object>"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    otel_retry.uninstrument()


def load(environment: dict[str, str] | None = None, **given_: Any) -> Settings:
    return Settings.load(given_, environment=environment or {})


def test_the_default_is_backpressure():
    assert type(load().policy) is BackpressurePolicy


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_named_by_keyword_and_by_variable(name):
    assert type(load(policy=name).policy) is POLICIES[name]
    assert type(load({VARIABLE: name}).policy) is POLICIES[name]


@pytest.mark.parametrize("spelling", ["current", "Current", " CURRENT ", "current\n"])
def test_case_and_blanks_around_a_name_do_not_matter(spelling):
    assert type(load({VARIABLE: spelling}).policy) is CurrentPolicy
    assert type(load(policy=spelling).policy) is CurrentPolicy


def test_the_variable_wins_over_the_default_and_the_keyword_over_the_variable():
    assert type(load({VARIABLE: "current"}).policy) is CurrentPolicy
    assert type(load({VARIABLE: "current"}, policy="once").policy) is OncePolicy


def test_a_keyword_of_none_counts_as_not_given():
    assert type(load({VARIABLE: "current"}, policy=None).policy) is CurrentPolicy
    assert type(load(policy=None).policy) is BackpressurePolicy


@pytest.mark.parametrize("value", ["", " ", "\t\n"])
def test_an_empty_variable_counts_as_not_set(value):
    assert type(load({VARIABLE: value}).policy) is BackpressurePolicy


def test_a_wrong_variable_does_not_matter_where_the_keyword_wins():
    assert type(load({VARIABLE: "nonsense"}, policy="once").policy) is OncePolicy


def test_without_an_environment_the_process_s_own_is_read(monkeypatch):
    monkeypatch.setenv(VARIABLE, "once")

    assert type(Settings.load({}).policy) is OncePolicy


def test_an_instance_is_taken_as_it_is():
    mine = Mine()

    assert load(policy=mine).policy is mine


def test_two_loads_do_not_share_a_policy_object():
    assert load().policy is not load().policy


@pytest.mark.parametrize(
    ("value", "possibilities"),
    [
        ("nonsense", POLICIES),
        ("", POLICIES),
        ("back pressure", POLICIES),
        (7, POLICIES),
        (True, POLICIES),
        (b"current", POLICIES),
        (["current"], POLICIES),
        (Unrelated(), POLICIES),
        (Unrelated, POLICIES),
        (Mine, ["policy=Mine()"]),
        (OwnRules(), RULES),
    ],
    ids=repr,
)
def test_a_wrong_keyword_is_named_with_its_value_and_what_is_possible(value, possibilities):
    with pytest.raises(SettingError) as caught:
        load(policy=value)

    message = str(caught.value)
    assert "option policy" in message
    assert repr(value) in message
    assert [one for one in possibilities if one not in message] == []
    assert VARIABLE not in message


def test_a_wrong_variable_is_named_with_its_value_and_what_is_possible():
    with pytest.raises(SettingError) as caught:
        load({VARIABLE: "nonsense"})

    message = str(caught.value)
    assert VARIABLE in message
    assert "'nonsense'" in message
    assert [name for name in POLICIES if name not in message] == []
    assert "option policy" not in message


def test_an_unknown_option_is_named_with_those_that_exist():
    with pytest.raises(SettingError) as caught:
        load(polices="current")

    assert "'polices'" in str(caught.value)
    assert [item.name for item in fields(Settings) if item.name not in str(caught.value)] == []


def test_the_wrong_setting_is_a_value_error():
    """So that applications need not import ours to catch it."""
    assert issubclass(SettingError, ValueError)
    assert otel_retry.SettingError is SettingError


@pytest.mark.parametrize(
    ("given_", "environment", "named"),
    [
        ({"policy": "nonsense"}, {}, "option policy"),
        ({}, {VARIABLE: "nonsense"}, VARIABLE),
        ({"polices": 1}, {}, "polices"),
    ],
)
def test_forgiving_logs_the_same_words_and_uses_the_default(caplog, given_, environment, named):
    with pytest.raises(SettingError) as strict:
        Settings.load(given_, environment=environment)
    with caplog.at_level(logging.WARNING, logger="otel_retry"):
        settings = Settings.load(given_, environment=environment, forgiving=True)

    assert type(settings.policy) is BackpressurePolicy
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert named in record.getMessage()
    assert str(strict.value) in record.getMessage()
    assert "default" in record.getMessage()


def test_forgiving_keeps_what_is_right_beside_what_is_wrong(caplog):
    settings = Settings.load({"policy": "once", "polices": 1}, environment={}, forgiving=True)

    assert type(settings.policy) is OncePolicy
    assert len(caplog.records) == 1


def test_forgiving_says_nothing_when_nothing_is_wrong(caplog):
    Settings.load({"policy": "once"}, environment={VARIABLE: "nonsense"}, forgiving=True)

    assert caplog.records == []


@pytest.mark.parametrize("wrong", [{"policy": "nonsense"}, {"policy": "once", "unknown": 1}, {"policy": Mine}])
def test_instrument_with_a_wrong_value_changes_nothing(wrong):
    class Client:
        """Has the options that the registry looks at."""

        class options:  # noqa: N801
            _options: dict[str, Any] = {}  # noqa: RUF012
            retry_reads = retry_writes = True

    client = Client()
    with pytest.raises(SettingError):
        otel_retry.instrument(**wrong)
    assert not instrumentor._seam.installed
    assert instrumentor._registry.empty

    otel_retry.instrument("current")
    before = instrumentor._registry.of(client)
    with pytest.raises(SettingError):
        otel_retry.instrument(**wrong)
    with pytest.raises(SettingError):
        otel_retry.instrument_client(client, **wrong)
    assert instrumentor._seam.installed
    assert instrumentor._registry.of(client) is before


def test_settings_cannot_be_changed_afterwards():
    settings = load()

    with pytest.raises(AttributeError):
        settings.policy = CurrentPolicy()


def test_every_setting_knows_its_variable_and_explains_itself():
    for item in fields(Settings):
        assert item.metadata["variable"].startswith("OTEL_")
        assert item.metadata["help"]
        assert callable(item.metadata["parse"])


def test_no_two_settings_share_a_variable():
    variables = [item.metadata["variable"] for item in fields(Settings)]

    assert len(set(variables)) == len(variables)


@given(text=st.text())
@example(text="\x00")
@example(text="{policy}")
@example(text="%s %(x)s")
@example(text="CURRENT")
@example(text="ﬁrst")  # ligatures change their length in upper and lower case
def test_any_text_in_the_variable_is_a_policy_or_a_setting_error(text):
    try:
        settings = load({VARIABLE: text})
    except SettingError as error:
        assert VARIABLE in str(error)
        assert repr(text) in str(error)
        assert text.strip().lower() not in POLICIES
    else:
        assert isinstance(settings.policy, RetryPolicy)
        assert not text.strip() or text.strip().lower() in POLICIES
    assert isinstance(Settings.load({}, environment={VARIABLE: text}, forgiving=True), Settings)


@given(
    value=st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.text()), st.just(object)
    )
)
def test_any_value_of_the_keyword_is_a_policy_or_a_setting_error(value):
    try:
        assert isinstance(load(policy=value).policy, RetryPolicy)
    except SettingError as error:
        assert "option policy" in str(error)  # noqa: PT017
