"""The ready-made policies of the DataStax drivers (seed 004), in MongoDB's terms."""

from __future__ import annotations

from otel_retry.events import Kind, Reason
from otel_retry.policy import RetryContext, RetryDecision, RetryPolicy


class DefaultRetryPolicy(RetryPolicy):
    """Tries another host where another host can help, the same one where it was only slow, and a write that timed out
    only if MongoDB guarantees that it is applied once.

    A query plan ends when every host was tried; here it ends when a host fails that has failed already.
    """

    name = "default"

    def on_unavailable(self, context: RetryContext) -> RetryDecision:
        """Nothing was executed, and another host may know better."""
        if context.failure.kind is Kind.NO_SERVER:
            return RetryDecision.rethrow(Reason.NO_SERVER)
        return self._next_host(context)

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:
        """The host was alive, only slow: one more try there."""
        return RetryDecision.retry() if context.retries == 0 else RetryDecision.rethrow(Reason.LIMIT)

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:
        """The counterpart of the batch log: a write with a txnNumber is applied at most once."""
        if not context.retryable:
            return RetryDecision.rethrow(Reason.NOT_RETRYABLE)
        return RetryDecision.retry() if context.retries == 0 else RetryDecision.rethrow(Reason.LIMIT)

    def on_request_error(self, context: RetryContext) -> RetryDecision:
        """Like the original it does not ask whether the write is idempotent: the hard rules do, outside of it."""
        return self._next_host(context)

    @staticmethod
    def _next_host(context: RetryContext) -> RetryDecision:
        if any(attempt.server == context.server for attempt in context.history):
            return RetryDecision.rethrow(Reason.LIMIT)
        return RetryDecision.try_next_host()


class FallthroughRetryPolicy(RetryPolicy):
    """Raises everything: for applications that retry by themselves."""

    name = "fallthrough"
