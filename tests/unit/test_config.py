"""Settings: who wins, and what is said about a value that cannot be."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pymongo import MongoClient

import otel_retry
from otel_retry import instrumentor
from otel_retry.config import SettingError, Settings, shown
from otel_retry.policies import POLICIES, BackpressurePolicy, CurrentPolicy, OncePolicy
from otel_retry.policy import RULES, RetryPolicy, Rules

VARIABLE = "OTEL_RETRY_POLICY"

# A busy machine is slow, and that is no failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
    ids=lambda each: type(each).__name__,
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


@pytest.mark.parametrize(
    "wrong", [{"policy": "nonsense"}, {"policy": "once", "unknown": 1}, {"policy": Mine}]
)
def test_instrument_with_a_wrong_value_changes_nothing(wrong):
    client = MongoClient("localhost:1", connect=False)
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


BOOLEANS = ["enabled", "metrics", "query_text_raw", "capture_statement"]
LENGTHS = ["query_text_max_length", "max_collections"]
HOOKS = ["request_hook", "response_hook", "failed_hook"]
PROVIDERS = {"tracer_provider": "get_tracer", "meter_provider": "get_meter"}
VARIABLES = {item.name: item.metadata["variable"] for item in fields(Settings)}


def test_every_setting_is_tested_here_and_explains_itself():
    assert sorted(VARIABLES) == sorted(["policy", "attempt_spans", *BOOLEANS, *LENGTHS, *HOOKS, *PROVIDERS])
    for item in fields(Settings):
        assert item.metadata["help"]
        assert callable(item.metadata["parse"])


def test_no_two_settings_share_a_variable():
    variables = [variable for variable in VARIABLES.values() if variable is not None]

    assert len(set(variables)) == len(variables)
    assert all(variable.startswith("OTEL_") for variable in variables)
    assert VARIABLES["policy"] == VARIABLE
    assert VARIABLES["enabled"] == "OTEL_PYTHON_INSTRUMENTATION_MONGODB_ENABLED"
    assert VARIABLES["query_text_max_length"] == "OTEL_PYTHON_INSTRUMENTATION_MONGODB_QUERY_TEXT_MAX_LENGTH"


def test_the_defaults_trace_measure_and_show_no_data():
    settings = load()

    assert (settings.enabled, settings.metrics) == (True, True)
    assert (settings.query_text_max_length, settings.query_text_raw) == (0, False)


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        *[(value, True) for value in (True, 1, "true", " TRUE ", "1", "on", "yes")],
        *[(value, False) for value in (False, 0, "false", "False", "0", "Off", "no")],
    ],
)
def test_a_switch_takes_what_people_write(name, value, meaning):
    assert getattr(load(**{name: value}), name) is meaning
    if isinstance(value, str) and VARIABLES[name]:
        assert getattr(load({VARIABLES[name]: value}), name) is meaning


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("value", "meaning"), [(0, 0), (7, 7), ("7", 7), (" 12 ", 12), ("0", 0)])
def test_a_length_takes_a_whole_number(name, value, meaning):
    assert getattr(load(**{name: value}), name) == meaning
    if isinstance(value, str):
        assert getattr(load({VARIABLES[name]: value}), name) == meaning


@pytest.mark.parametrize("value", ["all", "retried", " Retried "])
def test_attempt_spans_are_for_all_attempts_or_for_retried_operations(value):
    assert load().attempt_spans == "all"
    assert load(attempt_spans=value).attempt_spans == value.strip().lower()
    assert load({"OTEL_RETRY_ATTEMPT_SPANS": value}).attempt_spans == value.strip().lower()


WRONG = [
    *[("attempt_spans", value, "all or retried") for value in ("none", 1, True, [], "")],
    *[(name, value, "true or false") for name in BOOLEANS for value in ("maybe", "2", 2, [], "")],
    *[
        (name, value, "whole number, 0 or more")
        for name in LENGTHS
        for value in (-1, "-1", "7.5", 7.5, "x", True, [])
    ],
    *[(name, value, "function") for name in HOOKS for value in (7, "print", [])],
    *[(name, value, method) for name, method in PROVIDERS.items() for value in (7, "sdk", object)],
]


@pytest.mark.parametrize(("name", "value", "possible"), WRONG)
def test_every_wrong_option_is_named_with_its_value_and_what_it_takes(name, value, possible):
    with pytest.raises(SettingError) as caught:
        load(**{name: value})

    assert f"option {name}" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert possible in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "possible"),
    [
        (name, value, possible)
        for name, value, possible in WRONG
        if VARIABLES[name] and isinstance(value, str) and value
    ],
)
def test_every_wrong_variable_is_named_with_its_value_and_what_it_takes(name, value, possible, caplog):
    environment = {VARIABLES[name]: value}
    with pytest.raises(SettingError) as caught:
        load(environment)

    assert VARIABLES[name] in str(caught.value)
    assert repr(value) in str(caught.value)
    assert possible in str(caught.value)
    forgiven = Settings.load({}, environment=environment, forgiving=True)
    assert getattr(forgiven, name) == getattr(load(), name)
    assert len(caplog.records) == 1


def test_a_switch_switched_off_by_keyword_wins_over_the_variable_that_switches_it_on():
    """False is given, not missing."""
    assert load({VARIABLES["metrics"]: "true"}, metrics=False).metrics is False
    assert load({VARIABLES["query_text_max_length"]: "9"}, query_text_max_length=0).query_text_max_length == 0


def test_capture_statement_sets_a_length_where_none_is_given():
    assert load(capture_statement=True).query_text_max_length == 1024
    assert load(capture_statement=True, query_text_max_length=7).query_text_max_length == 7
    assert load(capture_statement=False).query_text_max_length == 0


@patient
@given(
    environment=st.dictionaries(
        st.sampled_from([variable for variable in VARIABLES.values() if variable]),
        st.one_of(st.text(), st.sampled_from([*POLICIES, "true", "0", "-1", "1e9", "9" * 4500])),
    )
)
@example(environment={VARIABLES["max_collections"]: "\uff19"})  # a digit, though not one of ours
@example(environment={VARIABLES["max_collections"]: "9" * 4500})  # Python refuses to convert so many
def test_any_environment_gives_settings_or_a_setting_error(environment):
    try:
        assert isinstance(load(environment), Settings)
    except SettingError as error:
        assert any(variable in str(error) for variable in environment)  # noqa: PT017
    assert isinstance(Settings.load({}, environment=environment, forgiving=True), Settings)


@patient
@given(text=st.text())
@example(text="\x00")
@example(text="{policy}")
@example(text="%s %(x)s")
@example(text="CURRENT")
@example(text="ﬁrst")  # ligatures change their length in upper and lower case
def test_any_text_in_the_variable_is_a_policy_or_a_setting_error(text):
    if not text.strip() or text.strip().lower() in POLICIES:
        assert isinstance(load({VARIABLE: text}).policy, RetryPolicy)
    else:
        with pytest.raises(SettingError) as caught:
            load({VARIABLE: text})
        assert VARIABLE in str(caught.value)
        assert shown(text) in str(caught.value)
    assert isinstance(Settings.load({}, environment={VARIABLE: text}, forgiving=True), Settings)


@patient
@given(
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.binary(),
        st.lists(st.text()),
        st.just(object),
    )
)
def test_any_value_of_the_keyword_is_a_policy_or_a_setting_error(value):
    try:
        assert isinstance(load(policy=value).policy, RetryPolicy)
    except SettingError as error:
        assert "option policy" in str(error)  # noqa: PT017
