"""Seed 000: retry until it succeeds, fails in a way that is not retryable, or times out twice."""

from __future__ import annotations

from otel_retry.policies.specified import SEED_READ_CODES, SpecifiedPolicy
from otel_retry.policy import PERSISTENT, RetryContext

IMMEDIATE_RETRIES = 5
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 1.0


class PersistentPolicy(SpecifiedPolicy):
    """The seed sets no pace. The first retries come at once; an error that stays must not become a busy loop
    against a server in trouble, so the later ones pause, up to a second.
    """

    name = "persistent"
    rules = PERSISTENT
    read_codes = SEED_READ_CODES
    knows_overload = False
    limit_text = "seed 000 3: the second socket timeout ends it"

    def may_retry_again(self, context: RetryContext) -> bool:
        # Seed 000 3: the second socket timeout, consecutive or not, ends it, where socketTimeoutMS set the timeout;
        # under a deadline the deadline does.
        return context.remaining is not None or context.network_timeouts < 2

    def pause(self, context: RetryContext) -> float:
        beyond = context.retries - IMMEDIATE_RETRIES
        return 0.0 if beyond < 0 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(beyond, 16))
