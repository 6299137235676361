"""What the policies that follow a MongoDB text have in common: which errors their texts call retryable."""

from __future__ import annotations

from otel_retry.events import RETRYABLE_ERROR, RETRYABLE_WRITE_ERROR, Kind, OperationKind, Reason
from otel_retry.policy import RetryContext, RetryDecision, RetryPolicy

# Seed 000, "Retryable Error".
SEED_READ_CODES = frozenset({11600, 11602, 10107, 13435, 13436, 189, 91, 7, 6, 89, 9001})

# The same list as it is today: ExceededTimeLimit came with seed 003, ReadConcernMajorityNotAvailableYet and the
# legacy "not primary" code with later texts. PyMongo retries reads on these, and so do we.
READ_CODES = SEED_READ_CODES | {262, 134, 10058}

_NETWORK = frozenset({Kind.NETWORK, Kind.NETWORK_TIMEOUT, Kind.POOL_CLEARED, Kind.NOT_PRIMARY})


class SpecifiedPolicy(RetryPolicy):
    """Retries what its text calls retryable, and leaves how often to `may_retry_again`.

    One rule serves all four kinds of failure, because the texts do not tell them apart.
    """

    read_codes = READ_CODES
    read_kinds = _NETWORK
    knows_overload = True

    def may_retry_again(self, context: RetryContext) -> bool:
        """One retry, or as many as fit under a deadline (seed 003, "Executing Retryable Write Commands").

        After an overload the overload limit takes the place of this one, and that is not the policy's to judge.
        """
        return context.overload_seen or context.retries < 1 or context.remaining is not None

    def on_unavailable(self, context: RetryContext) -> RetryDecision:
        if context.failure.kind is Kind.NO_SERVER:
            # Seeds 000 1, 002, 003: the caller may infer that no attempt was made.
            return RetryDecision.rethrow(Reason.NO_SERVER)
        return self._decide(context)

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:
        return self._decide(context)

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:
        return self._decide(context)

    def on_request_error(self, context: RetryContext) -> RetryDecision:
        return self._decide(context)

    def _decide(self, context: RetryContext) -> RetryDecision:
        if not self.is_retryable(context):
            return RetryDecision.rethrow(Reason.NOT_RETRYABLE)
        if not self.may_retry_again(context):
            return RetryDecision.rethrow(Reason.LIMIT)
        return RetryDecision.try_next_host(delay=self.pause(context))

    def pause(self, context: RetryContext) -> float:  # noqa: ARG002
        """Seconds to wait, apart from what an overload demands."""
        return 0.0

    def is_retryable(self, context: RetryContext) -> bool:
        failure = context.failure
        if (
            self.knows_overload
            and RETRYABLE_ERROR in failure.labels
            and (failure.overloaded or self.rules.labels_without_overload)
        ):
            return True  # seed 001, rule 4: every command, also those that are not retryable otherwise
        if not context.retryable:
            return False
        if context.kind is OperationKind.READ:
            return failure.kind in self.read_kinds or failure.code in self.read_codes
        return RETRYABLE_WRITE_ERROR in failure.labels  # seed 003, "Determining Retryable Errors"
