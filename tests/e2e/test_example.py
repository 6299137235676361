"""The shop of examples/stack, with the faults of examples/stack."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from otel_retry import semconv
from tests.e2e.stack import FILES
from tests.e2e.workload import telemetry

if TYPE_CHECKING:
    from otel_retry.mongod import Deployment
    from tests.e2e.stack import Backends


def test_the_shop_survives_its_overload_and_jaeger_shows_how(
    backends: Backends, deployment: Deployment, logs: Path
):
    spec = importlib.util.spec_from_file_location("faults", FILES / "app" / "faults.py")
    faults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faults)
    [(_, fault, probability, _), *_] = [entry for entry in faults.SCRIPT if entry[1] is faults.OVERLOAD]
    with deployment.fail_command(commands=faults.COMMANDS, probability=probability, appName="shop", **fault):
        done = subprocess.run(
            [str(Path(sys.executable).parent / "opentelemetry-instrument"), sys.executable, "shop.py"],
            cwd=FILES / "app",
            env={
                **os.environ,
                **telemetry("shop", backends.endpoint),
                "MONGODB_URI": f"{deployment.uri}&appName=shop",
                "SHOP_ORDERS": "60",
                "SHOP_ORDERS_PER_SECOND": "200",
            },
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert "closed after 60 orders" in done.stderr
    # Six times in a row a fifth: once in 15,000 operations all attempts are refused.
    assert done.stderr.count("lost order") <= 2
    found = backends.wait_until(
        lambda: backends.jaeger.search("shop", tags={semconv.RETRY_OUTCOME: semconv.RETRIED}),
        "no retried operation of the shop in Jaeger",
    )
    names = {span["operationName"] for trace in found.values() for span in trace["spans"]}
    assert names & {"find shop.articles", "findAndModify shop.articles", "insert shop.orders"}
