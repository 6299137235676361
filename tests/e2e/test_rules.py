"""The recording rules and alerts in Prometheus' own test tool: where each one speaks and where it stays quiet."""

from __future__ import annotations

import subprocess

import pytest

from otel_retry import dashboards
from scripts import backends as installed
from tests.e2e.conftest import need

FOLDER = installed.ROOT / "dashboards"


def promtool(*arguments: str) -> None:
    need(installed.PROMETHEUS)
    done = subprocess.run(
        [str(installed.PROMETHEUS.path("promtool")), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules():
    promtool("check", "rules", *(str(FOLDER / name) for name in dashboards.RULES))


@pytest.mark.parametrize("name", dashboards.RULES)
def test_the_rules_do_what_they_are_for(name: str):
    promtool("test", "rules", str(FOLDER / "tests" / name))
