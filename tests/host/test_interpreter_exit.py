"""The interpreter ends while operations are under way: as it would have ended without us, with the same code and not a
word more.
"""

from __future__ import annotations

import signal

import pytest
from pymongo import MongoClient

from tests.flavours import OVERLOAD

# Each program says on its first line what it is about to do, and is told by `mode` whether it is instrumented.
HEAD = """
    import asyncio, atexit, os, signal, sys, threading, time
    from pymongo import AsyncMongoClient, MongoClient, monitoring

    mode, uri, database, name, milliseconds = sys.argv[1:]
    SLOW = {"$where": f"sleep({milliseconds}) || true"}
    sent = threading.Event()

    class Sent(monitoring.CommandListener):
        def started(self, event):
            if event.command_name == "find":
                sent.set()

        def succeeded(self, event): pass
        def failed(self, event): pass

    if mode == "with":
        import otel_retry
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        tracers = TracerProvider()
        tracers.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
        otel_retry.instrument(tracer_provider=tracers, meter_provider=MeterProvider([InMemoryMetricReader()]))

    options = {"appname": name, "event_listeners": [Sent()]}
"""

DAEMONS = """
    client = MongoClient(uri, **options)
    for _ in range(5):
        threading.Thread(target=client[database].c.find_one, args=(SLOW,), daemon=True).start()
    assert sent.wait(60)
    print("leaving")
    sys.exit(3)
"""

THREADS = """
    client = MongoClient(uri, **options)
    left = threading.Event()
    def find():
        found = client[database].c.find_one(SLOW)
        assert left.wait(60)
        print("found", found)
    threading.Thread(target=find).start()
    assert sent.wait(60)
    print("leaving")
    left.set()
"""

ERROR = """
    client = MongoClient(uri, **options)
    threading.Thread(target=client[database].c.find_one, args=(SLOW,), daemon=True).start()
    assert sent.wait(60)
    print("leaving")
    raise SystemError("the application's own")
"""

AT_EXIT = """
    client = MongoClient(uri, **options)
    def last():
        print("last", client[database].command("ping")["ok"])
        client.close()
    atexit.register(last)
    threading.Thread(target=client[database].c.find_one, args=(SLOW,), daemon=True).start()
    assert sent.wait(60)
    print("leaving")
"""

TASKS = """
    async def main():
        client = AsyncMongoClient(uri, **options)
        tasks = [asyncio.create_task(client[database].c.find_one(SLOW)) for _ in range(5)]
        while not sent.is_set():
            await asyncio.sleep(0.01)
        print("leaving")
        global kept
        kept = client

    asyncio.run(main())
    sys.exit(4)
"""

STOPPED_LOOP = """
    async def main():
        await asyncio.create_task(AsyncMongoClient(uri, **options)[database].c.find_one(SLOW))

    def stop():
        assert sent.wait(60)
        loop.call_soon_threadsafe(loop.stop)

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    threading.Thread(target=stop).start()
    loop.run_forever()
    print("leaving")
    os._exit(5)  # the loop is left as it is, with all that it was doing
"""

TERMINATED = """
    client = MongoClient(uri, **options)
    def end():
        assert sent.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=end, daemon=True).start()
    print("leaving", flush=True)
    client[database].c.find_one(SLOW)
"""

LONG = 20_000
"""Milliseconds until the answer comes. All but one are gone by then, and a real server ends what nobody waits for."""

PROGRAMS = {
    "daemon threads": (DAEMONS, 3, "leaving\n"),
    "threads that are waited for": (THREADS, 0, "leaving\nfound {'_id': 1}\n"),
    "an error of the application": (ERROR, 1, "leaving\n"),
    "a last operation at exit": (AT_EXIT, 0, "leaving\nlast 1.0\n"),
    "tasks": (TASKS, 4, "leaving\n"),
    "a loop that is left": (STOPPED_LOOP, 5, "leaving\n"),
    "a signal": (TERMINATED, -signal.SIGTERM, "leaving\n"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_ends_in_mid_command_as_it_would_without(run, deployment, database_name, program):
    script, code, printed = PROGRAMS[program]
    with MongoClient(deployment.uri) as client:
        client[database_name].c.insert_one({"_id": 1})
    milliseconds = 500 if script is THREADS else LONG
    without, with_us = (
        run(HEAD + script, mode, deployment.uri, database_name, "ending", milliseconds)
        for mode in ("without", "with")
    )

    assert (without.returncode, without.stdout) == (code, printed), without.stderr
    assert with_us.stderr == without.stderr
    assert (with_us.returncode, with_us.stdout) == (code, printed)


# In backoff there is nothing to compare with: PyMongo alone would not wait, or not for long.
IN_BACKOFF = """
    from otel_retry.pymongo.seam import waiting

    asleep = threading.Event()

    def sleep(seconds):
        asleep.set()
        time.sleep(600)

    waiting.sleep = sleep
    client = MongoClient(uri, **options)
    for _ in range(5):
        threading.Thread(target=client.db.c.find_one, args=({},), daemon=True).start()
    assert asleep.wait(60)
    print("leaving")
    sys.exit(3)
"""


def test_it_ends_in_mid_backoff_with_its_own_code_and_says_nothing(run, deployment):
    with deployment.fail_command(commands=["find"], appName="ending-late", **OVERLOAD):
        ended = run(HEAD + IN_BACKOFF, "with", deployment.uri, "db", "ending-late", 0)

    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "leaving\n", "")
