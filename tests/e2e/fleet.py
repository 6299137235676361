"""A whole fleet in a real Prometheus: what the queries of the fleet dashboard cost, with the recording rules and without.

One real application says which series there are. They are written for as many instances as wanted, a point a minute, by
promtool; then the rules are evaluated over the whole time, as Prometheus would have done it meanwhile.

    python -m tests.e2e.fleet [instances] [minutes]

The figures are in docs/scale.md. They belong to the machine, so the test (test_fleet.py) looks at the answers only.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader, Sum
from pymongo import MongoClient
from pymongo.errors import PyMongoError

import otel_retry
from otel_retry import dashboards, mongod
from otel_retry.dashboards.names import Kind, label, series
from scripts import backends
from tests.e2e.processes import HOST, Program, free_ports
from tests.e2e.stack import Prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTANCES_OF_A_JOB = 4
POINT_SECONDS = 60
# Blocks of Prometheus are two hours long: an hour at the end of one lies in one block.
BLOCK_SECONDS = 7200
APP_NAME = "fleet"
OVERLOAD = {"errorCode": 462, "errorLabels": ["RetryableError", "SystemOverloadedError"], "appName": APP_NAME}
FAILED_OPERATIONS = 3

RULES: list[dict[str, str]] = [
    rule
    for group in yaml.safe_load(dashboards.read("recording-rules.yaml"))["groups"]
    for rule in group["rules"]
]
_RECORDED = re.compile(
    r"(?<![\w:])(" + "|".join(re.escape(rule["record"]) for rule in RULES) + r')(?![\w:])(?:\{job=~"\.\*"\})?'
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One series of one instance. What is no gauge grows by `value` a minute."""

    name: str
    labels: dict[str, str]
    value: float
    gauge: bool


@dataclass(frozen=True, kw_only=True)
class Question:
    """A query of the dashboard. `recorded` is how it is asked, `raw` the same without any recording rule."""

    panel: str
    recorded: str
    raw: str
    instant: bool


def unrecorded(expression: str) -> str:
    """With each recorded series replaced by what it is recorded from."""
    sources: dict[str, str] = {}
    for rule in RULES:
        sources[rule["record"]] = _RECORDED.sub(lambda found: f"({sources[found[1]]})", rule["expr"].strip())
    return _RECORDED.sub(lambda found: f"({sources[found[1]]})", expression)


def questions() -> list[Question]:
    """All of the fleet dashboard but the list of alerts, which is no matter of metrics."""
    return [
        Question(
            panel=panel["title"] + (f" ({target['refId']})" if len(panel["targets"]) > 1 else ""),
            recorded=expression,
            raw=unrecorded(expression),
            instant=bool(target.get("instant")),
        )
        for panel in json.loads(dashboards.read("fleet.json"))["panels"]
        for target in panel.get("targets") or []
        if _RECORDED.search(expression := target["expr"].replace("$job", ".*"))
    ]


def application(deployment: mongod.Deployment) -> list[Point]:
    """What an application sends that uses two collections in five ways each, and had to retry; as far as the rules
    read it.
    """
    reader = InMemoryMetricReader()
    with MongoClient(deployment.uri, appname=APP_NAME) as client:
        otel_retry.instrument_client(client, meter_provider=MeterProvider([reader]))
        for name in ("orders", "articles"):
            collection = client["shop"][name]
            collection.insert_one({"_id": 1})
            collection.find_one({"_id": 1})
            collection.update_one({"_id": 1}, {"$set": {"n": 1}})
            list(collection.aggregate([{"$count": "n"}]))
            for times in (1, 0):
                with deployment.fail_command(
                    commands=["find"], **({"times": times} if times else {}), **OVERLOAD
                ):
                    for _ in range(1 if times else FAILED_OPERATIONS):
                        with contextlib.suppress(PyMongoError):
                            collection.find_one({"_id": 1})
            collection.delete_one({"_id": 1})
        data = reader.get_metrics_data()
        otel_retry.uninstrument()
    assert data is not None
    read = " ".join(unrecorded(rule["expr"]) for rule in RULES)
    metrics = [
        metric for part in data.resource_metrics for scope in part.scope_metrics for metric in scope.metrics
    ]
    return [point for metric in metrics for point in _points(metric) if re.search(rf"\b{point.name}\b", read)]


def _points(metric: Any) -> Iterator[Point]:
    """As Prometheus names them when they come by OTLP."""
    kind = Kind.GAUGE
    if isinstance(metric.data, Histogram):
        kind = Kind.HISTOGRAM
    elif isinstance(metric.data, Sum) and metric.data.is_monotonic:
        kind = Kind.COUNTER
    names = series(metric.name, metric.unit, kind)
    for point in metric.data.data_points:
        labels = {label(name): str(value) for name, value in point.attributes.items()}
        if kind is not Kind.HISTOGRAM:
            yield Point(name=names[0], labels=labels, value=point.value, gauge=kind is Kind.GAUGE)
            continue
        below = 0
        for count, boundary in zip(point.bucket_counts, [*point.explicit_bounds, "+Inf"], strict=True):
            below += count
            yield Point(name=names[0], labels={**labels, "le": str(boundary)}, value=below, gauge=False)
        yield Point(name=names[1], labels=labels, value=point.sum, gauge=False)
        yield Point(name=names[2], labels=labels, value=point.count, gauge=False)


class Fleet:
    """A Prometheus that holds the last `minutes` before `end` of that many instances, and what the rules made of them."""

    def __init__(self, folder: Path, points: list[Point], *, instances: int, minutes: int) -> None:
        self.folder = folder
        self.end = int(time.time()) // BLOCK_SECONDS * BLOCK_SECONDS - POINT_SECONDS
        self.start = self.end - minutes * POINT_SECONDS
        self.series = len(points) * instances
        self.samples = self.series * (minutes + 1)
        self._points = points
        self._instances = instances
        [port] = free_ports(["PROMETHEUS"]).values()
        self.prometheus = Prometheus(f"http://{HOST}:{port}", timeout=600.0)
        (folder / "prometheus.yaml").write_text("{}\n")
        self._program = Program(
            "fleet",
            [
                str(backends.PROMETHEUS.path()),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--query.timeout=10m",
                f"--web.listen-address={HOST}:{port}",
            ],
            folder=folder,
            ready=f"{self.prometheus.url}/-/ready",
        )

    def __enter__(self) -> Self:
        try:
            self._write(self._raw_lines())
            self._program.start(timeout=120.0)
            recorded = list(self._recorded_lines())
            # Blocks are looked for at the start, and then only once a minute.
            self._program.kill()
            self._write(recorded)
            self._program.start(timeout=120.0)
        except BaseException:
            self._program.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._program.kill()

    def ask(self, question: Question, expression: str) -> list[dict[str, Any]]:
        """As Grafana does that shows one hour: a number, or a point for each fifteen seconds."""
        if question.instant:
            return self.prometheus.query(expression, at=self.end)
        return self.prometheus.query_range(
            expression, seconds=self.end - self.start, step=15.0, until=self.end
        )

    def _raw_lines(self) -> Iterator[str]:
        times = range(self.start, self.end + 1, POINT_SECONDS)
        for instance in range(self._instances):
            job = f"shop/service-{instance // INSTANCES_OF_A_JOB}"
            for point in self._points:
                # Each has another rate, and another budget left.
                share = (instance % 97 + 1) / 97
                head = _head(point.name, {"job": job, "instance": f"instance-{instance}", **point.labels})
                for number, at in enumerate(times):
                    value = point.value if point.gauge else point.value * number
                    # No client has more tokens than fit, so what it could have stays as it is.
                    if point.name != "mongodb_retry_budget_capacity":
                        value *= share
                    yield f"{head} {value} {at}\n"

    def _recorded_lines(self) -> Iterator[str]:
        for rule in RULES:
            found = self.prometheus.query_range(
                unrecorded(rule["record"]),
                seconds=self.end - self.start,
                step=POINT_SECONDS,
                until=self.end,
            )
            for each in found:
                head = _head(rule["record"], each["metric"])
                yield from (f"{head} {value} {int(at)}\n" for at, value in each["values"])

    def _write(self, lines: Any) -> None:
        file = self.folder / "openmetrics.txt"
        with file.open("w", encoding="utf-8") as output:
            output.writelines(lines)
            output.write("# EOF\n")
        subprocess.run(
            [
                str(backends.PROMETHEUS.path("promtool")),
                "tsdb",
                "create-blocks-from",
                "openmetrics",
                "--quiet",
                str(file),
                str(self.folder / "data"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        file.unlink()


def _head(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items()) + "}"


def main() -> None:
    instances = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    minutes = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    with mongod.deployment() as deployment:
        points = application(deployment)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(Path(folder), points, instances=instances, minutes=minutes) as fleet,
    ):
        _say(
            f"{instances} instances, {minutes} minutes: {fleet.series:,} series that the rules read, "
            f"{fleet.samples:,} samples, written in {time.monotonic() - began:.0f} s"
        )
        costs = {
            rule["record"]: _seconds(lambda r=rule: fleet.prometheus.query(r["expr"], at=fleet.end))
            for rule in RULES
        }
        worst = max(costs, key=lambda name: costs[name])
        _say(f"all rules once: {sum(costs.values()):.2f} s, of these {worst}: {costs[worst]:.2f} s")
        _say(f"{'':52} {'with rules':>12} {'without':>12}")
        with_rules, without = [], []
        for question in questions():
            with_rules.append(_seconds(lambda q=question: fleet.ask(q, q.recorded)))
            without.append(_seconds(lambda q=question: fleet.ask(q, q.raw)))
            _say(f"{question.panel:52} {with_rules[-1] * 1000:9.0f} ms {without[-1] * 1000:9.0f} ms")
        for name, figures in (("slowest", max), ("all one after the other", sum)):
            _say(f"{name:52} {figures(with_rules) * 1000:9.0f} ms {figures(without) * 1000:9.0f} ms")


def _seconds(do: Any) -> float:
    """The median of three."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        assert do()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
