"""scripts/backends.py, with a Go that only pretends: what it says, what it leaves behind, and two of them at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "backends.py"

# Compose is the plainest of them: one module, one binary named cmd.
ONE = "compose"

GO = """\
#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$1" in
  env) echo {version} ;;
  mod) echo '{{"Dir": "{source}"}}' ;;
  build)
    while [ -e "{gate}" ]; do sleep 0.05; done
    [ -z "{failure}" ] || {{ echo "{failure}"; exit 1; }}
    while [ "$1" != -o ]; do shift; done
    echo built > "$2/cmd" ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """One with a cache of its own, and with whatever Go the test gives it."""

    folder: Path

    @property
    def gate(self) -> Path:
        """As long as it is there, Go does not come to an end."""
        return self.folder / "gate"

    @property
    def cache(self) -> Path:
        return self.folder / "cache" / "otel_retry" / "backends"

    def builds(self) -> int:
        calls = self.folder / "calls"
        return calls.read_text().count("build ") if calls.exists() else 0

    def give_go(self, *, version: str = "go1.26.1", failure: str = "") -> None:
        source = self.folder / "source"
        source.mkdir()
        go = self.folder / "go"
        go.write_text(GO.format(version=version, source=source, gate=self.gate, failure=failure))
        go.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={
                **os.environ,
                "XDG_CACHE_HOME": str(self.folder / "cache"),
                "GO": str(self.folder / "go"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        return finish(self.start(*arguments))


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_check_says_what_is_missing_and_builds_nothing(machine: Machine) -> None:
    machine.give_go()
    code, output = machine.run("--check")
    assert code == 1
    assert [line.split()[0] for line in output.splitlines() if ": missing" in line] == [
        "prometheus",
        "otelcol",
        "jaeger",
        "compose",
    ]
    assert machine.builds() == 0
    assert not machine.cache.exists()


def test_without_go_it_says_where_to_get_it(machine: Machine) -> None:
    code, output = machine.run(ONE)
    assert code == 1
    assert "The backends are built with Go, and there is none here" in output
    assert "https://go.dev/dl/" in output
    assert "Traceback" not in output


def test_a_go_that_is_too_old_is_refused(machine: Machine) -> None:
    machine.give_go(version="go1.25.9")
    code, output = machine.run(ONE)
    assert code == 1
    assert "is go1.25.9, and the backends need go1.26" in output
    assert machine.builds() == 0


def test_a_name_that_there_is_not_is_a_wrong_call(machine: Machine) -> None:
    code, output = machine.run("grafana")
    assert code == 2
    assert "no such backend: grafana; there are prometheus, otelcol, jaeger, compose" in output


def test_what_is_built_is_there_and_is_not_built_again(machine: Machine) -> None:
    machine.give_go()
    code, output = machine.run(ONE)
    assert code == 0, output
    assert "building" in output
    assert [path.name for path in machine.cache.glob("compose-*/*")] == ["cmd"]
    assert machine.run(ONE, "--check")[0] == 0
    code, output = machine.run(ONE)
    assert (code, machine.builds()) == (0, 1)
    assert ": installed (" in output


def test_a_build_that_fails_tells_what_go_said_and_leaves_nothing_half_done(machine: Machine) -> None:
    machine.give_go(failure="main.go:7: undefined: everything")
    code, output = machine.run(ONE)
    assert code == 1
    assert "main.go:7: undefined: everything" in output
    assert "Traceback" not in output
    assert [path.name for path in machine.cache.iterdir()] == [".lock"]
    assert machine.run(ONE, "--check")[0] == 1


def test_of_two_runs_at_once_the_second_waits_and_finds_it_built(machine: Machine) -> None:
    machine.give_go()
    machine.gate.touch()
    first = machine.start(ONE)
    _until(lambda: machine.builds() == 1)
    second = machine.start(ONE)
    assert second.stdout is not None
    said = ""
    while "another run is building: waiting for it" not in said:
        line = second.stdout.readline()
        assert line, said
        said += line
    machine.gate.unlink()
    assert finish(first)[0] == 0
    assert finish(second)[0] == 0
    assert machine.builds() == 1


def test_a_run_that_was_killed_does_not_lock_out_the_next(machine: Machine) -> None:
    machine.give_go()
    machine.gate.touch()
    first = machine.start(ONE)
    _until(lambda: machine.builds() == 1)
    first.kill()
    first.wait()
    machine.gate.unlink()
    code, output = machine.run(ONE)
    assert code == 0, output
    # Its Go still holds the pipe until it has ended as well.
    first.communicate(timeout=60)


def _until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
