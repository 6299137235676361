"""Which database and collection an operation is about, read off the callback that PyMongo hands over.

PyMongo does not pass the namespace along, but the callback closes over the collection, the database, or the query.
Where it does not, there is no namespace: that is an attribute less, never an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.synchronous.client_session import ClientSession
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database

if TYPE_CHECKING:
    from collections.abc import Callable

Namespace = tuple[str | None, str | None]

_COLLECTIONS = (Collection, AsyncCollection)
_DATABASES = (Database, AsyncDatabase)
_SESSIONS = (ClientSession, AsyncClientSession)

_ADMIN: Namespace = ("admin", None)
_NOWHERE: Namespace = (None, None)

_TELLING = ("self", "operation", "command", "name", "cmd")

_finders: dict[Any, Callable[[Any], Any]] = {}
"""How to look into a callback, by its code: there are about thirty callbacks in all."""


def namespace_of(func: Any, bulk: Any) -> Namespace:
    found = target_of(func, bulk)
    return found if type(found) is tuple else (found.database.name, found.name)


def target_of(func: Any, bulk: Any) -> Any:
    """A collection of PyMongo's, or a namespace."""
    if bulk is not None:
        collection = getattr(bulk, "collection", None)
        return _ADMIN if collection is None else collection
    code = getattr(func, "__code__", None)
    find = _finders.get(code)
    if find is None:
        find = _finders[code] = _finder(func, code)
    return find(func)


def _finder(func: Any, code: Any) -> Callable[[Any], Any]:
    if code is None or getattr(func, "__self__", None) is not None:
        return _of_method
    free = code.co_freevars
    cells = {name: free.index(name) for name in _TELLING if name in free}

    def value(func: Any, name: str) -> Any:
        index = cells.get(name)
        return None if index is None else func.__closure__[index].cell_contents

    def find(func: Any) -> Any:
        query = value(func, "operation")
        if query is not None and hasattr(query, "coll"):
            return query.db, query.coll
        owner = value(func, "self")
        if owner is not None:
            return _of_owner(owner, value(func, "name") or _dropped(value(func, "command")))
        return _renamed(value(func, "cmd"))

    def of_query(func: Any) -> Any:
        query = func.__closure__[cells["operation"]].cell_contents
        try:
            return query.db, query.coll
        except AttributeError:
            return find(func)

    def of_collection(func: Any) -> Any:
        owner = func.__closure__[cells["self"]].cell_contents
        return owner if isinstance(owner, _COLLECTIONS) else find(func)

    if "operation" in cells:
        return of_query
    return of_collection if "self" in cells else find


def _of_method(func: Any) -> Any:
    return _of_owner(getattr(getattr(func, "__self__", None), "_target", None), None)


def _dropped(command: Any) -> Any:
    """From 4.17 on a drop closes over its command; a generic command does too, but is about no collection."""
    return command.get("drop") if isinstance(command, dict) else None


def _renamed(command: Any) -> Namespace:
    full_name = command.get("renameCollection") if isinstance(command, dict) else None
    if not isinstance(full_name, str):
        return _NOWHERE
    database, _, collection = full_name.partition(".")
    return database, collection


def _of_owner(owner: Any, name: Any) -> Any:
    if isinstance(owner, _COLLECTIONS):
        return owner
    if isinstance(owner, _DATABASES):
        return owner.name, name if isinstance(name, str) else None
    if isinstance(owner, _SESSIONS):
        return _ADMIN
    return _NOWHERE
