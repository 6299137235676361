"""The write behind an operation, read off PyMongo's callback when an attempt of it has failed.

Asked only for writes that MongoDB itself does not make repeatable. Empty: not known, and so not idempotent.
"""

from __future__ import annotations

from typing import Any

from otel_retry.idempotence import Statement
from otel_retry.pymongo.seam.closures import closure
from otel_retry.pymongo.seam.private import DELETE, INSERT, UPDATE

_VERBS = {INSERT: "insert", UPDATE: "update", DELETE: "delete"}


def statements_of(func: Any, bulk: Any, name: str) -> tuple[Statement, ...]:
    if bulk is not None:
        return _of_bulk(bulk)
    command: Any = getattr(func, "__self__", None)
    if getattr(command, "_performs_write", False):
        collection = getattr(getattr(command, "_target", None), "name", None)
        return (Statement(verb="aggregate", pipeline=command._pipeline, collection=collection),)
    if name == "update":
        return (
            Statement(
                verb="update",
                filter=closure(func, "criteria"),
                update=closure(func, "document"),
                multi=bool(closure(func, "multi")),
                upsert=bool(closure(func, "upsert")),
            ),
        )
    if name == "delete":
        return (
            Statement(verb="delete", filter=closure(func, "criteria"), multi=bool(closure(func, "multi"))),
        )
    if name == "insert":
        documents = (closure(func, "command") or {}).get("documents") or ()
        return tuple(Statement(verb="insert", document=document) for document in documents)
    return ()


def _of_bulk(bulk: Any) -> tuple[Statement, ...]:
    """The command at hand. A client's bulk write mixes everything in one command: it is left alone."""
    run = getattr(bulk, "current_run", None)
    if run is None:
        return ()
    verb = _VERBS.get(run.op_type, "")
    remaining = run.ops[run.idx_offset :]
    if verb == "insert":
        return tuple(Statement(verb=verb, document=document) for document in remaining)
    return tuple(
        Statement(
            verb=verb,
            filter=operation.get("q"),
            update=operation.get("u"),
            multi=bool(operation.get("multi")) or operation.get("limit") == 0,
            upsert=bool(operation.get("upsert")),
        )
        for operation in remaining
    )
