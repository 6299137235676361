"""`ignore()`: the empty result of an operation that failed, for those where an empty result means something."""

from __future__ import annotations

import datetime as dt
import inspect
from typing import Any

from pymongo.asynchronous.command_cursor import AsyncCommandCursor
from pymongo.response import Response
from pymongo.synchronous.command_cursor import CommandCursor

_WITH_CURSOR = frozenset({"aggregate", "listCollections", "listIndexes"})
_PLAIN = frozenset(
    {"insert", "update", "delete", "findAndModify", "find", "count", "distinct", "listDatabases"}
)

_NOWHERE = ("ignored", 0)
"""The address of a result that no server gave."""


def can_ignore(operation: Any) -> bool:
    """Not in a transaction, which would then be something else than the application asked for; not for what changes
    the schema, opens a change stream, goes on with a cursor, or is a command that only the application understands.
    """
    session = operation._session
    if session is not None and session.in_transaction:
        return False
    name = operation.otr_name()
    if getattr(operation, "_is_run_command", False) or name not in _PLAIN | _WITH_CURSOR:
        return False
    command = getattr(operation._func, "__self__", None)
    return type(command).__module__.rpartition(".")[2] != "change_stream" and not _is_change_stream(command)


def _is_change_stream(command: Any) -> bool:
    pipeline = getattr(command, "_pipeline", None) or ()
    return any("$changeStream" in stage for stage in pipeline)


def empty_result(operation: Any, *, is_async: bool, namespace: tuple[str | None, str | None]) -> Any:
    name = operation.otr_name()
    if operation._bulk is not None or name in {"insert", "findAndModify"}:
        return None
    if name == "update":
        return {"n": 0, "nModified": 0, "ok": 1.0, "updatedExisting": False}
    if name == "delete":
        return {"n": 0, "ok": 1.0}
    if name == "count":
        return 0
    if name == "distinct":
        return []
    if name == "listDatabases":
        return {"databases": [], "ok": 1.0}
    database, collection = namespace
    cursor = {"id": 0, "firstBatch": [], "ns": f"{database}.{collection or '$cmd'}"}
    if name == "find":
        return _response(cursor)
    if getattr(getattr(operation._func, "__self__", None), "_performs_write", False):
        cursor["ns"] = f"{database}.{collection}"
    handle = operation._client[database or "admin"][collection or "$cmd"]
    return (AsyncCommandCursor if is_async else CommandCursor)(handle, cursor, _NOWHERE)


def _response(cursor: dict[str, Any]) -> Response:
    reply = {"cursor": cursor, "ok": 1.0}
    given: dict[str, Any] = {
        "data": None,
        "address": _NOWHERE,
        "request_id": 0,
        "duration": dt.timedelta(0),
        "from_command": True,
        "docs": [reply],
    }
    known = inspect.signature(Response.__init__).parameters
    return Response(**{key: value for key, value in given.items() if key in known})
