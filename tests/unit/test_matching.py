"""The matcher of the conformance runner: one that finds no difference would make every file pass."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from bson import Binary, Decimal128, Int64, ObjectId
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.conformance.matching import MISSING, Matcher, Span, forest

SESSION = uuid.UUID("11111111-2222-3333-4444-555555555555")
OTHER = uuid.UUID(int=1)
LSID = {"id": Binary.from_uuid(SESSION)}
ENTITIES = {"saved": {"x": 1}, "number": 7}

matcher = Matcher(entity=ENTITIES.__getitem__, lsid={"session0": LSID}.__getitem__)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (1, 1),
        (1, 1.0),
        (1, Int64(1)),
        (float("nan"), float("nan")),
        ("a", "a"),
        (None, None),
        (True, True),
        ([1, [2]], [1, [2]]),
        ([1], (1,)),
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}),
        ({"a": {"$$exists": True}}, {"a": None}),
        ({"a": {"$$exists": False}}, {}),
        ({"a": {"$$unsetOrMatches": 1}}, {}),
        ({"a": {"$$unsetOrMatches": 1}}, {"a": 1}),
        ({"$$unsetOrMatches": {"a": 1}}, MISSING),
        ({"$$type": "string"}, "a"),
        ({"$$type": ["int", "long"]}, 27017),
        ({"$$type": ["long", "string"]}, 27017),
        ({"$$type": "long"}, Int64(1)),
        ({"$$type": "long"}, 2**40),
        ({"$$type": "double"}, 1.5),
        ({"$$type": "bool"}, False),
        ({"$$type": "objectId"}, ObjectId()),
        ({"$$type": "binData"}, b"a"),
        ({"$$type": "number"}, Decimal128("1")),
        ({"$$type": "object"}, {}),
        ({"$$type": "array"}, []),
        ({"$$type": "null"}, None),
        ({"$$matchesEntity": "saved"}, {"x": 1}),
        ({"$$matchesHexBytes": "12AB"}, b"\x12\xab"),
        ({"$$sessionLsid": "session0"}, LSID),
        ({"$$sessionLsid": "session0"}, str(SESSION)),
        ({"$$lte": 5}, 5.0),
        ({"$$matchAsDocument": {"a": 1}}, '{"a": 1}'),
        ({"$$matchAsDocument": {"a": {"$$type": "objectId"}}}, '{"a": {"$oid": "507f1f77bcf86cd799439011"}}'),
        ({"$$matchAsDocument": {"$$matchAsRoot": {"a": 1}}}, '{"a": 1, "b": 2}'),
        ({"$$matchAsRoot": {"a": 1}}, {"a": 1, "b": 2}),
        ({"a": {"$gt": 1}}, {"a": {"$gt": 1}}),
    ],
)
def test_these_match(expected: Any, actual: Any) -> None:
    assert matcher.problems(expected, actual) == []


@pytest.mark.parametrize(
    ("expected", "actual", "said"),
    [
        (1, 2, "expected 1, got 2"),
        (1, "1", "got str '1'"),
        ("1", 1, "got int 1"),
        (1, True, "got bool True"),
        (True, 1, "got int 1"),
        (1, 1.5, "got float 1.5"),
        (1, Decimal128("1"), "got Decimal128"),
        (None, 0, "got int 0"),
        ([1], [1, 2], "expected 1 elements, got 2"),
        ([1, 2], [1, 1], "1: expected 2"),
        ([1], 1, "expected an array"),
        ({"a": 1}, {}, "a: missing"),
        ({"a": 1}, {"a": 1, "b": 2}, "b: not expected"),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 1}}, "a/c: not expected"),
        ({"a": 1}, 1, "expected a document"),
        ({"a": None}, {}, "a: missing"),
        ({"a": {"$$exists": True}}, {}, "a: missing"),
        ({"a": {"$$exists": False}}, {"a": None}, "a: expected not to exist"),
        ({"a": {"$$exists": 1}}, {"a": 1}, "takes a boolean"),
        ({"a": {"$$unsetOrMatches": 1}}, {"a": 2}, "a: expected 1, got 2"),
        ({"a": {"$$unsetOrMatches": 1}}, {"a": None}, "a: expected 1"),
        ({"$$type": "string"}, 1, "expected type string, got int"),
        ({"$$type": ["int", "long"]}, "27017", "expected type int or long, got str"),
        ({"$$type": ["int", "long"]}, True, "got bool"),
        ({"$$type": ["int", "long"]}, 1.0, "got float"),
        ({"$$type": "int"}, Int64(1), "got Int64"),
        ({"$$type": "int"}, 2**40, "expected type int"),
        ({"$$type": "thing"}, 1, "does not know"),
        ({"a": {"$$type": "string"}}, {}, "a: missing"),
        ({"$$matchesEntity": "number"}, 8, "expected 7, got 8"),
        ({"$$matchesHexBytes": "12AB"}, b"\x12", "expected the bytes 12AB"),
        ({"a": {"$$sessionLsid": "session0"}}, {}, "a: expected the lsid"),
        ({"$$sessionLsid": "session0"}, str(OTHER), "expected the lsid of session0"),
        ({"$$sessionLsid": "session0"}, {"id": Binary.from_uuid(OTHER)}, "expected the lsid"),
        ({"$$sessionLsid": "session0"}, str(LSID), "expected the lsid"),
        ({"$$lte": 5}, 6, "at most 5"),
        ({"a": {"$$lte": 5}}, {}, "a: expected at most 5"),
        ({"$$matchAsDocument": {"a": 1}}, '{"a": 1, "b": 2}', "b: not expected"),
        ({"$$matchAsDocument": {"a": 1}}, '{"a": ', "is not Extended JSON"),
        ({"$$matchAsDocument": {"a": 1}}, {"a": 1}, "as a string"),
        ({"$$matchAsDocument": {"$$matchAsRoot": {"a": 1}}}, '{"b": 2}', "a: missing"),
        ({"$$matchAsDocument": {"$$matchAsRoot": {"a": {"b": 1}}}}, '{"a": {"b": 1, "c": 1}}', "a/c: not"),
        ({"$$newer": 1}, 1, "the operator $$newer is not one"),
    ],
)
def test_these_differ_and_it_says_where(expected: Any, actual: Any, said: str) -> None:
    (problem,) = matcher.problems(expected, actual)
    assert said in problem


def test_only_the_outermost_document_may_have_more_keys_than_expected() -> None:
    actual = {"a": {"b": 1, "c": 1}, "d": 1}
    assert matcher.problems({"a": {"b": 1, "c": 1}}, actual, root=True) == []
    assert matcher.problems({"a": {"b": 1}}, actual, root=True) == ["a/c: not expected, got 1"]


def test_a_root_may_still_not_have_what_is_forbidden() -> None:
    assert matcher.problems({"a": {"$$exists": False}}, {"a": 1, "b": 1}, root=True)


def command(name: str = "find", **attributes: Any) -> Span:
    return Span(name=name, attributes={"db.command.name": name, **attributes})


def operation(*children: Span, name: str = "find db.c") -> Span:
    return Span(
        name=name, attributes={"db.operation.name": "find", "extra": "allowed"}, children=list(children)
    )


def wanted(*nested: dict[str, Any], name: str = "find db.c", **attributes: Any) -> dict[str, Any]:
    span: dict[str, Any] = {"name": name, "attributes": attributes or {"db.operation.name": "find"}}
    return span | ({"nested": list(nested)} if nested else {})


def wanted_command(name: str = "find", **attributes: Any) -> dict[str, Any]:
    return {"name": name, "attributes": {"db.command.name": name, **attributes}}


def test_a_tree_that_is_as_expected_matches() -> None:
    assert matcher.span_problems([wanted(wanted_command())], [operation(command())]) == []


@pytest.mark.parametrize("ignore_extra", [False, True])
@pytest.mark.parametrize(
    ("expected", "actual", "said"),
    [
        pytest.param(
            [wanted(wanted_command(code="89"))],
            [operation(command(code="91"))],
            "find db.c > find: code: expected '89', got '91'",
            id="wrong attribute",
        ),
        pytest.param(
            [wanted(wanted_command(code="89"))],
            [operation(command(code=89))],
            "find db.c > find: code: expected '89', got int 89",
            id="attribute of the wrong type",
        ),
        pytest.param(
            [wanted(wanted_command(port={"$$type": ["int", "long"]}))],
            [operation(command(port="27017"))],
            "expected type int or long, got str",
            id="type that the operator refuses",
        ),
        pytest.param(
            [wanted(wanted_command(code="89"))],
            [operation(command())],
            "find db.c > find: code: missing",
            id="missing attribute",
        ),
        pytest.param(
            [wanted(wanted_command(code={"$$exists": False}))],
            [operation(command(code="89"))],
            "expected not to exist",
            id="forbidden attribute",
        ),
        pytest.param([wanted(wanted_command())], [operation()], "find db.c:", id="missing nested span"),
        pytest.param([wanted(wanted_command())], [], "root:", id="missing root span"),
        pytest.param([wanted(name="find db.d")], [operation()], "find db.d", id="wrong name"),
        pytest.param(
            [wanted(wanted_command("find"), wanted_command("getMore"))],
            [operation(command("getMore"), command("find"))],
            "getMore",
            id="wrong order",
        ),
        pytest.param(
            [wanted(wanted_command())], [operation(), command()], "find db.c:", id="beside, not nested"
        ),
        pytest.param(
            [wanted(wanted_command()), wanted_command()],
            [operation(command())],
            "find",
            id="nested, not beside",
        ),
        pytest.param(
            [wanted(wanted_command(), wanted_command())],
            [operation(command())],
            "find db.c:",
            id="one attempt, two expected",
        ),
        pytest.param(
            [{"name": "find db.c", "attributes": {}, "status": "OK"}],
            [operation()],
            "'status'",
            id="something of a span that it does not know",
        ),
    ],
)
def test_a_tree_that_differs_is_reported(
    expected: list[dict[str, Any]], actual: list[Span], said: str, ignore_extra: bool
) -> None:
    problems = matcher.span_problems(expected, actual, ignore_extra=ignore_extra)
    assert problems
    assert any(said in problem for problem in problems)


@pytest.mark.parametrize(
    "actual",
    [
        pytest.param([operation(command()), operation(name="ping db")], id="after"),
        pytest.param([operation(name="ping db"), operation(command())], id="before"),
        pytest.param([operation(command(), command("getMore"))], id="nested, after"),
        pytest.param([operation(command("getMore"), command())], id="nested, before"),
        pytest.param(
            [operation(Span(name="find", attributes=command().attributes, children=[command("x")]))],
            id="below a span of which nothing nested is expected",
        ),
    ],
)
def test_an_extra_span_is_reported_unless_extra_ones_are_to_be_ignored(actual: list[Span]) -> None:
    expected = [wanted(wanted_command())]
    assert matcher.span_problems(expected, actual, ignore_extra=True) == []
    assert any("expected the spans" in problem for problem in matcher.span_problems(expected, actual))


def test_among_namesakes_the_one_that_matches_is_found() -> None:
    expected = [wanted(wanted_command(code="2"), wanted_command(code="3"))]
    actual = [operation(*(command(code=str(number)) for number in range(5)))]
    assert matcher.span_problems(expected, actual, ignore_extra=True) == []
    assert matcher.span_problems(
        [wanted(wanted_command(code="3"), wanted_command(code="2"))], actual, ignore_extra=True
    )


def test_the_tree_is_built_from_parents_and_ordered_by_start() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer(__name__)
    with tracer.start_as_current_span("first", attributes={"n": 1}):
        early = tracer.start_span("early")
        with tracer.start_as_current_span("late"), tracer.start_as_current_span("deepest"):
            pass
        early.end()
    with tracer.start_as_current_span("second"):
        pass
    provider.shutdown()

    first, second = forest(exporter.get_finished_spans())

    assert (first.name, second.name) == ("first", "second")
    assert first.attributes == {"n": 1}
    assert [child.name for child in first.children] == ["early", "late"]
    assert [child.name for child in first.children[1].children] == ["deepest"]
