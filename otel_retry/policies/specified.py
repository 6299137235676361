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
        return self._decide(context)

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:
        return self._decide(context)

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:
        return self._decide(context)

    def on_request_error(self, context: RetryContext) -> RetryDecision:
        return self._decide(context)

    limit_text = 'seed 003 "Executing Retryable Write Commands": one retry, or any number under a deadline'

    def _decide(self, context: RetryContext) -> RetryDecision:
        if context.failure.kind is Kind.NO_SERVER:
            because = "seed 000 1, seeds 002, 003: the caller may infer that no attempt was made"
            return RetryDecision.rethrow(Reason.NO_SERVER, because=because)
        retryable, because = self.judge(context)
        if not retryable:
            return RetryDecision.rethrow(Reason.NOT_RETRYABLE, because=because)
        if not self.may_retry_again(context):
            return RetryDecision.rethrow(Reason.LIMIT, because=self.limit_text)
        return RetryDecision.try_next_host(delay=self.pause(context), because=because)

    def pause(self, context: RetryContext) -> float:  # noqa: ARG002
        """Seconds to wait, apart from what an overload demands."""
        return 0.0

    def judge(self, context: RetryContext) -> tuple[bool, str]:
        """Does the text call this error of this operation retryable, and where does it say so?"""
        failure = context.failure
        if (
            self.knows_overload
            and RETRYABLE_ERROR in failure.labels
            and (failure.overloaded or self.rules.labels_without_overload)
        ):
            return True, "seed 001, rule 4: the server says that every command may be repeated"
        if not context.retryable:
            return False, 'seed 000 "Unsupported Read Operations", seed 003 "Unsupported Write Operations"'
        if context.kind is OperationKind.READ:
            found = failure.kind in self.read_kinds or failure.code in self.read_codes
            return found, 'seed 000 "Retryable Error": network errors and the codes listed there'
        return (
            RETRYABLE_WRITE_ERROR in failure.labels,
            'seed 003 "Determining Retryable Errors": the label RetryableWriteError',
        )
