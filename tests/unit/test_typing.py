"""The types that the public API promises, judged by mypy: what must pass, and what must not."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = "import otel_retry\nfrom otel_retry import Reason, RetryContext, RetryDecision, RetryPolicy\n"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is not installed: pip install mypy"
)


def mypy(path: Path) -> subprocess.CompletedProcess[str]:
    # A cache of its own: another mypy at work in the same folder would be read half written.
    cache = ROOT / ".cache" / "mypy-typing"
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", cache, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_a_typed_application_can_use_the_whole_public_api():
    answer = mypy(ROOT / "tests" / "typing")

    assert answer.stdout + answer.stderr == ""
    assert answer.returncode == 0


def test_every_public_name_is_used_there():
    import otel_retry

    source = (ROOT / "tests" / "typing" / "public_api.py").read_text(encoding="utf-8")

    assert [name for name in otel_retry.__all__ if not re.search(rf"\b{name}\b", source)] == []


def test_what_is_wrong_is_rejected_each_on_its_line(tmp_path):
    wrong = {
        'RetryDecision.retry("x")': "Too many positional arguments",
        'RetryDecision.retry(delay="soon")': "arg-type",
        'RetryDecision.rethrow("limit")': "arg-type",
        "RetryDecision.ignore(1)": "Too many arguments",
        "otel_retry.instrument(policy=RetryPolicy)": "arg-type",
        "otel_retry.instrument(policy=7)": "arg-type",
        "otel_retry.attempts(7)": "arg-type",
        "otel_retry.budget(None).tokens": "union-attr",
        "otel_retry.no_such_name": "attr-defined",
    }
    policy = "class Mine(RetryPolicy):\n    def on_unavailable(self, context: RetryContext) -> str:\n        return 'retry'\n"
    path = tmp_path / "wrong.py"
    path.write_text(HEADER + "\n".join(wrong) + "\n" + policy)

    answer = mypy(path)

    assert answer.returncode == 1
    reported = {}
    for line in answer.stdout.splitlines():
        if ": error:" in line:
            number = int(line.split("wrong.py:")[1].split(":")[0])
            reported.setdefault(number, line)
    first = HEADER.count("\n") + 1
    for offset, (statement, complaint) in enumerate(wrong.items()):
        assert complaint in reported.get(first + offset, f"nothing was said about {statement}")
    assert "override" in reported[first + len(wrong) + 1]
