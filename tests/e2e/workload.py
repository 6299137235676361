"""An application for the end-to-end tests, and the handle by which a test drives it.

Run as a script, under `opentelemetry-instrument`, it is the application: plain PyMongo, a span of its own around each
request. It reads requests as lines of JSON and answers each with what it did and saw itself: trace ids, durations,
errors, and the commands that its own CommandListener heard of. That is the truth which the backends are held against.

Faults are not its business: a test sets failpoints on the mongod and knows what it set.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

APP_NAME = "e2e-workload"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the application says about one request of its own."""

    trace_id: str
    seconds: float
    error: str | None
    commands: list[dict[str, Any]]
    """As the listener heard them: name, operation_id, request_id, ok."""

    @property
    def attempts(self) -> int:
        return len(self.commands)


class Workload:
    """The application, running. One request at a time; `run` comes back when all of them are answered."""

    def __init__(
        self,
        *,
        uri: str,
        endpoint: str,
        service: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.service = service
        self.log = log
        self._output: queue.Queue[str | None] = queue.Queue()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).parent / "opentelemetry-instrument"), sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **telemetry(service, endpoint), "MONGODB_URI": uri, **(environment or {})},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """It ends as its input ends, and sends what it still holds."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=90.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def run(
        self,
        do: str = "find",
        *,
        count: int = 1,
        threads: int = 1,
        seconds: float = 0.0,
        timeout: float = 300.0,
    ) -> list[Request]:
        """`count` requests, or as many as fit into `seconds`, from that many threads."""
        answer = self._ask({"do": do, "count": count, "threads": threads, "seconds": seconds}, timeout)
        return [Request(**each) for each in answer]

    def flush(self, *, timeout: float = 120.0) -> None:
        """Have it send now what its SDK holds."""
        self._ask({"do": "flush"}, timeout)

    def _ask(self, order: dict[str, Any], timeout: float) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        try:
            line = self._output.get(timeout=timeout)
        except queue.Empty:
            line = None
        if line is None:
            raise RuntimeError(f"The workload gave no answer to {order}:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output.put(line)
        self._output.put(None)


def telemetry(service: str, endpoint: str) -> dict[str, str]:
    """What an operator would set, with shorter intervals than anybody needs."""
    return {
        "OTEL_SERVICE_NAME": service,
        "OTEL_RESOURCE_ATTRIBUTES": f"service.namespace=e2e,service.instance.id={service}-1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        # As in docker-compose.yaml: what a Collector's absence may last.
        "OTEL_EXPORTER_OTLP_TIMEOUT": "60",
        "OTEL_BSP_MAX_QUEUE_SIZE": "8192",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        "OTEL_LOGS_EXPORTER": "none",
    }


def main() -> None:
    from opentelemetry import metrics, trace
    from opentelemetry.trace import format_trace_id
    from pymongo import MongoClient, monitoring
    from pymongo.errors import PyMongoError

    heard = threading.local()

    class Listener(monitoring.CommandListener):
        def started(self, event: Any) -> None:
            pass

        def succeeded(self, event: Any) -> None:
            self._hear(event, ok=True)

        def failed(self, event: Any) -> None:
            self._hear(event, ok=False)

        @staticmethod
        def _hear(event: Any, *, ok: bool) -> None:
            if hasattr(heard, "commands"):
                heard.commands.append(
                    {
                        "name": event.command_name,
                        "operation_id": event.operation_id,
                        "request_id": event.request_id,
                        "ok": ok,
                    }
                )

    tracer = trace.get_tracer("workload")
    client = MongoClient(
        os.environ["MONGODB_URI"], appname=APP_NAME, event_listeners=[Listener()], heartbeatFrequencyMS=500
    )
    items = client["e2e"]["items"]
    actions: dict[str, Callable[[], Any]] = {
        "find": lambda: items.find_one({"_id": 1}),
        "insert": lambda: items.insert_one({"at": time.time()}),
        "update": lambda: items.update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True),
        "aggregate": lambda: list(items.aggregate([{"$count": "n"}])),
        "both": lambda: (items.update_one({"_id": 1}, {"$inc": {"n": 1}}), items.find_one({"_id": 1})),
    }

    def request(do: str) -> dict[str, Any]:
        heard.commands = []
        error = None
        with tracer.start_as_current_span(f"request {do}") as span:
            began = time.perf_counter()
            try:
                actions[do]()
            except PyMongoError as raised:
                error = type(raised).__name__
            seconds = time.perf_counter() - began
        return {
            "trace_id": format_trace_id(span.get_span_context().trace_id),
            "seconds": seconds,
            "error": error,
            "commands": heard.commands,
        }

    def several(do: str, count: int, seconds: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        done = [] if seconds else [request(do) for _ in range(count)]
        while time.monotonic() < deadline:
            done.append(request(do))
        return done

    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        if order["do"] == "flush":
            trace.get_tracer_provider().force_flush()
            metrics.get_meter_provider().force_flush()
        else:
            threads = order["threads"]
            with ThreadPoolExecutor(threads) as pool:
                shares = [order["count"] // threads + (i < order["count"] % threads) for i in range(threads)]
                parts = pool.map(lambda share, o=order: several(o["do"], share, o["seconds"]), shares)
                answer = [each for part in parts for each in part]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    client.close()


if __name__ == "__main__":
    main()
