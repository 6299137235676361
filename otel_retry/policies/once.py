"""Seed 002, the text of 2018: a single retry, and of writes only where the user asked for it."""

from __future__ import annotations

from otel_retry.policies.specified import SEED_READ_CODES, SpecifiedPolicy
from otel_retry.policy import ONCE, RetryContext


class OncePolicy(SpecifiedPolicy):
    """Overload labels mean nothing to this text: what it does not call retryable is raised."""

    name = "once"
    rules = ONCE
    read_codes = SEED_READ_CODES
    knows_overload = False
    limit_text = 'seed 002 "Executing Retryable Write Commands": never more than one retry'

    def may_retry_again(self, context: RetryContext) -> bool:
        return context.retries < 1  # "MUST NOT attempt to retry with the same transaction ID more than once"
