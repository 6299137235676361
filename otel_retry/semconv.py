"""Every span, attribute, event and metric name: the only place that spells them.

Three sources: OpenTelemetry's database conventions, MongoDB's OpenTelemetry specification for drivers, and, under
`mongodb.retry.` and `mongodb.client.`, what neither has.
"""

from __future__ import annotations

from typing import Final

SCOPE: Final = "otel_retry"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.39.0"

MONGODB: Final = "mongodb"

# Spans.
TRANSACTION_SPAN: Final = "transaction"
ATTEMPT_SPAN: Final = "attempt"

# Attributes, OpenTelemetry's.
DB_SYSTEM: Final = "db.system.name"
DB_NAMESPACE: Final = "db.namespace"
DB_COLLECTION: Final = "db.collection.name"
DB_OPERATION: Final = "db.operation.name"
DB_QUERY_SUMMARY: Final = "db.query.summary"
DB_QUERY_TEXT: Final = "db.query.text"
DB_STATUS_CODE: Final = "db.response.status_code"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
NETWORK_TRANSPORT: Final = "network.transport"
ERROR_TYPE: Final = "error.type"
EXCEPTION_EVENT: Final = "exception"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# Attributes, MongoDB's.
DB_OPERATION_SUMMARY: Final = "db.operation.summary"
DB_COMMAND: Final = "db.command.name"
SERVER_CONNECTION_ID: Final = "db.mongodb.server_connection_id"
DRIVER_CONNECTION_ID: Final = "db.mongodb.driver_connection_id"
CURSOR_ID: Final = "db.mongodb.cursor_id"
LSID: Final = "db.mongodb.lsid"
TXN_NUMBER: Final = "db.mongodb.txn_number"

# Attributes, ours.
OPERATION_ID: Final = "mongodb.operation_id"
REQUEST_ID: Final = "mongodb.request_id"
RETRY_ATTEMPT: Final = "mongodb.retry.attempt"
RETRY_ATTEMPTS: Final = "mongodb.retry.attempts"
RETRY_DECISION: Final = "mongodb.retry.decision"
RETRY_DELAY: Final = "mongodb.retry.delay"
RETRY_LINK: Final = "mongodb.retry.link"
RETRY_OUTCOME: Final = "mongodb.retry.outcome"
RETRY_POLICY: Final = "mongodb.retry.policy"
RETRY_REASON: Final = "mongodb.retry.reason"
RETRY_SERVER: Final = "mongodb.retry.server"
RETRY_TOKENS: Final = "mongodb.retry.tokens"
CLIENT: Final = "mongodb.client"

PREVIOUS_ATTEMPT: Final = "previous_attempt"

# The event on the operation span, one for each retry.
RETRY_EVENT: Final = "mongodb.retry"

# Outcomes of an operation; beside them the reasons why it gave up.
FIRST_TRY: Final = "first_try"
RETRIED: Final = "retried"
IGNORED: Final = "ignored"

# Metrics.
OPERATION_DURATION: Final = "db.client.operation.duration"
ATTEMPT_DURATION: Final = "mongodb.client.attempt.duration"
OPERATION_RETRIES: Final = "mongodb.client.operation.retries"
RETRY_ATTEMPTS_COUNTER: Final = "mongodb.retry.attempts"
RETRY_BACKOFF: Final = "mongodb.retry.backoff"
RETRY_GAVE_UP: Final = "mongodb.retry.gave_up"
BUDGET_TOKENS: Final = "mongodb.retry.budget.tokens"
BUDGET_CAPACITY: Final = "mongodb.retry.budget.capacity"
BUDGET_CONSUMED: Final = "mongodb.retry.budget.consumed"
BUDGET_DEPOSITED: Final = "mongodb.retry.budget.deposited"
BUDGET_DENIED: Final = "mongodb.retry.budget.denied"

CONNECTION_COUNT: Final = "db.client.connection.count"
CONNECTION_IDLE_MAX: Final = "db.client.connection.idle.max"
CONNECTION_IDLE_MIN: Final = "db.client.connection.idle.min"
CONNECTION_MAX: Final = "db.client.connection.max"
CONNECTION_PENDING: Final = "db.client.connection.pending_requests"
CONNECTION_TIMEOUTS: Final = "db.client.connection.timeouts"
CONNECTION_CREATE_TIME: Final = "db.client.connection.create_time"
CONNECTION_WAIT_TIME: Final = "db.client.connection.wait_time"
CONNECTION_USE_TIME: Final = "db.client.connection.use_time"
POOL_NAME: Final = "db.client.connection.pool.name"
CONNECTION_STATE: Final = "db.client.connection.state"

# The conventions' boundaries for durations in seconds.
DURATION_BOUNDARIES: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
RETRIES_BOUNDARIES: Final = (1, 2, 3, 4, 5, 10, 20, 50, 100)

OTHER: Final = "_other"
"""Stands for every collection beyond the number that metrics tell apart."""

# No span and no text for these, ever (Command Logging and Monitoring specification, "Security").
SENSITIVE_COMMANDS: Final = frozenset(
    {
        "authenticate",
        "saslstart",
        "saslcontinue",
        "getnonce",
        "createuser",
        "updateuser",
        "copydbgetnonce",
        "copydbsaslstart",
        "copydb",
    }
)
# Commands whose first value is a collection's name; of any other it is a value like the rest.
COLLECTION_COMMANDS: Final = frozenset(
    {
        "aggregate",
        "collMod",
        "collStats",
        "compact",
        "convertToCapped",
        "count",
        "create",
        "createIndexes",
        "createSearchIndexes",
        "delete",
        "distinct",
        "drop",
        "dropIndexes",
        "dropSearchIndex",
        "find",
        "findAndModify",
        "findandmodify",
        "insert",
        "killCursors",
        "listIndexes",
        "listSearchIndexes",
        "mapReduce",
        "mapreduce",
        "planCacheClear",
        "reIndex",
        "update",
        "updateSearchIndex",
        "validate",
    }
)
HELLO_COMMANDS: Final = frozenset({"hello", "ismaster"})
