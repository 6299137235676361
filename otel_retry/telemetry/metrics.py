"""The metrics. What happens on every operation is one histogram; retries add the rest; budgets and pools are plain
numbers that are read when somebody collects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import CallbackOptions, Observation

from otel_retry import semconv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.context import Context
    from opentelemetry.metrics import Meter

    from otel_retry.pacing import TokenBucket
    from otel_retry.telemetry.pools import Pool


class Instruments:
    """One meter's instruments, made once and shared by all clients that use the meter.

    `budgets` and `pools` answer with what exists at the moment of collection.
    """

    provider: Any = None
    """Kept for as long as there are instruments of it, or another one could come to have its identity."""

    def __init__(
        self,
        meter: Meter,
        *,
        budgets: Callable[[], Iterable[tuple[str, TokenBucket]]],
        pools: Callable[[], Iterable[Pool]],
    ) -> None:
        self._budgets = budgets
        self._pools = pools
        seconds = list(semconv.DURATION_BOUNDARIES)
        self.operation_duration = meter.create_histogram(
            semconv.OPERATION_DURATION,
            unit="s",
            description="Duration of database client operations, with all their attempts and waits.",
            explicit_bucket_boundaries_advisory=seconds,
        )
        self.attempt_duration = meter.create_histogram(
            semconv.ATTEMPT_DURATION,
            unit="s",
            description="Duration of the attempts of operations that needed more than one.",
            explicit_bucket_boundaries_advisory=seconds,
        )
        self.retries = meter.create_histogram(
            semconv.OPERATION_RETRIES,
            unit="{retry}",
            description="Retries per operation, of operations that were retried.",
            explicit_bucket_boundaries_advisory=list(semconv.RETRIES_BOUNDARIES),
        )
        self.retry_attempts = meter.create_counter(
            semconv.RETRY_ATTEMPTS_COUNTER,
            unit="{attempt}",
            description="Attempts after the first, by the reason of the failure that they follow.",
        )
        self.backoff = meter.create_histogram(
            semconv.RETRY_BACKOFF,
            unit="s",
            description="Waits before retries.",
            explicit_bucket_boundaries_advisory=seconds,
        )
        self.gave_up = meter.create_counter(
            semconv.RETRY_GAVE_UP,
            unit="{operation}",
            description="Operations that ended in an error, by the reason why they were not tried again.",
        )
        self.create_time = meter.create_histogram(
            semconv.CONNECTION_CREATE_TIME,
            unit="s",
            description="The time it took to create a new connection.",
            explicit_bucket_boundaries_advisory=seconds,
        )
        self.wait_time = meter.create_histogram(
            semconv.CONNECTION_WAIT_TIME,
            unit="s",
            description="The time it took to obtain an open connection from the pool.",
            explicit_bucket_boundaries_advisory=seconds,
        )
        self.use_time = meter.create_histogram(
            semconv.CONNECTION_USE_TIME,
            unit="s",
            description="The time between borrowing a connection and returning it to the pool.",
            explicit_bucket_boundaries_advisory=seconds,
        )
        self._observe_budgets(meter)
        self._observe_pools(meter)

    def _observe_budgets(self, meter: Meter) -> None:
        def observe(
            value: Callable[[TokenBucket], float],
        ) -> list[Callable[[CallbackOptions], Iterable[Observation]]]:
            def callback(_: CallbackOptions) -> Iterable[Observation]:
                return [
                    Observation(value(bucket), {semconv.CLIENT: client}) for client, bucket in self._budgets()
                ]

            return [callback]

        meter.create_observable_gauge(
            semconv.BUDGET_TOKENS,
            observe(lambda bucket: bucket.tokens),
            "{token}",
            "Tokens left in the client's retry budget.",
        )
        meter.create_observable_gauge(
            semconv.BUDGET_CAPACITY,
            observe(lambda bucket: bucket.capacity),
            "{token}",
            "Tokens that the client's retry budget can hold.",
        )
        meter.create_observable_counter(
            semconv.BUDGET_CONSUMED,
            observe(lambda bucket: bucket.consumed),
            "{token}",
            "Tokens taken from the retry budget.",
        )
        meter.create_observable_counter(
            semconv.BUDGET_DEPOSITED,
            observe(lambda bucket: bucket.deposited),
            "{token}",
            "Tokens returned to the retry budget.",
        )
        meter.create_observable_counter(
            semconv.BUDGET_DENIED,
            observe(lambda bucket: bucket.denied),
            "{token}",
            "Retries refused because the retry budget was empty.",
        )

    def _observe_pools(self, meter: Meter) -> None:
        def counts(_: CallbackOptions) -> Iterable[Observation]:
            for pool in self._pools():
                name = {semconv.POOL_NAME: pool.name}
                yield Observation(pool.used, {**name, semconv.CONNECTION_STATE: "used"})
                yield Observation(pool.idle, {**name, semconv.CONNECTION_STATE: "idle"})

        def observe(
            value: Callable[[Pool], int | None],
        ) -> list[Callable[[CallbackOptions], Iterable[Observation]]]:
            def callback(_: CallbackOptions) -> Iterable[Observation]:
                for pool in self._pools():
                    number = value(pool)
                    if number is not None:
                        yield Observation(number, {semconv.POOL_NAME: pool.name})

            return [callback]

        meter.create_observable_up_down_counter(
            semconv.CONNECTION_COUNT,
            [counts],
            "{connection}",
            "The number of connections that are currently in the state described by the state attribute.",
        )
        meter.create_observable_up_down_counter(
            semconv.CONNECTION_MAX,
            observe(lambda pool: pool.maximum),
            "{connection}",
            "The maximum number of open connections allowed.",
        )
        meter.create_observable_up_down_counter(
            semconv.CONNECTION_IDLE_MAX,
            observe(lambda pool: pool.maximum),
            "{connection}",
            "The maximum number of idle open connections allowed.",
        )
        meter.create_observable_up_down_counter(
            semconv.CONNECTION_IDLE_MIN,
            observe(lambda pool: pool.minimum),
            "{connection}",
            "The minimum number of idle open connections allowed.",
        )
        meter.create_observable_up_down_counter(
            semconv.CONNECTION_PENDING,
            observe(lambda pool: pool.pending),
            "{request}",
            "The number of current pending requests for an open connection.",
        )
        meter.create_observable_counter(
            semconv.CONNECTION_TIMEOUTS,
            observe(lambda pool: pool.timeouts),
            "{timeout}",
            "The number of times that no connection came from the pool in time.",
        )

    def operation_retried(
        self, *, operation: str, reason: str, policy: str, delay: float, context: Context | None
    ) -> None:
        attributes = {semconv.DB_OPERATION: operation, semconv.RETRY_REASON: reason}
        self.retry_attempts.add(1, {**attributes, semconv.RETRY_POLICY: policy}, context)
        self.backoff.record(delay, attributes, context)

    def attempt_ended(
        self,
        *,
        operation: str,
        seconds: float,
        server: dict[str, Any],
        outcome: str,
        reason: str | None,
        context: Context | None,
    ) -> None:
        attributes = {semconv.DB_OPERATION: operation, **server, semconv.RETRY_OUTCOME: outcome}
        if reason is not None:
            attributes[semconv.RETRY_REASON] = reason
        self.attempt_duration.record(seconds, attributes, context)

    def operation_ended(
        self,
        *,
        operation: str,
        retries: int,
        outcome: str,
        policy: str,
        failed: bool,
        context: Context | None,
    ) -> None:
        if retries:
            self.retries.record(
                retries, {semconv.DB_OPERATION: operation, semconv.RETRY_OUTCOME: outcome}, context
            )
        if failed:
            self.gave_up.add(
                1,
                {
                    semconv.DB_OPERATION: operation,
                    semconv.RETRY_REASON: outcome,
                    semconv.RETRY_POLICY: policy,
                },
                context,
            )
