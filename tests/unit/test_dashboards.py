"""The dashboards and rules as they are shipped: current, complete, and about metrics that exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

from otel_retry import dashboards, semconv
from otel_retry.dashboards.names import Kind, label, series
from otel_retry.dashboards.plot import TRACE, Bar, Series, bars, lines, picture, waterfall
from otel_retry.telemetry.metrics import Instruments

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dashboards"
DOCS = ROOT / "docs"

ROW = "row"
# Prometheus' own: the alerts that fire.
BUILT_IN = {"ALERTS"}
ALERTS = (
    "MongoDBRetryStorm",
    "MongoDBRetryAmplification",
    "MongoDBRetryBudgetNearlyEmpty",
    "MongoDBOperationsGiveUp",
    "MongoDBFailoverSeen",
    "MongoDBConnectionPoolExhausted",
)


def board(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def panels() -> list[Any]:
    return [
        pytest.param(panel, id=f"{name} {panel['title']}")
        for name in dashboards.DASHBOARDS
        for panel in board(name)["panels"]
        if panel["type"] != ROW
    ]


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in _yaml(name)["groups"] for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """Every expression of every panel, rule and variable, by where it stands."""
    found = {}
    for name in dashboards.DASHBOARDS:
        content = board(name)
        for panel in content["panels"]:
            for target in panel.get("targets", []):
                found[f"{name} {panel['title']} {target['refId']}"] = target["expr"]
        for variable in content["templating"]["list"]:
            if variable["type"] == "query":
                found[f"{name} ${variable['name']}"] = variable["query"]
    for name in dashboards.RULES:
        for rule in rules(name):
            found[f"{name} {rule.get('record') or rule['alert']}"] = rule["expr"]
    return found


def _yaml(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


# Names.


class Recorder:
    """A meter that notes what is made: name, unit and what it becomes in Prometheus."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, Kind]] = []

    def create_histogram(self, name: str, unit: str, **_: Any) -> None:
        self.made.append((name, unit, Kind.HISTOGRAM))

    def create_counter(self, name: str, unit: str, **_: Any) -> None:
        self.made.append((name, unit, Kind.COUNTER))

    def create_observable_gauge(self, name: str, _callbacks: Any, unit: str, _description: str) -> None:
        self.made.append((name, unit, Kind.GAUGE))

    def create_observable_up_down_counter(
        self, name: str, _callbacks: Any, unit: str, _description: str
    ) -> None:
        self.made.append((name, unit, Kind.GAUGE))

    def create_observable_counter(self, name: str, _callbacks: Any, unit: str, _description: str) -> None:
        self.made.append((name, unit, Kind.COUNTER))


def emitted() -> set[str]:
    """What an application sends, as Prometheus names it."""
    meter: Any = Recorder()
    Instruments(meter, budgets=list, pools=list)
    return {name for made in meter.made for name in series(*made)}


def labels() -> set[str]:
    spelled = {
        label(value)
        for name, value in vars(semconv).items()
        if name.isupper() and isinstance(value, str) and "." in value
    }
    return spelled | {"job", "instance", "le"}


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (
            ("db.client.operation.duration", "s", Kind.HISTOGRAM),
            [
                "db_client_operation_duration_seconds_bucket",
                "db_client_operation_duration_seconds_sum",
                "db_client_operation_duration_seconds_count",
            ],
        ),
        (("mongodb.retry.attempts", "{attempt}", Kind.COUNTER), ["mongodb_retry_attempts_total"]),
        (("mongodb.retry.budget.tokens", "{token}", Kind.GAUGE), ["mongodb_retry_budget_tokens"]),
        (("db.client.connection.idle.max", "{connection}", Kind.GAUGE), ["db_client_connection_idle_max"]),
        (("process.cpu.usage", "1", Kind.GAUGE), ["process_cpu_usage_ratio"]),
        (("things", "1", Kind.COUNTER), ["things_total"]),
        (("time.in.seconds", "s", Kind.COUNTER), ["time_in_seconds_total"]),
        (("a-b.c", "", Kind.GAUGE), ["a_b_c"]),
    ],
)
def test_names_are_translated_as_prometheus_does(metric: tuple[str, str, Kind], expected: list[str]) -> None:
    assert series(*metric) == expected


def test_a_unit_that_is_not_known_is_an_error() -> None:
    with pytest.raises(KeyError):
        series("a", "furlong", Kind.GAUGE)


@pytest.mark.parametrize(("where", "expression"), list(expressions().items()), ids=list(expressions()))
def test_every_metric_and_label_is_one_that_the_application_sends_or_a_rule_records(
    where: str, expression: str
) -> None:
    recorded = {rule["record"] for rule in rules("recording-rules.yaml")}
    metrics, used_labels = names_in(expression)
    assert metrics
    assert metrics - emitted() - recorded - BUILT_IN == set()
    assert used_labels - labels() - {"server", "alertname", "alertstate", "severity"} == set()


def test_everything_that_is_emitted_is_looked_at_somewhere() -> None:
    """Of a histogram one of its series is enough. The bounds of idle connections are settings that never change."""
    used = {name for expression in expressions().values() for name in names_in(expression)[0]}
    base = re.compile(r"_(bucket|sum|count)$")
    shown = {base.sub("", name) for name in used}
    unseen = {base.sub("", name) for name in emitted()} - shown
    assert unseen == {"db_client_connection_idle_max", "db_client_connection_idle_min"}


FUNCTIONS = re.compile(r"\b([a-z_]+)\s*(?=\()")
GROUPING = re.compile(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)")
STRING = re.compile(r'"[^"]*"')
BRACES = re.compile(r"\{([^}]*)\}")
WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
KEYWORDS = {"and", "or", "unless", "offset", "bool", "by", "on", "ignoring", "without", "inf"}


def names_in(expression: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels of an expression: crude, but a name that it takes for neither is an error above."""
    found = re.match(r"label_values\((.+), (\w+)\)$", expression)
    if found:
        metrics, used = names_in(found[1])
        return metrics, used | {found[2]}
    text = STRING.sub('""', expression)
    used = {name for group in GROUPING.findall(text) for name in WORD.findall(group)}
    used |= {name for braces in BRACES.findall(text) for name in WORD.findall(braces)}
    text = GROUPING.sub(" ", text)
    text = BRACES.sub(" ", text)
    text = re.sub(r"\[[^\]]*\]|\boffset\s+\w+|\$\w+", " ", text)
    text = FUNCTIONS.sub(" ", text)
    metrics = {word for word in WORD.findall(text) if word not in KEYWORDS}
    return metrics, used


def test_the_search_for_names_finds_them() -> None:
    """Or the rules above would be kept by anything."""
    text = 'topk(20, 1 + sum by (job, le) (rate(a_total{b=~"$c", d!="e"}[$__rate_interval])) / on (f) x:y:z offset 5m)'
    assert names_in(text) == ({"a_total", "x:y:z"}, {"job", "le", "b", "d", "f"})
    assert names_in('label_values(a{b="c"}, d)') == ({"a"}, {"b", "d"})


# Dashboards.


def test_the_files_are_what_the_code_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    from otel_retry.dashboards.build import build

    for path, text in build().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make dashboards`"


def test_the_check_says_what_is_out_of_date_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    from otel_retry.dashboards import build as building

    content = {tmp_path / "a.json": "new", tmp_path / "b.json": "same"}
    (tmp_path / "b.json").write_text("same")
    monkeypatch.setattr(building, "build", lambda: content)
    monkeypatch.setattr(building, "ROOT", tmp_path)
    assert building.main(["--check"]) == 1
    assert capsys.readouterr().out == "out of date: a.json\n"
    assert not (tmp_path / "a.json").exists()
    assert building.main([]) == 0
    assert (tmp_path / "a.json").read_text() == "new"
    assert building.main(["--check"]) == 0


def test_the_wheel_and_the_sdist_carry_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    targets = project["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["force-include"] == {
        f"dashboards/{name}": f"otel_retry/dashboards/files/{name}" for name in dashboards.FILES
    }
    assert "dashboards" in targets["sdist"]["include"]


def test_no_file_is_forgotten() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == set(dashboards.FILES)
    assert all(dashboards.read(name) for name in dashboards.FILES)


@pytest.mark.parametrize("panel", panels())
def test_every_panel_has_title_description_unit_and_queries_with_legends(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith((".", "..."))
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["expr"]
        assert target["legendFormat"]
        assert target["datasource"]["uid"] == "${datasource}"
    columns = [override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"] or []]
    assert len(columns) == len(set(columns))


@pytest.mark.parametrize("panel", panels())
def test_rates_have_the_interval_that_grafana_chooses(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert set(re.findall(r"\[([^\]]+)\]", target["expr"])) <= {"$__rate_interval"}


@pytest.mark.parametrize("panel", panels())
def test_what_a_legend_names_survives_the_aggregation(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        groups = [set(WORD.findall(group)) for group in re.findall(r"\bby \(([^)]*)\)", target["expr"])]
        if groups:
            assert any(wanted - {"server"} <= group for group in groups), target["expr"]


@pytest.mark.parametrize("panel", panels())
def test_latency_panels_have_exemplars_and_a_link_to_the_traces(panel: dict[str, Any]) -> None:
    drawn = panel["type"] == "timeseries" and "db_client_operation_duration_seconds_bucket" in str(panel)
    if drawn:
        assert any(target.get("exemplar") for target in panel["targets"])
        urls = [link["url"] for link in panel["fieldConfig"]["defaults"]["links"]]
        assert any("${trace}" in url and "${jaeger}" in url for url in urls)
        assert any("${service}" in url for url in urls)


@pytest.mark.parametrize("name", dashboards.DASHBOARDS)
def test_every_dashboard_can_be_provisioned_and_finds_the_others(name: str) -> None:
    content = board(name)
    variables = {each["name"]: each for each in content["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["jaeger"]["query"] == "jaeger"
    assert variables["job"]["multi"]
    assert ("instance" in variables) == (name != "fleet.json")
    assert "__inputs" not in content
    [others] = [link for link in content["links"] if link["type"] == "dashboards"]
    assert set(others["tags"]) <= set(content["tags"])
    assert others["keepTime"]
    assert others["includeVars"]
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(content["panels"]) + json.dumps(content["links"])))
    assert used <= set(variables), "a variable that is used but not defined"


def test_dashboards_and_panels_have_names_of_their_own() -> None:
    boards = [board(name) for name in dashboards.DASHBOARDS]
    assert len({content["uid"] for content in boards}) == len(boards)
    assert len({content["title"] for content in boards}) == len(boards)
    for content in boards:
        ids = [panel["id"] for panel in content["panels"]]
        assert len(ids) == len(set(ids))
        titles = [panel["title"] for panel in content["panels"] if panel["type"] != ROW]
        assert len(titles) == len(set(titles)), "pictures in the docs are named after panels"


def test_links_to_other_dashboards_lead_somewhere() -> None:
    uids = {board(name)["uid"] for name in dashboards.DASHBOARDS}
    linked = set(
        re.findall(r'"url": "/d/([a-z-]+)', json.dumps([board(name) for name in dashboards.DASHBOARDS]))
    )
    assert linked
    assert linked <= uids


def test_the_fleet_reads_recording_rules_only() -> None:
    """It stays fast with a thousand instances: no raw series is touched."""
    recorded = {rule["record"] for rule in rules("recording-rules.yaml")}
    for panel in board("fleet.json")["panels"]:
        for target in panel.get("targets", []):
            assert names_in(target["expr"])[0] <= recorded | BUILT_IN


def test_the_page_explains_every_panel() -> None:
    text = (DOCS / "dashboards.md").read_text(encoding="utf-8")
    for name in dashboards.DASHBOARDS:
        for panel in board(name)["panels"]:
            if panel["type"] != ROW:
                assert f"#### {panel['title']}\n\n{panel['description']}\n" in text


# Pictures for the page.


def test_a_plot_is_well_formed_whatever_it_is_given() -> None:
    nothing = float("nan")
    drawn = [
        Series(name='<a> & "b"', points=((0.0, 1.0), (5.0, nothing), (10.0, 3.0)), unit="s"),
        Series(name="flat", points=((0.0, 0.0), (10.0, 0.0)), unit="s"),
        Series(name="never", points=((0.0, nothing),), unit="s"),
    ]
    for draw in (lines, bars):
        for given in (drawn, drawn[1:], drawn[2:], []):
            ET.fromstring(draw("p99 <of> operations", given))
    assert "&lt;a&gt;" in lines("t", drawn)
    assert "nan" not in lines("t", drawn) + bars("t", drawn)


def test_a_waterfall_is_well_formed_and_shows_what_failed() -> None:
    spans = [
        Bar(name="find <db>", note="", depth=0, start=1.0, end=2.0, failed=False),
        Bar(name="find", note="attempt 1", depth=1, start=1.0, end=1.0, failed=True),
    ]
    for given in (spans, spans[1:]):
        ET.fromstring(waterfall("a trace", given))
    assert "find &lt;db&gt;" in waterfall("a trace", spans)
    assert waterfall("a trace", spans).count("#e02f44") == 1


def test_the_page_shows_a_picture_of_every_panel_and_every_picture_is_of_something() -> None:
    shown = set(
        re.findall(r"!\[[^]]*\]\(images/([^)]+)\)", (DOCS / "dashboards.md").read_text(encoding="utf-8"))
    )
    wanted = {
        picture(name, panel["title"])
        for name in dashboards.DASHBOARDS
        for panel in board(name)["panels"]
        if panel["type"] != ROW
    }
    assert shown == {*wanted, TRACE}
    for name in shown:
        ET.parse(DOCS / "images" / name)
    assert {path.name for path in (DOCS / "images").glob("*.svg")} == shown


def test_the_page_shows_a_picture_where_there_is_one(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    from otel_retry.dashboards.build import BOARDS
    from otel_retry.dashboards.page import page

    (tmp_path / picture("retries.json", "Gave up, by reason")).write_text("<svg/>")
    text = page(BOARDS, tmp_path)
    assert text.count("![") == 1
    assert "{trace}" not in text
    assert "![Gave up, by reason](images/retries-gave-up-by-reason.svg)" in text


# Rules.


def test_the_alerts_are_those_of_the_runbook() -> None:
    assert tuple(sorted(rule["alert"] for rule in rules("alerts.yaml"))) == tuple(sorted(ALERTS))


@pytest.mark.parametrize("rule", rules("alerts.yaml"), ids=lambda rule: rule["alert"])
def test_every_alert_says_how_bad_it_is_what_to_do_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert "{{ $labels.job }}" in rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 100
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page.endswith("/blob/main/docs/runbook.md")
    assert anchor in anchors(DOCS / "runbook.md")


def test_dashboards_that_the_alerts_and_the_runbook_quote_exist() -> None:
    titles = {board(name)["title"] for name in dashboards.DASHBOARDS}
    panel_titles = {panel["title"] for name in dashboards.DASHBOARDS for panel in board(name)["panels"]}
    texts = [rule["annotations"]["description"] for rule in rules("alerts.yaml")]
    texts.append((DOCS / "runbook.md").read_text(encoding="utf-8"))
    quoted = {" ".join(each.split()) for text in texts for each in re.findall(r'"(\w[^"]+)"', text)}
    assert quoted
    assert quoted - titles - panel_titles == set()


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_rule_is_tested_where_it_speaks_and_where_it_is_silent() -> None:
    tested = (FOLDER / "tests" / "recording-rules.yaml").read_text(encoding="utf-8")
    for rule in rules("recording-rules.yaml"):
        assert f"expr: {rule['record']}\n" in tested or f"({rule['record']}," in tested, rule["record"]
    cases = [check for test in _yaml("tests/alerts.yaml")["tests"] for check in test["promql_expr_test"]]
    for name in ALERTS:
        expected = [check["exp_samples"] for check in cases if f'"{name}"' in check["expr"]]
        assert any("firing" in str(samples) for samples in expected), f"{name} never fires"
        assert [] in expected, f"{name} is never quiet"
