"""`db.query.text`: never longer than asked for, never with a value in it unless raw text was asked for."""

from __future__ import annotations

import datetime as dt
import json
import string
import time
import timeit
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import bson
import pytest
from bson import (
    SON,
    Binary,
    Code,
    DatetimeMS,
    DBRef,
    Decimal128,
    Int64,
    MaxKey,
    MinKey,
    ObjectId,
    Regex,
    Timestamp,
    json_util,
)
from bson.raw_bson import RawBSONDocument
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_retry.config import Settings
from otel_retry.telemetry.query_text import LEFT_OUT, query_text

PLANTED = "planted"

keys = st.text(string.ascii_letters + "$._", min_size=1, max_size=8)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1).map(Int64),
    st.floats(),
    st.text(max_size=30),
    st.binary(max_size=30),
    st.binary(max_size=30).map(lambda value: Binary(value, 128)),
    st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-1000, max_value=1000).map(
        lambda value: Decimal128(str(value))
    ),
    st.binary(min_size=12, max_size=12).map(ObjectId),
    st.datetimes(min_value=dt.datetime(1970, 1, 2), max_value=dt.datetime(9000, 1, 1)).map(  # noqa: DTZ001
        lambda value: value.replace(tzinfo=dt.UTC)
    ),
    st.integers(0, 2**40).map(DatetimeMS),
    st.text(string.ascii_letters, max_size=10).map(lambda value: Regex(value, "i")),
    st.text(string.ascii_letters, max_size=10).map(lambda value: Code(value, {"x": 1})),
    st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)).map(lambda value: Timestamp(*value)),
    st.just(MinKey()),
    st.just(MaxKey()),
    st.binary(min_size=12, max_size=12).map(lambda value: DBRef("c", ObjectId(value))),
)

documents = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(SON),
    ),
    max_leaves=20,
)

commands = st.dictionaries(
    keys.filter(lambda key: key not in {*LEFT_OUT, "find"}), documents, max_size=5
).map(lambda rest: {"find": "things", **rest})


def test_it_is_off_by_default():
    assert Settings.load({}, environment={}).query_text_max_length == 0
    assert not Settings.load({}, environment={}).query_text_raw


@settings(deadline=None, max_examples=60)
@given(commands, st.integers(0, 300), st.booleans())
def test_it_is_never_longer_than_the_limit(command, limit, raw):
    assert len(query_text(command, limit=limit, raw=raw)) <= limit


@settings(deadline=None, max_examples=60)
@given(commands)
def test_without_values_it_is_json_of_the_same_shape_with_question_marks(command):
    found = json.loads(query_text(command, limit=1_000_000, raw=False))

    assert list(found) == list(command)
    assert found.pop("find") == "things"

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for each in value.values():
                yield from leaves(each)
        elif isinstance(value, list):
            for each in value:
                yield from leaves(each)
        else:
            yield value

    assert set(leaves(found)) <= {"?"}


@settings(deadline=None, max_examples=60)
@given(commands)
@example({"find": "things", "filter": {"n": float("nan"), "m": float("-inf")}})
@example({"find": "things", "filter": DBRef("c", 1, "db", extra={"x": Int64(5)})})
def test_raw_it_is_relaxed_extended_json_of_the_command(command):
    text = query_text(command, limit=1_000_000, raw=True)

    expected = json_util.dumps(command, json_options=json_util.RELAXED_JSON_OPTIONS)
    assert json.loads(text) == json.loads(expected)


def test_raw_a_uuid_is_extended_json_too():
    text = query_text({"find": "c", "filter": {"_id": uuid.UUID(int=5)}}, limit=1000, raw=True)

    assert json.loads(text)["filter"]["_id"] == {
        "$binary": {"base64": "AAAAAAAAAAAAAAAAAAAABQ==", "subType": "04"}
    }


PLANTS = {
    "text": PLANTED,
    "bytes": PLANTED.encode(),
    "binary": Binary(PLANTED.encode(), 128),
    "regex": Regex(PLANTED),
    "code": Code(PLANTED),
    "code with scope": Code("x", {"y": PLANTED}),
    "dbref": DBRef(PLANTED, PLANTED, PLANTED, note=PLANTED),
    "list": [PLANTED],
    "tuple": (PLANTED, [PLANTED]),
    "nested": {"a": [{"b": [PLANTED, {"c": PLANTED}]}]},
    "son": SON([("a", PLANTED)]),
    "raw": RawBSONDocument(bson.encode({"a": PLANTED, "b": {"c": [PLANTED]}})),
    "list of raw": [RawBSONDocument(bson.encode({"a": PLANTED}))],
    "a type of nobody's": type("Mine", (), {"__repr__": lambda _: PLANTED})(),
    "a set": {PLANTED},
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
@pytest.mark.parametrize(
    "around",
    [
        lambda plant: {"find": "things", "filter": plant},
        lambda plant: {"insert": "things", "documents": [{"_id": 1, "a": plant}, plant, 1, plant]},
        lambda plant: {"aggregate": 1, "pipeline": [{"$match": {"a": {"$in": [1, plant, [plant]]}}}]},
        lambda plant: {"update": "things", "updates": [{"q": {"a": plant}, "u": {"$set": {"a": plant}}}]},
        lambda plant: {"ping": plant, "comment": plant} if not isinstance(plant, str) else {"ping": [plant]},
    ],
    ids=["filter", "documents", "pipeline", "updates", "command"],
)
def test_no_value_is_in_it_wherever_it_was_planted(plant, around):
    text = query_text(around(plant), limit=100_000, raw=False)

    assert PLANTED not in text
    assert "cGxhbnRlZA" not in text  # the same in base64


@settings(deadline=None, max_examples=60)
@given(documents.filter(lambda value: isinstance(value, (dict, list))), st.integers(1, 400))
def test_no_value_is_in_a_text_that_was_cut(document, limit):
    def planted(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: planted(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [planted(each) for each in value]
        return PLANTED

    text = query_text({"find": "things", "filter": planted(document)}, limit=limit, raw=False)
    assert PLANTED not in text


@pytest.mark.parametrize(
    "command", ["usersInfo", "dropUser", "createRole", "getParameter", "killOp", "whatever"]
)
def test_the_argument_of_a_command_that_takes_no_collection_is_a_value_too(command):
    assert PLANTED not in query_text({command: PLANTED, "$db": "admin"}, limit=1000, raw=False)


def test_what_the_specification_leaves_out_is_absent():
    command = {
        "find": "things",
        "filter": {"lsid": 1},
        "lsid": {"id": Binary(b"0" * 16, 4)},
        "$db": "shop",
        "$clusterTime": {"clusterTime": Timestamp(1, 1), "signature": {"hash": b"", "keyId": 1}},
        "signature": "s",
        "txnNumber": Int64(1),
    }

    for raw in (False, True):
        found = json.loads(query_text(command, limit=10_000, raw=raw))
        assert set(found) == {"find", "filter", "txnNumber"}
        assert set(found["filter"]) == {"lsid"}  # the application's own field of that name stays


class Counting(Mapping[str, Any]):
    """As large as anything, and counts how much of it was looked at."""

    def __init__(self, looked: list[str], size: int = 1_000_000) -> None:
        self._looked = looked
        self._size = size

    def __getitem__(self, key: str) -> Any:
        self._looked.append(key)
        return "value"

    def __iter__(self) -> Iterator[str]:
        return (f"key{index}" for index in range(self._size))

    def __len__(self) -> int:
        return self._size


@pytest.mark.parametrize("raw", [False, True])
def test_what_is_beyond_the_limit_is_not_looked_at(raw):
    looked: list[str] = []
    query_text({"find": "things", "filter": Counting(looked)}, limit=200, raw=raw)

    assert len(looked) < 30


@pytest.mark.parametrize("raw", [False, True])
def test_a_huge_list_costs_no_more_than_a_short_one(raw):
    command = {"insert": "things", "documents": [{"a": index} for index in range(200_000)]}

    assert len(query_text(command, limit=500, raw=raw)) == 500
    assert min(timeit.repeat(lambda: query_text(command, limit=500, raw=raw), number=1, repeat=10)) < 0.05


@pytest.mark.parametrize("value", ["x" * 16_000_000, b"x" * 16_000_000], ids=["text", "bytes"])
def test_raw_a_huge_value_costs_no_more_than_a_short_one(value):
    best = min(_seconds(value) for _ in range(10))

    assert best < 0.02


def _seconds(value: Any) -> float:
    started = time.perf_counter()
    query_text({"find": "things", "filter": {"a": value}}, limit=500, raw=True)
    return time.perf_counter() - started


def test_a_document_that_is_nested_without_end_ends():
    document: dict[str, Any] = {}
    document["again"] = document

    assert len(query_text({"find": "things", "filter": document}, limit=5000, raw=False)) <= 5000


def test_a_mapping_that_fails_is_no_error():
    class Broken(Counting):
        def __getitem__(self, key: str) -> Any:
            raise RuntimeError(PLANTED)

    text = query_text({"find": "things", "filter": Broken([])}, limit=1000, raw=False)
    assert PLANTED not in text
