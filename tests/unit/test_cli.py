"""The command line, called as a person or a script would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from otel_retry.cli.catalogue import ERRORS, OPERATIONS
from otel_retry.cli.main import cli
from otel_retry.cli.operations_page import page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def call(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(cli, arguments, env=env)


def test_the_page_of_operations_is_current() -> None:
    assert (DOCS / "operations.md").read_text() == page(), (
        "run: otel-retry explain --page > docs/operations.md"
    )


def test_explain_tells_each_attempt_with_its_rules() -> None:
    result = call("explain", "insert_one", "overload")
    assert result.exit_code == 0
    assert result.output.count("→ again") == 5
    assert "→ raised: limit" in result.output
    assert "seed 001, rule 4" in result.output


def test_explain_as_json_is_the_same_story() -> None:
    rounds = json.loads(call("explain", "insert_one", "overload", "--json").output)
    assert [each["outcome"] for each in rounds] == ["retry"] * 5 + ["limit"]
    assert [each["delay"] for each in rounds] == [0.1, 0.2, 0.4, 0.8, 1.6, None]
    assert rounds[0]["questions"][-1]["rule"] == "BUDGET"


@pytest.mark.parametrize(
    ("arguments", "outcomes"),
    [
        (["update_many", "network"], ["not_retryable"]),
        (["update_many", "network", "--idempotent"], ["not_retryable"]),
        (["find", "network"], ["retry", "limit"]),
        (["find", "network", "--no-retry-reads"], ["not_retryable"]),
        (["insert_one", "network", "--no-retry-writes"], ["not_retryable"]),
        (["find", "overload", "--policy", "current"], ["retry", "retry", "limit"]),
        (["find", "overload", "--tokens", "1"], ["retry", "budget"]),
        (["find", "overload", "--timeout", "0.25"], ["retry", "deadline"]),
        (["find", "network_timeout", "--policy", "persistent"], ["retry", "limit"]),
        (["find", "--code", "91"], ["retry", "limit"]),
        (["find", "--code", "11000"], ["not_retryable"]),
        (["find", "--kind", "network"], ["retry", "limit"]),
        (["update_many", "--label", "RetryableError", "--code", "8"], ["retry", "limit"]),
        (["find", "no_server"], ["no_server"]),
    ],
)
def test_explain_knows_options_codes_labels_and_kinds(arguments: list[str], outcomes: list[str]) -> None:
    result = call("explain", *arguments, "--json")
    assert result.exit_code == 0, result.output
    assert [each["outcome"] for each in json.loads(result.output)] == outcomes


def test_a_story_without_end_is_cut() -> None:
    assert "and so on" in call("explain", "find", "network", "--policy", "persistent").output


def test_the_matrix_has_every_operation_and_error() -> None:
    matrix = json.loads(call("explain", "--table", "--json").output)
    assert set(matrix) == set(OPERATIONS)
    assert all(set(row) == set(ERRORS) for row in matrix.values())
    assert "update_many" in call("explain", "--table").output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain"], "name an operation: find"),
        (["explain", "nonsense", "network"], "update_many"),
        (["explain", "find", "nonsense"], "overload"),
        (["explain", "find"], "--code"),
        (["explain", "find", "network", "--policy", "nonsense"], "backpressure"),
        (["explain", "find", "network", "--policy", "driver"], "PyMongo's own loop"),
        (["nonsense"], "No such command"),
    ],
)
def test_a_wrong_call_says_what_is_possible_without_a_traceback(arguments: list[str], says: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output


def test_doctor_finds_this_installation_well() -> None:
    result = call("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(result.output)}
    assert findings["PyMongo"]["state"] == "ok"
    assert findings["auto-instrumentation"]["state"] == "ok"
    assert result.exit_code == 0, result.output


def test_doctor_says_where_a_setting_comes_from() -> None:
    output = call("doctor", env={"OTEL_RETRY_POLICY": "once"}).output
    assert "once (from OTEL_RETRY_POLICY)" in output
    assert "200 (the default)" in output


def test_doctor_fails_on_a_wrong_setting_and_names_the_fix() -> None:
    result = call("doctor", env={"OTEL_RETRY_POLICY": "nonsense"})
    assert result.exit_code == 1
    assert "nonsense" in result.output
    assert "correct or unset OTEL_RETRY_POLICY" in result.output


def test_doctor_says_when_it_is_switched_off() -> None:
    output = call("doctor", env={"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "redis,otel_retry"}).output
    assert "keeps otel_retry off" in output


def test_doctor_never_shows_a_password() -> None:
    secret = "s3cret"
    result = call(
        "doctor",
        "--uri",
        f"mongodb://user:{secret}@127.0.0.1:1",
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://user:{secret}@127.0.0.1:1"},
    )
    assert result.exit_code == 1
    assert secret not in result.output


def test_piped_output_has_no_colours() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from otel_retry.cli import main; main()", "explain", "find", "network"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_without_the_extra_one_line_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['click'] = None; from otel_retry.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'otel-retry[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
