"""The dashboard "MongoDB client overview": what an application asks of MongoDB, and how it is served."""

from __future__ import annotations

from otel_retry.dashboards import panels
from otel_retry.dashboards.panels import GREEN, RED, YELLOW, Board, Panel, Query, Row

_METRIC = "db_client_operation_duration_seconds_count"

_SLOW = panels.jaeger_search("Slow operations in Jaeger", tags="db.system.name=mongodb", slower_than="100ms")
_FAILED = panels.jaeger_search("Failed operations in Jaeger", tags="db.system.name=mongodb error=true")
_TRACE = panels.jaeger_trace()

_COUNT = "rate(db_client_operation_duration_seconds_count{$where}[$__rate_interval])"
_FAILURES = 'rate(db_client_operation_duration_seconds_count{$where, error_type!=""}[$__rate_interval])'
_BUCKET = "rate(db_client_operation_duration_seconds_bucket{$where}[$__rate_interval])"
_IN_COLLECTIONS = (
    'rate(db_client_operation_duration_seconds_bucket{$where, db_collection_name!=""}[$__rate_interval])'
)
_AT_SERVERS = (
    'rate(db_client_operation_duration_seconds_bucket{$where, server_address!=""}[$__rate_interval])'
)

_POOL = "{{instance}} {{db_client_connection_pool_name}}"


def _server(expression: str) -> str:
    return f'label_join({expression}, "server", ":", "server_address", "server_port")'


def _pool_time(metric: str) -> tuple[Query, ...]:
    return tuple(
        Query(
            expr=(
                f"histogram_quantile({value}, sum by (le)"
                f" (rate(db_client_connection_{metric}_seconds_bucket{{$where}}[$__rate_interval])))"
            ),
            legend=name,
            exemplars=True,
        )
        for value, name in ((0.5, "median"), (0.99, "p99"))
    )


BOARD = Board(
    file="client.json",
    uid="otel-retry-client",
    title="MongoDB: client overview",
    description="Rate, errors and latency of operations; connection pools; servers. As the application sees them.",
    variables=(
        panels.jobs(_METRIC),
        panels.instances(_METRIC),
        panels.quantile(),
        panels.jaeger_service(_METRIC),
        panels.trace_id(),
    ),
    rows=(
        Row(
            title="Rate and errors",
            panels=(
                Panel(
                    kind="stat",
                    title="Operations per second",
                    description="Logical operations: one for each call, however many attempts it took.",
                    unit="ops",
                    span=6,
                    height=5,
                    queries=(Query(expr=f"sum({_COUNT})", legend="operations"),),
                ),
                Panel(
                    kind="stat",
                    title="Share of operations that fail",
                    description="Those that ended in an error for the application, after all retries.",
                    unit="percentunit",
                    span=6,
                    height=5,
                    decimals=2,
                    thresholds=((None, GREEN), (0.001, YELLOW), (0.01, RED)),
                    queries=(
                        Query(
                            expr=f"(sum({_FAILURES}) or vector(0)) / (sum({_COUNT}) > 0)",
                            legend="failed",
                        ),
                    ),
                    links=(_FAILED, _TRACE),
                ),
                Panel(
                    kind="stat",
                    title="p99 latency",
                    description="Of operations, with all their attempts and waits.",
                    unit="s",
                    span=6,
                    height=5,
                    queries=(Query(expr=f"histogram_quantile(0.99, sum by (le) ({_BUCKET}))", legend="p99"),),
                    links=(_SLOW, _TRACE),
                ),
                Panel(
                    kind="stat",
                    title="Fullest pool",
                    description="Connections in use, as a share of maxPoolSize, of the pool that is worst off.",
                    unit="percentunit",
                    span=6,
                    height=5,
                    maximum=1,
                    no_value="no pool has a maximum",
                    thresholds=((None, GREEN), (0.8, YELLOW), (0.95, RED)),
                    queries=(
                        Query(
                            expr=(
                                'max(db_client_connection_count{$where, db_client_connection_state="used"}'
                                " / ignoring (db_client_connection_state) (db_client_connection_max{$where} > 0))"
                            ),
                            legend="in use",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Operations by name",
                    description="What is asked: find, insert, aggregate, ...",
                    unit="ops",
                    span=6,
                    stacked=True,
                    queries=(
                        Query(expr=f"sum by (db_operation_name) ({_COUNT})", legend="{{db_operation_name}}"),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Operations by collection",
                    description=(
                        "The 20 busiest. `_other` stands for the collections beyond OTEL_RETRY_MAX_COLLECTIONS."
                    ),
                    unit="ops",
                    span=6,
                    stacked=True,
                    queries=(
                        Query(
                            expr=(
                                "topk(20, sum by (db_namespace, db_collection_name)"
                                ' (rate(db_client_operation_duration_seconds_count{$where, db_collection_name!=""}'
                                "[$__rate_interval])))"
                            ),
                            legend="{{db_namespace}}.{{db_collection_name}}",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Errors by type",
                    description="The class of the exception that the application got.",
                    unit="ops",
                    span=6,
                    stacked=True,
                    no_value="no errors",
                    queries=(Query(expr=f"sum by (error_type) ({_FAILURES})", legend="{{error_type}}"),),
                    links=(_FAILED, _TRACE),
                ),
                Panel(
                    kind="lines",
                    title="Share of failures, by operation",
                    description="Which operations fail, however rare they are.",
                    unit="percentunit",
                    span=6,
                    no_value="no errors",
                    queries=(
                        Query(
                            expr=(
                                f"sum by (db_operation_name) ({_FAILURES})"
                                f" / sum by (db_operation_name) ({_COUNT})"
                            ),
                            legend="{{db_operation_name}}",
                        ),
                    ),
                    links=(_FAILED, _TRACE),
                ),
            ),
        ),
        Row(
            title="Latency",
            panels=(
                Panel(
                    kind="lines",
                    title="Latency percentiles",
                    description=(
                        "Of all operations, with their attempts and waits. Dots are exemplars: click one for its trace."
                    ),
                    unit="s",
                    queries=tuple(
                        Query(
                            expr=f"histogram_quantile({value}, sum by (le) ({_BUCKET}))",
                            legend=name,
                            exemplars=value == 0.99,
                        )
                        for value, name in ((0.5, "median"), (0.9, "p90"), (0.99, "p99"))
                    ),
                    links=(_SLOW, _TRACE),
                ),
                Panel(
                    kind="lines",
                    title="Latency by operation",
                    description="At the percentile chosen above.",
                    unit="s",
                    queries=(
                        Query(
                            expr=f"histogram_quantile($quantile, sum by (le, db_operation_name) ({_BUCKET}))",
                            legend="{{db_operation_name}}",
                            exemplars=True,
                        ),
                    ),
                    links=(_SLOW, _TRACE),
                ),
                Panel(
                    kind="lines",
                    title="Latency by collection",
                    description="At the percentile chosen above; the 20 slowest.",
                    unit="s",
                    queries=(
                        Query(
                            expr=(
                                "topk(20, histogram_quantile($quantile,"
                                f" sum by (le, db_namespace, db_collection_name) ({_IN_COLLECTIONS})))"
                            ),
                            legend="{{db_namespace}}.{{db_collection_name}}",
                            exemplars=True,
                        ),
                    ),
                    links=(_SLOW, _TRACE),
                ),
            ),
        ),
        Row(
            title="Connection pools",
            panels=(
                Panel(
                    kind="lines",
                    title="Connections in use and idle",
                    description="Of all pools together. Many idle ones cost the servers memory.",
                    unit="short",
                    stacked=True,
                    queries=(
                        Query(
                            expr="sum by (db_client_connection_state) (db_client_connection_count{$where})",
                            legend="{{db_client_connection_state}}",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="In use, by pool",
                    description="As a share of maxPoolSize; the 20 fullest. At 100 % the next operation has to wait.",
                    unit="percentunit",
                    maximum=1,
                    no_value="no pool has a maximum",
                    thresholds=((None, GREEN), (0.95, RED)),
                    queries=(
                        Query(
                            expr=(
                                "topk(20, max by (instance, db_client_connection_pool_name)"
                                ' (db_client_connection_count{$where, db_client_connection_state="used"}'
                                " / ignoring (db_client_connection_state) (db_client_connection_max{$where} > 0)))"
                            ),
                            legend=_POOL,
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Waiting for a connection",
                    description="Operations that wait for one just now; the 20 pools with the most.",
                    unit="short",
                    queries=(
                        Query(
                            expr=(
                                "topk(20, sum by (instance, db_client_connection_pool_name)"
                                " (db_client_connection_pending_requests{$where}))"
                            ),
                            legend=_POOL,
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Time to get a connection",
                    description=(
                        "From the pool, including making a new one. It grows when the pool is too small or when "
                        "operations hold connections for too long."
                    ),
                    unit="s",
                    span=6,
                    queries=_pool_time("wait_time"),
                ),
                Panel(
                    kind="lines",
                    title="Time a connection is held",
                    description="Between borrowing it and giving it back: one command, or a whole cursor or transaction.",
                    unit="s",
                    span=6,
                    queries=_pool_time("use_time"),
                ),
                Panel(
                    kind="lines",
                    title="Time to make a connection",
                    description="TCP, TLS, handshake and authentication. Slow ones during an overload delay everything.",
                    unit="s",
                    span=6,
                    queries=_pool_time("create_time"),
                ),
                Panel(
                    kind="lines",
                    title="No connection in time",
                    description="waitQueueTimeoutMS or the operation's deadline passed before the pool had one.",
                    unit="cps",
                    span=6,
                    queries=(
                        Query(
                            expr=(
                                "topk(20, sum by (instance, db_client_connection_pool_name)"
                                " (rate(db_client_connection_timeouts_total{$where}[$__rate_interval])))"
                            ),
                            legend=_POOL,
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Servers",
            panels=(
                Panel(
                    kind="lines",
                    title="Operations by server",
                    description=(
                        "Where operations ended up. When the line of writes moves to another server, there was a failover."
                    ),
                    unit="ops",
                    stacked=True,
                    queries=(
                        Query(
                            expr=_server(
                                "sum by (server_address, server_port) (rate("
                                'db_client_operation_duration_seconds_count{$where, server_address!=""}'
                                "[$__rate_interval]))"
                            ),
                            legend="{{server}}",
                        ),
                    ),
                ),
                Panel(
                    kind="lines",
                    title="Latency by server",
                    description="At the percentile chosen above. One server apart from the others is the one to look at.",
                    unit="s",
                    queries=(
                        Query(
                            expr=_server(
                                "histogram_quantile($quantile,"
                                f" sum by (le, server_address, server_port) ({_AT_SERVERS}))"
                            ),
                            legend="{{server}}",
                            exemplars=True,
                        ),
                    ),
                    links=(_SLOW, _TRACE),
                ),
                Panel(
                    kind="lines",
                    title="Failures by server",
                    description="Operations that ended in an error, by the server of their last attempt.",
                    unit="ops",
                    stacked=True,
                    no_value="no errors",
                    queries=(
                        Query(
                            expr=_server(
                                "sum by (server_address, server_port) (rate(db_client_operation_duration_seconds_count"
                                '{$where, error_type!="", server_address!=""}[$__rate_interval]))'
                            ),
                            legend="{{server}}",
                        ),
                    ),
                    links=(_FAILED, _TRACE),
                ),
            ),
        ),
    ),
)
