"""The analysis by itself; tests/spec/test_idempotence.py asks a real server whether it is right."""

from __future__ import annotations

import re
from typing import Any

import pytest
from bson import ObjectId
from hypothesis import given
from hypothesis import strategies as st

from otel_retry.idempotence import (
    Statement,
    idempotent,
    insert_is_recognisable,
    is_by_id,
    is_idempotent,
    vouched,
)


def update(change: Any, query: Any = None, **options: Any) -> bool:
    query = {"_id": 1} if query is None else query
    return is_idempotent([Statement(verb="update", filter=query, update=change, **options)])


@pytest.mark.parametrize(
    "change",
    [
        {"$set": {"a": 1}},
        {"$unset": {"a": ""}},
        {"$max": {"a": 1}, "$min": {"b": 2}},
        {"$setOnInsert": {"a": 1}},
        {"$addToSet": {"a": {"$each": [1, 2]}}},
        {"$pull": {"a": {"$gt": 1}}},
        {"$pullAll": {"a": [1]}},
        {"$bit": {"a": {"and": 5}}},
        {"$bit": {"a": {"or": 5}}},
        {"$set": {"a.$[].b": 1}},
        {"$set": {"a.$[x].b": 1}},
        {"a": 1},
        [{"$set": {"a": 1, "b": "text", "c": {"d": [1, None]}}}],
        [{"$set": {"a": {"$literal": "$b"}}}],
        [{"$unset": ["a", "b"]}],
    ],
)
def test_what_has_a_fixed_point_is_idempotent(change: Any) -> None:
    assert update(change)


@pytest.mark.parametrize(
    "change",
    [
        {"$inc": {"a": 1}},
        {"$mul": {"a": 2}},
        {"$push": {"a": 1}},
        {"$pop": {"a": 1}},
        {"$rename": {"a": "b"}},
        {"$currentDate": {"a": True}},
        {"$bit": {"a": {"xor": 5}}},
        {"$set": {"a": 1}, "$inc": {"b": 1}},
        {"$set": {"a.$.b": 1}},
        {"$set": {"a.$": 1}},
        {"$unheardOf": {"a": 1}},
        {"$set": "not a document"},
        [{"$set": {"a": "$b"}}],
        [{"$set": {"a": {"$add": ["$a", 1]}}}],
        [{"$set": {"a": "$$NOW"}}],
        [{"$replaceWith": {"a": 1}}],
        "nonsense",
        None,
    ],
)
def test_what_is_not_known_to_have_one_is_not(change: Any) -> None:
    assert not update(change)


def test_a_single_update_must_name_the_document() -> None:
    assert not update({"$set": {"a": 1}}, {"a": 0})
    assert update({"$set": {"a": 1}}, {"a": 0}, multi=True)


def test_an_upsert_must_name_the_document_and_nothing_else() -> None:
    assert update({"$set": {"a": 1}}, upsert=True)
    assert not update({"$set": {"a": 1}}, {"_id": 1, "a": 0}, upsert=True)
    assert not update({"$set": {"a": 1}}, {"a": 0}, upsert=True, multi=True)


def test_deletes() -> None:
    assert is_idempotent([Statement(verb="delete", filter={"a": 1}, multi=True)])
    assert is_idempotent([Statement(verb="delete", filter={"_id": 1})])
    assert not is_idempotent([Statement(verb="delete", filter={"a": 1})])


@pytest.mark.parametrize(
    ("query", "by_id"),
    [
        ({"_id": 1}, True),
        ({"_id": {"$eq": 1}}, True),
        ({"_id": {"a": 1}}, True),
        ({"_id": {"$in": [1]}}, False),
        ({"_id": {"$gt": 1}}, False),
        ({"_id": re.compile("a")}, False),
        ({"a": 1}, False),
        ({"$or": [{"_id": 1}]}, False),
        ({}, False),
        (None, False),
    ],
)
def test_only_an_equal_id_names_one_document(query: Any, by_id: bool) -> None:
    assert is_by_id(query) == by_id


def merge(pipeline: Any, collection: str | None = "source") -> bool:
    return is_idempotent([Statement(verb="aggregate", pipeline=pipeline, collection=collection)])


@pytest.mark.parametrize(
    "pipeline",
    [
        [{"$out": "target"}],
        [{"$match": {"a": 1}}, {"$merge": "target"}],
        [
            {"$group": {"_id": "$a", "n": {"$sum": 1}}},
            {"$merge": {"into": "target", "whenMatched": "replace"}},
        ],
        [{"$project": {"a": 1}}, {"$sort": {"a": 1}}, {"$out": {"db": "x", "coll": "target"}}],
        [{"$unset": "a"}, {"$merge": {"into": {"db": "x", "coll": "target"}, "on": "_id"}}],
    ],
)
def test_stable_pipelines_into_another_collection_are_idempotent(pipeline: Any) -> None:
    assert merge(pipeline)


@pytest.mark.parametrize(
    "pipeline",
    [
        [{"$out": "source"}],
        [{"$merge": "source"}],
        [{"$limit": 1}, {"$merge": "target"}],
        [{"$sample": {"size": 1}}, {"$out": "target"}],
        [{"$set": {"at": "$$NOW"}}, {"$out": "target"}],
        [{"$set": {"r": {"$rand": {}}}}, {"$merge": "target"}],
        [{"$project": {"_id": 0, "a": 1}}, {"$merge": "target"}],
        [{"$unset": "_id"}, {"$out": "target"}],
        [{"$lookup": {"from": "target"}}, {"$merge": "target"}],
        [{"$merge": {"into": "target", "whenMatched": "fail"}}],
        [{"$merge": {"into": "target", "whenMatched": [{"$set": {"n": {"$add": ["$n", 1]}}}]}}],
        [{"$merge": {"into": "target", "whenNotMatched": "fail"}}],
        [{"$merge": {"into": "target", "on": "a"}}],
        [{"$match": {}}],
        [],
        None,
    ],
)
def test_other_pipelines_are_not(pipeline: Any) -> None:
    assert not merge(pipeline)


def test_of_several_statements_none_is_trusted() -> None:
    safe = Statement(verb="update", filter={"_id": 1}, update={"$set": {"a": 1}})
    assert is_idempotent([safe])
    assert not is_idempotent([safe, safe])
    assert not is_idempotent([])


@pytest.mark.parametrize("verb", ["findAndModify", "insert", "create", "ping", ""])
def test_unknown_verbs_are_not(verb: str) -> None:
    assert not is_idempotent([Statement(verb=verb, filter={"_id": 1}, update={"$set": {"a": 1}})])


def test_an_insert_is_recognised_by_its_objectid_only() -> None:
    assert insert_is_recognisable({"_id": ObjectId()})
    assert not insert_is_recognisable({"_id": 1})
    assert not insert_is_recognisable({})
    assert not insert_is_recognisable(None)


def test_the_callers_word_holds_inside_and_only_there() -> None:
    assert vouched() is None
    with idempotent():
        assert vouched() is True
        with idempotent(False):
            assert vouched() is False
        assert vouched() is True
    assert vouched() is None


ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.floats(), st.binary(max_size=3)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.text(max_size=4), st.sampled_from(["$set", "$merge", "$out", "_id", "$bit"])),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=12,
)


@given(ANYTHING, ANYTHING, ANYTHING, st.booleans(), st.booleans())
def test_no_statement_makes_the_analysis_fail(
    query: Any, change: Any, pipeline: Any, multi: bool, upsert: bool
) -> None:
    for verb in ("update", "delete", "insert", "aggregate"):
        answer = is_idempotent(
            [
                Statement(
                    verb=verb,
                    filter=query,
                    update=change,
                    document=query,
                    pipeline=pipeline,
                    collection="c",
                    multi=multi,
                    upsert=upsert,
                )
            ]
        )
        assert isinstance(answer, bool)
