"""The dashboard "Fleet": hundreds of services on one screen.

Every expression reads what the recording rules have counted already (`dashboards/recording-rules.yaml`), so it costs as
much as there are services and instances, not as there are collections, servers and buckets.
"""

from __future__ import annotations

from otel_retry.dashboards import panels
from otel_retry.dashboards.panels import GREEN, RED, YELLOW, Board, Link, Panel, Query, Row

_METRIC = "job:db_client_operation_duration_seconds_count:rate5m"

_JOB = Link(
    title="Retries of this service",
    url="/d/otel-retry-retries?${datasource:queryparam}&var-job=${__field.labels.job:percentencode}"
    "&${__url_time_range}",
)
_INSTANCE = Link(
    title="Retries of this instance",
    url="/d/otel-retry-retries?${datasource:queryparam}&var-job=${__field.labels.job:percentencode}"
    "&var-instance=${__field.labels.instance:percentencode}&${__url_time_range}",
)
_ROW = Link(
    title="Retries of this service",
    url="/d/otel-retry-retries?${datasource:queryparam}&var-job=${__data.fields.job:percentencode}"
    "&${__url_time_range}",
)

_AMPLIFICATION = ((None, GREEN), (1.1, YELLOW), (1.5, RED))
_LEFT = ((None, RED), (0.2, YELLOW), (0.5, GREEN))
_NONE_IS_GOOD = ((None, GREEN), (0.001, YELLOW), (1.0, RED))

BOARD = Board(
    file="fleet.json",
    uid="otel-retry-fleet",
    title="MongoDB: fleet",
    description="Which service, which instance is near an empty budget; who retries most. Needs the recording rules.",
    variables=(panels.jobs(_METRIC), panels.jaeger_service(_METRIC), panels.trace_id()),
    rows=(
        Row(
            title="The whole fleet",
            panels=(
                Panel(
                    kind="stat",
                    title="Services",
                    description="Jobs that report operations of MongoDB.",
                    unit="short",
                    span=4,
                    height=5,
                    queries=(
                        Query(
                            expr='count(job:db_client_operation_duration_seconds_count:rate5m{job=~"$job"})',
                            legend="services",
                        ),
                    ),
                ),
                Panel(
                    kind="stat",
                    title="Instances",
                    description="Processes that report operations of MongoDB.",
                    unit="short",
                    span=4,
                    height=5,
                    queries=(
                        Query(expr='sum(job:db_client_instances:count{job=~"$job"})', legend="instances"),
                    ),
                ),
                Panel(
                    kind="stat",
                    title="Operations per second",
                    description="Of all services, over five minutes.",
                    unit="ops",
                    span=4,
                    height=5,
                    queries=(
                        Query(
                            expr='sum(job:db_client_operation_duration_seconds_count:rate5m{job=~"$job"})',
                            legend="operations",
                        ),
                    ),
                ),
                Panel(
                    kind="stat",
                    title="Retries per second",
                    description="Of all services, over five minutes.",
                    unit="cps",
                    span=4,
                    height=5,
                    queries=(
                        Query(expr='sum(job:mongodb_retry_attempts:rate5m{job=~"$job"})', legend="retries"),
                    ),
                ),
                Panel(
                    kind="stat",
                    title="Amplification",
                    description="Attempts for each operation, over the whole fleet: what the servers carry.",
                    unit="suffix:x",
                    span=4,
                    height=5,
                    decimals=2,
                    minimum=1,
                    thresholds=_AMPLIFICATION,
                    queries=(
                        Query(
                            expr=(
                                '1 + sum(job:mongodb_retry_attempts:rate5m{job=~"$job"})'
                                ' / (sum(job:db_client_operation_duration_seconds_count:rate5m{job=~"$job"}) > 0)'
                            ),
                            legend="attempts per operation",
                        ),
                    ),
                ),
                Panel(
                    kind="stat",
                    title="Instances short of budget",
                    description="With less than 20 % of the tokens of one of their clients left.",
                    unit="short",
                    span=4,
                    height=5,
                    thresholds=((None, GREEN), (1, RED)),
                    queries=(
                        Query(
                            expr=(
                                'count(job_instance:mongodb_retry_budget_tokens:min_ratio{job=~"$job"} < 0.2)'
                                " or vector(0)"
                            ),
                            legend="instances",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Who is in trouble?",
            panels=(
                Panel(
                    kind="table",
                    title="Service by service",
                    description=(
                        "One row for each service, the emptiest budget first. A click on a row opens its retries."
                    ),
                    unit="short",
                    span=24,
                    height=11,
                    sort_by="Lowest budget",
                    descending=False,
                    # `max by` drops the rules' names: rows that differ in a name would not be merged.
                    queries=(
                        Query(
                            expr='max by (job) (job:db_client_instances:count{job=~"$job"})',
                            legend="{{job}}",
                            column="Instances",
                            unit="short",
                        ),
                        Query(
                            expr='max by (job) (job:db_client_operation_duration_seconds_count:rate5m{job=~"$job"})',
                            legend="{{job}}",
                            column="Operations",
                            unit="ops",
                        ),
                        Query(
                            expr='max by (job) (job:db_client_operation_errors:ratio_rate5m{job=~"$job"})',
                            legend="{{job}}",
                            column="Failed",
                            unit="percentunit",
                            thresholds=((None, "text"), (0.01, RED)),
                        ),
                        Query(
                            expr='max by (job) (job:db_client_operation_duration_seconds:p99_rate5m{job=~"$job"})',
                            legend="{{job}}",
                            column="p99",
                            unit="s",
                        ),
                        Query(
                            expr='max by (job) (job:mongodb_retry_attempts:rate5m{job=~"$job"})',
                            legend="{{job}}",
                            column="Retries",
                            unit="cps",
                        ),
                        Query(
                            expr='max by (job) (job:mongodb_retry_amplification:ratio_rate5m{job=~"$job"})',
                            legend="{{job}}",
                            column="Amplification",
                            unit="suffix:x",
                            thresholds=_AMPLIFICATION,
                        ),
                        Query(
                            expr='max by (job) (job:mongodb_retry_gave_up:rate5m{job=~"$job"})',
                            legend="{{job}}",
                            column="Gave up",
                            unit="ops",
                            thresholds=_NONE_IS_GOOD,
                        ),
                        Query(
                            expr='max by (job) (job:mongodb_retry_budget_denied:rate5m{job=~"$job"})',
                            legend="{{job}}",
                            column="Denied",
                            unit="cps",
                            thresholds=_NONE_IS_GOOD,
                        ),
                        Query(
                            expr='max by (job) (job:mongodb_retry_budget_tokens:min_ratio{job=~"$job"})',
                            legend="{{job}}",
                            column="Lowest budget",
                            unit="percentunit",
                            thresholds=_LEFT,
                        ),
                    ),
                    links=(_ROW,),
                ),
                Panel(
                    kind="bars",
                    title="Instances nearest to an empty budget",
                    description="The 15 with the least left. One instance alone: look at it. All of them: the servers.",
                    unit="percentunit",
                    span=8,
                    height=11,
                    maximum=1,
                    thresholds=_LEFT,
                    queries=(
                        Query(
                            expr='sort(bottomk(15, job_instance:mongodb_retry_budget_tokens:min_ratio{job=~"$job"}))',
                            legend="{{job}} {{instance}}",
                        ),
                    ),
                    links=(_INSTANCE,),
                ),
                Panel(
                    kind="bars",
                    title="Services that retry most",
                    description="The 15 with the most retries per second: they put the most load on the servers.",
                    unit="cps",
                    span=8,
                    height=11,
                    queries=(
                        Query(
                            expr='sort_desc(topk(15, job:mongodb_retry_attempts:rate5m{job=~"$job"}))',
                            legend="{{job}}",
                        ),
                    ),
                    links=(_JOB,),
                ),
                Panel(
                    kind="bars",
                    title="Instances with the highest amplification",
                    description="The 15 that send the most for each operation, however few operations they have.",
                    unit="suffix:x",
                    span=8,
                    height=11,
                    decimals=2,
                    minimum=1,
                    thresholds=_AMPLIFICATION,
                    queries=(
                        Query(
                            expr=(
                                "sort_desc(topk(15,"
                                ' job_instance:mongodb_retry_amplification:ratio_rate5m{job=~"$job"}))'
                            ),
                            legend="{{job}} {{instance}}",
                        ),
                    ),
                    links=(_INSTANCE,),
                ),
            ),
        ),
        Row(
            title="How did it come about?",
            panels=(
                Panel(
                    kind="lines",
                    title="Retries by service",
                    description="The ten with the most. All rising together: the servers. One alone: that service.",
                    unit="cps",
                    stacked=True,
                    queries=(
                        Query(
                            expr='topk(10, job:mongodb_retry_attempts:rate5m{job=~"$job"})', legend="{{job}}"
                        ),
                    ),
                    links=(_JOB,),
                ),
                Panel(
                    kind="lines",
                    title="Lowest budget by service",
                    description="The ten with the least left.",
                    unit="percentunit",
                    maximum=1,
                    thresholds=((None, RED), (0.2, GREEN)),
                    queries=(
                        Query(
                            expr='bottomk(10, job:mongodb_retry_budget_tokens:min_ratio{job=~"$job"})',
                            legend="{{job}}",
                        ),
                    ),
                    links=(_JOB,),
                ),
                Panel(
                    kind="lines",
                    title="Gave up, by service",
                    description="Operations lost although they might have been retried; the ten with the most.",
                    unit="ops",
                    stacked=True,
                    queries=(
                        Query(
                            expr='topk(10, job:mongodb_retry_gave_up:rate5m{job=~"$job"})', legend="{{job}}"
                        ),
                    ),
                    links=(_JOB,),
                ),
                Panel(
                    kind="table",
                    title="Alerts",
                    description="Of `dashboards/alerts.yaml`: what fires or is about to. Each has a section in docs/runbook.md.",
                    unit="short",
                    span=24,
                    height=7,
                    no_value="no alerts",
                    queries=(
                        Query(
                            expr=(
                                "count by (alertname, severity, alertstate, job)"
                                ' (ALERTS{alertname=~"MongoDB.+", job=~"$job"})'
                            ),
                            legend="{{alertname}} {{job}}",
                            column="Alerts",
                            unit="short",
                        ),
                    ),
                    links=(_ROW,),
                ),
            ),
        ),
    ),
)
