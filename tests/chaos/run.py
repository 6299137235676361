"""One run: a cluster, a workload, faults by a seed, then calm, then the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pymongo
from pymongo import MongoClient
from pymongo.write_concern import WriteConcern

import otel_retry
from tests.chaos import ledger, reading, telemetry_ledger
from tests.chaos.cluster import Cluster
from tests.chaos.faults import APP_NAME, WRITES, Injector, schedule
from tests.chaos.resources import Resources, sample
from tests.chaos.telemetry_ledger import Telemetry
from tests.chaos.workload import DATABASE, LAST, Clients, Consumer, Findings, Worker, finish, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_SETTLE_SECONDS = 120.0
"""For what must come to an end when all is well again; a run that is well takes a few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int
    duration: float
    policy: str = "backpressure"
    threads: int = 12
    tasks: int = 32

    @property
    def decides(self) -> bool:
        return self.policy != "driver"


@dataclass(slots=True)
class Result:
    """Figures for the table, and what is wrong; `violations` is empty after a good run."""

    figures: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """What to show while it runs."""

    stage: str = "starting"
    elapsed: float = 0.0
    operations: int = 0
    faults: int = 0
    errors: int = 0


def run(plan: Plan, show: Callable[[Progress], None] = lambda progress: None) -> Result:
    progress = Progress()
    show(progress)
    with Cluster(seed=plan.seed) as cluster:
        scene = Scene(plan, cluster)
        scene.play(progress, show)
        progress.stage = "judging"
        show(progress)
        return scene.judge()


class Scene:
    """The parts of one run, from the first client to the last."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan = plan
        self.cluster = cluster
        self.resources = Resources()
        cluster.attend()
        # A client's bulk write needs MongoDB 8.0.
        self._client_bulk_writes = cluster.ask(0, {"hello": 1})["maxWireVersion"] >= 25
        self.telemetry = Telemetry()
        self.findings = Findings()
        self.begin = threading.Event()
        self.over = threading.Event()
        self.give_up = threading.Event()
        self.injector = Injector(cluster, schedule(plan.seed, plan.duration), duration=plan.duration)
        self.telemetry.overload(self.injector.overloaded)
        self.stuck: list[str] = []
        self.broken: list[str] = []
        self.workers: list[Worker] = []
        self.consumers: list[Consumer] = []
        self._ready = threading.Semaphore(0)
        self._go = threading.Event()
        self._budgets: list[Any] = []
        self._tokens_out_of_range = 0

    # The two drivers, each by its own kind of concurrency.

    def _cast(self, *, is_async: bool) -> Clients:
        """The clients of one driver, with their workers and their consumer."""
        plan = self.plan
        clients = Clients(self.cluster.uri, is_async=is_async, policy=plan.policy, telemetry=self.telemetry)
        self._budgets += [
            bucket for client in clients.all if (bucket := otel_retry.budget(client)) is not None
        ]
        kind = "task" if is_async else "thread"
        for number in range(plan.tasks if is_async else plan.threads):
            name = f"{kind}{number}"
            self.workers.append(
                Worker(
                    name,
                    clients,
                    clients.all[number % len(clients.all)],
                    seed=f"{plan.seed}/{name}",
                    findings=self.findings,
                    begin=self.begin,
                    over=self.over,
                    decides=plan.decides,
                    client_bulk_writes=self._client_bulk_writes,
                )
            )
        self.consumers.append(
            Consumer(
                f"{kind} consumer",
                clients.plain,
                is_async=is_async,
                findings=self.findings,
                decides=plan.decides,
            )
        )
        return clients

    def _of(self, *, is_async: bool) -> list[Coroutine[Any, Any, None]]:
        return [
            *(self._guarded(each.run(), each.name) for each in self.workers if each.is_async is is_async),
            *(
                self._guarded(each.run(give_up=self.give_up), each.name)
                for each in self.consumers
                if each.is_async is is_async
            ),
        ]

    async def _guarded(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """What is no error of PyMongo ends a worker, and the run must say so."""
        try:
            await coroutine
        except Exception as error:
            self.broken.append(f"{name} ended with {type(error).__name__}: {error}")

    def _threads(self) -> None:
        clients = self._cast(is_async=False)
        self._ready.release()
        self._go.wait()
        threads = [
            threading.Thread(target=finish, args=(each,), name=f"chaos-{number}", daemon=True)
            for number, each in enumerate(self._of(is_async=False))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        finish(clients.close())
        self._kept.append(clients)

    def _tasks(self) -> None:
        async def main() -> None:
            clients = self._cast(is_async=True)
            self._ready.release()
            await asyncio.to_thread(self._go.wait)
            await asyncio.gather(*self._of(is_async=True))
            await clients.close()
            self._kept.append(clients)

        asyncio.run(main())

    def play(self, progress: Progress, show: Callable[[Progress], None]) -> None:
        self._kept: list[Clients] = []
        drivers = [
            threading.Thread(target=self._threads, name="chaos-threads", daemon=True),
            threading.Thread(target=self._tasks, name="chaos-tasks", daemon=True),
        ]
        for driver in drivers:
            driver.start()
        for _ in drivers:
            self._ready.acquire()
        prepare(self.cluster.deployment.uri, self.workers)
        self._go.set()
        for consumer in self.consumers:
            if not consumer.opened.wait(_SETTLE_SECONDS):
                raise RuntimeError(f"{consumer.name} cannot open its change stream")
        self.begin.set()
        self.injector.start()
        self._watch(progress, show)
        progress.stage = "healing"
        show(progress)
        self.injector.stop()
        self.cluster.heal()
        self.over.set()
        self._end(drivers)
        self.cluster.leave()
        self.resources.settle()

    def _watch(self, progress: Progress, show: Callable[[Progress], None]) -> None:
        began = time.monotonic()
        progress.stage = "running"
        last_sample = 0.0
        while (elapsed := time.monotonic() - began) < self.plan.duration:
            if elapsed - last_sample >= 1:
                last_sample = elapsed
                self.resources.over_time.append(sample())
                self._tokens_out_of_range += sum(
                    not 0 <= bucket.tokens <= bucket.capacity for bucket in self._budgets
                )
            progress.elapsed = elapsed
            progress.operations = self.telemetry.operations.count
            progress.errors = len(self.telemetry.operations.failed)
            progress.faults = self.injector.done.total()
            show(progress)
            time.sleep(0.25)
        self.seconds = time.monotonic() - began
        self.operations_in_time = self.telemetry.operations.count

    def _end(self, drivers: list[threading.Thread]) -> None:
        """The workers bring their last operation to its end; then one more event, which consumers wait for."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        with MongoClient(self.cluster.deployment.uri) as client:
            events = client[DATABASE].get_collection("events", write_concern=WriteConcern("majority"))
            self._wait_for_workers(deadline)
            self._wait_for_late_writes(client, deadline)
            events.insert_one({"s": LAST})
        for driver in drivers:
            driver.join(max(0.0, deadline - time.monotonic()))
        self.give_up.set()
        for driver in drivers:
            driver.join(10)
            if driver.is_alive():
                self.stuck.append(f"{driver.name} did not end within {_SETTLE_SECONDS:.0f} s")

    def _wait_for_workers(self, deadline: float) -> None:
        while any(not worker.done for worker in self.workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.stuck += [f"{worker.name} is stuck" for worker in self.workers if not worker.done]

    def _wait_for_late_writes(self, client: Any, deadline: float) -> None:
        """What a client gave up on may still be under way on the server, and must not come after the last event."""
        asked = {"currentOp": 1, "appName": APP_NAME, "active": True}
        while time.monotonic() < deadline:
            commands = [
                next(iter(each.get("command") or {"": 0})) for each in client.admin.command(asked)["inprog"]
            ]
            if not any(command in WRITES or command == "commitTransaction" for command in commands):
                return
            time.sleep(0.1)
        self.stuck.append("writes are under way on the server though all clients have given up")

    # The verdict.

    def judge(self) -> Result:
        telemetry, findings = self.telemetry, self.findings
        telemetry.read_metrics()
        streams = {stream.name: stream for worker in self.workers for stream in worker.streams.values()}
        found, events, wrong = reading.read(self.cluster.deployment.uri, streams)
        verdict = ledger.judge(streams, found)
        for consumer in self.consumers:
            verdict.add(ledger.judge_events(events, consumer.seen, consumer.name))
            if not consumer.finished:
                self.stuck.append(f"{consumer.name} never saw the last event")
        leaks = self.resources.judge()
        told = telemetry_ledger.judge(
            telemetry.reported,
            operations=telemetry.operations.count,
            commands=telemetry.commands.started_by_name,
            changed_context=telemetry.operations.changed_context,
            decides=self.plan.decides,
        )
        if self._tokens_out_of_range:
            told.append(f"{self._tokens_out_of_range} times a bucket was below 0 or above its capacity")
        result = Result()
        result.violations = [
            *(f"data: {each}" for each in verdict.complaints() + wrong + findings.wrong),
            *(f"telemetry: {each}" for each in told),
            *(f"leak: {each}" for each in leaks),
            *(f"stuck: {each}" for each in self.stuck + self.broken),
        ]
        result.figures = self._figures(verdict, leaks)
        result.figures["violations"] = len(result.violations)
        with contextlib.suppress(Exception):
            telemetry.close()
        return result

    def _figures(self, verdict: ledger.Verdict, leaks: list[str]) -> dict[str, Any]:
        plan, operations, reported = self.plan, self.telemetry.operations, self.telemetry.reported
        durations = sorted([*operations.succeeded, *operations.failed])
        overload = len(operations.overload_succeeded) + len(operations.overload_failed)
        seconds = self.injector.overload_seconds
        commands = self.telemetry.commands
        memory = [each.megabytes for each in self.resources.over_time]
        return {
            "seed": plan.seed,
            "policy": plan.policy,
            "duration": plan.duration,
            "pymongo": pymongo.version,
            "operations": operations.count,
            "succeeded": len(operations.succeeded),
            "success_rate": len(operations.succeeded) / max(1, operations.count),
            "attempts_per_operation": 1 + reported.retries_by_operation / max(1, reported.operation_spans),
            "retries": reported.retries_by_operation,
            "p50_ms": 1000 * _quantile(durations, 0.5),
            "p99_ms": 1000 * _quantile(durations, 0.99),
            "backoff_seconds": reported.backoff_seconds,
            "overload_seconds": seconds,
            "overload_operations": overload,
            "overload_success_rate": len(operations.overload_succeeded) / max(1, overload),
            "overload_commands_per_operation": commands.in_overload / max(1, overload),
            "overload_commands_per_second": commands.in_overload / max(0.001, seconds),
            "faults": self.injector.done.total(),
            "faults_by_kind": dict(sorted(self.injector.done.items())),
            "faults_skipped": self.injector.skipped.total(),
            "strikes": self.cluster.proxies.ask(),
            "acknowledged": verdict.acknowledged,
            "unacknowledged": verdict.unacknowledged,
            "applied_unacknowledged": verdict.applied_unacknowledged,
            "events": sum(consumer.seen.total() for consumer in self.consumers),
            "lost": len(verdict.lost),
            "doubled": len(verdict.doubled),
            "phantom": len(verdict.phantom),
            "leaked": len(leaks),
            "spans": reported.ended,
            "outcomes": dict(reported.outcomes),
            "calls": dict(sorted(self.findings.calls.items())),
            "errors": dict(self.findings.errors.most_common()),
            "memory_mb": [round(statistics.median(memory), 1), round(max(memory), 1)] if memory else [],
        }


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
