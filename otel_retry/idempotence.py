"""Is this statement safe to send twice? Does the data look the same, whether it was applied once or twice?

Pure, and conservative: what is not known to be idempotent is not. docs/policies.md has the table, operator by operator.
Applied twice in a row is meant, with nothing else in between; the counts in the reply may differ (a second
`delete_many` deletes nothing).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_vouched: ContextVar[bool | None] = ContextVar("otel_retry_idempotent", default=None)


@contextmanager
def idempotent(value: bool = True) -> Iterator[None]:
    """The caller vouches for what runs inside: sending it twice is as good as once. False: it is not, whatever the
    analysis says.
    """
    token = _vouched.set(value)
    try:
        yield
    finally:
        _vouched.reset(token)


def vouched() -> bool | None:
    """What the caller said, or None."""
    return _vouched.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One write as a command carries it. `verb`: insert, update, delete, aggregate, or anything else."""

    verb: str
    filter: Any = None
    update: Any = None
    document: Any = None
    pipeline: Any = None
    collection: str | None = None
    multi: bool = False
    upsert: bool = False


# Applied to a document a second time, these change nothing: the value is given, or the change is a fixed point.
SAFE_OPERATORS = frozenset(
    {"$set", "$unset", "$max", "$min", "$setOnInsert", "$addToSet", "$pull", "$pullAll", "$bit"}
)

# Stages that give the same documents with the same _id each time, as long as their input is the same.
SAFE_STAGES = frozenset({"$match", "$project", "$addFields", "$set", "$unset", "$group", "$sort"})

# Anywhere inside an expression these make a second run differ from the first.
_UNSTABLE = frozenset(
    {"$$NOW", "$$CLUSTER_TIME", "$rand", "$sampleRate", "$function", "$accumulator", "$where"}
)

# Tuples: a pipeline in their place is a list, which no set can be asked for.
_SAFE_WHEN_MATCHED = ("replace", "merge", "keepExisting")
_SAFE_WHEN_NOT_MATCHED = ("insert", "discard")


def is_idempotent(statements: Sequence[Statement]) -> bool:
    """Of several statements in one command each may undo another's effect, so only one by itself counts."""
    return len(statements) == 1 and _statement(statements[0])


def _statement(statement: Statement) -> bool:
    if statement.verb == "delete":
        return statement.multi or is_by_id(statement.filter)
    if statement.verb == "update":
        return _update(statement)
    if statement.verb == "aggregate":
        return _aggregate(statement)
    return False  # insert: see `insert_is_recognisable`


def insert_is_recognisable(document: Any) -> bool:
    """A document whose _id is an ObjectId: if a second insert of it meets a duplicate of that very _id, the first
    insert was applied, because nobody else makes the same ObjectId. Another _id could be somebody else's document.
    """
    return isinstance(document, Mapping) and type(document.get("_id")).__name__ == "ObjectId"


def is_by_id(query: Any, *, exactly: bool = False) -> bool:
    """Whether a filter can only ever match one and the same document."""
    if not isinstance(query, Mapping) or "_id" not in query or (exactly and len(query) != 1):
        return False
    value = query["_id"]
    if isinstance(value, Mapping):
        operators = [key for key in value if str(key).startswith("$")]
        return not operators or list(value) == ["$eq"]
    return not hasattr(value, "pattern")  # a regular expression may match many


def _update(statement: Statement) -> bool:
    if statement.upsert:
        # Only {_id: value}: another filter might not match what was upserted, and upsert again.
        if not is_by_id(statement.filter, exactly=True):
            return False
    elif not statement.multi and not is_by_id(statement.filter):
        return False  # once the first match is changed, another document may be the first match
    if _unstable(statement.filter):
        return False
    update = statement.update
    if isinstance(update, Mapping):
        return _operators(update) if any(str(key).startswith("$") for key in update) else True
    if isinstance(update, Sequence) and not isinstance(update, (str, bytes)):
        return all(_constant_stage(stage) for stage in update)
    return False


def _operators(update: Mapping[str, Any]) -> bool:
    for operator, changes in update.items():
        if operator not in SAFE_OPERATORS or not isinstance(changes, Mapping):
            return False
        for path, change in changes.items():
            if "$" in str(path).split("."):
                return False  # the positional $: the next run may find another element
            if operator == "$bit" and not (isinstance(change, Mapping) and set(change) <= {"and", "or"}):
                return False
    return True


def _constant_stage(stage: Any) -> bool:
    """In an update pipeline only constants are safe: `$a` reads what the run before has written."""
    if not isinstance(stage, Mapping) or len(stage) != 1:
        return False
    ((name, body),) = stage.items()
    if name == "$unset":
        return isinstance(body, (str, list))
    if name not in {"$set", "$addFields"} or not isinstance(body, Mapping):
        return False
    return all(_constant(value) for value in body.values())


def _constant(value: Any) -> bool:
    if isinstance(value, str):
        return not value.startswith("$")
    if isinstance(value, Mapping):
        if list(value) == ["$literal"]:
            return True
        return all(not str(key).startswith("$") and _constant(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(_constant(inner) for inner in value)
    return True


def _aggregate(statement: Statement) -> bool:
    """`$out` and `$merge` into another collection, fed by stages that give the same each time."""
    pipeline = statement.pipeline
    if not isinstance(pipeline, Sequence) or not pipeline or _unstable(pipeline):
        return False
    *stages, last = pipeline
    return all(_stable_stage(stage) for stage in stages) and _writes_elsewhere(last, statement.collection)


def _stable_stage(stage: Any) -> bool:
    if not isinstance(stage, Mapping) or len(stage) != 1:
        return False
    ((name, body),) = stage.items()
    if name not in SAFE_STAGES:
        return False
    # Without its _id a document gets a new one each time it is written.
    if name == "$project":
        return isinstance(body, Mapping) and bool(body.get("_id", True))
    if name == "$unset":
        return "_id" not in ([body] if isinstance(body, str) else body)
    return True


def _writes_elsewhere(stage: Any, source: str | None) -> bool:
    if not isinstance(stage, Mapping) or len(stage) != 1 or source is None:
        return False
    ((name, body),) = stage.items()
    if name == "$out":
        target = body.get("coll") if isinstance(body, Mapping) else body
        return isinstance(target, str) and target != source
    if name != "$merge":
        return False
    options: Mapping[str, Any] = body if isinstance(body, Mapping) else {"into": body}
    into = options.get("into")
    target = into.get("coll") if isinstance(into, Mapping) else into
    return (
        isinstance(target, str)
        and target != source
        and options.get("on", "_id") in ("_id", ["_id"])
        and "let" not in options
        and options.get("whenMatched", "merge") in _SAFE_WHEN_MATCHED
        and options.get("whenNotMatched", "insert") in _SAFE_WHEN_NOT_MATCHED
    )


def _unstable(value: Any) -> bool:
    if isinstance(value, str):
        return value in _UNSTABLE
    if isinstance(value, Mapping):
        return any(str(key) in _UNSTABLE or _unstable(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return any(_unstable(inner) for inner in value)
    return False
