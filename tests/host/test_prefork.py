"""Servers that load the application first and fork afterwards: gunicorn, Celery, multiprocessing. Every child answers,
retries with a budget of its own, and its telemetry arrives.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import multiprocessing
import signal
import socket
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.otlp_receiver import OtlpReceiver, environment
from tests.flavours import OVERLOAD
from tests.host.conftest import ROOT, ended_well

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE = 60.0

pytestmark = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork"
)


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"{module} is not installed: pip install {module}"
    )


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as started:
        yield started


@contextlib.contextmanager
def serving(
    command: list[object], receiver: OtlpReceiver, folder: Path, **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """The server, and what it said so far; told to end at the end, and killed if it does not."""
    said = folder / "said.txt"
    with said.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env={
                **environment(receiver, "http/protobuf", OTEL_BSP_SCHEDULE_DELAY="100", **variables),
                "PYTHONPATH": f"{ROOT}:{folder}",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield server, said.read_text
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def operations(receiver: OtlpReceiver, name: str) -> list[Any]:
    return [
        span
        for span in receiver.spans
        if span.scope == "otel_retry" and span.attributes.get("db.operation.name") == name
    ]


def arrived(receiver: OtlpReceiver, name: str, count: int, said: Callable[[], str]) -> None:
    try:
        receiver.wait_for(lambda _: len(operations(receiver, name)) >= count, timeout=PATIENCE)
    except Exception:
        pytest.fail(f"{len(operations(receiver, name))} of {count} spans of {name} arrived\n{said()}")


# gunicorn

WSGI = """
    import json, os, warnings
    warnings.simplefilter("ignore")  # PyMongo warns of a client that is older than its process
    import otel_retry
    from pymongo import MongoClient

    otel_retry.setup_otlp("shop")
    client = MongoClient(os.environ["URI"], appname="gunicorn")
    orders = client[os.environ["DATABASE"]].orders
    orders.insert_one({"_id": "before the fork"})

    def app(request, start_response):
        orders.insert_one({"pid": os.getpid()})
        answer = {
            "pid": os.getpid(),
            "mine": orders.count_documents({"pid": os.getpid()}),
            "consumed": otel_retry.budget(client).consumed,
        }
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]
"""


class UnixConnection(http.client.HTTPConnection):
    """No port to be taken by somebody else."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._path)


def ask(path: str) -> dict[str, Any]:
    connection = UnixConnection(path)
    try:
        connection.request("GET", "/")
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        return json.loads(body)
    finally:
        connection.close()


@needs("gunicorn")
def test_gunicorn_s_workers_each_answer_retry_and_report(deployment, database_name, receiver, tmp_path):
    (tmp_path / "shop.py").write_text(textwrap.dedent(WSGI))
    path = tmp_path / "gunicorn.sock"
    command = ["-m", "gunicorn", "--preload", "--workers", 3, "--bind", f"unix:{path}", "shop:app"]
    answers: dict[int, list[dict[str, Any]]] = {}
    with serving(command, receiver, tmp_path, URI=deployment.uri, DATABASE=database_name) as (server, said):
        deadline = time.monotonic() + PATIENCE
        while not path.exists():
            assert server.poll() is None, said()
            assert time.monotonic() < deadline, said()
            time.sleep(0.05)
        with deployment.fail_command(commands=["insert"], times=5, appName="gunicorn", **OVERLOAD):
            asked = 0
            while len(answers) < 2 or asked < 12:
                assert time.monotonic() < deadline, said()
                answer = ask(str(path))
                answers.setdefault(answer["pid"], []).append(answer)
                asked += 1
        arrived(receiver, "insert", asked + 1, said)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0, said()

    for of_one in answers.values():
        assert [answer["mine"] for answer in of_one] == list(range(1, len(of_one) + 1))
    # Each child has a bucket of its own, and together they took what the failures cost.
    assert sum(max(answer["consumed"] for answer in of_one) for of_one in answers.values()) == 5
    assert "Traceback" not in said(), said()


# Celery

CELERY = """
    import os, warnings
    warnings.simplefilter("ignore")
    import otel_retry
    from celery import Celery
    from pymongo import MongoClient

    folder = os.environ["FOLDER"]
    for each in ("queue", "processed", "results"):
        os.makedirs(f"{folder}/{each}", exist_ok=True)
    app = Celery("shop", broker="filesystem://", backend=f"file://{folder}/results")
    app.conf.broker_transport_options = {
        "data_folder_in": f"{folder}/queue",
        "data_folder_out": f"{folder}/queue",
        "control_folder": f"{folder}/control",
        "store_processed": False,
    }
    app.conf.worker_hijack_root_logger = False
    app.conf.broker_connection_retry_on_startup = True

    if os.environ.get("WORKER"):
        otel_retry.setup_otlp("shop")
        client = MongoClient(os.environ["URI"], appname="celery")
        orders = client[os.environ["DATABASE"]].orders
        orders.insert_one({"_id": "before the fork"})

    @app.task
    def buy(number):
        orders.insert_one({"_id": number})
        orders.update_one({"_id": number}, {"$inc": {"bought": 1}})
        found = orders.find_one({"_id": number})
        return [os.getpid(), [found["_id"], found["bought"]], otel_retry.budget(client).consumed]
"""

SENDER = """
    import json
    from shop import buy

    sent = [buy.delay(number) for number in range(12)]
    print(json.dumps([one.get(timeout=60, interval=0.05) for one in sent]))
"""


@needs("celery")
def test_celery_s_children_each_work_retry_and_report(deployment, database_name, receiver, tmp_path, run):
    (tmp_path / "shop.py").write_text(textwrap.dedent(CELERY))
    command = [
        "-m", "celery", "-A", "shop", "worker", "--pool", "prefork", "--concurrency", 2,
        "--without-gossip", "--without-mingle", "--without-heartbeat",
    ]  # fmt: skip
    variables = {"FOLDER": str(tmp_path), "URI": deployment.uri, "DATABASE": database_name}
    with (
        deployment.fail_command(commands=["update"], times=5, appName="celery", **OVERLOAD),
        serving(command, receiver, tmp_path, **variables, WORKER="1") as (server, said),
    ):
        results = json.loads(ended_well(run(SENDER, **variables)))
        arrived(receiver, "insert", 13, said)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0, said()

    assert [found for _, found, _ in results] == [[number, 1] for number in range(12)]
    by_child: dict[int, float] = {}
    for pid, _, consumed in results:
        by_child[pid] = max(consumed, by_child.get(pid, 0))
    assert server.pid not in by_child
    assert sum(by_child.values()) == 5
    assert "Traceback" not in said(), said()


# multiprocessing

POOL = """
    import json, multiprocessing, os, sys, threading, warnings
    warnings.simplefilter("ignore")
    import otel_retry
    from pymongo import MongoClient

    def buy(number):
        client[database].orders.insert_one({"_id": number})
        bucket = otel_retry.budget(client)
        return [number, bucket.tokens == bucket.capacity + bucket.deposited - bucket.consumed]

    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")
        uri, database = sys.argv[1:]
        otel_retry.setup_otlp("shop")
        client = MongoClient(uri, appname="pool")
        client.admin.command("ping")
        stopping = threading.Event()

        def busy():
            # The parent is at work while it forks, and holds every lock of ours now and then.
            while not stopping.is_set():
                otel_retry.instrument_client(client)
                client.admin.command("ping")

        threads = [threading.Thread(target=busy) for _ in range(4)]
        for thread in threads:
            thread.start()
        bought = []
        for turn in range(4):
            with multiprocessing.Pool(3) as pool:
                bought += pool.map_async(buy, range(turn * 10, turn * 10 + 10)).get(timeout=60)
                pool.close()
                pool.join()
        stopping.set()
        for thread in threads:
            thread.join(60)
        print(json.dumps(sorted(bought)))
        client.close()
"""


def test_children_that_are_forked_while_the_parent_holds_every_lock_work(
    deployment, database_name, receiver, run
):
    variables = {
        name: value
        for name, value in environment(receiver, "http/protobuf").items()
        if name.startswith("OTEL_")
    }
    with deployment.fail_command(commands=["insert"], times=5, appName="pool", **OVERLOAD):
        bought = json.loads(ended_well(run(POOL, deployment.uri, database_name, **variables)))

    assert bought == [[number, True] for number in range(40)]
