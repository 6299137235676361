"""Each test of behaviour runs twice, with MongoClient and with AsyncMongoClient: the same lines, both drivers."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

from pymongo import AsyncMongoClient, MongoClient
from pymongo.monitoring import CommandListener

OVERLOAD: dict[str, Any] = {"errorCode": 462, "errorLabels": ["SystemOverloadedError", "RetryableError"]}
"""What a real server says when it rejects a command for overload (seed 001, "Overload Errors")."""


class Commands(CommandListener):
    """Records what the driver publishes."""

    def __init__(self) -> None:
        self.started_events: list[Any] = []
        self.ended_events: list[Any] = []

    def started(self, event: Any) -> None:
        self.started_events.append(event)

    def succeeded(self, event: Any) -> None:
        self.ended_events.append(event)

    def failed(self, event: Any) -> None:
        self.ended_events.append(event)

    def named(self, name: str) -> list[Any]:
        """The started events of one command."""
        return [event for event in self.started_events if event.command_name == name]

    def count(self, name: str) -> int:
        return len(self.named(name))

    def clear(self) -> None:
        self.started_events.clear()
        self.ended_events.clear()


async def resolve(value: Any) -> Any:
    """What an operation of either driver comes to."""
    return await value if inspect.isawaitable(value) else value


async def listed(cursor: Any) -> list[Any]:
    """All that a cursor of either driver yields."""
    if hasattr(cursor, "__aiter__"):
        return [item async for item in cursor]
    return list(cursor)


class Flavour:
    """Makes clients of one driver, and closes them."""

    _numbers = itertools.count()

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_async = name == "async"
        self._clients: list[Any] = []

    @property
    def client_class(self) -> type[Any]:
        return AsyncMongoClient if self.is_async else MongoClient

    def client(self, uri: str, **options: Any) -> Any:
        """A client with a name of its own (`client.options.pool_options.appname`), so that failpoints can aim at it,
        and a fast heartbeat: after some errors a retry waits for the next one.
        """
        options.setdefault("heartbeatFrequencyMS", 500)
        options.setdefault("serverSelectionTimeoutMS", 10_000)
        options.setdefault("appname", f"otel_retry-test-{next(self._numbers)}")
        client = self.client_class(uri, **options)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        while self._clients:
            await resolve(self._clients.pop().close())
