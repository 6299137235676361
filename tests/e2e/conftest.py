"""The backends and the application, started once for all end-to-end tests.

`backends.prometheus.query(expression)` and `backends.jaeger.search(service, tags=...)` ask what an operator would ask;
`workload.run(...)` makes an application work; `traffic` is a given mix of calm and faults, done and delivered.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from scripts import backends as installed
from tests.e2e.stack import Backends
from tests.e2e.workload import APP_NAME, Request, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from otel_retry.mongod import Deployment

REQUIRE_VARIABLE = "OTEL_RETRY_REQUIRE_BACKENDS"

OVERLOAD = {"errorCode": 462, "errorLabels": ["RetryableError", "SystemOverloadedError"], "appName": APP_NAME}


def need(*wanted: installed.Backend) -> None:
    """Skip, with what to do about it; where they must be there (CI), fail."""
    absent = installed.missing(wanted)
    if not absent:
        return
    names = ", ".join(f"{backend.name} {backend.version}" for backend in absent)
    reason = f"not installed: {names}; {installed.HOW_TO}"
    if os.environ.get(REQUIRE_VARIABLE):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every program of the run leaves its log."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def backends(logs: Path) -> Iterator[Backends]:
    """Jaeger, Prometheus and the Collector with the files of examples/stack."""
    need(installed.JAEGER, installed.PROMETHEUS, installed.COLLECTOR)
    with Backends(logs) as started:
        yield started


@pytest.fixture(scope="session")
def workload(backends: Backends, deployment: Deployment, logs: Path) -> Iterator[Workload]:
    """An application, under `opentelemetry-instrument`, sending to the Collector; any test may make it work."""
    with Workload(
        uri=deployment.uri, endpoint=backends.endpoint, service="workload", log=logs / "workload.log"
    ) as started:
        started.run("update")  # connects; and there is a document to find
        yield started


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What an application did in its whole life, by its own account, when all of it was sent."""

    service: str
    first: list[Request]
    """To connect."""
    calm: list[Request]
    retried: list[Request]
    """Overloaded once, twice or three times, then served; some lost their connection."""
    gave_up: list[Request]
    slow: list[Request]

    @property
    def kept(self) -> list[Request]:
        """Those whose traces must not be sampled away."""
        return [*self.retried, *self.gave_up, *self.slow]

    @property
    def all(self) -> list[Request]:
        return [*self.first, *self.calm, *self.kept]


@pytest.fixture(scope="session")
def traffic(backends: Backends, deployment: Deployment, logs: Path) -> Traffic:
    """Done once, by an application of its own, so that what is counted stays as it is."""
    service = "traffic"
    with Workload(
        uri=deployment.uri, endpoint=backends.endpoint, service=service, log=logs / "traffic.log"
    ) as application:
        done = Traffic(
            service=service, first=application.run("update"), calm=[], retried=[], gave_up=[], slow=[]
        )
        _calm_and_faults(application, deployment, done)
    backends.wait_for_traces(service, [request.trace_id for request in done.kept])
    backends.wait_until_settled(service)
    return done


def _calm_and_faults(application: Workload, deployment: Deployment, done: Traffic) -> None:
    done.calm.extend(application.run("find", count=500, threads=2))
    for times, do in (
        *[(times, do) for times in (1, 2) for do in ("find", "insert", "aggregate")],
        *[(1, "update")] * 5,
        (3, "find"),
    ):
        with deployment.fail_command(commands=[do], times=times, **OVERLOAD):
            done.retried.extend(application.run(do))
    with deployment.fail_command(commands=["insert"], errorCode=121, appName=APP_NAME):
        done.gave_up.extend(application.run("insert", count=3))
    with deployment.fail_command(commands=["find"], **OVERLOAD):
        done.gave_up.extend(application.run("find"))
    with deployment.fail_command(
        commands=["aggregate"], blockConnection=True, blockTimeMS=600, appName=APP_NAME
    ):
        done.slow.extend(application.run("aggregate", count=4))
    done.calm.extend(application.run("both", count=500, threads=2))
    # Last of all something that is kept: once it is in Jaeger, all before it is decided as well.
    for do in ("find", "insert"):
        with deployment.fail_command(commands=[do], times=1, closeConnection=True, appName=APP_NAME):
            done.retried.extend(application.run(do))
