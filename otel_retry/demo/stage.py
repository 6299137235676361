"""Plays the demo: servers, shop, scenes, screen. Whatever happens, nothing is left running and no file behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pymongo import MongoClient
from rich.live import Live
from rich.table import Table

from otel_retry import mongod
from otel_retry.config import inherited, otlp_http_endpoint
from otel_retry.demo.receiver import Receiver
from otel_retry.demo.scenes import SCENES, Scene, healed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from otel_retry.demo.receiver import Sample, Seen, SeenSpan
    from otel_retry.mongod import Deployment

_TICK = 0.25
_SHOP = Path(__file__).with_name("shop.py")
_SETTLE = 2.0


class DemoError(Exception):
    """The demo cannot be played; the message says why and what to do."""


@dataclass(slots=True, kw_only=True)
class SceneResult:
    """What the shop says, and what its telemetry says."""

    name: str
    text: str
    began: float
    ended: float = 0.0
    operations: int = 0
    failed: int = 0
    retried: int = 0
    gave_up: int = 0
    acknowledged: int = 0
    lost: int = 0
    slowest: float = 0.0


@dataclass(slots=True, kw_only=True)
class Result:
    """All that the end of the demo shows."""

    policy: str
    seed: int
    scenes: list[SceneResult] = field(default_factory=list)
    seen: Seen | None = None
    shown: list[SeenSpan] = field(default_factory=list)
    """The spans of the trace in the waterfall, the operation first."""
    jaeger: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "seed": self.seed,
            "scenes": [asdict(scene) for scene in self.scenes],
            "trace": [asdict(span) for span in self.shown],
            "samples": [asdict(sample) for sample in self.seen.samples] if self.seen else [],
        }


def play(console: Console, *, policy: str, seed: int, duration: float, keep: bool = False) -> Result:
    """Raises DemoError when there is nothing to play with, KeyboardInterrupt when somebody has seen enough."""
    with ExitStack() as stack:
        deployment = stack.enter_context(_servers(console))
        forward_to = otlp_http_endpoint()
        receiver = stack.enter_context(Receiver(forward_to=forward_to))
        folder = Path(tempfile.mkdtemp(prefix="otel_retry-demo-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        ledger = folder / "ledger.jsonl"
        shop = stack.enter_context(_Shop(deployment.uri, ledger, receiver.endpoint, policy=policy, seed=seed))
        result = Result(policy=policy, seed=seed, seen=receiver.seen)
        shop.wait_until_open()
        _play_scenes(console, result, deployment, receiver, shop, duration)
        shop.close()
        time.sleep(0.5)  # its last export is on the way
        entries = [json.loads(line) for line in ledger.read_text().splitlines()]
        _account(result, entries, deployment.uri)
        result.shown = _best_trace(receiver.seen.spans)
        if forward_to is not None and result.shown:
            result.jaeger = f"http://{urlsplit(forward_to).hostname}:16686/trace/{result.shown[0].trace_id}"
        if keep:
            _keep(console, deployment, receiver)
        return result


def _servers(console: Console) -> Deployment:
    with console.status("starting a replica set of three..."):
        try:
            return mongod.start(3)
        except mongod.MongodError as error:
            raise DemoError(str(error)) from None


class _Shop:
    """The shop's process. It ends when its standard input is closed, so also when the demo dies."""

    def __init__(self, uri: str, ledger: Path, endpoint: str, *, policy: str, seed: int) -> None:
        launcher = Path(sys.executable).with_name("opentelemetry-instrument")
        if not launcher.exists():
            raise DemoError(f"{launcher} is missing: pip install opentelemetry-distro")
        ledger.touch()
        self._ledger = ledger
        self._errors = ledger.with_name("stderr.txt")
        environment = {
            **inherited(),
            "OTEL_SERVICE_NAME": "otel-retry-demo-shop",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_LOGS_EXPORTER": "none",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
            "OTEL_RETRY_POLICY": policy,
        }
        for signal in ("TRACES", "METRICS"):
            environment.pop(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", None)
            environment.pop(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", None)
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own script, under the distro's launcher
                [launcher, sys.executable, str(_SHOP), uri, str(ledger), str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(patience=2.0)

    def wait_until_open(self, patience: float = 30.0) -> None:
        deadline = time.monotonic() + patience
        while self._ledger.stat().st_size == 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._errors.read_text()[-2000:]
                raise DemoError(f"the shop did not open:\n{tail}")
            time.sleep(0.05)

    def entries(self) -> int:
        with self._ledger.open() as file:
            return sum(1 for _ in file)

    def close(self, patience: float = 20.0) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _play_scenes(
    console: Console, result: Result, deployment: Deployment, receiver: Receiver, shop: _Shop, duration: float
) -> None:
    seconds = duration / len(SCENES)
    with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
        for scene in SCENES:
            current = SceneResult(name=scene.name, text=scene.text, began=time.time())
            result.scenes.append(current)
            with healed(deployment):
                for _ in _ticks(scene, deployment, seconds):
                    live.update(_screen(result, receiver.seen.samples, shop.entries()))
            current.ended = time.time()
    time.sleep(_SETTLE)


def _ticks(scene: Scene, deployment: Deployment, seconds: float) -> Iterator[None]:
    playing = scene.play(deployment, seconds)
    end = time.monotonic() + seconds
    next(playing, None)
    while time.monotonic() < end:
        yield
        if scene.lasting:
            next(playing, None)
        time.sleep(_TICK)
    next(playing, None)


def _screen(result: Result, samples: list[Sample], entries: int) -> Table:
    table = Table(title=f"the shop, policy {result.policy}")
    for column in ("scene", "operations/s", "retries/s", "gave up", "in backoff", "tokens"):
        table.add_column(column, justify="left" if column == "scene" else "right")
    for scene in result.scenes:
        inside = [s for s in samples if scene.began <= s.at <= (scene.ended or time.time())]
        if len(inside) < 2:
            table.add_row(scene.name, *["…"] * 5)
            continue
        first, last = inside[0], inside[-1]
        span = max(last.at - first.at, 0.1)
        table.add_row(
            scene.name,
            f"{(last.operations - first.operations) / span:.0f}",
            f"{(last.retries - first.retries) / span:.1f}",
            str(last.gave_up - first.gave_up),
            f"{last.backoff - first.backoff:.1f} s",
            "-" if last.tokens is None else f"{last.tokens:.1f}",
        )
    table.caption = f"{result.scenes[-1].text} · {entries} operations so far"
    return table


def _account(result: Result, entries: list[dict[str, Any]], uri: str) -> None:
    """The shop's ledger against the data: every order that was acknowledged must be there."""
    with MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=20_000) as client:
        there = {document["_id"] for document in client.shop.orders.find({}, {"_id": 1})}
    spans = result.seen.spans if result.seen else []
    for index, scene in enumerate(result.scenes):
        last = index == len(result.scenes) - 1
        inside = [
            e
            for e in entries
            if scene.began <= e["at"] and (last or e["at"] < result.scenes[index + 1].began)
        ]
        scene.operations = len(inside)
        scene.failed = sum(entry["error"] is not None for entry in inside)
        scene.slowest = max((entry["seconds"] for entry in inside), default=0.0)
        orders = [entry for entry in inside if entry["key"] and entry["error"] is None]
        scene.acknowledged = len(orders)
        scene.lost = sum(entry["key"] not in there for entry in orders)
        during = [
            span
            for span in spans
            if "mongodb.retry.outcome" in span.attributes
            and scene.began <= span.end
            and (last or span.end < result.scenes[index + 1].began)
        ]
        scene.retried = sum(span.attributes["mongodb.retry.outcome"] == "retried" for span in during)
        scene.gave_up = sum(span.failed for span in during)


def _best_trace(spans: list[SeenSpan]) -> list[SeenSpan]:
    """The operation with the most attempts that succeeded in the end, its attempts after it."""
    candidates = [span for span in spans if span.attributes.get("mongodb.retry.outcome") == "retried"]
    if not candidates:
        candidates = [span for span in spans if span.attributes.get("mongodb.retry.attempts", 0) > 1]
    if not candidates:
        return []
    best = max(candidates, key=lambda span: (span.attributes["mongodb.retry.attempts"], span.seconds))
    children = sorted((span for span in spans if span.parent_id == best.span_id), key=lambda span: span.start)
    return [best, *children]


def _keep(console: Console, deployment: Deployment, receiver: Receiver) -> None:
    console.print(f"MongoDB keeps running: {deployment.uri}")
    console.print(f"OTLP (HTTP) keeps listening: {receiver.endpoint}")
    console.print("Ctrl-C ends both.")
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        console.print("bye")
