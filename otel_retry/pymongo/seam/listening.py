"""Listeners for clients that exist already: PyMongo copies its listeners when a client is built."""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

from otel_retry.pymongo.listener import CommandEvents
from otel_retry.telemetry.pools import PoolListener

if TYPE_CHECKING:
    from otel_retry.clients import ClientRegistry, ClientState
    from otel_retry.pymongo.seam.shape import Half
    from otel_retry.telemetry import Telemetry
    from otel_retry.telemetry.spans import OperationTrace

_COMMANDS = ("_EventListeners__command_listeners", "_EventListeners__enabled_for_commands")
_POOLS = ("_EventListeners__cmap_listeners", "_EventListeners__enabled_for_cmap")

_changing = threading.RLock()
"""Held while a client's listeners are changed. One for all: the states that come and go with `instrument()` share the
client's lists, and nobody waits long.
"""


def _after_fork() -> None:
    global _changing  # noqa: PLW0603 - another thread's hold on it would never end in the child
    _changing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def listen(client: Any, state: ClientState, telemetry: Telemetry) -> None:
    """From the first operation whose span is recorded: until then nobody would hear."""
    with _changing:  # the first operations of a client may come from many threads at once
        if state.commands is None and not state.retired:
            commands = CommandEvents(telemetry)
            if telemetry.every_attempt:
                _add(client._event_listeners, _COMMANDS, commands)
            state.commands = commands
    listen_to_pool_events(client, state, telemetry)


def is_heard(client: Any, state: ClientState, telemetry: Telemetry) -> bool:
    """Whether anybody would see what is reported; an SDK may have come only now."""
    if telemetry.awake:
        return True
    if not telemetry.wakes():
        return False
    if telemetry.instruments is not None:
        listen_to_pool_events(client, state, telemetry)
    return True


class RetryHeard:
    """For an operation that is being retried, where commands are not listened to all the time: while there is one of
    these, PyMongo publishes the client's commands.
    """

    def __init__(self, client: Any, state: ClientState) -> None:
        self._state = state
        with _changing:
            state.retried_under_way += 1
            if not state.retired:
                _add(client._event_listeners, _COMMANDS, state.commands)

    def release(self, client: Any) -> None:
        state = self._state
        with _changing:
            state.retried_under_way = max(0, state.retried_under_way - 1)
            if not state.retried_under_way:
                _remove(client._event_listeners, _COMMANDS, state.commands)


def hear_retry(client: Any, state: ClientState, trace: OperationTrace | None) -> RetryHeard | None:
    """None: commands are heard in any case, or there is nobody to tell."""
    if trace is None or not trace.recording or trace.telemetry.every_attempt or state.commands is None:
        return None
    return RetryHeard(client, state)


def listen_before_unacknowledged(half: Half, registry: ClientRegistry) -> Any:
    """An unacknowledged bulk write takes none of the other ways in. If it is the first thing that a client does,
    nobody would listen yet.
    """
    original = half.client.__dict__["_conn_for_writes"]

    def prepare(client: Any) -> None:
        state = registry.of(client)
        telemetry = None if state is None else state.telemetry
        if state is None or telemetry is None or state.commands is not None:
            return
        if is_heard(client, state, telemetry) and telemetry.records:
            listen(client, state, telemetry)

    @functools.wraps(original)
    def conn_for_writes(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(self)
        return original(self, *args, **kwargs)

    @functools.wraps(original)
    async def conn_for_writes_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(self)
        return await original(self, *args, **kwargs)

    return conn_for_writes_async if half.is_async else conn_for_writes


def listen_to_pool_events(client: Any, state: ClientState, telemetry: Telemetry) -> None:
    """For metrics of pools, and for the number of the connection that a command span names."""
    with _changing:
        if state.pools is not None or state.retired:
            return
        options = client.options.pool_options
        pools = PoolListener(
            client=state.name,
            instruments=telemetry.instruments,
            minimum=options.min_pool_size,
            maximum=options.max_pool_size,
        )
        _add(client._event_listeners, _POOLS, pools)
        state.pools = pools
        _publish(client, wanted=True)


def stop_listening(client: Any, state: ClientState) -> None:
    """Leaves the client as it was built, also by operations under way that would listen only now."""
    with _changing:
        state.retire()
        events = client._event_listeners
        _remove(events, _COMMANDS, state.commands)
        _remove(events, _POOLS, state.pools)
        _publish(client, wanted=events.enabled_for_cmap)
    if state.commands is not None:
        state.commands.stop()


def _add(events: Any, where: tuple[str, str], listener: Any) -> None:
    registered, enabled = where
    there = getattr(events, registered)
    if not any(each is listener for each in there):
        # A new list: another thread may be going through the old one.
        setattr(events, registered, [*there, listener])
    setattr(events, enabled, True)


def _remove(events: Any, where: tuple[str, str], listener: Any) -> None:
    registered, enabled = where
    remaining = [each for each in getattr(events, registered) if each is not listener]
    setattr(events, registered, remaining)
    setattr(events, enabled, bool(remaining))


def _publish(client: Any, *, wanted: bool) -> None:
    """Pools that are open already have looked once whether anybody listens; they are told to look again."""
    topology = client._topology
    for server in list(getattr(topology, "_servers", {}).values()):
        pool = server.pool
        telemetry = getattr(pool, "_telemetry", None)
        if telemetry is not None:
            telemetry._should_publish = wanted
            continue
        pool.enabled_for_cmap = wanted
        for connection in list(pool.conns):
            connection.enabled_for_cmap = wanted
