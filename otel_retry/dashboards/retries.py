"""The dashboard "Retries and backpressure": five questions from top to bottom, for the person who was woken up."""

from __future__ import annotations

from otel_retry.dashboards import panels
from otel_retry.dashboards.panels import GREEN, RED, YELLOW, Board, Panel, Query, Row

_METRIC = "db_client_operation_duration_seconds_count"

_RETRIED = panels.jaeger_search("Retried operations in Jaeger", tags="mongodb.retry.outcome=retried")
_OVER_BUDGET = panels.jaeger_search(
    "Operations that gave up for want of tokens", tags="mongodb.retry.outcome=budget"
)
_LIMIT = panels.jaeger_search("Operations that gave up at the limit", tags="mongodb.retry.outcome=limit")
_TRACE = panels.jaeger_trace()

_AMPLIFICATION = ((None, GREEN), (1.1, YELLOW), (1.5, RED))
_LEFT = ((None, RED), (0.2, YELLOW), (0.5, GREEN))

BOARD = Board(
    file="retries.json",
    uid="otel-retry-retries",
    title="MongoDB: retries and backpressure",
    description="Are we retrying, why, does it help, what does it cost, how much is left?",
    variables=(
        panels.jobs(_METRIC),
        panels.instances(_METRIC),
        panels.jaeger_service(_METRIC),
        panels.trace_id(),
    ),
    rows=(
        Row(
            title="Are we retrying?",
            panels=(
                Panel(
                    kind="stat",
                    title="Retries per second",
                    description="Attempts after the first. 0 is what a healthy deployment shows.",
                    unit="cps",
                    span=4,
                    decimals=2,
                    queries=(
                        Query(
                            expr="sum(rate(mongodb_retry_attempts_total{$where}[$__rate_interval])) or vector(0)",
                            legend="retries",
                        ),
                    ),
                    links=(_RETRIED, _TRACE),
                ),
                Panel(
                    kind="stat",
                    title="Share of operations retried",
                    description="Of all operations, those that needed more than one attempt, with whatever end.",
                    unit="percentunit",
                    span=4,
                    decimals=2,
                    thresholds=((None, GREEN), (0.01, YELLOW), (0.1, RED)),
                    queries=(
                        Query(
                            expr=(
                                "(sum(rate(mongodb_client_operation_retries_count{$where}[$__rate_interval]))"
                                " or vector(0))"
                                " / (sum(rate(db_client_operation_duration_seconds_count{$where}[$__rate_interval]))"
                                " > 0)"
                            ),
                            legend="retried",
                        ),
                    ),
                    links=(_RETRIED, _TRACE),
                ),
                Panel(
                    kind="stat",
                    title="Amplification",
                    description=(
                        "Attempts for each operation. 1 means no retries; at 2 the servers carry twice the load "
                        "that the applications ask for. The alert is at 1.5."
                    ),
                    unit="suffix:x",
                    span=4,
                    decimals=2,
                    minimum=1,
                    thresholds=_AMPLIFICATION,
                    queries=(
                        Query(
                            expr=(
                                "1 + (sum(rate(mongodb_retry_attempts_total{$where}[$__rate_interval])) or vector(0))"
                                " / (sum(rate(db_client_operation_duration_seconds_count{$where}[$__rate_interval]))"
                                " > 0)"
                            ),
                            legend="attempts per operation",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Operations and retries",
                    description=(
                        "What the applications ask for, and what is sent on top. When retries rise while operations "
                        "fall, the retries are eating the capacity."
                    ),
                    unit="cps",
                    span=6,
                    queries=(
                        Query(
                            expr="sum(rate(db_client_operation_duration_seconds_count{$where}[$__rate_interval]))",
                            legend="operations",
                        ),
                        Query(
                            expr="sum(rate(mongodb_retry_attempts_total{$where}[$__rate_interval])) or vector(0)",
                            legend="retries",
                        ),
                    ),
                    links=(_RETRIED, _TRACE),
                ),
                Panel(
                    kind="lines",
                    title="Amplification by job",
                    description="Attempts for each operation: which application sends how much more than it asks for.",
                    unit="suffix:x",
                    span=6,
                    minimum=1,
                    thresholds=_AMPLIFICATION,
                    queries=(
                        Query(
                            expr=(
                                "1 + (sum by (job) (rate(mongodb_retry_attempts_total{$where}[$__rate_interval]))"
                                " or 0 * sum by (job)"
                                " (rate(db_client_operation_duration_seconds_count{$where}[$__rate_interval])))"
                                " / (sum by (job)"
                                " (rate(db_client_operation_duration_seconds_count{$where}[$__rate_interval])) > 0)"
                            ),
                            legend="{{job}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Why?",
            panels=(
                Panel(
                    kind="lines",
                    title="Retries by reason",
                    description=(
                        "What the attempt before failed with. `overload`: the server sheds load. `not_primary`: a "
                        "failover. `network`, `network_timeout`, `pool_cleared`: the way to the server, or its death."
                    ),
                    unit="cps",
                    stacked=True,
                    queries=(
                        Query(
                            expr=(
                                "sum by (mongodb_retry_reason)"
                                " (rate(mongodb_retry_attempts_total{$where}[$__rate_interval]))"
                            ),
                            legend="{{mongodb_retry_reason}}",
                        ),
                    ),
                    links=(_RETRIED, _TRACE),
                ),
                Panel(
                    kind="lines",
                    title="Failed attempts by server",
                    description=(
                        "Of operations that were tried more than once. One server alone points at that server; all of "
                        "them at the load or the network. `none`: no server was selected."
                    ),
                    unit="cps",
                    stacked=True,
                    queries=(
                        Query(
                            expr=(
                                "label_replace(label_join(sum by (server_address, server_port) (rate("
                                'mongodb_client_attempt_duration_seconds_count{$where, mongodb_retry_outcome="error"}'
                                '[$__rate_interval])), "server", ":", "server_address", "server_port"),'
                                ' "server", "none", "server", ":")'
                            ),
                            legend="{{server}}",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Retries by operation",
                    description="Which operations are sent again. Writes alone: look at the primary.",
                    unit="cps",
                    stacked=True,
                    queries=(
                        Query(
                            expr=(
                                "sum by (db_operation_name)"
                                " (rate(mongodb_retry_attempts_total{$where}[$__rate_interval]))"
                            ),
                            legend="{{db_operation_name}}",
                        ),
                    ),
                    links=(_RETRIED, _TRACE),
                ),
            ),
        ),
        Row(
            title="Is it helping?",
            panels=(
                Panel(
                    kind="lines",
                    title="After a retry: succeeded or gave up",
                    description=(
                        "How the retried operations ended. As long as most succeed the retries earn their cost; when "
                        "most give up they only add load."
                    ),
                    unit="ops",
                    stacked=True,
                    queries=(
                        Query(
                            expr=(
                                'sum(rate(mongodb_client_operation_retries_count{$where, mongodb_retry_outcome="retried"}'
                                "[$__rate_interval])) or vector(0)"
                            ),
                            legend="succeeded",
                        ),
                        Query(
                            expr=(
                                "sum(rate(mongodb_client_operation_retries_count"
                                '{$where, mongodb_retry_outcome!="retried"}[$__rate_interval])) or vector(0)'
                            ),
                            legend="gave up",
                        ),
                    ),
                    links=(_RETRIED, _LIMIT, _OVER_BUDGET, _TRACE),
                ),
                Panel(
                    kind="lines",
                    title="Gave up, by reason",
                    description=(
                        "Operations whose error reached the application. `limit`: five retries were not enough. "
                        "`budget`: no tokens. `deadline`: timeoutMS. `no_server`: none could be selected. "
                        "`not_retryable`: the application's own errors too, such as duplicate keys."
                    ),
                    unit="ops",
                    stacked=True,
                    queries=(
                        Query(
                            expr=(
                                "sum by (mongodb_retry_reason)"
                                " (rate(mongodb_retry_gave_up_total{$where}[$__rate_interval]))"
                            ),
                            legend="{{mongodb_retry_reason}}",
                        ),
                    ),
                    links=(_LIMIT, _OVER_BUDGET, _TRACE),
                ),
                Panel(
                    kind="lines",
                    title="Retries that an operation needed",
                    description="Of the retried ones. A p99 at the limit (5) means that operations are being lost.",
                    unit="short",
                    queries=tuple(
                        Query(
                            expr=(
                                f"histogram_quantile({value}, sum by (le)"
                                " (rate(mongodb_client_operation_retries_bucket{$where}[$__rate_interval])))"
                            ),
                            legend=name,
                            exemplars=True,
                        )
                        for value, name in ((0.5, "median"), (0.99, "p99"))
                    ),
                    links=(_RETRIED, _TRACE),
                ),
            ),
        ),
        Row(
            title="What does it cost?",
            panels=(
                Panel(
                    kind="lines",
                    title="Operations waiting in backoff",
                    description=(
                        "Seconds of waiting for each second that passes: so many threads or tasks of the application "
                        "are asleep before a retry, on average."
                    ),
                    unit="short",
                    span=6,
                    stacked=True,
                    queries=(
                        Query(
                            expr=(
                                "sum by (mongodb_retry_reason)"
                                " (rate(mongodb_retry_backoff_seconds_sum{$where}[$__rate_interval]))"
                            ),
                            legend="{{mongodb_retry_reason}}",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Length of one wait",
                    description="Before a retry. It grows with each retry of an operation and has full jitter.",
                    unit="s",
                    span=6,
                    queries=tuple(
                        Query(
                            expr=(
                                f"histogram_quantile({value}, sum by (le)"
                                " (rate(mongodb_retry_backoff_seconds_bucket{$where}[$__rate_interval])))"
                            ),
                            legend=name,
                            exemplars=True,
                        )
                        for value, name in ((0.5, "median"), (0.99, "p99"))
                    ),
                    links=(_RETRIED, _TRACE),
                ),
                Panel(
                    kind="lines",
                    title="Mean latency, with retries and without",
                    description=(
                        "With: as the application sees it. Without: the same less the failed attempts of retried "
                        "operations and the waits between them. The gap is the price of retrying."
                    ),
                    unit="s",
                    span=6,
                    queries=(
                        Query(
                            expr=(
                                "sum(rate(db_client_operation_duration_seconds_sum{$where}[$__rate_interval]))"
                                " / (sum(rate(db_client_operation_duration_seconds_count{$where}[$__rate_interval]))"
                                " > 0)"
                            ),
                            legend="with",
                        ),
                        Query(
                            expr=(
                                "clamp_min("
                                "sum(rate(db_client_operation_duration_seconds_sum{$where}[$__rate_interval]))"
                                " - (sum(rate(mongodb_client_attempt_duration_seconds_sum"
                                '{$where, mongodb_retry_outcome="error"}[$__rate_interval])) or vector(0))'
                                " - (sum(rate(mongodb_retry_backoff_seconds_sum{$where}[$__rate_interval]))"
                                " or vector(0)), 0)"
                                " / (sum(rate(db_client_operation_duration_seconds_count{$where}[$__rate_interval]))"
                                " > 0)"
                            ),
                            legend="without",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="p99 of operations and of single attempts",
                    description=(
                        "Operations with all their attempts and waits, against the single attempts of those that were "
                        "retried. Attempts as slow as operations: the server is slow, the retries are not to blame. "
                        "Dots are exemplars: click one for its trace."
                    ),
                    unit="s",
                    span=6,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.99, sum by (le)"
                                " (rate(db_client_operation_duration_seconds_bucket{$where}[$__rate_interval])))"
                            ),
                            legend="operations",
                            exemplars=True,
                        ),
                        Query(
                            expr=(
                                "histogram_quantile(0.99, sum by (le)"
                                " (rate(mongodb_client_attempt_duration_seconds_bucket{$where}[$__rate_interval])))"
                            ),
                            legend="attempts",
                            exemplars=True,
                        ),
                    ),
                    links=(_RETRIED, _TRACE),
                ),
            ),
        ),
        Row(
            title="How much is left?",
            panels=(
                Panel(
                    kind="stat",
                    title="Lowest budget",
                    description="The share of its tokens that the worst-off client has left. The alert is at 20 %.",
                    unit="percentunit",
                    span=4,
                    maximum=1,
                    thresholds=_LEFT,
                    queries=(
                        Query(
                            expr="min(mongodb_retry_budget_tokens{$where} / mongodb_retry_budget_capacity{$where})",
                            legend="left",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Tokens left, by client",
                    description=(
                        "The 20 clients with the fewest. A retry takes one token, a success gives back 0.1, a success "
                        "after a retry 1.1. Without a whole token nothing is retried."
                    ),
                    unit="short",
                    span=10,
                    queries=(
                        Query(
                            expr="bottomk(20, min by (instance, mongodb_client) (mongodb_retry_budget_tokens{$where}))",
                            legend="{{instance}} {{mongodb_client}}",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Time to empty",
                    description=(
                        "At the present pace, for the 20 clients that are nearest to it. Nothing is shown for a "
                        "budget that is not shrinking, or will last for more than an hour."
                    ),
                    unit="s",
                    span=10,
                    no_value="none within an hour",
                    queries=(
                        Query(
                            expr=(
                                "bottomk(20, min by (instance, mongodb_client) (mongodb_retry_budget_tokens{$where}"
                                " / (rate(mongodb_retry_budget_consumed_total{$where}[$__rate_interval])"
                                " - rate(mongodb_retry_budget_deposited_total{$where}[$__rate_interval]) > 0))"
                                " < 3600)"
                            ),
                            legend="{{instance}} {{mongodb_client}}",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Tokens taken and returned",
                    description="When more is taken than returned, the budget shrinks; the difference is how fast.",
                    unit="cps",
                    span=12,
                    queries=(
                        Query(
                            expr="sum(rate(mongodb_retry_budget_consumed_total{$where}[$__rate_interval]))",
                            legend="taken",
                        ),
                        Query(
                            expr="sum(rate(mongodb_retry_budget_deposited_total{$where}[$__rate_interval]))",
                            legend="returned",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Retries denied, by client",
                    description=(
                        "Refused because the bucket was empty: the breaker is open and the error goes straight to the "
                        "application. The 20 clients with the most."
                    ),
                    unit="cps",
                    span=12,
                    queries=(
                        Query(
                            expr=(
                                "topk(20, sum by (instance, mongodb_client)"
                                " (rate(mongodb_retry_budget_denied_total{$where}[$__rate_interval])))"
                            ),
                            legend="{{instance}} {{mongodb_client}}",
                        ),
                    ),
                    links=(_OVER_BUDGET, _TRACE),
                ),
            ),
        ),
    ),
)
