"""What the README says, tried."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from otel_retry.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
COMMANDS = re.findall(r"^\$ (.+)$", README, re.MULTILINE)

# Commands that other tests, or this very run, execute.
ELSEWHERE = {
    "make demo": "tests/integration/test_demo.py plays it, and CI calls it",
    "make test": "it is what runs here",
    "pip install otel-retry": "tests/integration/test_wheel.py installs the wheel",
    "opentelemetry-instrument python app.py": "tests/integration/test_auto_instrumentation.py",
}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ELSEWHERE])
def test_every_command_works(command: str) -> None:
    program, *arguments = command.split()
    assert program == "otel-retry", f"{command}: say in ELSEWHERE which test runs it"
    done = subprocess.run(
        [sys.executable, "-c", "from otel_retry.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_commands_are_there_at_all() -> None:
    assert len(COMMANDS) >= 6
    assert set(ELSEWHERE) <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_policy_is_described() -> None:
    for name in POLICIES:
        assert f"| `{name}`" in README


@pytest.mark.parametrize(
    "block", re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "policies.md").read_text(), re.DOTALL)
)
def test_the_worked_examples_of_policies_run(block: str) -> None:
    """In a process of its own each: they instrument."""
    if "pytest_plugins" in block:
        pytest.skip("a pytest module: tests/integration/test_testing_module.py has the same test")
    subprocess.run([sys.executable, "-W", "error", "-c", block], check=True, timeout=60)
