"""A real OTLP receiver, by gRPC and by HTTP: decodes the protobufs that exporters send, and keeps what they say.

It can also be the kind of endpoint that operators dread: one that takes requests and never answers, that accepts
connections and says nothing, that refuses them, or that answers with nonsense. At the end of the module: how a program
is told to export to it, and run.
"""

from __future__ import annotations

import contextlib
import gzip
import http.server
import os
import socket
import subprocess
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

Mode = Literal["accept", "hang", "silent", "refuse", "garbage"]
"""What the endpoint does: takes everything; takes requests and never answers; takes connections and never reads them;
takes no connection; answers with bytes that are no protocol's.
"""
Protocol = Literal["grpc", "http/protobuf"]
PROTOCOLS: tuple[Protocol, ...] = ("grpc", "http/protobuf")

_HOST = "127.0.0.1"
_GARBAGE = b"\xff\x00 what? \r\n" * 20
_NOTHING_OPEN_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Who made it, and for whom."""

    resource: dict[str, Any]
    scope: str
    version: str
    schema_url: str


@dataclass(frozen=True, kw_only=True)
class Event:
    name: str
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Link:
    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Span(Scope):
    """Ids in hexadecimal; `parent_id` is empty for a root. `proto` has what is not spelled out."""

    proto: Any
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[Event]
    links: list[Link]

    @property
    def failed(self) -> bool:
        return bool(self.proto.status.code == self.proto.status.STATUS_CODE_ERROR)


@dataclass(frozen=True, kw_only=True)
class Point:
    """`value` is the number, or a histogram's sum; `count` is None but for histograms."""

    proto: Any
    attributes: dict[str, Any]
    value: float
    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class Metric(Scope):
    """One export of one instrument."""

    proto: Any
    name: str
    unit: str
    kind: str
    points: list[Point]


class OtlpReceiver:
    """Listens on two free ports of 127.0.0.1 between `__enter__` and `__exit__`; no thread or socket outlives it."""

    def __init__(self, mode: Mode = "accept") -> None:
        self.mode: Mode = mode
        self._changed = threading.Condition()
        self._spans: list[Span] = []
        self._metrics: list[Metric] = []
        self._requests = 0
        self._endpoints: dict[Protocol, _Endpoint] = {}

    def __enter__(self) -> Self:
        kinds: Mapping[Protocol, Callable[[], _Endpoint]]
        if self.mode in {"accept", "hang"}:
            kinds = {
                "grpc": lambda: _GrpcEndpoint(self._receive, hangs=self.mode == "hang"),
                "http/protobuf": lambda: _HttpEndpoint(self._receive, hangs=self.mode == "hang"),
            }
        else:
            kinds = dict.fromkeys(PROTOCOLS, lambda: _RawEndpoint(self.mode, self._noticed))
        try:
            for protocol, make in kinds.items():
                self._endpoints[protocol] = make()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        while self._endpoints:
            self._endpoints.popitem()[1].close()

    def endpoint(self, protocol: Protocol) -> str:
        """For OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://{_HOST}:{self._endpoints[protocol].port}"

    @property
    def spans(self) -> list[Span]:
        """All that came, in the order of arrival."""
        with self._changed:
            return list(self._spans)

    @property
    def metrics(self) -> list[Metric]:
        """All that came, in the order of arrival: an instrument is there once for each export."""
        with self._changed:
            return list(self._metrics)

    @property
    def requests(self) -> int:
        """How often somebody called, or connected where nothing more is understood."""
        with self._changed:
            return self._requests

    def latest(self, name: str) -> Metric:
        """An instrument as last exported: what is cumulative is then complete."""
        found = [metric for metric in self.metrics if metric.name == name]
        if not found:
            raise AssertionError(f"no metric {name!r} came; there are: {sorted(self.metric_names())}")
        return found[-1]

    def metric_names(self, scope: str | None = None) -> set[str]:
        return {metric.name for metric in self.metrics if scope is None or metric.scope == scope}

    def wait_for(self, predicate: Callable[[OtlpReceiver], object], timeout: float = 10.0) -> None:
        """Until `predicate` holds, looked at anew whenever something came; `timeout` in seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not predicate(self):
                if not self._changed.wait(deadline - time.monotonic()):
                    raise AssertionError(
                        f"not within {timeout} s; there are spans {[span.name for span in self._spans]}, "
                        f"metrics {sorted({metric.name for metric in self._metrics})}"
                    )

    def _noticed(self) -> None:
        with self._changed:
            self._requests += 1
            self._changed.notify_all()

    def _receive(self, request: Any) -> None:
        spans = list(_spans(request)) if hasattr(request, "resource_spans") else []
        metrics = list(_metrics(request)) if hasattr(request, "resource_metrics") else []
        with self._changed:
            self._spans += spans
            self._metrics += metrics
            self._requests += 1
            self._changed.notify_all()


# What the protobufs say


def _spans(request: Any) -> Iterable[Span]:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    **_scope(resource, scope),
                    proto=span,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    attributes=_attributes(span.attributes),
                    events=[Event(name=e.name, attributes=_attributes(e.attributes)) for e in span.events],
                    links=[
                        Link(
                            trace_id=link.trace_id.hex(),
                            span_id=link.span_id.hex(),
                            attributes=_attributes(link.attributes),
                        )
                        for link in span.links
                    ],
                )


def _metrics(request: Any) -> Iterable[Metric]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                yield Metric(
                    **_scope(resource, scope),
                    proto=metric,
                    name=metric.name,
                    unit=metric.unit,
                    kind=kind,
                    points=[_point(point) for point in getattr(metric, kind).data_points],
                )


def _scope(resource: Any, scope: Any) -> dict[str, Any]:
    return {
        "resource": _attributes(resource.resource.attributes),
        "scope": scope.scope.name,
        "version": scope.scope.version,
        "schema_url": scope.schema_url,
    }


def _point(point: Any) -> Point:
    attributes = _attributes(point.attributes)
    if hasattr(point, "bucket_counts"):
        return Point(proto=point, attributes=attributes, value=point.sum, count=point.count)
    return Point(proto=point, attributes=attributes, value=getattr(point, point.WhichOneof("value")))


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    found = getattr(value, kind)
    if kind == "array_value":
        return [_value(each) for each in found.values]
    if kind == "kvlist_value":
        return _attributes(found.values)
    return found


# The endpoints


class _Endpoint:
    port: int

    def close(self) -> None:
        raise NotImplementedError


class _GrpcEndpoint(_Endpoint):
    def __init__(self, receive: Callable[[Any], None], *, hangs: bool) -> None:
        closing = self._closing = threading.Event()

        def export(answer: type[Any]) -> Callable[[Any, Any, Any], Any]:
            def method(_self: Any, request: Any, _context: Any) -> Any:
                receive(request)
                if hangs:
                    closing.wait()
                return answer()

            return method

        self._workers = ThreadPoolExecutor(8, thread_name_prefix="otlp-receiver")
        # Two receivers must never share a port, which gRPC would otherwise allow.
        self._server = grpc.server(self._workers, options=[("grpc.so_reuseport", 0)])
        for add, servicer, answer in (
            (
                trace_service_pb2_grpc.add_TraceServiceServicer_to_server,
                trace_service_pb2_grpc.TraceServiceServicer,
                trace_service_pb2.ExportTraceServiceResponse,
            ),
            (
                metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server,
                metrics_service_pb2_grpc.MetricsServiceServicer,
                metrics_service_pb2.ExportMetricsServiceResponse,
            ),
            (
                logs_service_pb2_grpc.add_LogsServiceServicer_to_server,
                logs_service_pb2_grpc.LogsServiceServicer,
                logs_service_pb2.ExportLogsServiceResponse,
            ),
        ):
            add(type(servicer.__name__, (servicer,), {"Export": export(answer)})(), self._server)
        self.port = self._server.add_insecure_port(f"{_HOST}:0")
        self._server.start()

    def close(self) -> None:
        self._closing.set()
        self._server.stop(grace=None).wait()
        self._workers.shutdown()


_HTTP_SERVICES = {
    "/v1/traces": (
        trace_service_pb2.ExportTraceServiceRequest,
        trace_service_pb2.ExportTraceServiceResponse,
    ),
    "/v1/metrics": (
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
    ),
    "/v1/logs": (
        logs_service_pb2.ExportLogsServiceRequest,
        logs_service_pb2.ExportLogsServiceResponse,
    ),
}
_DECODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
    "": bytes,
}


class _HttpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, receive: Callable[[Any], None], *, hangs: bool) -> None:
        self.receive = receive
        self.hangs = hangs
        self.closing = threading.Event()
        self.connections = _Connections()
        super().__init__((_HOST, 0), _HttpHandler)


class _HttpHandler(http.server.BaseHTTPRequestHandler):
    server: _HttpServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def handle(self) -> None:
        # The client, or our own end, closed the connection.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        self.server.connections.discard(self.connection)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path not in _HTTP_SERVICES:
            self._answer(404, b"")
            return
        if self.headers.get("Content-Type") != "application/x-protobuf":
            self._answer(415, b"")
            return
        asked, answered = _HTTP_SERVICES[self.path]
        decode = _DECODERS[self.headers.get("Content-Encoding", "")]
        self.server.receive(asked.FromString(decode(body)))
        if self.server.hangs:
            self.server.closing.wait()
        self._answer(200, answered().SerializeToString())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        pass


class _HttpEndpoint(_Endpoint):
    def __init__(self, receive: Callable[[Any], None], *, hangs: bool) -> None:
        self._server = _HttpServer(receive, hangs=hangs)
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name=f"otlp-http-{self.port}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.connections.close()


class _RawEndpoint(_Endpoint):
    """Speaks no protocol at all."""

    def __init__(self, mode: Mode, noticed: Callable[[], None]) -> None:
        self._mode = mode
        self._noticed = noticed
        self._connections = _Connections()
        self._closing = False
        self._acceptor: threading.Thread | None = None
        self._socket = socket.socket()
        self._socket.bind((_HOST, 0))
        self.port = self._socket.getsockname()[1]
        if mode == "refuse":
            return  # bound and not listening: nobody else gets the port, and whoever calls is refused
        self._socket.listen()
        self._acceptor = threading.Thread(target=self._accept, name=f"otlp-{mode}-{self.port}", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        self._closing = True
        if self._acceptor is not None:
            # Neither close() nor shutdown() of a listener wakes accept() on every system; a visitor does.
            with contextlib.suppress(OSError):
                socket.create_connection((_HOST, self.port), timeout=1).close()
            self._acceptor.join()
        self._socket.close()
        self._connections.close()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            if self._closing:
                connection.close()
                return
            self._noticed()
            self._connections.add(connection)
            serve = self._talk_nonsense if self._mode == "garbage" else self._say_nothing
            threading.Thread(target=serve, args=(connection,), name=f"otlp-{self._mode}", daemon=True).start()

    def _say_nothing(self, connection: socket.socket) -> None:
        """Until the other side goes, or `close` shuts the socket down."""
        with contextlib.suppress(OSError), connection:
            while connection.recv(65536):
                pass
        self._connections.discard(connection)

    def _talk_nonsense(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if connection.recv(65536):
                connection.sendall(_GARBAGE)
        self._connections.discard(connection)


class _Connections:
    """Those that are open, each served by a thread that takes it out of here when it ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()

    def add(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.add(connection)

    def discard(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.discard(connection)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            if not self._changed.wait_for(lambda: not self._open, _NOTHING_OPEN_SECONDS):
                raise AssertionError(f"{len(self._open)} connections of the receiver did not end")


# Programs that export to it


def environment(receiver: OtlpReceiver, protocol: Protocol, **variables: str) -> dict[str, str]:
    """This process's environment without what it says of OpenTelemetry, and with what sends telemetry to `receiver`."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "PYTHONWARNINGS": "",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint(protocol),
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        **variables,
    }


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A program that has run. `at`: when it was gone, as by `time.time()`, which the program can tell as well."""

    code: int
    stdout: str
    stderr: str
    at: float


def run_program(
    command: Sequence[object], environment: Mapping[str, str], *, folder: Path, timeout: float = 60.0
) -> Ended:
    """Runs it to its end, in `folder`; raises `TimeoutExpired` after `timeout` seconds, and then it is killed."""
    done = subprocess.run(
        [str(part) for part in command],
        env=dict(environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(code=done.returncode, stdout=done.stdout, stderr=done.stderr, at=time.time())
