"""The two loops: that they are one, and that they do what the machine says."""

from __future__ import annotations

import ast
import asyncio
import inspect
from typing import Any

import pytest

from otel_retry import drivers
from otel_retry.drivers import run, run_async
from otel_retry.events import Failure, Kind, Reason
from otel_retry.machine import Ignore, Raise, Retry


class WithoutAwait(ast.NodeTransformer):
    def visit_Await(self, node: ast.Await) -> Any:
        return self.visit(node.value)


def body_of(function: Any) -> str:
    tree = ast.parse(inspect.getsource(function)).body[0]
    return "\n".join(ast.dump(WithoutAwait().visit(statement)) for statement in tree.body)  # type: ignore[attr-defined]


def test_the_two_loops_are_the_same_code_but_for_await() -> None:
    assert body_of(run) == body_of(run_async)


def test_the_comparison_would_see_a_difference() -> None:
    assert body_of(run) != body_of(drivers.raise_step)


def test_the_sync_and_async_operations_are_the_same_code_but_for_await() -> None:
    from otel_retry.pymongo.seam import operation

    def source(function: Any) -> str:
        text = inspect.getsource(function).replace("waiting.sleep_async", "waiting.sleep")
        text = text.replace("run_async(", "run(").replace(
            "AsyncRetriedClientOperation", "RetriedClientOperation"
        )
        text = text.replace("is_async=True", "is_async=False")
        tree = WithoutAwait().visit(
            ast.parse(text.replace("async def", "def").replace("_async_class", "_sync_class"))
        )
        return ast.dump(tree)

    assert source(operation._sync_class) == source(operation._async_class)


class Scripted:
    """An execution whose answers are given in advance; `log` shows the order of what happened."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.log: list[Any] = []

    def failed(self, error: Exception) -> Any:
        self.log.append(("failed", str(error)))
        return self.steps.pop(0)

    def succeeded(self) -> None:
        self.log.append("succeeded")

    def prepare(self, step: Retry) -> Any:
        self.log.append("prepare")

    def ignored(self) -> Any:
        return "nothing"


class AsyncScripted(Scripted):
    async def prepare(self, step: Retry) -> Any:
        self.log.append("prepare")

    async def ignored(self) -> Any:
        return "nothing"


@pytest.fixture(params=["sync", "async"])
def drive(request: pytest.FixtureRequest) -> Any:
    """Runs outcomes (values to return, exceptions to raise) through one of the loops."""

    def drive_sync(outcomes: list[Any], *steps: Any) -> tuple[Any, list[Any]]:
        execution = Scripted(*steps)
        return run(
            execution, lambda: outcome(outcomes), lambda s: execution.log.append(("sleep", s))
        ), execution.log

    def drive_async(outcomes: list[Any], *steps: Any) -> tuple[Any, list[Any]]:
        execution = AsyncScripted(*steps)

        async def attempt() -> Any:
            return outcome(outcomes)

        async def sleep(seconds: float) -> None:
            execution.log.append(("sleep", seconds))

        return asyncio.run(run_async(execution, attempt, sleep)), execution.log

    def outcome(outcomes: list[Any]) -> Any:
        value = outcomes.pop(0)
        if isinstance(value, BaseException):
            raise value
        return value

    return drive_sync if request.param == "sync" else drive_async


def retry(delay: float = 0.0) -> Retry:
    return Retry(delay=delay, failure=Failure(ValueError(), Kind.NETWORK))


def test_a_success_is_returned_and_told(drive: Any) -> None:
    assert drive([7]) == (7, ["succeeded"])


def test_the_state_is_prepared_before_the_wait(drive: Any) -> None:
    result, log = drive([OSError("a"), 7], retry(0.5))
    assert result == 7
    assert log == [("failed", "a"), "prepare", ("sleep", 0.5), "succeeded"]


def test_no_delay_means_no_sleep(drive: Any) -> None:
    assert drive([OSError("a"), 7], retry())[1] == [("failed", "a"), "prepare", "succeeded"]


def test_the_error_that_the_machine_names_is_raised(drive: Any) -> None:
    named, cause = OSError("named"), OSError("b")
    with pytest.raises(OSError, match="named") as caught:
        drive([OSError("a"), cause], retry(), Raise(error=named, reason=Reason.LIMIT, cause=cause))
    assert caught.value is named
    assert caught.value.__cause__ is cause


def test_an_error_raised_as_it_is_gets_no_cause_or_context(drive: Any) -> None:
    error = OSError("a")
    with pytest.raises(OSError, match="a") as caught:
        drive([error], Raise(error=error, reason=Reason.NOT_RETRYABLE))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_ignore_gives_the_empty_result(drive: Any) -> None:
    assert drive([OSError("a")], Ignore(failure=retry().failure))[0] == "nothing"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_an_attempt_that_failed(drive: Any, interrupt: type[BaseException]) -> None:
    with pytest.raises(interrupt):
        drive([interrupt()])
