"""What the tests of hosts share: programs that run on their own, and an SDK in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import otel_retry
from tests.integration.telemetry_rig import Rig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
SECONDS = 90.0
"""What a program may take; they take a second or two, on a machine that has nothing else to do."""


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    """Whatever a test did, it leaves the driver alone."""
    yield
    otel_retry.uninstrument()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Both providers in memory; shut down after the test."""
    made = Rig()
    yield made
    made.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a Python of its own: `run(SCRIPT, uri, "-O" as a flag)`. Its last words are shown if a test
    fails, since they are in what it returns.
    """

    def run(
        script: str, *arguments: object, flags: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(script))
        return subprocess.run(
            [sys.executable, *flags, program, *map(str, arguments)],
            cwd=tmp_path,
            env={**plain_environment(), **variables},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    return run


def plain_environment() -> dict[str, str]:
    """This process's, without what it says of OpenTelemetry; programs can import this folder's modules."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**kept, "PYTHONWARNINGS": "", "PYTHONPATH": str(ROOT)}


def ended_well(ended: subprocess.CompletedProcess[str]) -> str:
    """What it printed."""
    assert ended.returncode == 0, f"it ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def our_lines(caplog: Any) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "otel_retry" and record.levelname in {"WARNING", "ERROR", "CRITICAL"}
    ]
