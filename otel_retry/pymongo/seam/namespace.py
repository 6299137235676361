"""Which database and collection an operation is about, read off the callback that PyMongo hands over.

PyMongo does not pass the namespace along, but the callback closes over the collection, the database, or the query.
Where it does not, there is no namespace: that is an attribute less, never an error.
"""

from __future__ import annotations

from typing import Any

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.synchronous.client_session import ClientSession
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database

Namespace = tuple[str | None, str | None]

_COLLECTIONS = (Collection, AsyncCollection)
_DATABASES = (Database, AsyncDatabase)
_SESSIONS = (ClientSession, AsyncClientSession)

_ADMIN: Namespace = ("admin", None)
_NOWHERE: Namespace = (None, None)

_cells: dict[Any, dict[str, int]] = {}
"""Where a callback's code keeps the variables that tell: there are about thirty callbacks in all."""

_TELLING = ("self", "operation", "command", "name", "cmd")


def namespace_of(func: Any, bulk: Any) -> Namespace:
    if bulk is not None:
        collection = getattr(bulk, "collection", None)
        return _ADMIN if collection is None else (collection.database.name, collection.name)
    code = getattr(func, "__code__", None)
    if code is None or getattr(func, "__self__", None) is not None:
        command = getattr(func, "__self__", None)
        return _of_owner(getattr(command, "_target", None), None)
    cells = _cells.get(code)
    if cells is None:
        free = code.co_freevars
        cells = _cells[code] = {name: free.index(name) for name in _TELLING if name in free}

    def value(name: str) -> Any:
        index = cells.get(name)
        return None if index is None else func.__closure__[index].cell_contents

    query = value("operation")
    if query is not None and hasattr(query, "coll"):
        return query.db, query.coll
    owner = value("self")
    if owner is not None:
        return _of_owner(owner, value("name") or _dropped(value("command")))
    return _renamed(value("cmd"))


def _dropped(command: Any) -> Any:
    """From 4.17 on a drop closes over its command; a generic command does too, but is about no collection."""
    return command.get("drop") if isinstance(command, dict) else None


def _renamed(command: Any) -> Namespace:
    full_name = command.get("renameCollection") if isinstance(command, dict) else None
    if not isinstance(full_name, str):
        return _NOWHERE
    database, _, collection = full_name.partition(".")
    return database, collection


def _of_owner(owner: Any, name: Any) -> Namespace:
    if isinstance(owner, _COLLECTIONS):
        return owner.database.name, owner.name
    if isinstance(owner, _DATABASES):
        return owner.name, name if isinstance(name, str) else None
    if isinstance(owner, _SESSIONS):
        return _ADMIN
    return _NOWHERE
