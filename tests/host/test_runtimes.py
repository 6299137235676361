"""Runtimes that change what threads, sleeping and asserting mean: gevent, uvloop, `python -O`."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.flavours import OVERLOAD
from tests.host.conftest import ended_well


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"{module} is not installed: pip install {module}"
    )


# All end alike: what was found, and the forest of spans.
TELL = """
    def tell(rig, **facts):
        import json
        operations = rig.operations
        inserts = [each for each in operations if each.attributes["db.operation.name"] == "insert"]
        print(json.dumps({
            **facts,
            "inserts": len(inserts),
            "roots": sum(each.parent is None for each in inserts),
            "whole": sum(
                len(rig.children(each)) == each.attributes["mongodb.retry.attempts"] for each in inserts
            ),
            "retried": sum(each.attributes["mongodb.retry.outcome"] == "retried" for each in inserts),
            "open": len(rig.open),
        }))
"""

GEVENT = (
    """
    from gevent import monkey
    monkey.patch_all()
    import gevent, sys, time
    import otel_retry
    from otel_retry.pymongo.seam import waiting
    from pymongo import MongoClient
    from tests.integration.telemetry_rig import Rig
"""
    + TELL
    + """
    uri, database = sys.argv[1:]
    rig = Rig()
    otel_retry.instrument(**rig.providers)
    client = MongoClient(uri, appname="greenlets")
    orders = client[database].orders
    client.admin.command("ping")
    inside, most = [0], [0]

    def sleep(seconds):
        # Until two wait at once, which never happens if whoever waits holds up all others.
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        deadline = time.monotonic() + 30
        while most[0] < 2 and time.monotonic() < deadline:
            original(0.02)
        original(seconds)
        inside[0] -= 1

    original, waiting.sleep = waiting.sleep, sleep

    def buy(number):
        orders.insert_one({"_id": number})
        assert orders.find_one({"_id": number}) == {"_id": number}

    gevent.joinall([gevent.spawn(buy, number) for number in range(40)], timeout=60, raise_error=True)
    tell(rig, count=orders.count_documents({}), together=most[0] >= 2, consumed=otel_retry.budget(client).consumed)
    client.close()
"""
)


@needs("gevent")
def test_greenlets_retry_without_holding_each_other_up(run, deployment, database_name):
    with deployment.fail_command(commands=["insert"], times=7, appName="greenlets", **OVERLOAD):
        told = json.loads(ended_well(run(GEVENT, deployment.uri, database_name)))

    retried = told.pop("retried")
    assert 1 <= retried <= 7
    assert told == {
        "count": 40,
        "together": True,
        "consumed": 7,
        "inserts": 40,
        "roots": 40,
        "whole": 40,
        "open": 0,
    }


UVLOOP = (
    """
    import asyncio, sys, uvloop
    import otel_retry
    from pymongo import AsyncMongoClient
    from tests.integration.telemetry_rig import Rig
"""
    + TELL
    + """
    async def main(uri, database):
        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        rig = Rig()
        otel_retry.instrument(**rig.providers)
        async with AsyncMongoClient(uri, appname="uvloop") as client:
            orders = client[database].orders

            async def buy(number):
                await orders.insert_one({"_id": number})
                assert await orders.find_one({"_id": number}) == {"_id": number}

            await client.admin.command("ping")
            await asyncio.gather(*(buy(number) for number in range(40)))
            cancelled = asyncio.create_task(orders.find_one({"$where": "sleep(10000) || true"}))
            while not any(span.name == "find" and span.end_time is None for span in rig.open):
                await asyncio.sleep(0.01)
            cancelled.cancel()
            try:
                await cancelled
                ended = "answered"
            except asyncio.CancelledError:
                ended = "cancelled"
            tell(rig, count=await orders.count_documents({}), ended=ended)

    uvloop.run(main(*sys.argv[1:]))
"""
)


@needs("uvloop")
def test_uvloop_is_a_loop_like_any_other(run, deployment, database_name):
    with deployment.fail_command(commands=["insert"], times=7, appName="uvloop", **OVERLOAD):
        told = json.loads(ended_well(run(UVLOOP, deployment.uri, database_name)))

    retried = told.pop("retried")
    assert 1 <= retried <= 7
    assert told == {"count": 40, "ended": "cancelled", "inserts": 40, "roots": 40, "whole": 40, "open": 0}


OPTIMISED = """
    import asyncio, json, sys
    import otel_retry
    from otel_retry.pymongo.seam import waiting
    from pymongo import AsyncMongoClient, InsertOne, MongoClient, UpdateMany
    from pymongo.errors import DuplicateKeyError, OperationFailure
    from tests.flavours import resolve
    from tests.integration.telemetry_rig import Rig, events

    uri, database = sys.argv[1:]
    rig = Rig()
    otel_retry.instrument(**rig.providers, query_text_max_length=200)
    waiting.sleep = lambda seconds: None

    async def no_sleep(seconds):
        pass

    waiting.sleep_async = no_sleep
    seen = []

    async def shop(client):
        orders = client[database][type(client).__name__]
        await resolve(orders.insert_one({"_id": 1}))
        seen.append(await resolve(orders.find_one({"_id": 1})))
        await resolve(orders.bulk_write([InsertOne({"_id": 2}), UpdateMany({}, {"$set": {"x": 1}})]))
        try:
            await resolve(orders.insert_one({"_id": 1}))
        except DuplicateKeyError as error:
            seen.append([error.code, len(otel_retry.attempts(error))])
        try:
            await resolve(client[database].command("nonsense"))
        except OperationFailure as error:
            seen.append([error.code, len(otel_retry.attempts(error))])
        session = await resolve(client.start_session())
        await resolve(session.start_transaction())
        await resolve(orders.insert_one({"_id": 3}, session=session))
        await resolve(session.commit_transaction())
        await resolve(session.end_session())
        seen.append(await resolve(orders.count_documents({})))
        bucket = otel_retry.budget(client)
        seen.append([bucket.consumed, bucket.tokens])

    async def main():
        with MongoClient(uri, appname="optimised") as client:
            await shop(client)
        async with AsyncMongoClient(uri, appname="optimised") as client:
            await shop(client)

    asyncio.run(main())
    seen.append([[span.name.replace(database, "db"), sorted(span.attributes), len(events(span))] for span in rig.spans])
    seen.append(sorted(rig.metrics()))
    print(json.dumps([__debug__, seen]))
"""


def test_without_asserts_and_docstrings_it_does_the_same(run, deployment, database_name):
    told = []
    for flags in ((), ("-O",), ("-OO",)):
        with deployment.fail_command(commands=["find", "insert"], times=2, appName="optimised", **OVERLOAD):
            ended = run(OPTIMISED, deployment.uri, f"{database_name}{len(told)}", flags=flags)
        debug, seen = json.loads(ended_well(ended))
        assert debug is (flags == ())
        told.append(seen)

    assert told[0] == told[1] == told[2]
    consumed, _ = told[0][4]
    assert consumed == 2
