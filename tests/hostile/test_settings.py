"""Every setting, given anything, as an argument or in the environment: a named error or a default, never half of it."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pymongo import MongoClient

import otel_retry
from otel_retry import RetryPolicy, instrumentor
from otel_retry.config import (
    SettingError,
    Settings,
    otlp_endpoint,
    otlp_protocol,
    otlp_wanted,
    shown,
)
from otel_retry.policies import POLICIES
from tests.hostile.bench import hostile

KNOWN = {item.name: item for item in fields(Settings)}
VARIABLES = {item.metadata["variable"]: name for name, item in KNOWN.items() if item.metadata["variable"]}


class Hostile:
    """Whatever is asked of it, it raises; but hypothesis must be able to write it."""

    def __repr__(self) -> str:
        return "Hostile()"

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("planted")

    __str__ = __bool__ = __len__ = __int__ = __index__ = _raise

    @property
    def get_tracer(self) -> Any:
        raise RuntimeError("planted")

    get_meter = get_tracer


class Unwritable(Hostile):
    __repr__ = Hostile._raise


class Nameless(RetryPolicy):
    name = 7  # type: ignore[assignment]


class Verbose(RetryPolicy):
    name = "x" * 1_000_000


class Unruly(RetryPolicy):
    rules = property(Hostile()._raise)  # type: ignore[assignment]


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from([*POLICIES, "true", "0", "17", "-1", "1e3", "9" * 5000, "x" * 100_000, "\udcff", "on\n"]),
    st.lists(st.integers(), max_size=2),
    st.sampled_from(
        [Hostile(), Hostile, RetryPolicy(), RetryPolicy, Nameless(), Verbose(), Unruly(), print, 10**400]
    ),
)
arguments = st.dictionaries(
    st.one_of(st.sampled_from([*KNOWN]), st.text(min_size=1, max_size=10)), anything, max_size=5
)
environments = st.dictionaries(
    st.sampled_from([*VARIABLES]),
    st.one_of(
        st.text(st.characters(exclude_characters="\0"), max_size=20),
        st.sampled_from(
            [*POLICIES, "true", "0", "17", "-1", "9" * 5000, "x" * 100_000, "\udcff", " ", "mongodb://h"]
        ),
    ),
    max_size=4,
)


def tried(read: Any) -> tuple[Any, str]:
    """What it gives, or what the error says; any other error than ours is a failure of the test."""
    try:
        return read(), ""
    except SettingError as error:
        return None, str(error)


def makes_sense(found: Settings) -> bool:
    return (
        isinstance(found.policy, RetryPolicy)
        and len(str(found.policy)) <= 200
        and all(isinstance(getattr(found, name), bool) for name in ("enabled", "metrics", "query_text_raw"))
        and all(
            type(getattr(found, name)) is int and getattr(found, name) >= 0
            for name in ("query_text_max_length", "max_collections")
        )
        and all(
            getattr(found, name) is None or callable(getattr(found, name))
            for name in ("request_hook", "response_hook", "failed_hook")
        )
    )


@settings(hostile, max_examples=150)
@given(arguments, environments)
@example({"policy": Hostile()}, {})
@example({"policy": Unruly()}, {})
@example({"policy": Nameless()}, {})
@example({"enabled": Hostile(), "tracer_provider": Hostile()}, {})
def test_arguments_and_variables_make_settings_or_one_short_error_that_names_the_source(given_, environment):
    found, error = tried(lambda: Settings.load(given_, environment=environment))
    if found is not None:
        assert makes_sense(found)
        return
    assert len(error) < 1000
    assert "planted" not in error
    names = [*(f"option {name} " for name in given_), *(shown(name) for name in given_), *environment]
    assert any(name in error for name in names)


@pytest.mark.parametrize("name", KNOWN)
def test_a_value_that_cannot_even_be_written_is_named_by_its_type(name):
    with pytest.raises(SettingError, match=f"option {name} is <Unwritable>"):
        Settings.load({name: Unwritable()}, environment={})


@settings(hostile, max_examples=80)
@given(arguments, environments)
@example({"policy": Hostile(), "query_text_max_length": 17}, {})
def test_under_auto_instrumentation_what_is_wrong_is_a_default_and_what_is_right_is_kept(given_, environment):
    logging.getLogger("otel_retry").disabled = True
    try:
        found = Settings.load(given_, environment=environment, forgiving=True)
    finally:
        logging.getLogger("otel_retry").disabled = False
    assert makes_sense(found)
    for name, value in given_.items():
        try:
            alone = Settings.load({name: value}, environment=environment if value is None else {})
        except SettingError:
            continue
        if value is not None and name != "capture_statement":
            assert type(getattr(found, name)) is type(getattr(alone, name))


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "nonsense"},
        {"metrics": "perhaps"},
        {"no_such_option": 1},
        {"policy": Nameless()},
        {"tracer_provider": 1},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("already", [None, "current"])
def test_a_wrong_setting_changes_nothing(instrument, wrong, already):
    with MongoClient("mongodb://127.0.0.1:1", connect=False) as client:
        if already is not None:
            instrument(policy=already)
        before = otel_retry.budget(client), instrumentor._seam.installed, instrumentor.state_of(client)
        for attempt in (instrument, lambda **options: otel_retry.instrument_client(client, **options)):
            with pytest.raises(SettingError):
                attempt(**{"query_text_max_length": 5, **wrong})
            assert (
                otel_retry.budget(client),
                instrumentor._seam.installed,
                instrumentor.state_of(client),
            ) == before


@pytest.mark.parametrize(
    "thing", [None, "mongodb://u:planted@h", 7, Hostile(), object()], ids=lambda each: type(each).__name__
)
def test_what_is_no_client_is_refused_by_name_and_changes_nothing(thing):
    with pytest.raises(SettingError, match="MongoClient") as caught:
        otel_retry.instrument_client(thing)

    assert type(thing).__name__ in str(caught.value)
    assert "planted" not in str(caught.value)
    assert not instrumentor._seam.installed


@settings(hostile, max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "OTEL_EXPORTER_OTLP_PROTOCOL",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
                "OTEL_TRACES_EXPORTER",
                "OTEL_METRICS_EXPORTER",
                "OTEL_EXPORTER_OTLP_ENDPOINT",
            ]
        ),
        st.one_of(st.text(max_size=10), st.sampled_from(["grpc", "http/protobuf", "none", "x" * 10_000])),
    )
)
def test_the_variables_of_the_exporters_are_read_or_named(environment):
    for read in (
        lambda: otlp_protocol("TRACES", environment),
        lambda: otlp_wanted("METRICS", environment),
        lambda: otlp_endpoint(environment),
    ):
        found, error = tried(read)
        assert found is not None or (len(error) < 500 and any(name in error for name in environment))
