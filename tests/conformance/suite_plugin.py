"""A pytest plugin for PyMongo's own suite: it switches otel_retry on before the suite is imported, records each
test's outcome line by line, so that a killed run still tells what it had reached, and proves which loop ran.

`driver_suite.py` loads it with `-p suite_plugin`, in both configurations. It runs in an environment that
knows nothing of this repository's `tests` package, so it imports nothing from there.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pymongo
import pymongo.asynchronous.mongo_client
import pymongo.common
import pymongo.synchronous.mongo_client
import pytest

POLICY = os.environ.get("OTEL_RETRY_CONFORMANCE_POLICY")
REPORT = Path(os.environ["OTEL_RETRY_CONFORMANCE_REPORT"])
VACUOUS = 70  # exit status: what ran is not what was asked for
HALVES = (pymongo.synchronous.mongo_client, pymongo.asynchronous.mongo_client)


@pytest.hookimpl(tryfirst=True)  # before test/conftest.py, hence before the suite makes its first client
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # Some tests build a client with no host; PyMongo's CI has its server on the default port.
    for client in (pymongo.MongoClient, pymongo.AsyncMongoClient):
        client.HOST = os.environ["DB_IP"]
        client.PORT = int(os.environ["DB_PORT"])
    # A retry after code 91 waits for the next heartbeat: with the default of 10 s, minutes would go there.
    pymongo.common.HEARTBEAT_FREQUENCY = 1
    early_config.pluginmanager.register(Recorder(Engine(POLICY) if POLICY else None))


class Recorder:
    """Writes what happens to `REPORT`, one JSON object per line."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine
        self._file = REPORT.open("w", encoding="utf-8", buffering=1)

    def _write(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A setup or teardown that went well says nothing, nor does a subtest: the test's own report follows.
        if report.failed or (not hasattr(report, "context") and (report.when == "call" or report.skipped)):
            self._write(
                test=report.nodeid,
                outcome=_outcome(report),
                seconds=round(report.duration, 3),
                **({"error": report.longreprtext} if report.failed else {}),
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._write(test=report.nodeid, outcome=_outcome(report), error=report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        loops = [half._ClientConnectionRetryable.__module__ for half in HALVES]
        seen = self._engine.seen if self._engine else Counter()
        self._write(finished=True, seen=dict(seen), logged=self._engine.logged if self._engine else [])
        self._file.close()
        if Path(pymongo.__file__).is_relative_to(Path.cwd()):
            pytest.exit(f"the sdist's PyMongo was imported: {pymongo.__file__}", returncode=VACUOUS)
        if not all(loop.startswith("otel_retry.") == bool(self._engine) for loop in loops):
            wanted = f"policy {POLICY}" if self._engine else "no plugin"
            pytest.exit(f"{wanted} was asked for, but the retry loops are {loops}", returncode=VACUOUS)
        if self._engine and not seen["operations"]:
            pytest.exit("the plugin was on, yet no operation went through it", returncode=VACUOUS)


class Engine:
    """otel_retry, switched on, and counted: operations that it ran, errors that it judged, spans that it made.

    There are real providers, as in an application, so that the code which makes spans and metrics runs too.
    """

    def __init__(self, policy: str) -> None:
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

        import otel_retry

        seen = self.seen = Counter[str]()
        logged = self.logged = list[str]()  # where it falls back or drops an observer, it says so

        class Spans(SpanProcessor):
            def on_end(self, span: Any) -> None:
                seen["spans"] += 1

        class Log(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                logged.append(f"{record.levelname} {record.name}: {record.getMessage()}")

        logging.getLogger("otel_retry").addHandler(Log(logging.WARNING))
        tracer_provider = TracerProvider()
        tracer_provider.add_span_processor(Spans())
        trace.set_tracer_provider(tracer_provider)
        metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))
        otel_retry.instrument(policy=policy)
        for half in HALVES:
            _count(half._ClientConnectionRetryable, "run", seen, "operations")
            _count(half._ClientConnectionRetryable, "failed", seen, "errors")


def _count(cls: Any, method: str, seen: Counter[str], what: str) -> None:
    original = getattr(cls, method)

    @functools.wraps(original)
    def counted(*args: Any) -> Any:
        seen[what] += 1
        return original(*args)  # for an async method a coroutine, which the caller awaits

    setattr(cls, method, counted)


def _outcome(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.failed:
        return "fail"
    if report.skipped:
        return "xfail" if hasattr(report, "wasxfail") else "skip"
    return "pass"
