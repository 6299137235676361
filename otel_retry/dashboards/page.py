"""The page docs/dashboards.md: for each panel what it answers, its queries and what they returned. What the panels say themselves is said
there in the same words, since both come from the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_retry.dashboards.panels import WHERE
from otel_retry.dashboards.plot import TRACE, picture

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from otel_retry.dashboards.panels import Board, Panel

INTRODUCTION = """\
# Dashboards

Made by `python -m otel_retry.dashboards.build` (`make dashboards`) from the code in `otel_retry/dashboards/`, so this page
and the dashboards say the same; a test compares. The alerts are in [runbook.md](runbook.md).

## Getting them into Grafana

| way | how |
| --- | --- |
| from the installed package | `otel-retry dashboards push --grafana https://grafana.example.com --folder MongoDB`, with a service account's token in `GRAFANA_TOKEN` |
| by provisioning | `otel-retry dashboards export /etc/grafana/dashboards`, and a provider with that `path` (see `examples/stack/grafana/`) |
| by hand | Dashboards → New → Import → a file of `dashboards/*.json` |

The rules go to Prometheus: `otel-retry dashboards export DIR` writes `recording-rules.yaml` and `alerts.yaml` too; name
them under `rule_files`. The fleet dashboard shows nothing without the recording rules; the other two need none.

Made for Grafana 11.6 and later, and a Prometheus that receives OTLP with its default name translation.

## What they expect of the data sources

- Each dashboard asks for its Prometheus (`datasource`) and its Jaeger (`jaeger`); neither name is fixed.
- `$__rate_interval` is four times the data source's *scrape interval*: set that to your `OTEL_METRIC_EXPORT_INTERVAL`
  (60 s unless you changed it).
- The dots on latency panels (exemplars) lead to a trace where the Prometheus data source has an exemplar link: label
  `trace_id`, data source Jaeger. `examples/stack/grafana/provisioning/datasources/` has it; no dashboard can bring it along.
- Prometheus keeps exemplars with `--enable-feature=exemplar-storage`.
- *Retried operations in Jaeger*, *Slow operations in Jaeger* and the like, in the menu of a series, search in the service
  chosen as *Service in Jaeger*. *Trace by its id* opens what is in the field *Trace id*: paste it from a log line.

{trace}## At a thousand instances

The fleet dashboard reads recording rules only: at most one series for each instance and rule. The other two read the raw
series of the jobs and instances that are chosen: choose a job first. The p99 of each job is the one expensive rule (all
buckets of all instances); it is in a group of its own that runs once a minute. `promtool tsdb analyze` shows what you have.
What the queries cost, measured: [scale.md](scale.md#the-fleet-dashboard).

## The pictures

Each picture below is what the panel's own queries returned in the end-to-end tests: a real application that is calm, then
overloaded until its budget is gone, then meets a primary that is none any more and runs out of connections; real
Collector, real Prometheus. They are plain plots, not Grafana's. `make pictures` makes them anew.
"""

_TRACE_TEXT = """\
## Where a click leads

The links and the dots open a trace like this one, of an operation that was overloaded three times. It is what Jaeger's
API returned in the end-to-end tests: the operation with one span for each attempt, red what failed, and between them the
waits.

![A find that was overloaded three times: the request, the operation, four attempts](images/{name})

"""


def page(boards: Iterable[Board], images: Path) -> str:
    """A picture is shown where there is one: `docs/images/<dashboard>-<panel>.svg`."""
    trace = _TRACE_TEXT.format(name=TRACE) if (images / TRACE).is_file() else ""
    parts = [INTRODUCTION.replace("{trace}", trace)]
    for board in boards:
        parts.append(f"\n## {board.title}\n\n`dashboards/{board.file}`. {board.description}\n")
        for row in board.rows:
            parts.append(f"\n### {row.title}\n")
            parts.extend(_panel(board, panel, images) for panel in row.panels)
    return "".join(parts)


def _panel(board: Board, panel: Panel, images: Path) -> str:
    name = picture(board.file, panel.title)
    shown = f"\n![{panel.title}](images/{name})\n" if (images / name).is_file() else ""
    queries = "\n".join(
        f"# {query.column or query.legend}\n{query.expr.replace('$where', WHERE)}" for query in panel.queries
    )
    return f"\n#### {panel.title}\n\n{panel.description}\n{shown}\n```promql\n{queries}\n```\n"
