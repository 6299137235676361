"""Hooks: what users of opentelemetry-instrumentation-pymongo have already works as it is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from opentelemetry.instrumentation.utils import suppress_instrumentation
from pymongo.errors import OperationFailure
from pymongo.monitoring import CommandFailedEvent, CommandStartedEvent, CommandSucceededEvent

from tests.flavours import OVERLOAD, resolve
from tests.integration.telemetry_rig import is_command


class Hooked:
    """Three hooks that write down what they get, and leave a mark on the span."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []

    def request_hook(self, span: Any, event: Any) -> None:
        self.calls.append(("request", span, event))
        span.set_attribute("hook.request", event.command_name)

    def response_hook(self, span: Any, event: Any) -> None:
        self.calls.append(("response", span, event))
        span.set_attribute("hook.response", True)

    def failed_hook(self, span: Any, event: Any) -> None:
        self.calls.append(("failed", span, event))
        span.set_attribute("hook.failed", event.failure["code"])

    @property
    def options(self) -> dict[str, Any]:
        """By the names that contrib's `instrument()` has."""
        return {name: getattr(self, name) for name in ("request_hook", "response_hook", "failed_hook")}


async def test_hooks_get_the_command_span_and_the_event_of_pymongo(connect, things, watch, rig, fail, delays):
    hooked = Hooked()
    watch(**hooked.options)
    client = connect()
    fail(client, "find", times=1, **OVERLOAD)
    await resolve(things(client).find_one({}))

    assert [kind for kind, _, _ in hooked.calls] == ["request", "failed", "request", "response"]
    assert [type(event) for _, _, event in hooked.calls] == [
        CommandStartedEvent,
        CommandFailedEvent,
        CommandStartedEvent,
        CommandSucceededEvent,
    ]
    failed, succeeded = rig.commands
    assert all(is_command(span) for _, span, _ in hooked.calls)
    assert [span.context.span_id for _, span, _ in hooked.calls] == [
        failed.context.span_id,
        failed.context.span_id,
        succeeded.context.span_id,
        succeeded.context.span_id,
    ]
    assert failed.attributes["hook.request"] == "find"
    assert failed.attributes["hook.failed"] == 462
    assert "hook.response" not in failed.attributes
    assert succeeded.attributes["hook.response"] is True


async def test_hooks_hear_of_commands_outside_of_any_operation_and_not_of_sensitive_or_suppressed_ones(
    connect, things, watch, shared_database
):
    hooked = Hooked()
    watch(**hooked.options)
    client = connect()
    collection = things(client)
    with suppress_instrumentation():
        await resolve(collection.insert_many([{}, {}, {}]))
    assert not hooked.calls
    with pytest.raises(OperationFailure):
        await resolve(client[shared_database].command("updateUser", "nobody", pwd="secret"))
    assert not hooked.calls
    cursor = collection.find({}, batch_size=2)
    await resolve(cursor.__anext__() if hasattr(cursor, "__anext__") else next(cursor))
    await resolve(cursor.close())
    assert [event.command_name for kind, _, event in hooked.calls if kind == "response"] == [
        "find",
        "killCursors",
    ]


@pytest.mark.parametrize("name", ["request_hook", "response_hook", "failed_hook"])
async def test_a_hook_that_fails_is_logged_once_and_nothing_else_happens(
    connect, things, watch, rig, fail, delays, caplog, capfd, name
):
    def broken(span: Any, event: Any) -> None:
        raise ValueError("the hook's own fault")

    watch(**{name: broken})
    client = connect()
    fail(client, "find", times=2, **OVERLOAD)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await resolve(things(client).find_one({}))

    [record] = caplog.records
    assert record.name == "otel_retry"
    assert name in record.getMessage()
    assert "the hook's own fault" in str(record.exc_info[1])
    assert [operation.attributes["mongodb.retry.outcome"] for operation in rig.operations] == [
        "retried",
        "first_try",
        "first_try",
    ]
    assert len(rig.commands) == 5
    assert not rig.open
    assert "Traceback" not in capfd.readouterr().err  # PyMongo prints what a listener raises


async def test_capture_statement_is_query_text_without_values(connect, things, watch, rig):
    watch(capture_statement=True)
    await resolve(things(connect()).find_one({"name": "planted"}))

    text = rig.command().attributes["db.query.text"]
    assert '"name": "?"' in text
    assert "planted" not in text
    assert len(text) <= 1024


async def test_statements_are_not_captured_by_default_or_when_told_not_to(connect, things, watch, rig):
    for options in ({}, {"capture_statement": False}):
        watch(**options)
        await resolve(things(connect()).find_one({"name": "planted"}))

    assert len(rig.commands) == 2
    assert all("db.query.text" not in command.attributes for command in rig.commands)


async def test_raw_text_is_there_when_asked_for(connect, things, watch, rig):
    watch(query_text_max_length=40, query_text_raw=True)
    collection = things(connect())
    await resolve(collection.find_one({"name": "planted"}))
    await resolve(collection.database.command("ping", comment="planted"))

    found, ping = (command.attributes["db.query.text"] for command in rig.commands)
    assert found.startswith(f'{{"find": "{collection.name}')
    assert len(found) == 40
    assert ping.startswith('{"ping": 1, "comment": "planted"')
