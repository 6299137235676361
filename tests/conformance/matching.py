"""The matching rules of MongoDB's unified test format, for documents and for trees of spans.

Says what differs and where, in sentences; never raises for a value that does not match. Rules are those of
"Evaluating Matches" and "expectTracingMessages" in the specification.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp, json_util

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing"})()
"""Stands for a key that is not there: a value of None is one that is."""

JSON_OPTIONS = json_util.JSONOptions(tz_aware=False)
SHOWN_CHARACTERS = 160


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fits(value: int, bits: int) -> bool:
    return -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)


# A plain Python integer has no width: an attribute of a span is an int64 whatever its value, and PyMongo gives
# a BSON int32 the same type. So it passes for both; an Int64 is a long and nothing else.
BSON_TYPES: dict[str, Callable[[Any], bool]] = {
    "double": lambda value: isinstance(value, float),
    "string": lambda value: isinstance(value, str) and not isinstance(value, Code),
    "object": lambda value: isinstance(value, Mapping),
    "array": lambda value: isinstance(value, (list, tuple)),
    "binData": lambda value: isinstance(value, (bytes, uuid.UUID)),
    "objectId": lambda value: isinstance(value, ObjectId),
    "bool": lambda value: isinstance(value, bool),
    "date": lambda value: isinstance(value, dt.datetime),
    "null": lambda value: value is None,
    "undefined": lambda value: value is None,
    "regex": lambda value: isinstance(value, (Regex, re.Pattern)),
    "dbPointer": lambda value: isinstance(value, DBRef),
    "javascript": lambda value: isinstance(value, Code) and value.scope is None,
    "javascriptWithScope": lambda value: isinstance(value, Code) and value.scope is not None,
    "int": lambda value: _is_integer(value) and not isinstance(value, Int64) and _fits(value, 32),
    "long": lambda value: _is_integer(value) and _fits(value, 64),
    "timestamp": lambda value: isinstance(value, Timestamp),
    "decimal": lambda value: isinstance(value, Decimal128),
    "minKey": lambda value: isinstance(value, MinKey),
    "maxKey": lambda value: isinstance(value, MaxKey),
    "number": lambda value: _is_number(value) or isinstance(value, Decimal128),
}


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def operator_of(expected: Any) -> str | None:
    """The special operator that an expected value is, such as `$$exists`."""
    if isinstance(expected, Mapping) and len(expected) == 1:
        (key,) = expected
        return key if isinstance(key, str) and key.startswith("$$") else None
    return None


class Matcher:
    """Compares what a test file expects with what there is; answers with one sentence for each difference.

    `entity` and `lsid` look up a test's entities by name and raise for a name that they do not know.
    """

    def __init__(
        self,
        *,
        entity: Callable[[str], Any],
        lsid: Callable[[str], Mapping[str, Any]],
    ) -> None:
        self._entity = entity
        self._lsid = lsid

    def problems(self, expected: Any, actual: Any, path: str = "", *, root: bool = False) -> list[str]:
        """`root`: the document may have keys that are not expected, though the documents in it may not."""
        return list(self._compare(expected, actual, path, root))

    def span_problems(
        self, expected: Sequence[Mapping[str, Any]], actual: Sequence[Span], *, ignore_extra: bool = False
    ) -> list[str]:
        """`ignore_extra`: at every level there may be spans that are not expected, before, between and after."""
        return list(self._compare_spans(expected, actual, "", ignore_extra))

    def _compare(self, expected: Any, actual: Any, path: str, root: bool) -> Iterator[str]:
        operator = operator_of(expected)
        if operator is not None:
            rule = self._OPERATORS.get(operator)
            if rule is None:
                yield f"{_at(path)}the operator {operator} is not one that this matcher knows"
            else:
                yield from rule(self, expected[operator], actual, path, root)
        elif actual is MISSING:
            yield f"{_at(path)}missing, expected {shown(expected)}"
        elif isinstance(expected, Mapping):
            yield from self._compare_documents(expected, actual, path, root)
        elif isinstance(expected, list):
            yield from self._compare_arrays(expected, actual, path)
        elif not _equal(expected, actual):
            yield f"{_at(path)}expected {shown(expected)}, got {_typed(expected, actual)}"

    def _compare_documents(
        self, expected: Mapping[str, Any], actual: Any, path: str, root: bool
    ) -> Iterator[str]:
        if not isinstance(actual, Mapping):
            yield f"{_at(path)}expected a document, got {shown(actual)}"
            return
        for key, value in expected.items():
            yield from self._compare(value, actual.get(key, MISSING), _join(path, key), False)
        if not root:
            for key in actual:
                if key not in expected:
                    yield f"{_at(_join(path, key))}not expected, got {shown(actual[key])}"

    def _compare_arrays(self, expected: list[Any], actual: Any, path: str) -> Iterator[str]:
        if not isinstance(actual, (list, tuple)):
            yield f"{_at(path)}expected an array, got {shown(actual)}"
        elif len(actual) != len(expected):
            yield f"{_at(path)}expected {len(expected)} elements, got {len(actual)}: {shown(actual)}"
        else:
            for index, (wanted, found) in enumerate(zip(expected, actual, strict=True)):
                yield from self._compare(wanted, found, _join(path, str(index)), False)

    def _exists(self, expected: Any, actual: Any, path: str, _root: bool) -> Iterator[str]:
        if not isinstance(expected, bool):
            yield f"{_at(path)}$$exists takes a boolean, the file has {shown(expected)}"
        elif expected and actual is MISSING:
            yield f"{_at(path)}missing, expected to exist"
        elif not expected and actual is not MISSING:
            yield f"{_at(path)}expected not to exist, got {shown(actual)}"

    def _type(self, expected: Any, actual: Any, path: str, _root: bool) -> Iterator[str]:
        names = expected if isinstance(expected, list) else [expected]
        if unknown := [name for name in names if name not in BSON_TYPES]:
            yield f"{_at(path)}$$type does not know {shown(unknown)}"
        elif actual is MISSING:
            yield f"{_at(path)}missing, expected type {' or '.join(names)}"
        elif not any(BSON_TYPES[name](actual) for name in names):
            yield f"{_at(path)}expected type {' or '.join(names)}, got {type(actual).__name__} {shown(actual)}"

    def _matches_entity(self, expected: Any, actual: Any, path: str, root: bool) -> Iterator[str]:
        yield from self._compare(self._entity(expected), actual, path, root)

    def _matches_hex_bytes(self, expected: Any, actual: Any, path: str, _root: bool) -> Iterator[str]:
        if actual != bytes.fromhex(expected):
            yield f"{_at(path)}expected the bytes {expected}, got {shown(actual)}"

    def _unset_or_matches(self, expected: Any, actual: Any, path: str, root: bool) -> Iterator[str]:
        if actual is not MISSING:
            yield from self._compare(expected, actual, path, root)

    def _session_lsid(self, expected: Any, actual: Any, path: str, _root: bool) -> Iterator[str]:
        """In a command the id is a document, in an attribute it is the UUID as text."""
        lsid = self._lsid(expected)
        wanted: Any = str(_uuid(lsid["id"])) if isinstance(actual, str) else dict(lsid)
        if actual != wanted:
            yield f"{_at(path)}expected the lsid of {expected}, {shown(wanted)}, got {shown(actual)}"

    def _lte(self, expected: Any, actual: Any, path: str, _root: bool) -> Iterator[str]:
        if not _is_number(actual) or actual > expected:
            yield f"{_at(path)}expected at most {shown(expected)}, got {shown(actual)}"

    def _match_as_document(self, expected: Any, actual: Any, path: str, _root: bool) -> Iterator[str]:
        if not isinstance(actual, str):
            yield f"{_at(path)}expected Extended JSON as a string, got {shown(actual)}"
            return
        try:
            document = json_util.loads(actual, json_options=JSON_OPTIONS)
        except ValueError as error:
            yield f"{_at(path)}is not Extended JSON ({error}): {shown(actual)}"
            return
        yield from self._compare(expected, document, path, False)

    def _match_as_root(self, expected: Any, actual: Any, path: str, _root: bool) -> Iterator[str]:
        yield from self._compare(expected, actual, path, True)

    _OPERATORS: dict[str, Callable[[Matcher, Any, Any, str, bool], Iterator[str]]] = {  # noqa: RUF012
        "$$exists": _exists,
        "$$type": _type,
        "$$matchesEntity": _matches_entity,
        "$$matchesHexBytes": _matches_hex_bytes,
        "$$unsetOrMatches": _unset_or_matches,
        "$$sessionLsid": _session_lsid,
        "$$lte": _lte,
        "$$matchAsDocument": _match_as_document,
        "$$matchAsRoot": _match_as_root,
    }

    def _compare_spans(
        self, expected: Sequence[Mapping[str, Any]], actual: Sequence[Span], path: str, ignore_extra: bool
    ) -> Iterator[str]:
        if ignore_extra:
            yield from self._find_spans(expected, actual, path)
            return
        if len(expected) != len(actual):
            wanted = [span["name"] for span in expected]
            yield f"{path or 'root'}: expected the spans {wanted}, got {[span.name for span in actual]}"
        # With too few or too many of them, those before the first odd one are still compared.
        for wanted, found in zip(expected, actual, strict=False):
            if len(expected) != len(actual) and wanted["name"] != found.name:
                return
            yield from self._compare_span(wanted, found, path, False)

    def _find_spans(
        self, expected: Sequence[Mapping[str, Any]], actual: Sequence[Span], path: str
    ) -> Iterator[str]:
        """Each expected one must be among the actual ones, in the order of the file.

        Taking the first that matches is enough: whatever could follow a later one can follow it too.
        """
        position = 0
        for wanted in expected:
            attempts = [list(self._compare_span(wanted, found, path, True)) for found in actual[position:]]
            if [] in attempts:
                position += attempts.index([]) + 1
                continue
            namesakes = [
                problems
                for found, problems in zip(actual[position:], attempts, strict=True)
                if found.name == wanted["name"]
            ]
            if namesakes:
                yield from min(namesakes, key=len)
            else:
                names = [span.name for span in actual[position:]]
                yield f"{path or 'root'}: no span {wanted['name']!r} among {names}"

    def _compare_span(
        self, wanted: Mapping[str, Any], found: Span, path: str, ignore_extra: bool
    ) -> Iterator[str]:
        here = f"{path} > {found.name}" if path else found.name
        for key in wanted.keys() - {"name", "attributes", "nested"}:
            yield f"{here}: the file says {key!r} of a span, which this matcher does not know"
        if wanted["name"] != found.name:
            yield f"{here}: expected a span named {wanted['name']!r}"
            return
        # Attributes are matched as a root: a driver may add others.
        for problem in self._compare(wanted.get("attributes", {}), found.attributes, "", True):
            yield f"{here}: {problem}"
        yield from self._compare_spans(wanted.get("nested", []), found.children, here, ignore_extra)


@dataclass(kw_only=True)
class Span:
    """A span that has ended, with those that it is the parent of, in the order in which they started."""

    name: str
    attributes: Mapping[str, Any]
    children: list[Span] = field(default_factory=list)

    def lines(self, depth: int = 0) -> Iterator[str]:
        """For people: the tree, a line for each span."""
        yield f"{'  ' * depth}{self.name}  {shown_attributes(self.attributes)}"
        for child in self.children:
            yield from child.lines(depth + 1)


def shown_attributes(attributes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={shown(value)}" for key, value in sorted(attributes.items()))


def forest(ended: Iterable[ReadableSpan]) -> list[Span]:
    """The spans that have no parent among them, each with its descendants."""
    ordered = sorted(ended, key=lambda span: span.start_time or 0)
    nodes = {
        span.context.span_id: Span(name=span.name, attributes=dict(span.attributes or {})) for span in ordered
    }
    roots = []
    for span in ordered:
        node = nodes[span.context.span_id]
        parent = nodes.get(span.parent.span_id) if span.parent else None
        (roots if parent is None else parent.children).append(node)
    return roots


def _at(path: str) -> str:
    return f"{path}: " if path else ""


def _join(path: str, key: str) -> str:
    # Attribute names have dots of their own, so the first one stands alone and is set off by a slash.
    return f"{path}/{key}" if path else str(key)


def _equal(expected: Any, actual: Any) -> bool:
    if _is_number(expected) and _is_number(actual):
        return bool(expected == actual) or (math.isnan(expected) and math.isnan(actual))
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    return bool(isinstance(actual, type(expected)) and expected == actual)


def _typed(expected: Any, actual: Any) -> str:
    """With the type where the text alone would look the same."""
    if type(expected) is type(actual):
        return shown(actual)
    return f"{type(actual).__name__} {shown(actual)}"


def _uuid(value: Any) -> uuid.UUID:
    return value.as_uuid() if isinstance(value, Binary) else uuid.UUID(bytes=bytes(value))
