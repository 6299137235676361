"""PyMongo's exceptions turned into facts. It trusts nothing that a server sent: labels, codes and hints may be
of any type, and whatever is not what it should be counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConnectionFailure,
    DuplicateKeyError,
    ExecutionTimeout,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WTimeoutError,
)

from otel_retry.events import (
    NO_WRITES_PERFORMED,
    RETRYABLE_ERROR,
    RETRYABLE_WRITE_ERROR,
    SYSTEM_OVERLOADED_ERROR,
    Failure,
    Kind,
    Phase,
)

LABELS = (RETRYABLE_WRITE_ERROR, RETRYABLE_ERROR, SYSTEM_OVERLOADED_ERROR, NO_WRITES_PERFORMED)

NOT_PRIMARY_CODES = frozenset({10058, 10107, 13435, 13436, 189, 11600, 11602, 91})

# MaxTimeMSExpired, NetworkTimeout, ExceededTimeLimit, WriteConcernFailed (a wtimeout that a mongos relays).
SERVER_TIMEOUT_CODES = frozenset({50, 89, 262, 64})

# Validation and authorisation (seed 004, "Hard-coded rules"): BadValue, FailedToParse, Unauthorized, TypeMismatch,
# AuthenticationFailed, IllegalOperation, NamespaceNotFound, IndexNotFound, NamespaceExists, CommandNotFound,
# InvalidOptions, InvalidNamespace, IndexOptionsConflict, IndexKeySpecsConflict, DocumentValidationFailure,
# DuplicateKey.
REJECTION_CODES = frozenset({2, 9, 13, 14, 18, 20, 26, 27, 48, 59, 72, 73, 85, 86, 121, 11000})

_LONGEST_HINT = 3600.0


def classify(error: BaseException, *, phase: Phase = Phase.SENT, server: str | None = None) -> Failure:
    """`phase` and `server` are what the caller saw of the attempt; the rest is read off the exception."""
    cause = underlying(error)
    code = _code(cause)
    labels = _labels(error, cause)
    kind = _kind(cause, code, phase)
    if kind is Kind.REJECTED and labels & {RETRYABLE_ERROR, RETRYABLE_WRITE_ERROR}:
        kind = Kind.SERVER_ERROR  # the server's own label outweighs what its code usually means
    return Failure(
        error=error,
        kind=kind,
        phase=phase,
        code=code,
        labels=labels,
        base_backoff=_base_backoff(cause),
        server=server,
    )


def underlying(error: BaseException) -> BaseException:
    """A client bulk write wraps the error that ended it."""
    inner = getattr(error, "error", None) if isinstance(error, OperationFailure) else None
    return inner if isinstance(inner, PyMongoError) else error


def _kind(error: BaseException, code: int | None, phase: Phase) -> Kind:
    if isinstance(error, ServerSelectionTimeoutError):
        return Kind.NO_SERVER
    if isinstance(error, WaitQueueTimeoutError):
        return Kind.POOL_EXHAUSTED
    if isinstance(error, NotPrimaryError):
        return Kind.NOT_PRIMARY
    if isinstance(error, NetworkTimeout):
        return Kind.NETWORK_TIMEOUT
    if isinstance(error, AutoReconnect) and phase is Phase.CONNECTION and _is_paused_pool(error):
        return Kind.POOL_CLEARED
    if isinstance(error, ConnectionFailure):
        return Kind.NETWORK
    if isinstance(error, BulkWriteError):
        code = _write_concern_code(error.details)
    if isinstance(error, OperationFailure):
        return _server_kind(error, code)
    return Kind.CLIENT_ERROR


def _server_kind(error: OperationFailure, code: int | None) -> Kind:
    if code in NOT_PRIMARY_CODES:
        return Kind.NOT_PRIMARY
    if code in SERVER_TIMEOUT_CODES or isinstance(error, (ExecutionTimeout, WTimeoutError)):
        return Kind.SERVER_TIMEOUT
    if code in REJECTION_CODES or isinstance(error, DuplicateKeyError):
        return Kind.REJECTED
    return Kind.SERVER_ERROR


def _is_paused_pool(error: AutoReconnect) -> bool:
    """PyMongo has no PoolClearedError: a paused pool raises a plain AutoReconnect with this text."""
    return "connection pool paused" in str(error)


def _code(error: BaseException) -> int | None:
    code: Any = getattr(error, "code", None)
    if code is None:
        details = getattr(error, "details", None)
        code = details.get("code") if isinstance(details, Mapping) else None
    if isinstance(code, bool) or not isinstance(code, (int, float)):
        return None
    if isinstance(code, float) and not code.is_integer():
        return None
    return int(code) if -(2**31) <= code < 2**31 else None


def _write_concern_code(details: Any) -> int | None:
    errors = details.get("writeConcernErrors") if isinstance(details, Mapping) else None
    last = errors[-1] if isinstance(errors, list) and errors else None
    code = last.get("code") if isinstance(last, Mapping) else None
    return code if isinstance(code, int) and not isinstance(code, bool) else None


def _labels(error: BaseException, cause: BaseException) -> frozenset[str]:
    """Only the labels that rules know, so that a hostile reply cannot make this large.

    A client bulk write may carry labels itself or on the error that ended it.
    """
    found: set[str] = set()
    for candidate in (error, cause):
        if isinstance(candidate, PyMongoError):
            found.update(label for label in LABELS if candidate.has_error_label(label))
    return frozenset(found)


def _base_backoff(error: BaseException) -> float | None:
    """The server's `baseBackoffMS`, in seconds."""
    details = getattr(error, "details", None)
    hint = details.get("baseBackoffMS") if isinstance(details, Mapping) else None
    if isinstance(hint, bool) or not isinstance(hint, (int, float)):
        return None
    if not 0 < hint < math.inf:  # a NaN is neither
        return None
    return min(hint, _LONGEST_HINT * 1000) / 1000 or None  # the smallest doubles come to nothing
