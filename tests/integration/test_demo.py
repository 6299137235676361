"""`otel-retry demo`, as a newcomer runs it, only shorter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-c", "from otel_retry.cli import main; main()", "demo"]
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")

pytestmark = [
    pytest.mark.skipif(
        bool(os.environ.get("MONGODB_URI")), reason="the demo starts and kills servers of its own"
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [
            *COMMAND,
            "--duration",
            "15",
            "--html",
            "r.html",
            "--json",
            "r.json",
            "--svg",
            "w.svg",
            "--seed",
            "7",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "r.json").read_text()), folder, done.stdout


def test_three_scenes_are_played_and_nothing_is_lost(played: Any) -> None:
    figures, _, _ = played
    assert [scene["name"] for scene in figures["scenes"]] == ["calm", "overload", "failover"]
    assert all(scene["operations"] > 20 for scene in figures["scenes"])
    assert all(scene["lost"] == 0 for scene in figures["scenes"])
    calm, overload, _ = figures["scenes"]
    assert calm["retried"] < overload["retried"]
    assert overload["retried"] > 5


def test_the_trace_shown_is_one_operation_with_its_attempts(played: Any) -> None:
    figures, _, output = played
    operation, *attempts = figures["trace"]
    assert operation["attributes"]["mongodb.retry.outcome"] == "retried"
    assert len(attempts) == operation["attributes"]["mongodb.retry.attempts"] >= 2
    assert [each["attributes"]["mongodb.retry.attempt"] for each in attempts] == list(
        range(1, len(attempts) + 1)
    )
    assert operation["trace_id"] in output
    assert "lost" in output


def test_metrics_were_sampled_all_along(played: Any) -> None:
    samples = played[0]["samples"]
    assert len(samples) > 10
    assert samples[-1]["operations"] > samples[0]["operations"]
    assert min(sample["tokens"] for sample in samples if sample["tokens"] is not None) < 1000


def test_the_report_stands_alone(played: Any) -> None:
    text = (played[1] / "r.html").read_text()
    assert "<script" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert text.count("<polyline") == 4


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium-headless-shell")
def test_the_report_opens_in_a_real_browser(played: Any, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--window-size=960,2000",
    ]
    subprocess.run(
        [
            CHROMIUM,
            *flags,
            f"--user-data-dir={tmp_path}/profile",
            f"--screenshot={picture}",
            f"file://{played[1]}/r.html",
        ],
        check=True,
        capture_output=True,
        timeout=90,
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000  # an empty page of this size has a tenth of it


def test_the_picture_for_the_readme_is_an_svg(played: Any) -> None:
    assert (played[1] / "w.svg").read_text().startswith("<svg")


def processes_of(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in line and str(os.getpid()) != folder.name:
            found.append(line)
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("after", [0.5, 6.0])
def test_an_interrupt_at_any_time_leaves_nothing_behind(tmp_path: Path, after: float) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    running = subprocess.Popen(
        [*COMMAND, "--duration", "60"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    time.sleep(after)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=100)
    assert running.returncode in {130, -signal.SIGINT, 1}, output
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (processes_of(str(tmp_path)) or any(tmp_path.iterdir())):
        time.sleep(0.2)
    assert processes_of(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_without_a_mongod_one_message_says_what_to_do(tmp_path: Path) -> None:
    environment = {**os.environ, "OTEL_RETRY_MONGOD": str(tmp_path / "nothing")}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "OTEL_RETRY_MONGOD" in done.stderr
    assert "Traceback" not in done.stderr
