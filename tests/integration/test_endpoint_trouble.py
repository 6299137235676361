"""An OTLP endpoint that hangs, is down or talks nonsense is the operators' trouble, never the application's: its
database calls neither fail nor slow down, and it ends by itself.
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.otlp_receiver import Mode, OtlpReceiver, Protocol, environment, run_program
from tests.flavours import OVERLOAD

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(sys.executable).with_name("opentelemetry-instrument")
CALLS = 300
SLOWEST_MEDIAN = 0.2
"""Seconds. A call takes about a millisecond; one that waits for an export takes as long as the exporter's timeout."""
EXIT_SECONDS = 25.0
"""Each signal's last exports may take their timeouts, one second each; then it is over."""

# The exporters are at work all the time, and the queue is full long before the end.
BUSY = {
    "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "pymongo",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    "OTEL_BSP_SCHEDULE_DELAY": "20",
    "OTEL_BSP_MAX_QUEUE_SIZE": "32",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16",
    "OTEL_METRIC_EXPORT_INTERVAL": "100",
}

CALLER = """
    import json
    import sys
    import time
    from pymongo import MongoClient

    uri, name, database, calls = sys.argv[1:]
    seconds = []
    with MongoClient(uri, appname=name, heartbeatFrequencyMS=500) as client:
        orders = client[database].orders
        orders.insert_one({"_id": 1})
        # Long enough for an exporter to be in the middle of an export.
        time.sleep(0.3)
        for _ in range(int(calls)):
            began = time.perf_counter()
            found = orders.find_one({"_id": 1})
            seconds.append(time.perf_counter() - began)
            assert found == {"_id": 1}
    print(json.dumps([time.time(), seconds]))
"""


@pytest.fixture
def call(deployment, database_name, tmp_path) -> Callable[[OtlpReceiver, Protocol], Any]:
    """Runs the caller under `opentelemetry-instrument`, with one retry on the way; answers how it ended, the seconds
    that its end took, and those of each call.
    """

    def call(receiver: OtlpReceiver, protocol: Protocol) -> Any:
        app = tmp_path / "caller.py"
        app.write_text(textwrap.dedent(CALLER))
        with deployment.fail_command(commands=["insert"], times=1, appName="trouble", **OVERLOAD):
            ended = run_program(
                [SCRIPT, sys.executable, app, deployment.uri, "trouble", database_name, CALLS],
                environment(receiver, protocol, **BUSY),
                folder=tmp_path,
            )
        assert ended.code == 0, ended.stderr
        done, seconds = json.loads(ended.stdout)
        return ended, ended.at - done, seconds

    return call


@pytest.mark.parametrize(
    ("mode", "protocol"),
    [
        ("accept", "grpc"),
        ("hang", "grpc"),
        ("hang", "http/protobuf"),
        ("silent", "grpc"),
        ("refuse", "grpc"),
        ("refuse", "http/protobuf"),
        ("garbage", "grpc"),
        ("garbage", "http/protobuf"),
    ],
)
def test_calls_do_not_wait_for_the_endpoint_and_the_program_ends_by_itself(
    call, mode: Mode, protocol: Protocol
):
    with OtlpReceiver(mode) as receiver:
        ended, to_end, seconds = call(receiver, protocol)
        called = receiver.requests

    assert len(seconds) == CALLS
    assert statistics.median(seconds) < SLOWEST_MEDIAN
    # One that waited for an export would have waited for the exporter's timeout, a second, and so would the next.
    assert sum(each >= 0.9 for each in seconds) < CALLS / 20
    assert to_end < EXIT_SECONDS
    assert called or mode == "refuse"
    # The SDK's own lines tell of the endpoint; ours would be of no use to anybody.
    assert "otel_retry" not in ended.stderr
