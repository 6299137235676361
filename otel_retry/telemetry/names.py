"""Span names and attribute sets, built once for each operation and namespace and then handed out as they are."""

from __future__ import annotations

from typing import Any

from otel_retry import semconv

# PyMongo's names of operations where MongoDB's specification has others.
_OPERATION_NAMES = {
    "create": "createCollection",
    "drop": "dropCollection",
    "rename": "renameCollection",
    "dropSearchIndexes": "dropSearchIndex",
}

Address = tuple[str, int | None]
CommandKey = tuple[str, str | None, str | None, Address]
"""A command's name, database and collection, and the server that it goes to."""

MOST_NAMES = 2000
"""Entries kept before all are forgotten: a program with more namespaces than that pays for building them again."""


class OperationNames:
    """All that is the same for every run of one operation on one namespace."""

    __slots__ = (
        "attributes",
        "collection",
        "commands",
        "database",
        "metric_namespace",
        "metrics",
        "operation",
        "summary",
    )

    def __init__(
        self,
        operation: str,
        database: str | None,
        collection: str | None,
        policy: str,
        metric_namespace: tuple[str | None, str | None],
    ) -> None:
        self.operation = _OPERATION_NAMES.get(operation, operation)
        self.database = database
        self.collection = collection
        self.metric_namespace = metric_namespace
        self.summary = summarise(self.operation, database, collection)
        self.attributes: dict[str, Any] = {
            semconv.DB_SYSTEM: semconv.MONGODB,
            **namespace_attributes(database, collection),
            semconv.DB_OPERATION: self.operation,
            semconv.DB_OPERATION_SUMMARY: self.summary,
            semconv.RETRY_POLICY: policy,
        }
        self.commands: dict[CommandKey, dict[str, Any]] = {}
        """What `command_attributes` has built, to be looked up without calling it."""
        self.metrics: dict[tuple[Address | None, str | None], dict[str, Any]] = {}
        """What `metric_attributes` has built."""

    def command_attributes(self, key: CommandKey) -> dict[str, Any]:
        """What is the same for every sending of one command to one server, if it is a first attempt; the caller
        copies it.
        """
        command, database, collection, address = key
        if len(self.commands) >= MOST_NAMES:
            self.commands.clear()
        found = self.commands[key] = {
            semconv.DB_SYSTEM: semconv.MONGODB,
            semconv.DB_COMMAND: command,
            **namespace_attributes(database, collection),
            semconv.DB_QUERY_SUMMARY: summarise(command, database, collection),
            **server_attributes(address),
            semconv.NETWORK_TRANSPORT: "unix" if address[1] is None else "tcp",
            semconv.RETRY_ATTEMPT: 1,
        }
        return found

    def metric_attributes(self, address: Address | None, error_type: str | None) -> dict[str, Any]:
        if len(self.metrics) >= MOST_NAMES:
            self.metrics.clear()
        found = self.metrics[address, error_type] = {
            semconv.DB_SYSTEM: semconv.MONGODB,
            semconv.DB_OPERATION: self.operation,
            **namespace_attributes(*self.metric_namespace),
            **({} if address is None else server_attributes(address)),
        }
        if error_type is not None:
            found[semconv.ERROR_TYPE] = error_type
        return found


class Naming:
    """The cache of names of one client's operations. Metrics tell `most_collections` collections apart."""

    __slots__ = ("_known", "_most_collections", "_namespaces", "_of_collections", "_policy")

    def __init__(self, *, policy: str, most_collections: int) -> None:
        self._policy = policy
        self._most_collections = most_collections
        self._known: dict[tuple[str, str | None, str | None], OperationNames] = {}
        self._of_collections: dict[tuple[str, str], OperationNames] = {}
        self._namespaces: set[tuple[str | None, str | None]] = set()

    def of_collection(self, operation: str, collection: Any) -> OperationNames:
        """By PyMongo's object, which keeps its full name at hand and has to ask for the parts."""
        key = (operation, collection.full_name)
        names = self._of_collections.get(key)
        if names is None:
            if len(self._of_collections) >= MOST_NAMES:
                self._of_collections.clear()
            names = self._of_collections[key] = self.of(operation, collection.database.name, collection.name)
        return names

    def of(self, operation: str, database: str | None, collection: str | None) -> OperationNames:
        key = (operation, database, collection)
        names = self._known.get(key)
        if names is None:
            if len(self._known) >= MOST_NAMES:
                self._known.clear()
            names = self._known[key] = OperationNames(
                operation, database, collection, self._policy, self._metric_namespace(database, collection)
            )
        return names

    def _metric_namespace(
        self, database: str | None, collection: str | None
    ) -> tuple[str | None, str | None]:
        """Programs with a database or a collection for each tenant must not make a metric for each of them."""
        key = (database, collection)
        if key == (None, None) or key in self._namespaces:
            return key
        if len(self._namespaces) < self._most_collections:
            self._namespaces.add(key)
            return key
        known = any(database == each for each, _ in self._namespaces)
        return database if known else semconv.OTHER, None if collection is None else semconv.OTHER


def summarise(name: str, database: str | None, collection: str | None) -> str:
    """`find db.coll`, `listDatabases admin`: an operation's span name, a command's summary."""
    if database is None:
        return name
    return f"{name} {database}.{collection}" if collection is not None else f"{name} {database}"


def namespace_attributes(database: str | None, collection: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if database is not None:
        found[semconv.DB_NAMESPACE] = database
    if collection is not None:
        found[semconv.DB_COLLECTION] = collection
    return found


def server_attributes(address: Address) -> dict[str, Any]:
    host, port = address
    found: dict[str, Any] = {semconv.SERVER_ADDRESS: host}
    if port is not None:
        found[semconv.SERVER_PORT] = port
    return found
