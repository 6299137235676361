"""Many at once, and many one after the other: tokens are exact, and what is gone leaves nothing."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import pytest
from opentelemetry.metrics import get_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure

import otel_retry
from otel_retry import instrumentor
from otel_retry.pacing import TokenBucket
from tests.flavours import OVERLOAD, Commands, resolve

registry = instrumentor._registry

THREADS = 64


def tenths(tokens: float) -> int:
    return round(10 * tokens)


@pytest.mark.parametrize(("capacity", "share"), [(1000, 0.3), (2, 0.6)])
def test_sixty_four_threads_on_one_bucket_and_every_token_is_accounted_for(
    deployment, database_name, instrument, delays, rig, capacity, share
):
    """With 2 tokens many retries are refused, and a refusal must cost nothing either."""
    instrument(**rig.providers)
    commands = Commands()
    with MongoClient(deployment.uri, appname="many", event_listeners=[commands], maxPoolSize=16) as client:
        collection = client[database_name].c
        collection.insert_one({"_id": "first"})
        bucket = instrumentor.state_of(client).budget = TokenBucket(capacity=capacity)
        commands.clear()
        gate = threading.Barrier(THREADS)
        errors: list[OperationFailure] = []
        unexpected: list[BaseException] = []

        def work(number: int) -> None:
            gate.wait(60)
            for turn in range(8):
                try:
                    collection.insert_one({"_id": f"{number}-{turn}"})
                except OperationFailure as error:
                    errors.append(error)
                except BaseException as error:
                    unexpected.append(error)

        with deployment.fail_command(commands=["insert"], probability=share, appName="many", **OVERLOAD):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
        stored = collection.count_documents({}) - 1

    assert unexpected == []
    assert stored == THREADS * 8 - len(errors)
    rejected = sum(
        hasattr(event, "failure") for event in commands.ended_events if event.command_name == "insert"
    )
    retries = rejected - len(errors)  # each rejection is followed by a retry or by the error
    assert retries > 0
    assert bucket.consumed == retries == len(delays)
    assert tenths(bucket.tokens) == tenths(bucket.capacity) + tenths(bucket.deposited) - tenths(
        bucket.consumed
    )
    assert 0 <= bucket.tokens <= bucket.capacity
    # Who gave up after fewer than six attempts was refused by the bucket, and nobody else.
    assert bucket.denied == sum(len(otel_retry.attempts(error)) < 6 for error in errors)
    assert (bucket.denied > 0) is (capacity == 2)
    assert rig.total("mongodb.retry.attempts") == retries
    assert not rig.open


def batches(cls: type[Any], *, total: int, size: int) -> list[int]:
    """Clients come and go; the blocks of memory that are held after each batch."""
    held = []
    for _ in range(total // size):
        clients = [cls("localhost:1", connect=False) for _ in range(size)]
        assert all(otel_retry.budget(client) is not None for client in clients)
        clients.clear()
        gc.collect()
        held.append(sys.getallocatedblocks())
    return held


@pytest.mark.parametrize(
    ("cls", "sdk"),
    [(MongoClient, True), (AsyncMongoClient, True), (MongoClient, False)],
    ids=["sync", "async", "without an SDK"],
)
def test_ten_thousand_clients_come_and_go_and_nothing_is_kept(cls, sdk, rig, instrument):
    """A third of them here each time; as many at once: tests/unit/test_clients.py."""
    gc.collect()
    instrument(**rig.providers) if sdk else instrument()
    before = len(registry)
    instruments = len(instrumentor._hub._instruments)
    batches(cls, total=600, size=100)  # what is made once is made now
    api_meters = len(getattr(get_meter_provider(), "_meters", ()))
    held = batches(cls, total=2800, size=100)

    assert len(registry) == before
    assert len(registry._references) == before
    assert len(registry._departed) <= 50
    # No client was ever given a number that is higher than there were clients to be told apart.
    assert registry._numbers <= before + 100 + 50
    assert len(instrumentor._hub._instruments) <= instruments + 1
    assert len(getattr(get_meter_provider(), "_meters", ())) == api_meters
    # Some 1,800 clients lie between the two: one block kept of each would be seen.
    assert min(held[-5:]) - min(held[:5]) < 1000, held


async def test_providers_that_are_dropped_are_gone(mongo, deployment):
    """Whoever sets up telemetry anew, in tests or when settings change, does not keep what was before."""
    kept: list[weakref.ref[Any]] = []
    client = mongo.client(deployment.uri)
    await resolve(client.admin.command("ping"))  # the driver's background tasks keep the context of the first
    for _ in range(5):
        meters = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
        tracers = TracerProvider(shutdown_on_exit=False)
        otel_retry.instrument(meter_provider=meters, tracer_provider=tracers)
        await resolve(client.admin.command("ping"))
        otel_retry.uninstrument()
        meters.shutdown()
        tracers.shutdown()
        kept += [weakref.ref(meters), weakref.ref(tracers)]
        del meters, tracers
    await mongo.close()
    gc.collect()

    assert [reference() for reference in kept] == [None] * 10


async def test_two_clients_of_one_provider_share_its_instruments(mongo, deployment, rig, instrument):
    """Which a weak reference must not change: made twice on one meter they would be a warning and a wrong sum."""
    instrument(**rig.providers)
    for _ in range(2):
        client = mongo.client(deployment.uri)
        await resolve(client.admin.command("ping"))
        await mongo.close()
        del client
        gc.collect()

    [point] = rig.points("db.client.operation.duration", {"db.operation.name": "runCommand"})
    assert point.count == 2
