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

_cells: dict[Any, tuple[int, int, int]] = {}
"""Where a callback's code keeps `self`, `operation` and `name`: there are about thirty callbacks in all."""


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
        owner, operation, name = (
            free.index(wanted) if wanted in free else -1 for wanted in ("self", "operation", "name")
        )
        cells = _cells[code] = (owner, operation, name)
    owner, operation, name = cells
    closure = func.__closure__
    if operation >= 0:
        query = closure[operation].cell_contents
        if hasattr(query, "coll"):
            return query.db, query.coll
    if owner >= 0:
        return _of_owner(closure[owner].cell_contents, closure[name].cell_contents if name >= 0 else None)
    return _NOWHERE


def _of_owner(owner: Any, name: Any) -> Namespace:
    if isinstance(owner, _COLLECTIONS):
        return owner.database.name, owner.name
    if isinstance(owner, _DATABASES):
        return owner.name, name if isinstance(name, str) else None
    if isinstance(owner, _SESSIONS):
        return _ADMIN
    return _NOWHERE
