"""Wraps a policy: when the primary is gone, a read is answered by a secondary."""

from __future__ import annotations

from otel_retry.events import Kind
from otel_retry.policies.backpressure import BackpressurePolicy
from otel_retry.policy import RetryContext, RetryDecision, RetryPolicy

_PRIMARY_GONE = frozenset({Kind.NO_SERVER, Kind.NOT_PRIMARY, Kind.NETWORK, Kind.POOL_CLEARED})


class SecondaryFallbackPolicy(RetryPolicy):
    """The counterpart of retrying with a lower consistency level: the answer may be stale, but it is an answer.

    It gives the first retry of a read that could not reach a primary the read preference `secondaryPreferred`;
    everything else is the wrapped policy's. Not in transactions, which belong to the primary. A server selection
    waits `serverSelectionTimeoutMS` (30 s) before it says that there is no primary: set it to what a reader can bear.
    """

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self.policy = BackpressurePolicy() if policy is None else policy
        self.rules = self.policy.rules
        self.name = f"secondary_fallback({self.policy})"

    def on_unavailable(self, context: RetryContext) -> RetryDecision:
        if self._falls_back(context):
            return RetryDecision.try_next_host(read_preference="secondaryPreferred")
        return self.policy.on_unavailable(context)

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:
        return self.policy.on_read_timeout(context)

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:
        return self.policy.on_write_timeout(context)

    def on_request_error(self, context: RetryContext) -> RetryDecision:
        if self._falls_back(context):
            return RetryDecision.try_next_host(read_preference="secondaryPreferred")
        return self.policy.on_request_error(context)

    @staticmethod
    def _falls_back(context: RetryContext) -> bool:
        return (
            context.is_read
            and not context.in_transaction
            and not context.failure.overloaded
            and context.retries == 0
            and context.failure.kind in _PRIMARY_GONE
        )
