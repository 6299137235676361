"""Is this a PyMongo that the seam knows? Asked once, at install, of the code itself rather than of its version.

Every private name that the seam touches is looked up here first. One that is missing means that the driver has
changed in a way nobody has looked at yet: then nothing is patched.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pymongo

from otel_retry.pymongo.seam.private import NAMES

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet
    from types import ModuleType

FIRST_WITH_OWN_OVERLOAD_RETRY = (4, 17)
FIRST_WITH_SHARED_OPERATION_ID = (4, 18)

_CLASS = "_ClientConnectionRetryable"
_METHODS = ("__init__", "run", "_read", "_write", "_get_server", "_is_retrying", "_check_last_error")
_ATTRIBUTES = frozenset(
    {
        "_last_error",
        "_retrying",
        "_client",
        "_func",
        "_bulk",
        "_session",
        "_is_read",
        "_retryable",
        "_read_pref",
        "_server_selector",
        "_address",
        "_server",
        "_deprioritized_servers",
        "_operation",
        "_operation_id",
    }
)
_LISTENERS = frozenset(
    f"_EventListeners__{name}"
    for name in ("command_listeners", "enabled_for_commands", "cmap_listeners", "enabled_for_cmap")
)


class UnknownShape(Exception):  # noqa: N818 - says what was found, not that something went wrong
    """The installed PyMongo lacks what the seam needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One of the driver's two halves: its modules and the class that runs operations."""

    is_async: bool
    mongo_client: ModuleType
    operation: type[Any]
    session: type[Any]

    @property
    def name(self) -> str:
        return "asynchronous" if self.is_async else "synchronous"

    @property
    def client(self) -> type[Any]:
        return _need(self.mongo_client, "AsyncMongoClient" if self.is_async else "MongoClient")  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What was found."""

    version: str
    halves: tuple[Half, ...]
    own_overload_retry: bool
    """From 4.17: every operation takes the retryable path, and the handshake speaks of backpressure."""
    shared_operation_id: bool
    """From 4.18: all attempts of an operation publish one operation id."""


def check() -> Shape:
    """Raise `UnknownShape`, naming what is missing, unless the seam fits."""
    version: tuple[Any, ...] = tuple(pymongo.version_tuple)
    if version < (4, 9):
        raise UnknownShape(f"it is older than 4.9 ({pymongo.version})")
    for module, names in NAMES.items():
        for name in names:
            _need(_module(module), name)
    _need(_need(_module("pymongo.client_options"), "ClientOptions"), "_options")
    _mentions(_need(_module("pymongo.monitoring"), "_EventListeners").__init__, _LISTENERS)
    return Shape(
        version=pymongo.version,
        halves=tuple(_check_half(is_async=is_async) for is_async in (False, True)),
        own_overload_retry=version >= FIRST_WITH_OWN_OVERLOAD_RETRY,
        shared_operation_id=version >= FIRST_WITH_SHARED_OPERATION_ID,
    )


def _check_half(*, is_async: bool) -> Half:
    package = f"pymongo.{'asynchronous' if is_async else 'synchronous'}"
    mongo_client = _module(f"{package}.mongo_client")
    operation = _need(mongo_client, _CLASS)
    for method in _METHODS:
        _need(operation, method)
    _mentions(operation.__init__, _ATTRIBUTES)
    for method, calls in {"run": {"_read", "_write"}, "_read": {"_func"}, "_write": {"_func"}}.items():
        if not calls <= set(_code_of(getattr(operation, method)).co_names):
            raise UnknownShape(f"{_CLASS}.{method} no longer calls {', '.join(sorted(calls))}")
    client = _need(mongo_client, "AsyncMongoClient" if is_async else "MongoClient")
    if _CLASS not in _code_of(_need(client, "_retry_internal")).co_names:
        raise UnknownShape(f"{client.__name__}._retry_internal no longer makes a {_CLASS}")
    for method in ("_conn_for_writes", "_select_server"):
        _need(client, method)
    for module, bulk in (("bulk", "Bulk"), ("client_bulk", "ClientBulk")):
        _check_bulk(_need(_module(f"{package}.{module}"), f"_Async{bulk}" if is_async else f"_{bulk}"))
    session = _need(
        _module(f"{package}.client_session"), "AsyncClientSession" if is_async else "ClientSession"
    )
    for method in ("start_transaction", "commit_transaction", "abort_transaction", "_unpin"):
        _need(session, method)
    _mentions(session.__init__, {"_transaction"})
    _mentions(client.__init__, {"_event_listeners", "_topology"})
    return Half(is_async=is_async, mongo_client=mongo_client, operation=operation, session=session)


def _check_bulk(bulk: type[Any]) -> None:
    """A bulk write says that one of its commands is done by setting `retrying` to False."""
    if "retrying" not in _code_of(_need(bulk, "_execute_command")).co_names or hasattr(bulk, "retrying"):
        raise UnknownShape(f"{bulk.__name__} no longer keeps `retrying` on the instance")


def _mentions(function: Any, names: AbstractSet[str]) -> None:
    missing = names - set(_code_of(function).co_names)
    if missing:
        owner = getattr(function, "__qualname__", str(function)).removesuffix(".__init__")
        raise UnknownShape(f"{owner} has no {', '.join(sorted(missing))}")


def _code_of(function: Any) -> Any:
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    if code is None:
        raise UnknownShape(f"{function!r}, of {_CLASS} or near it, is no Python function")
    return code


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnknownShape(f"there is no module {name}") from error


def _need(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise UnknownShape(f"{owner.__name__} has no {name}") from None
