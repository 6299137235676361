"""One operation under way: ties the driver's attempt to the machine, and the machine's answer to the error raised.

What differs between the ways into PyMongo (its retryable operations, the methods that bypass them) is in the seam.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, cast

from otel_retry.events import Reason
from otel_retry.history import attach
from otel_retry.logs import logger, warn_once
from otel_retry.machine import Ignore, OperationFacts, Raise, Retry, RetryMachine, Situation, Step

if TYPE_CHECKING:
    from otel_retry.clients import ClientState
    from otel_retry.events import Failure
    from otel_retry.telemetry.spans import OperationTrace


class OperationExecution:
    """Shared by all operations. Invariant: nothing of ours is raised; only PyMongo's own errors leave `failed`."""

    otr_state: ClientState | None
    otr_started: float
    otr_attempt_started: float
    """When the first attempt of the command at hand began; later ones the machine knows itself."""
    otr_machine: RetryMachine | None
    otr_trace: OperationTrace | None
    otr_decides: bool
    """False: the client is not instrumented, or PyMongo's own loop decides."""

    @abstractmethod
    def otr_facts(self) -> OperationFacts: ...

    @abstractmethod
    def otr_failure(self, error: Exception) -> Failure: ...

    @abstractmethod
    def otr_situation(self, now: float) -> Situation: ...

    def failed(self, error: Exception) -> Step:
        try:
            return self._judge(error)
        except Exception:
            warn_once("engine", "otel_retry failed to judge an error; it is raised as it is", exc_info=True)
            return Raise(error=error, reason=Reason.NOT_RETRYABLE)

    def succeeded(self) -> None:
        if self.otr_machine is not None:
            self.otr_machine.attempt_succeeded()
        elif self.otr_state is not None and self.otr_state.budget is not None:
            self.otr_state.budget.deposit_first_success()

    def otr_deposit_first_success(self) -> None:
        state = self.otr_state
        if state is not None and state.budget is not None:
            state.budget.deposit_first_success()

    def ignored(self) -> Any:
        """The empty result that stands for success; only called when `otr_can_ignore` said yes."""
        return None

    def otr_already_applied(self, error: Exception) -> bool:  # noqa: ARG002
        """Whether this error of a retry is proof that an attempt before it succeeded."""
        return False

    def otr_can_ignore(self) -> bool:
        """Whether an empty result means something for this operation."""
        return False

    def _judge(self, error: Exception) -> Step:
        now = time.monotonic()
        machine = self.otr_machine
        if machine is None:
            state = cast("ClientState", self.otr_state)
            machine = self.otr_machine = RetryMachine(
                facts=self.otr_facts(),
                policy=state.policy,
                rules=state.rules,
                budget=state.budget,
                jitter=state.jitter,
                attempt_started=self.otr_attempt_started,
            )
        failure = self.otr_failure(error)
        if self.otr_already_applied(error):
            step: Step = machine.found_applied(failure, now)
            self._tell(failure, step)
            return step
        step = machine.attempt_failed(failure, self.otr_situation(now))
        if isinstance(step, Ignore) and not self.otr_can_ignore():
            name = self.otr_facts().name
            warn_once(
                f"ignore: {name}",
                "the retry policy answered ignore(), but an empty result of %s would mean nothing; the error is raised",
                name,
            )
            step = Raise(error=error, reason=Reason.POLICY)
        self._tell(failure, step)
        if isinstance(step, Retry):
            logger.debug(
                "%s: attempt %d on %s failed (%s); next one in %.3f s",
                self.otr_facts().name,
                machine.retries,
                failure.server,
                failure.reason,
                step.delay,
            )
        elif isinstance(step, Raise):
            self._gave_up(machine, step)
        return step

    def _tell(self, failure: Failure, step: Step) -> None:
        trace = self.otr_trace
        if trace is None:
            return
        try:
            if isinstance(step, Retry):
                budget = cast("ClientState", self.otr_state).budget
                trace.retrying(
                    failure,
                    delay=step.delay,
                    tokens=None if budget is None else budget.tokens,
                    decision="retry" if step.same_host else "try_next_host",
                )
            elif isinstance(step, Raise):
                trace.gave_up(failure, step.reason)
            else:
                trace.ignored(failure, applied=step.applied)
        except Exception:
            warn_once("trace", "otel_retry failed to report an attempt", exc_info=True)

    def _gave_up(self, machine: RetryMachine, step: Raise) -> None:
        history = machine.history
        # The error's traceback holds this object: without this, error and history would keep each other alive.
        self.otr_machine = None
        attach(step.error, history)
        if machine.total_retries:
            logger.info(
                "%s gave up (%s) after %d attempts: %s",
                self.otr_facts().name,
                step.reason,
                len(history),
                "; ".join(
                    f"{a.server or 'no server'} {a.failure.reason}, {a.duration:.3f} s" for a in history[-10:]
                ),
            )
