"""How much one sampling gateway takes: the figures under docs/scale.md.

It runs the Collector with examples/stack/collector-gateway.yaml, sends it real spans of otel_retry with fresh ids, and
reads from /proc what they cost. Linux only; no test, since the figures belong to the machine.

    python -m tests.e2e.load [traces per second] [seconds]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pymongo import MongoClient

import otel_retry
from otel_retry import mongod
from scripts import backends
from tests.e2e import stack
from tests.e2e.processes import HOST, free_ports

TRACES_IN_A_BATCH = 200
SPANS_IN_A_TRACE = 5  # a request, two operations, a command each


def batch():
    """One export of an application: whole traces of a request with two operations."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "load"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with mongod.deployment() as deployment, MongoClient(deployment.uri) as client:
        otel_retry.instrument_client(client, tracer_provider=provider)
        items = client["shop"]["items"]
        items.insert_one({"_id": 1})
        exporter.clear()
        tracer = provider.get_tracer("load")
        for _ in range(TRACES_IN_A_BATCH):
            with tracer.start_as_current_span("GET /basket"):
                items.find_one({"_id": 1})
                items.update_one({"_id": 1}, {"$inc": {"n": 1}})
    return encode_spans(exporter.get_finished_spans())


def main() -> None:
    wanted = float(sys.argv[1]) if len(sys.argv) > 1 else 1000.0
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    request = batch()
    spans = [span for part in request.resource_spans for scope in part.scope_spans for span in scope.spans]
    # The closing of the client is a trace of its own.
    traces = [trace for trace in _by_trace(spans) if len(trace) == SPANS_IN_A_TRACE]
    assert len(traces) == TRACES_IN_A_BATCH
    names = ["COLLECTOR_GRPC", "COLLECTOR_HTTP", "COLLECTOR_HEALTH", "JAEGER_GRPC", "PROMETHEUS"]
    ports = free_ports(names)
    with tempfile.TemporaryFile() as log:
        gateway = subprocess.Popen(
            [str(backends.COLLECTOR.path()), f"--config={stack.FILES / 'collector-gateway.yaml'}"],
            env=stack.environment(ports),
            stdout=log,
            stderr=log,
        )
        try:
            time.sleep(3)
            _say(f"{len(request.SerializeToString()) / len(spans):.0f} bytes per span on the wire")
            _say(f"at rest: {_memory(gateway.pid):.0f} MB")
            _drive(gateway.pid, request, traces, ports["COLLECTOR_GRPC"], wanted, seconds)
        finally:
            gateway.kill()
            gateway.wait()


def _by_trace(spans) -> list[list]:
    found: dict[bytes, list] = {}
    for span in spans:
        found.setdefault(span.trace_id, []).append(span)
    return list(found.values())


def _drive(pid: int, request, traces, port: int, wanted: float, seconds: float) -> None:
    sent, refused = 0, 0
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        stub = TraceServiceStub(channel)
        began, cpu = time.monotonic(), _cpu(pid)
        report = began + 5
        while time.monotonic() < began + seconds:
            for trace in traces:
                trace_id = os.urandom(16)
                for span in trace:
                    span.trace_id = trace_id
            try:
                stub.Export(request, timeout=10.0)
                sent += TRACES_IN_A_BATCH
            except grpc.RpcError:
                refused += TRACES_IN_A_BATCH
            time.sleep(max(0.0, began + sent / wanted - time.monotonic()))
            if time.monotonic() > report:
                report += 5
                _say(
                    f"{time.monotonic() - began:4.0f} s: {_memory(pid):5.0f} MB, {sent} traces, {refused} refused"
                )
        took, cpu = time.monotonic() - began, _cpu(pid) - cpu
        count = sent * SPANS_IN_A_TRACE
        _say(
            f"{sent / took:.0f} traces and {count / took:.0f} spans a second, {cpu / count * 1e6:.1f} us of CPU per span"
        )


def _memory(pid: int) -> float:
    """Resident, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _cpu(pid: int) -> float:
    """Seconds, in user and in kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
