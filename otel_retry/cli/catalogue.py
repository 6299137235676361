"""Operations and errors by the names that people use, for `explain` and docs/operations.md.

What it says of each operation is checked against the running driver by tests/spec/test_catalogue.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from otel_retry.events import (
    NO_WRITES_PERFORMED,
    RETRYABLE_ERROR,
    RETRYABLE_WRITE_ERROR,
    SYSTEM_OVERLOADED_ERROR,
    Failure,
    Kind,
    OperationKind,
    Phase,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`retryable`: MongoDB itself supports repeating it."""

    name: str
    kind: OperationKind
    retryable: bool
    acknowledged: bool = True
    in_transaction: bool = False
    note: str = ""


def _read(name: str, *, retryable: bool = True, note: str = "") -> Operation:
    return Operation(name=name, kind=OperationKind.READ, retryable=retryable, note=note)


def _write(name: str, *, retryable: bool, note: str = "") -> Operation:
    return Operation(name=name, kind=OperationKind.WRITE, retryable=retryable, note=note)


OPERATIONS = {
    operation.name: operation
    for operation in (
        _read("find"),
        _read("find_one"),
        _read("aggregate", note="without $out or $merge"),
        _read("distinct"),
        _read("count_documents"),
        _read("estimated_document_count"),
        _read("watch", note="opening the stream; of a collection, database or client"),
        _read("list_databases"),
        _read("list_collections"),
        _read("list_indexes"),
        _read("gridfs_read", note="the finds behind it"),
        _read("getMore", retryable=False, note="a cursor that was moved cannot be moved back"),
        _write("insert_one", retryable=True),
        _write("insert_many", retryable=True, note="each command by itself"),
        _write("update_one", retryable=True),
        _write("replace_one", retryable=True),
        _write("delete_one", retryable=True),
        _write("find_one_and_update", retryable=True),
        _write("find_one_and_replace", retryable=True),
        _write("find_one_and_delete", retryable=True),
        _write("bulk_write", retryable=True, note="each command without update_many or delete_many in it"),
        _write("update_many", retryable=False),
        _write("delete_many", retryable=False),
        _write("aggregate_out", retryable=False, note="aggregate with $out or $merge"),
        _write("create_collection", retryable=False),
        _write("create_index", retryable=False),
        _write("drop_collection", retryable=False),
        _write("drop_index", retryable=False),
        _write("rename_collection", retryable=False),
        Operation(
            name="unacknowledged_write",
            kind=OperationKind.WRITE,
            retryable=False,
            acknowledged=False,
            note="w: 0",
        ),
        Operation(
            name="run_command",
            kind=OperationKind.RUN_COMMAND,
            retryable=False,
            note="database.command, whatever the command; also drop_database, validate, server_info",
        ),
        Operation(name="find_in_transaction", kind=OperationKind.READ, retryable=False, in_transaction=True),
        Operation(
            name="insert_in_transaction", kind=OperationKind.WRITE, retryable=False, in_transaction=True
        ),
        Operation(
            name="commit_transaction",
            kind=OperationKind.TRANSACTION_END,
            retryable=True,
            in_transaction=True,
            note="also abort_transaction",
        ),
    )
}

_OVERLOAD = frozenset({SYSTEM_OVERLOADED_ERROR, RETRYABLE_ERROR})
_LABELLED = frozenset({RETRYABLE_WRITE_ERROR})


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """An error as the machine sees it, before it happened."""

    name: str
    kind: Kind
    phase: Phase = Phase.SENT
    code: int | None = None
    labels: frozenset[str] = frozenset()
    note: str = ""

    def failure(self, operation: Operation) -> Failure:
        """PyMongo and servers label lost answers of writes that carry a txnNumber, and only those."""
        labels = self.labels
        if RETRYABLE_WRITE_ERROR in labels and not operation.retryable:
            labels -= {RETRYABLE_WRITE_ERROR}
        return Failure(
            error=RuntimeError(self.name),
            kind=self.kind,
            phase=self.phase,
            code=self.code,
            labels=labels,
            server="a:27017",
        )


ERRORS = {
    error.name: error
    for error in (
        ErrorShape(
            name="overload",
            kind=Kind.SERVER_ERROR,
            code=462,
            labels=_OVERLOAD,
            note="the server rejects the command",
        ),
        ErrorShape(
            name="network", kind=Kind.NETWORK, labels=_LABELLED, note="the connection broke after sending"
        ),
        ErrorShape(
            name="network_timeout", kind=Kind.NETWORK_TIMEOUT, labels=_LABELLED, note="no answer in time"
        ),
        ErrorShape(
            name="not_primary",
            kind=Kind.NOT_PRIMARY,
            code=10107,
            labels=_LABELLED,
            note="a failover: 10107, 13435, 13436",
        ),
        ErrorShape(
            name="shutdown", kind=Kind.NOT_PRIMARY, code=91, labels=_LABELLED, note="91, 11600, 11602, 189"
        ),
        ErrorShape(
            name="pool_cleared",
            kind=Kind.POOL_CLEARED,
            phase=Phase.CONNECTION,
            labels=_LABELLED,
            note="nothing was sent",
        ),
        ErrorShape(name="no_server", kind=Kind.NO_SERVER, phase=Phase.SELECTION, note="none found in time"),
        ErrorShape(
            name="pool_exhausted", kind=Kind.POOL_EXHAUSTED, phase=Phase.CONNECTION, note="waitQueueTimeoutMS"
        ),
        ErrorShape(name="max_time_expired", kind=Kind.SERVER_TIMEOUT, code=50, note="maxTimeMS"),
        ErrorShape(name="duplicate_key", kind=Kind.REJECTED, code=11000),
        ErrorShape(name="unauthorized", kind=Kind.REJECTED, code=13),
    )
}

LABELS = (RETRYABLE_WRITE_ERROR, RETRYABLE_ERROR, SYSTEM_OVERLOADED_ERROR, NO_WRITES_PERFORMED)
