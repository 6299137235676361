"""A small OTLP receiver: decodes what the shop exports, keeps what the demo shows, and passes the bytes on to a real
endpoint if there is one.
"""

from __future__ import annotations

import gzip
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST_FORWARD = 5.0


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """A span as it arrived. Times in seconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: float
    end: float
    attributes: dict[str, Any]
    failed: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Sample:
    """The metrics at one moment: sums over all attribute sets, tokens at their lowest."""

    at: float
    operations: int = 0
    retries: int = 0
    gave_up: int = 0
    backoff: float = 0.0
    tokens: float | None = None


@dataclass(slots=True)
class Seen:
    """Everything that arrived."""

    spans: list[SeenSpan] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Receiver:
    """Listens on a free loopback port for OTLP over HTTP; `forward_to` gets the same bytes."""

    def __init__(self, *, forward_to: str | None = None) -> None:
        self.seen = Seen()
        self._forward_to = forward_to
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                receiver.take(self.path, body, dict(self.headers))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Silence: the screen belongs to the demo."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        plain = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        if path.endswith("/v1/traces"):
            self.seen.spans.extend(_spans(plain))
        elif path.endswith("/v1/metrics"):
            self.seen.samples.append(_sample(plain))
        if self._forward_to is not None:
            self._forward(path, body, headers)

    def _forward(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        wanted = {key: headers[key] for key in ("Content-Type", "Content-Encoding") if key in headers}
        request = urllib.request.Request(f"{self._forward_to}{path}", body, wanted)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=_LONGEST_FORWARD):  # noqa: S310 - the user's own endpoint
                pass
        except OSError:
            self._forward_to = None  # it is gone; the demo goes on


def _spans(body: bytes) -> Iterator[SeenSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    name=span.name,
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    attributes=_attributes(span.attributes),
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


def _sample(body: bytes) -> Sample:
    sample = Sample(at=time.time())
    request = ExportMetricsServiceRequest.FromString(body)
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                _add(sample, metric)
    return sample


def _add(sample: Sample, metric: Any) -> None:
    if metric.name == "db.client.operation.duration":
        sample.operations += sum(point.count for point in metric.histogram.data_points)
    elif metric.name == "mongodb.retry.attempts":
        sample.retries += sum(point.as_int for point in metric.sum.data_points)
    elif metric.name == "mongodb.retry.gave_up":
        sample.gave_up += sum(point.as_int for point in metric.sum.data_points)
    elif metric.name == "mongodb.retry.backoff":
        sample.backoff += sum(point.sum for point in metric.histogram.data_points)
    elif metric.name == "mongodb.retry.budget.tokens":
        found = [point.as_double or float(point.as_int) for point in metric.gauge.data_points]
        if found:
            sample.tokens = min(found)
