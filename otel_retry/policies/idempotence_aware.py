"""Wraps a policy: what may already have been applied is repeated only if it is idempotent, and then it is."""

from __future__ import annotations

from dataclasses import replace

from otel_retry.events import RETRYABLE_WRITE_ERROR, Kind, OperationKind, Reason
from otel_retry.policies.specified import READ_CODES
from otel_retry.policy import RetryContext, RetryDecision, RetryPolicy

_LOST_ANSWER = frozenset({Kind.NETWORK, Kind.NETWORK_TIMEOUT, Kind.POOL_CLEARED, Kind.NOT_PRIMARY})

# A generic command may be a write; only the caller's word makes it repeatable.
_WRITES = frozenset({OperationKind.WRITE, OperationKind.RUN_COMMAND})


class IdempotenceAware(RetryPolicy):
    """A write that MongoDB does not make repeatable (update_many, delete_many, $merge, any write with
    retryWrites=false) is shown to the wrapped policy as one that is, when sending it twice equals sending it once;
    otherwise the wrapped policy is not even asked.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self.rules = policy.rules
        self.name = f"idempotence_aware({policy})"

    def on_unavailable(self, context: RetryContext) -> RetryDecision:
        return self.policy.on_unavailable(self._seen(context))

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:
        return self.policy.on_read_timeout(context)

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:
        if self._is_unsafe(context):
            return RetryDecision.rethrow(Reason.NOT_RETRYABLE)
        return self.policy.on_write_timeout(self._seen(context))

    def on_request_error(self, context: RetryContext) -> RetryDecision:
        if self._is_unsafe(context):
            return RetryDecision.rethrow(Reason.NOT_RETRYABLE)
        return self.policy.on_request_error(self._seen(context))

    @staticmethod
    def _is_unsafe(context: RetryContext) -> bool:
        return (
            context.kind in _WRITES
            and not context.failure.nothing_executed
            and not context.retryable
            and not context.idempotent
        )

    @staticmethod
    def _seen(context: RetryContext) -> RetryContext:
        """The label that PyMongo gives to lost answers of writes with a txnNumber, for those without one."""
        if context.retryable or not context.idempotent or context.kind not in _WRITES:
            return context
        failure = context.failure
        if failure.kind in _LOST_ANSWER or failure.code in READ_CODES:
            failure = replace(failure, labels=failure.labels | {RETRYABLE_WRITE_ERROR})
        return replace(context, retryable=True, failure=failure)
