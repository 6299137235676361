"""Every example runs, and its telemetry arrives."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.otlp_receiver import OtlpReceiver, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_retry.mongod import Deployment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCHER = str(Path(sys.executable).with_name("opentelemetry-instrument"))

SCRIPTS = {
    "worker_transactions.py": ("20 transfers, sum 1000\n", "commitTransaction admin"),
    "change_stream.py": (f"seen: {list(range(10))}\n", "getMore example_stream.orders"),
    "gridfs_files.py": ("1000000 bytes, the same: True\n", "find example_gridfs.fs.files"),
    "mongoengine_app.py": ("lamps: 4\n", "update example_mongoengine.item"),
    "programmatic.py": ("tokens left: 1000.0\n", "insert example_programmatic.c"),
    "two_policies.py": ("web has a bucket: False; nightly: True\n", None),
}
FROM_CODE = {"programmatic.py", "two_policies.py"}


@pytest.fixture
def receiver() -> Iterator[Any]:
    with OtlpReceiver() as started:
        yield started


def variables(receiver: Any, deployment: Deployment) -> dict[str, str]:
    return {**environment(receiver, "http/protobuf"), "MONGODB_URI": deployment.uri}


def has_span(receiver: Any, name: str) -> bool:
    return any(span.name == name for span in receiver.spans)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_it_should_and_is_seen(script: str, receiver: Any, deployment: Deployment) -> None:
    said, span = SCRIPTS[script]
    command = [sys.executable, str(EXAMPLES / script)]
    done = subprocess.run(
        command if script in FROM_CODE else [LAUNCHER, *command],
        env=variables(receiver, deployment),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == (said, 0), done.stderr
    if span is not None:
        receiver.wait_for(lambda _: has_span(receiver, span), 20)


@contextmanager
def serving(command: list[str], env: dict[str, str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_wsgi_app(receiver: Any, deployment: Deployment, port: int) -> None:
    command = [LAUNCHER, sys.executable, str(EXAMPLES / "wsgi_app.py"), str(port)]
    with serving(command, variables(receiver, deployment), port):
        pages = [urllib.request.urlopen(f"http://127.0.0.1:{port}/a", timeout=20).read() for _ in range(2)]
        assert pages[1] != pages[0]
        receiver.wait_for(lambda _: has_span(receiver, "findAndModify example_wsgi.hits"), 20)


def test_the_fastapi_app(receiver: Any, deployment: Deployment, port: int) -> None:
    pytest.importorskip("fastapi", reason="pip install fastapi uvicorn")
    pytest.importorskip("uvicorn", reason="pip install fastapi uvicorn")
    command = [
        LAUNCHER,
        sys.executable,
        "-m",
        "uvicorn",
        "--app-dir",
        str(EXAMPLES),
        "--port",
        str(port),
        "fastapi_app:app",
    ]
    with serving(command, variables(receiver, deployment), port):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/orders/lamp", method="POST")
        urllib.request.urlopen(request, timeout=20).close()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/orders/lamp/count", timeout=20) as answer:
            assert b'"count"' in answer.read()
        receiver.wait_for(lambda _: has_span(receiver, "insert example_fastapi.orders"), 20)


def test_every_example_is_listed_and_every_listed_one_is_there() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in text
