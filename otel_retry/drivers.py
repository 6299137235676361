"""The two loops that drive the machine: attempt, ask, wait, again. They hold no judgement.

`run` and `run_async` are the same code but for `await`; tests/unit/test_drivers.py compares them. Cancellation
(KeyboardInterrupt, asyncio.CancelledError) is not caught here at all: whoever started the operation ends it in a
`finally`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from otel_retry.machine import Ignore, Raise, Retry, Step

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Execution(Protocol):
    """An operation under way, as the loops see it."""

    def failed(self, error: Exception) -> Step: ...

    def succeeded(self) -> None: ...

    def prepare(self, step: Retry) -> Any:
        """Put the driver's own state in order for the next attempt, before the wait."""

    def ignored(self) -> Any: ...


def run(execution: Execution, attempt: Callable[[], Any], sleep: Callable[[float], Any]) -> Any:
    while True:
        try:
            result = attempt()
        except Exception as error:
            step = execution.failed(error)
        else:
            execution.succeeded()
            return result
        if isinstance(step, Ignore):
            return execution.ignored()
        if isinstance(step, Raise):
            try:
                raise_step(step)
            finally:
                del step  # the error's traceback holds this frame; without this it would hold the error too
        execution.prepare(step)
        if step.delay:
            sleep(step.delay)
        del step  # or this frame, which the error's traceback holds, would hold the error


async def run_async(
    execution: Execution, attempt: Callable[[], Awaitable[Any]], sleep: Callable[[float], Awaitable[Any]]
) -> Any:
    while True:
        try:
            result = await attempt()
        except Exception as error:
            step = execution.failed(error)
        else:
            execution.succeeded()
            return result
        if isinstance(step, Ignore):
            return await execution.ignored()
        if isinstance(step, Raise):
            try:
                raise_step(step)
            finally:
                del step  # the error's traceback holds this frame; without this it would hold the error too
        await execution.prepare(step)
        if step.delay:
            await sleep(step.delay)
        del step  # or this frame, which the error's traceback holds, would hold the error


def raise_step(step: Raise) -> None:
    """Raise outside of any `except` block, so that the application sees PyMongo's own chain of errors."""
    try:
        if step.cause is not None:
            raise step.error from step.cause
        raise step.error
    finally:
        del step  # the error's traceback holds this frame as well
