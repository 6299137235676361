"""The wall clock jumps, by hours, forwards and back, at every look at it. Waits, durations and spans do not follow."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import opentelemetry.sdk.trace
import pymongo
import pytest
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_preferences import Secondary

import otel_retry
from otel_retry.telemetry import spans
from tests.flavours import OVERLOAD, resolve
from tests.integration.telemetry_rig import is_child

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

HOURS = 3600 * 10**9
LONGEST = 60.0
"""Seconds: far more than any operation here takes, far less than a jump."""

JUMPS = {
    "back at every look": itertools.count(0, -1),
    "forwards at every look": itertools.count(),
    "to and fro": itertools.cycle([0, 5, -3, 8, -13]),
}


@pytest.fixture(params=JUMPS)
def jumping(request, monkeypatch):
    jumps, real = JUMPS[request.param], time.time_ns

    def time_ns() -> int:
        return real() + next(jumps) * HOURS

    monkeypatch.setattr(time, "time_ns", time_ns)
    monkeypatch.setattr(time, "time", lambda: time_ns() / 1e9)
    for module in (opentelemetry.sdk.trace, spans):
        monkeypatch.setattr(module, "time_ns", time_ns)


def seconds(span: ReadableSpan) -> float:
    return (span.end_time - span.start_time) / 1e9


def durations(rig: Any, name: str) -> list[float]:
    return [point.sum for point in rig.points(name)]


async def test_spans_and_metrics_tell_how_long_it_took(
    mongo, deployment, database_name, rig, instrument, delays, jumping
):
    instrument(**rig.providers)
    client = mongo.client(deployment.uri)
    collection = client[database_name].c
    await resolve(collection.insert_many([{"_id": number} for number in range(5)]))
    name = client.options.pool_options.appname
    with deployment.fail_command(commands=["find"], times=2, appName=name, **OVERLOAD):
        assert await resolve(collection.find_one({"_id": 1})) == {"_id": 1}
    with (
        deployment.fail_command(commands=["find"], appName=name, **OVERLOAD),
        pytest.raises(OperationFailure) as raised,
    ):
        await resolve(collection.find_one({}))
    session = await resolve(client.start_session())
    await resolve(session.start_transaction())
    await resolve(collection.insert_one({"_id": 9}, session=session))
    await resolve(session.commit_transaction())
    await resolve(session.end_session())
    await mongo.close()

    assert len(rig.operations) >= 5
    for span in rig.spans:
        assert 0 <= seconds(span) < LONGEST, span.name
        for event in span.events:
            assert span.start_time <= event.timestamp <= span.end_time, (span.name, event.name)
    for operation in rig.operations:
        ends = [(child.start_time, child.end_time) for child in rig.children(operation)]
        assert ends == sorted(ends)
        assert all(operation.start_time <= start <= end <= operation.end_time for start, end in ends)
        assert all(is_child(child, operation) for child in rig.children(operation))
    for metric in ("db.client.operation.duration", "mongodb.client.attempt.duration"):
        assert durations(rig, metric)
        assert all(0 <= each < LONGEST for each in durations(rig, metric))
    history = otel_retry.attempts(raised.value)
    assert len(history) == 6
    assert all(0 <= attempt.duration < LONGEST for attempt in history)
    # The waits: 2 and 5 of them, by the rule and not by the clock.
    assert len(delays) == 7
    assert all(0 <= delay <= 1.6 for delay in delays)


async def test_an_attempt_that_sent_nothing_lies_within_its_operation(
    mongo, deployment, rig, instrument, jumping
):
    client = mongo.client(deployment.uri)
    await resolve(client.admin.command("ping"))
    instrument(**rig.providers)
    nowhere = client.get_database("db", read_preference=Secondary())  # there is none
    with pymongo.timeout(0.3), pytest.raises(PyMongoError):
        await resolve(nowhere.c.find_one({}))

    [operation] = rig.operations
    [attempt] = rig.unsent
    assert operation.start_time <= attempt.start_time <= attempt.end_time <= operation.end_time
    assert seconds(operation) < LONGEST


async def test_a_real_wait_is_as_long_as_it_should_be(mongo, deployment, instrument, jumping):
    """No patience is taken from the wall clock: neither at once, nor for an hour."""
    instrument()
    client = mongo.client(deployment.uri)
    await resolve(client.admin.command("ping"))
    began = time.monotonic()
    with deployment.fail_command(
        commands=["find"], times=2, appName=client.options.pool_options.appname, **OVERLOAD
    ):
        await resolve(client.db.c.find_one({}))
    assert time.monotonic() - began < LONGEST
    assert otel_retry.budget(client).consumed == 2
