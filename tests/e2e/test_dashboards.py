"""Every panel, rule and alert, asked of a Prometheus that holds what a real application sent.

One application of its own is calm first, then overloaded until its budget is gone, meets a primary that is none any
more, and runs out of connections. Its answers are the pictures of docs/dashboards.md (`make pictures`).
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from otel_retry import dashboards
from otel_retry.dashboards.plot import Series, bars, lines, picture
from tests.e2e import pictures
from tests.e2e.conftest import OVERLOAD
from tests.e2e.workload import APP_NAME, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from otel_retry.mongod import Deployment
    from tests.e2e.stack import Backends

# The alerts wait for up to two minutes before they fire.
pytestmark = pytest.mark.timeout(1200)

JOB = "e2e/overloaded"
IN_CALM = "e2e/calm"

FILLED = {"$__rate_interval": "1m", "$job": JOB, "$instance": ".*", "$quantile": "0.99"}

CALM_OPERATIONS = 100
# Six attempts and five tokens each, until the 1,000 tokens are gone; some more that are denied.
OVERLOADED_OPERATIONS = 215
REPEATED_ON_ANOTHER_PRIMARY = (
    f'sum(mongodb_retry_attempts_total{{job="{JOB}",mongodb_retry_reason="not_primary"}})'
)
THREADS = 16
CONNECTIONS = 4


@dataclass(frozen=True, kw_only=True)
class Panel:
    board: str
    title: str
    kind: str
    unit: str
    targets: list[dict[str, Any]]
    columns: dict[str, str]
    """Of a table: the heading over each query's values."""
    units: dict[str, str]
    """Of a table's columns, by heading."""


PANELS = [
    Panel(
        board=name,
        title=panel["title"],
        kind=panel["type"],
        unit=panel["fieldConfig"]["defaults"]["unit"],
        targets=panel["targets"],
        columns={
            value.removeprefix("Value #"): heading
            for step in panel.get("transformations") or []
            for value, heading in step["options"].get("renameByName", {}).items()
        },
        units={
            override["matcher"]["options"]: each["value"]
            for override in panel["fieldConfig"]["overrides"] or []
            for each in override["properties"]
            if each["id"] == "unit"
        },
    )
    for name in dashboards.DASHBOARDS
    for panel in json.loads(dashboards.read(name))["panels"]
    if panel["type"] != "row"
]

RECORDED = re.findall(r"record: (\S+)", dashboards.read("recording-rules.yaml"))
ALERTS = re.findall(r"alert: (\S+)", dashboards.read("alerts.yaml"))


def filled(expression: str, **others: str) -> str:
    for name, value in {**FILLED, **{f"${name}": value for name, value in others.items()}}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@pytest.fixture(scope="module")
def calm(backends: Backends, deployment: Deployment, logs: Path) -> Iterator[Workload]:
    """An application to which nothing happens, all the while."""
    with Workload(
        uri=deployment.uri, endpoint=backends.endpoint, service="calm", log=logs / "calm.log"
    ) as started:
        started.run("update")
        started.run("both", count=CALM_OPERATIONS, threads=2)
        started.flush()
        yield started


@pytest.fixture(scope="module")
def overloaded(backends: Backends, calm: Workload, deployment: Deployment, logs: Path) -> Iterator[float]:
    """The other application, when all that happens to it has happened; answers when it began."""
    joint = "&" if "?" in deployment.uri else "/?"
    with Workload(
        uri=f"{deployment.uri}{joint}maxPoolSize={CONNECTIONS}&waitQueueTimeoutMS=2000",
        endpoint=backends.endpoint,
        service="overloaded",
        log=logs / "overloaded.log",
    ) as started:
        began = time.time()
        started.run("update")
        for do in ("find", "insert", "aggregate", "update"):
            started.run(do, count=CALM_OPERATIONS // 4)
        with deployment.fail_command(commands=["find"], times=2, **OVERLOAD):
            started.run("find")
        with deployment.fail_command(commands=["find"], times=1, closeConnection=True, appName=APP_NAME):
            started.run("find")
        # Apart, so that the counter is seen to grow; and what comes next grows from what was seen here.
        for times in (1, 2, 3):
            with deployment.fail_command(commands=["find"], times=1, errorCode=10107, appName=APP_NAME):
                started.run("find")
            backends.wait_until(
                lambda times=times: backends.prometheus.value(REPEATED_ON_ANOTHER_PRIMARY) == times,
                "the retries are not in Prometheus",
            )
        with deployment.fail_command(commands=["find", "insert"], **OVERLOAD):
            started.run("find", count=OVERLOADED_OPERATIONS, threads=THREADS)
            started.run("insert", count=5)
        # More threads than connections, and each connection is held for longer than anybody waits for one.
        with deployment.fail_command(
            commands=["aggregate"], blockConnection=True, blockTimeMS=3000, appName=APP_NAME
        ):
            started.run("aggregate", count=THREADS, threads=THREADS)
        started.flush()
        calm.run("both", count=CALM_OPERATIONS, threads=2)
        yield began


@pytest.fixture(scope="module")
def firing(backends: Backends, overloaded: float) -> list[dict[str, Any]]:
    """The alerts of the overloaded application, once each of them has fired; the first may be over by then."""
    seen: dict[str, dict[str, Any]] = {}

    def all_fired() -> bool:
        for alert in backends.prometheus.alerts():
            if alert["labels"].get("job") == JOB and alert["state"] == "firing":
                seen[alert["labels"]["alertname"]] = alert
        return seen.keys() == set(ALERTS)

    backends.wait_until(all_fired, f"not all of {ALERTS} fire", timeout=420.0)
    return list(seen.values())


@pytest.mark.parametrize("name", ALERTS)
def test_during_the_overload_the_alert_fires_and_says_what_to_do(
    firing: list[dict[str, Any]], name: str
) -> None:
    [alert] = [each for each in firing if each["labels"]["alertname"] == name]
    assert alert["labels"]["severity"] in {"info", "warning", "critical"}
    assert JOB in alert["annotations"]["summary"]
    assert "<" not in alert["annotations"]["summary"], "a template that could not be filled in"
    assert alert["annotations"]["runbook_url"].endswith(f"#{name.lower()}")


@pytest.mark.usefixtures("firing")
def test_an_application_in_calm_has_no_alert_all_the_while(backends: Backends) -> None:
    assert backends.prometheus.query(f'job:mongodb_retry_attempts:rate5m{{job="{IN_CALM}"}}'), (
        "not seen at all"
    )
    # Not now, and not a quarter of an hour ago either.
    assert backends.prometheus.query_range(f'ALERTS{{job="{IN_CALM}"}}', seconds=900.0) == []


@pytest.mark.usefixtures("firing")
@pytest.mark.parametrize("name", RECORDED)
def test_every_recording_rule_has_recorded(backends: Backends, name: str) -> None:
    found = backends.prometheus.query(f'{name}{{job="{JOB}"}}')
    assert len(found) == 1
    assert math.isfinite(float(found[0]["value"][1]))
    wanted = {"job", "instance"} if name.startswith("job_instance:") else {"job"}
    assert found[0]["metric"].keys() - {"__name__"} == wanted


@pytest.mark.usefixtures("firing")
def test_no_rule_fails(backends: Backends) -> None:
    rules = backends.prometheus.rules()
    assert {rule["name"] for rule in rules} >= {*RECORDED, *ALERTS}
    assert [rule for rule in rules if rule["health"] != "ok"] == []


@pytest.mark.usefixtures("firing")
@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel.board} {panel.title}")
def test_every_query_of_the_panel_returns_data_with_the_labels_of_its_legend(
    backends: Backends, overloaded: float, panel: Panel
) -> None:
    drawn = []
    for target in panel.targets:
        # One service for those who look at one, all of them for those who look at the fleet.
        expression = filled(target["expr"], **({"job": ".*"} if panel.board == "fleet.json" else {}))
        found = answers(backends, expression, instant=bool(target.get("instant")), since=overloaded)
        assert found, f"no data: {expression}"
        for metric, points in found:
            names = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            assert all(metric.get(name) for name in names), f"{metric} has not all of {names}"
            name = re.sub(r"\{\{(\w+)\}\}", lambda label, of=metric: of[label[1]], target["legendFormat"])
            column = panel.columns.get(target["refId"], "") if len(panel.targets) > 1 else ""
            drawn.append(
                Series(
                    name=f"{name}: {column}" if column else name,
                    points=tuple(points),
                    unit=panel.units.get(column, panel.unit),
                )
            )
    draw = lines if panel.kind in {"timeseries", "stat"} else bars
    pictures.keep(picture(panel.board, panel.title), draw(panel.title, drawn))


def answers(
    backends: Backends, expression: str, *, instant: bool, since: float
) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    """The series with at least one number in them, asked for as the panel asks."""
    if instant:
        series = [
            {"metric": each["metric"], "values": [each["value"]]}
            for each in backends.prometheus.query(expression)
        ]
    else:
        series = backends.prometheus.query_range(expression, seconds=time.time() - since + 10.0, step=5.0)
    return [
        (each["metric"], [(float(at), float(value)) for at, value in each["values"]])
        for each in series
        if any(math.isfinite(float(value)) for _, value in each["values"])
    ]


@pytest.mark.usefixtures("firing")
@pytest.mark.parametrize(
    "metric",
    [
        "db_client_operation_duration_seconds",
        "mongodb_client_attempt_duration_seconds",
        "mongodb_retry_backoff_seconds",
    ],
)
def test_the_dots_of_latency_panels_carry_trace_ids(backends: Backends, metric: str) -> None:
    """Where they lead is in test_metrics.py."""
    asked = [
        filled(target["expr"])
        for panel in PANELS
        for target in panel.targets
        if target.get("exemplar") and f"{metric}_bucket" in target["expr"]
    ]
    assert asked
    for expression in asked:
        found = backends.prometheus.exemplars(expression)
        assert found, expression
        assert all(re.fullmatch(r"[0-9a-f]{32}", each["labels"]["trace_id"]) for each in found)


@pytest.mark.usefixtures("firing")
def test_the_variables_list_what_there_is(backends: Backends) -> None:
    for name in dashboards.DASHBOARDS:
        for variable in json.loads(dashboards.read(name))["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]).groups()
                values = {each["metric"][label] for each in backends.prometheus.query(filled(metric))}
                assert values
                if "regex" in variable:
                    [expression] = re.findall(r"^/(.+)/$", variable["regex"])
                    assert {re.match(expression, value)[1] for value in values} == {"overloaded"}


@pytest.mark.usefixtures("firing")
def test_the_numbers_agree_with_each_other(backends: Backends) -> None:
    """Retries are tokens taken; what is amplified is what was retried; nothing is left that could have been denied."""
    ask = backends.prometheus.value
    where = f'{{job="{JOB}"}}'
    retries = ask(f"sum(mongodb_retry_attempts_total{where})")
    assert retries == ask(f"sum(mongodb_retry_budget_consumed_total{where})")
    assert retries == ask(f"sum(mongodb_client_operation_retries_sum{where})")
    assert ask(f"sum(mongodb_retry_budget_denied_total{where})") > 0
    assert ask(f"job:mongodb_retry_budget_tokens:min_ratio{where}") < 0.2
