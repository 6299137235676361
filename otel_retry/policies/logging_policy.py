"""Wraps a policy: says what it decided."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from otel_retry.policy import RetryContext, RetryDecision, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("otel_retry.policy")


class Logging(RetryPolicy):
    """One line a decision, at INFO or the level given. Never the error's own text: it may quote documents."""

    def __init__(self, policy: RetryPolicy, *, level: int = logging.INFO) -> None:
        self.policy = policy
        self.rules = policy.rules
        self.name = f"logging({policy})"
        self._level = level

    def on_unavailable(self, context: RetryContext) -> RetryDecision:
        return self._log(self.policy.on_unavailable, context)

    def on_read_timeout(self, context: RetryContext) -> RetryDecision:
        return self._log(self.policy.on_read_timeout, context)

    def on_write_timeout(self, context: RetryContext) -> RetryDecision:
        return self._log(self.policy.on_write_timeout, context)

    def on_request_error(self, context: RetryContext) -> RetryDecision:
        return self._log(self.policy.on_request_error, context)

    def _log(self, method: Callable[[RetryContext], RetryDecision], context: RetryContext) -> RetryDecision:
        decision = method(context)
        logger.log(
            self._level,
            "%s %s: attempt %d on %s failed (%s): %s of %s says %s",
            context.operation,
            context.namespace or "",
            context.attempt,
            context.server or "no server",
            context.failure.reason,
            method.__name__,
            self.policy,
            decision.action,
        )
        return decision
