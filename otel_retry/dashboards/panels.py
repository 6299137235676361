"""What a dashboard is made of, in the few words that ours need, and how it becomes Grafana's JSON.

Expressions are plain PromQL, so that one can be copied to Prometheus as it stands. `$where` in them stands for the
chosen jobs and instances; everything else with a dollar sign is Grafana's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

WHERE = 'job=~"$job", instance=~"$instance"'
TAG = "otel_retry"

# The alarm colours; the others are Grafana's palette.
GREEN, YELLOW, RED = "green", "yellow", "red"

Thresholds = tuple[tuple[float | None, str], ...]
NEUTRAL: Thresholds = ((None, "text"),)

_DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    title: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """`legend` names each series by its labels. In a table, `column` is the heading and `unit` the column's own."""

    expr: str
    legend: str
    exemplars: bool = False
    column: str = ""
    unit: str = ""
    thresholds: Thresholds = NEUTRAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One question and its answer. `span` is the width, of 24; `links` open from a series' menu."""

    kind: Literal["stat", "lines", "bars", "table"]
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    span: int = 8
    height: int = 8
    stacked: bool = False
    decimals: int | None = None
    minimum: float | None = 0
    maximum: float | None = None
    thresholds: Thresholds = NEUTRAL
    no_value: str = ""
    links: tuple[Link, ...] = ()
    sort_by: str = ""
    descending: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """`variables` come after the data sources, which every dashboard has."""

    file: str
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Any, ...] = field(default_factory=tuple)


# Variables.


def jobs(metric: str) -> dashboard.QueryVariable:
    return (
        _label_values("job", "Job", f"label_values({metric}, job)")
        .description("service.namespace/service.name of the application.")
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


def instances(metric: str) -> dashboard.QueryVariable:
    return (
        _label_values("instance", "Instance", f'label_values({metric}{{job=~"$job"}}, instance)')
        .description("service.instance.id of the application.")
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


def jaeger_service(metric: str) -> dashboard.QueryVariable:
    """Jaeger knows services by their bare name: the part of `job` behind the namespace."""
    return (
        _label_values("service", "Service in Jaeger", f'label_values({metric}{{job=~"$job"}}, job)')
        .description("Where the links to Jaeger search.")
        .regex(r"/^(?:.*\/)?([^\/]+)$/")
    )


def quantile() -> dashboard.CustomVariable:
    return (
        dashboard.CustomVariable("quantile")
        .label("Percentile")
        .description("For the latencies by operation, collection and server.")
        .values("0.5,0.9,0.95,0.99")
        .current(model.VariableOption(selected=True, text="0.99", value="0.99"))
        .options(
            [
                model.VariableOption(selected=each == "0.99", text=each, value=each)
                for each in ("0.5", "0.9", "0.95", "0.99")
            ]
        )
    )


def trace_id() -> dashboard.TextBoxVariable:
    return (
        dashboard.TextBoxVariable("trace")
        .label("Trace id")
        .description("From a log line or an exemplar; the link 'Trace by its id' opens it in Jaeger.")
        .default_value("")
    )


def _label_values(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(_DATASOURCE)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )


# Links.


def jaeger_search(title: str, *, tags: str, slower_than: str = "") -> Link:
    """Explore, with the operations of the chosen service that have these tags, in the time that is shown."""
    query = {"queryType": "search", "service": "${service}", "tags": tags}
    if slower_than:
        query["minDuration"] = slower_than
    return Link(title=title, url=_explore(query))


def jaeger_trace() -> Link:
    return Link(title="Trace by its id", url=_explore({"query": "${trace}"}))


def _explore(query: dict[str, str]) -> str:
    source = {"type": "jaeger", "uid": "${jaeger}"}
    panes = {
        "a": {
            "datasource": "${jaeger}",
            "queries": [{"refId": "A", "datasource": source, **query}],
            "range": {"from": "${__from}", "to": "${__to}"},
        }
    }
    encoded = quote(json.dumps(panes, separators=(",", ":")), safe="")
    # Grafana fills in its variables before it opens the address, so they must not be encoded.
    return "/explore?schemaVersion=1&panes=" + re.sub(r"%24%7B(\w+)%7D", r"${\1}", encoded)


# To Grafana's JSON.


def render(board: Board) -> str:
    """The file, as Grafana imports and provisions it."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG, "mongodb"])
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .editable()
        .links(_board_links())
        .variables([*_sources(), *board.variables])
    )
    number = 0
    for row in board.rows:
        number += 1
        builder.with_row(dashboard.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            builder.with_panel(_panel(panel).id(number))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n"


def _sources() -> list[Any]:
    return [
        dashboard.DatasourceVariable("datasource")
        .label("Prometheus")
        .type("prometheus")
        .description("Where the metrics are."),
        dashboard.DatasourceVariable("jaeger")
        .label("Jaeger")
        .type("jaeger")
        .description("Where the traces are; only the links use it."),
    ]


def _board_links() -> list[Any]:
    return [
        dashboard.DashboardLink("MongoDB retries")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .tooltip("The other dashboards of otel_retry")
        .include_vars(include_vars=True)
        .keep_time(keep_time=True),
        dashboard.DashboardLink("Trace by its id")
        .type(model.DashboardLinkType.LINK)
        .icon("external link")
        .tooltip("Opens what the field 'Trace id' names in Jaeger")
        .url(jaeger_trace().url)
        .target_blank(target_blank=True),
    ]


def _panel(panel: Panel) -> Any:
    make = {"stat": _stat, "lines": _lines, "bars": _bars, "table": _table}[panel.kind]
    builder = make(panel)
    for position, query in enumerate(panel.queries):
        builder.with_target(_target(query, chr(ord("A") + position), instant=panel.kind in {"bars", "table"}))
    builder.title(panel.title).description(panel.description).unit(panel.unit).datasource(_DATASOURCE)
    builder.span(panel.span).height(panel.height)
    builder.thresholds(_thresholds(panel.thresholds))
    if panel.links:
        builder.data_links([dashboard.DashboardLink(link.title).url(link.url) for link in panel.links])
    if panel.decimals is not None:
        builder.decimals(panel.decimals)
    if panel.minimum is not None:
        builder.min(panel.minimum)
    if panel.maximum is not None:
        builder.max(panel.maximum)
    if panel.no_value:
        builder.no_value(panel.no_value)
    return builder


def _target(query: Query, ref_id: str, *, instant: bool) -> Any:
    target = (
        prometheus.Dataquery()
        .expr(query.expr.replace("$where", WHERE))
        .legend_format(query.legend)
        .ref_id(ref_id)
        .datasource(_DATASOURCE)
    )
    if query.column:
        target.format(PromQueryFormat.TABLE)
    if query.exemplars:
        target.exemplar(exemplar=True)
    return target.instant() if instant else target.range()


def _thresholds(steps: Thresholds) -> Any:
    return (
        dashboard.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(value=value, color=color) for value, color in steps])
    )


def _stat(panel: Panel) -> Any:
    return (
        stat.Panel()
        .graph_mode(common_model.BigValueGraphMode.AREA)
        .color_mode(
            common_model.BigValueColorMode.NONE
            if panel.thresholds == NEUTRAL
            else common_model.BigValueColorMode.VALUE
        )
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _lines(panel: Panel) -> Any:
    builder = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(25 if panel.stacked else 8)
        .show_points(common_model.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.TABLE)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_model.TooltipDisplayMode.MULTI)
            .sort(common_model.SortOrder.DESCENDING)
        )
    )
    if panel.stacked:
        builder.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    if panel.thresholds != NEUTRAL:
        builder.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED)
        )
    return builder


def _bars(panel: Panel) -> Any:
    del panel
    return (
        bargauge.Panel()
        .display_mode(common_model.BarGaugeDisplayMode.BASIC)
        .orientation(common_model.VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    )


def _table(panel: Panel) -> Any:
    """The instant queries side by side, one row for each set of labels."""
    values = {f"Value #{chr(ord('A') + i)}": query.column for i, query in enumerate(panel.queries)}
    if len(panel.queries) == 1:
        values = {"Value": panel.queries[0].column, **values}
    builder = (
        table.Panel()
        .with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            model.DataTransformerConfig(
                id_val="organize", options={"excludeByName": {"Time": True}, "renameByName": values}
            )
        )
        .filterable(filterable=True)
        .sort_by(
            [common.TableSortByFieldState().display_name(panel.sort_by).desc(desc=panel.descending)]
            if panel.sort_by
            else []
        )
    )
    for query in panel.queries:
        properties = [model.DynamicConfigValue(id_val="unit", value=query.unit)]
        if query.thresholds != NEUTRAL:
            steps = [{"value": value, "color": color} for value, color in query.thresholds]
            properties += [
                model.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps}),
                model.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
            ]
        builder.override_by_name(query.column, properties)
    return builder
