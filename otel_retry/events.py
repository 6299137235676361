"""Frozen values that the parts exchange: what failed, what was tried, why it ended.

Nothing here knows PyMongo or OpenTelemetry, and nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum

RETRYABLE_WRITE_ERROR = "RetryableWriteError"
RETRYABLE_ERROR = "RetryableError"
NO_WRITES_PERFORMED = "NoWritesPerformed"
# Seed 001 spells the label in two ways; servers send this one.
SYSTEM_OVERLOADED_ERROR = "SystemOverloadedError"


class Phase(Enum):
    """How far an attempt came. Only `SENT` leaves it open whether the server did something."""

    SELECTION = "selection"
    CONNECTION = "connection"
    SENT = "sent"


class Kind(StrEnum):
    """What sort of failure it was."""

    NO_SERVER = "no_server"
    POOL_CLEARED = "pool_cleared"
    POOL_EXHAUSTED = "pool_exhausted"
    NETWORK = "network"
    NETWORK_TIMEOUT = "network_timeout"
    SERVER_TIMEOUT = "server_timeout"
    NOT_PRIMARY = "not_primary"
    SERVER_ERROR = "server_error"
    REJECTED = "rejected"
    """Validation or authorisation: no other host and no other time can make it succeed."""
    CLIENT_ERROR = "client_error"
    """Raised by the driver or by the application's own code, not by a server."""


OVERLOAD = "overload"


class Reason(StrEnum):
    """Why an operation ended in an error: the closed set of `mongodb.retry.gave_up`."""

    BUDGET = "budget"
    LIMIT = "limit"
    DEADLINE = "deadline"
    NOT_RETRYABLE = "not_retryable"
    POLICY = "policy"
    NO_SERVER = "no_server"
    CANCELLED = "cancelled"


class OperationKind(Enum):
    """Which client options gate the retries of an operation."""

    READ = "read"
    WRITE = "write"
    RUN_COMMAND = "run_command"
    TRANSACTION_END = "transaction_end"


@dataclass(frozen=True, slots=True)
class Failure:
    """The facts about one error.

    `server` is the one that the failed attempt was sent to, never a later one. `base_backoff` is the server's
    own hint in seconds, already checked to be a sane number.
    """

    error: BaseException
    kind: Kind
    phase: Phase = Phase.SENT
    code: int | None = None
    labels: frozenset[str] = field(default_factory=frozenset)
    base_backoff: float | None = None
    server: str | None = None

    @property
    def overloaded(self) -> bool:
        return SYSTEM_OVERLOADED_ERROR in self.labels

    @property
    def nothing_executed(self) -> bool:
        """The server cannot have applied anything: nothing was sent, or it says so itself."""
        return (
            self.phase is not Phase.SENT
            or RETRYABLE_ERROR in self.labels
            or NO_WRITES_PERFORMED in self.labels
        )

    @property
    def reason(self) -> str:
        """A bounded word for metrics: `overload`, or the kind."""
        return OVERLOAD if self.overloaded else self.kind.value


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that failed, as `otel_retry.attempts()` shows it. Times in seconds, `started` monotonic.

    `delay` is the wait before this attempt; `decision` says what followed it (`retry`, or the reason it ended).
    """

    number: int
    started: float
    duration: float
    delay: float
    failure: Failure
    decision: str

    @property
    def server(self) -> str | None:
        return self.failure.server

    @property
    def error(self) -> BaseException:
        return self.failure.error
