"""PyMongo's own test suite, run once without and once with otel_retry, and compared test by test.

Run it with `make conformance`. A test that passes without the plugin must pass with it under policy `current`,
which promises to behave as the driver does; exit status 1 says that one did not. The suite comes from
PyMongo's sdist, the driver from its wheel, the server is a real replica set of its own for each run, since
the suite sets fail points that would hit a neighbour. Nothing is written outside `.cache` and `.venvs`.
"""
# ruff: noqa: T201 - a script: its output is its purpose

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import venv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Literal

from otel_retry import mongod

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
REQUIREMENTS = ["pytest>=8.2", "pytest-asyncio>=0.24", "importlib_metadata>=7"]
TIME_LIMIT = 600.0  # seconds for one module in one configuration

# One node will do, but some tests read from a secondary or retry on one.
NODES = {"test_transactions_unified": 2, "test_retryable_reads": 2}

# The suite inserts batches of 48 MB, which need more than the small cache that other tests are content with.
LARGER_CACHE = {"setParameter": 1, "wiredTigerEngineRuntimeConfig": "cache_size=1GB"}

# The longest first, so that two workers finish at about the same time.
MODULES = [
    "test_csot",
    "test_retryable_reads_unified",
    "test_transactions_unified",
    "test_retryable_writes_unified",
    "test_client_backpressure",
    "test_transactions",
    "test_retryable_writes",
    "test_retryable_reads",
    "test_command_monitoring",
    "test_command_logging",
    "test_operation_id_retry",
]

_COUNTS_CALLS = (
    "it counts the calls of PyMongo's own _RetryPolicy.backoff, which otel_retry does not use; that ours "
    "waits after overloads only: tests/unit/test_machine.py::test_only_an_overload_makes_it_wait"
)
_WANTS_SILENCE = (
    "it wants no operation id made while nobody listens to commands; otel_retry's spans do listen"
)

# Differences that stand for a good reason: (PyMongo version or "*", test id) → the reason.
EXPLAINED: dict[tuple[str, str], str] = {
    ("*", f"test/{flavour}{test}"): reason
    for flavour in ("", "asynchronous/")
    for test, reason in {
        "test_retryable_reads.py::TestRetryableReads"
        "::test_backoff_is_not_applied_for_non_overload_errors": _COUNTS_CALLS,
        "test_retryable_writes.py::TestErrorPropagationAfterEncounteringMultipleErrors"
        "::test_backoff_is_not_applied_for_non_overload_errors": _COUNTS_CALLS,
        "test_operation_id_retry.py::TestOperationIdRetry"
        "::test_retry_without_telemetry_creates_no_operation_id": _WANTS_SILENCE,
        "test_operation_id_retry.py::TestOperationIdRetry"
        "::test_bulk_write_without_telemetry_creates_no_operation_id": _WANTS_SILENCE,
    }.items()
}

Configuration = Literal["without", "with"]
CONFIGURATIONS: tuple[Configuration, ...] = ("without", "with")
OUTCOMES = ("pass", "skip", "xfail", "fail")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """PyMongo's tests on disk, and the interpreter that has the same version installed."""

    version: str
    python: Path
    folder: Path

    def modules(self, names: list[str]) -> tuple[list[str], list[str]]:
        """The modules' paths, sync and async, parted into those that this version has and has not."""
        paths = [f"test/{flavour}{name}.py" for name in names for flavour in ("", "asynchronous/")]
        return (
            [path for path in paths if (self.folder / path).exists()],
            [path for path in paths if not (self.folder / path).exists()],
        )


@dataclass(kw_only=True)
class Run:
    """One module in one configuration: each test's outcome, and what went wrong with the run as a whole."""

    module: str
    configuration: Configuration
    seconds: float = 0.0
    outcomes: dict[str, str] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    """How many operations otel_retry ran, errors it judged, spans it made."""
    logged: list[str] = field(default_factory=list)
    problem: str | None = None

    def counts(self) -> str:
        counted = Counter(self.outcomes.values())
        return "".join(f"{counted[outcome]:>6}" for outcome in OUTCOMES)


@dataclass(kw_only=True)
class Difference:
    test: str
    without: str
    with_: str
    verdict: str = "not a loss"
    loss: bool = False
    error: str = ""


def prepare(version: str) -> Suite:
    """Fetch the sdist and build the environment, unless an earlier run has."""
    return Suite(version=version, python=_environment(version), folder=_unpacked(version))


def _environment(version: str) -> Path:
    folder = ROOT / ".venvs" / f"conformance-{version}"
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    wanted = "\n".join([*REQUIREMENTS, sys.version, (ROOT / "pyproject.toml").read_text(encoding="utf-8")])
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        print(f"creating {folder.relative_to(ROOT)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        _pip(python, "install", f"pymongo=={version}", *REQUIREMENTS, "-e", str(ROOT))
        stamp.write_text(wanted, encoding="utf-8")
    return python


def _unpacked(version: str) -> Path:
    """`test/` and `pyproject.toml` alone: beside the sdist's `pymongo/` the installed wheel would be shadowed."""
    folder = CACHE / f"pymongo-{version}-suite"
    if folder.exists():
        return folder
    sdist = CACHE / f"pymongo-{version}.tar.gz"
    if not sdist.exists():
        print(f"fetching {sdist.relative_to(ROOT)}", flush=True)
        source = ["--no-deps", "--no-binary", "pymongo", "--dest", str(CACHE)]
        _pip(Path(sys.executable), "download", *source, f"pymongo=={version}")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch, tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
        wanted = Path(scratch, "suite")
        wanted.mkdir()
        for name in ("test", "pyproject.toml"):
            Path(scratch, f"pymongo-{version}", name).rename(wanted / name)
        wanted.rename(folder)
    return folder


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


class Runner:
    """Runs modules, each in a pytest of its own against a replica set of its own. `stop` ends what is under way."""

    def __init__(self, suite: Suite, *, policy: str, logs: Path) -> None:
        self._suite = suite
        self._policy = policy
        self._logs = logs
        self._stop = threading.Event()
        logs.mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        self._stop.set()

    def run(
        self, module: str, configuration: Configuration, tests: list[str] | None = None, suffix: str = ""
    ) -> Run:
        """Run a module, or only `tests` of it."""
        name = f"{_short(module).replace('/', '.')}-{configuration}{suffix}"
        report, output = self._logs / f"{name}.jsonl", self._logs / f"{name}.txt"
        report.unlink(missing_ok=True)
        run = Run(module=module, configuration=configuration)
        command = [self._suite.python, "-m", "pytest", "-o", "addopts=", "-q", "-p", "suite_plugin"]
        # An older suite and today's pytest: what pytest deprecates is no error here.
        command += ["-W", "ignore::pytest.PytestDeprecationWarning"]
        # Before the time limit ends a hang, its stack is in the output.
        command += ["-p", "no:cacheprovider", "-o", f"faulthandler_timeout={TIME_LIMIT / 4}"]
        with (
            mongod.start(nodes=NODES.get(Path(module).stem, 1)) as deployment,
            output.open("w", encoding="utf-8") as file,
        ):
            for node in deployment.nodes:
                node.command(LARGER_CACHE)
            environment = self._variables(configuration, report)
            seed = deployment.primary()
            environment |= {"DB_IP": seed.host, "DB_PORT": str(seed.port)}
            started = time.monotonic()
            process = subprocess.Popen(
                [*command, *(tests or [module])],
                cwd=self._suite.folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            status = self._wait(process, started + TIME_LIMIT)
            run.seconds = time.monotonic() - started
        reached = _read(report, run)
        if status is None:
            run.problem = f"hung: ended after {TIME_LIMIT:.0f} s in {reached}"
        elif reached:
            run.problem = f"pytest ended with status {status} in {reached}"
        elif status not in {0, 1}:  # 0: all passed, 1: some failed; all else is no verdict on the tests
            run.problem = f"pytest ended with status {status}"
        if run.problem:
            last = output.read_text(encoding="utf-8").strip().rpartition("\n")[2]
            run.problem += f": {last} (see {output.relative_to(ROOT)})"
        return run

    def _variables(self, configuration: Configuration, report: Path) -> dict[str, str]:
        """The caller's environment without what would change the suite, pytest or otel_retry."""
        foreign = ("OTEL_", "PYTEST_", "PYTHON", "DB_", "MONGO", "TEST_", "COMPRESSORS")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        variables["PYTHONPATH"] = str(Path(__file__).parent)
        variables["OTEL_RETRY_CONFORMANCE_REPORT"] = str(report)
        if configuration == "with":
            variables["OTEL_RETRY_CONFORMANCE_POLICY"] = self._policy
        return variables

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> int | None:
        """The exit status, or None for a process that had to be killed."""
        while True:
            try:
                return process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                if self._stop.is_set() or time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    return None


def _read(report: Path, run: Run) -> str:
    """Fill `run` from the plugin's report; answers where the run stopped, if it did not come to its end."""
    reached = "the preparation"
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    for facts in map(json.loads, lines):
        if "started" in facts:
            reached = facts["started"]
        elif "finished" in facts:
            run.seen, run.logged = facts["seen"], facts["logged"]
            reached = ""
        else:
            test = facts["test"]
            run.durations[test] = run.durations.get(test, 0.0) + facts.get("seconds", 0.0)
            if run.outcomes.get(test) != "fail":  # a teardown may fail after the test passed
                run.outcomes[test] = facts["outcome"]
            if facts["outcome"] == "fail":
                run.errors[test] = facts["error"]
    return reached


def compare(module: str, pair: dict[Configuration, Run], runner: Runner, version: str) -> list[Difference]:
    """The module's differences, each with its verdict.

    A test that failed with the plugin is run again in both configurations, with nothing beside it, to tell flakes
    from losses. So is one that failed without the plugin too, or a flake there would hide a loss here. And one that
    passes alone has its whole module run again, since it may fail for what the plugin kept from an earlier test.
    """
    if pair["without"].problem or pair["with"].problem:
        return []  # one of the runs did not come to its end: that is said elsewhere, and a failure by itself
    before, after = pair["without"].outcomes, pair["with"].outcomes
    differences = []
    for test in dict.fromkeys([*before, *after]):
        outcomes = before.get(test, "not run"), after.get(test, "not run")
        if outcomes[0] != outcomes[1] or outcomes[1] == "fail":
            error = pair["with"].errors.get(test, "")
            differences.append(Difference(test=test, without=outcomes[0], with_=outcomes[1], error=error))
    suspects = [each for each in differences if each.with_ == "fail" or each.without == "pass"]
    if suspects:
        print(f"running {len(suspects)} of {_short(module)} again, alone", flush=True)
        tests = [each.test for each in suspects]
        alone = [runner.run(module, each, tests, "-alone").outcomes for each in CONFIGURATIONS]
        whole = {}
        if any(alone[1].get(test) == "pass" for test in tests):
            print(f"running the whole of {_short(module)} again, with the plugin", flush=True)
            whole = runner.run(module, "with", suffix="-again").outcomes
        for each in suspects:
            _settle(each, version, *(outcomes.get(each.test, "not run") for outcomes in (*alone, whole)))
    return differences


def _settle(difference: Difference, version: str, alone_without: str, alone_with: str, again: str) -> None:
    seen = f"(alone: {alone_without} without, {alone_with} with"
    seen += f"; its module again: {again} with)" if alone_with == "pass" else ")"
    reason = EXPLAINED.get((version, difference.test)) or EXPLAINED.get(("*", difference.test))
    if alone_with == again == "pass":
        difference.verdict = f"flake {seen}"
    elif "pass" not in {difference.without, alone_without}:
        difference.verdict = f"not a loss {seen}"
    elif reason:
        difference.verdict = f"explained: {reason} {seen}"
    else:
        difference.verdict = f"LOSS {seen}"
        difference.loss = True


def run_all(runner: Runner, modules: list[str], jobs: int) -> dict[str, dict[Configuration, Run]]:
    runs: dict[str, dict[Configuration, Run]] = {module: {} for module in modules}
    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(runner.run, module, configuration)
            for module in modules
            for configuration in CONFIGURATIONS
        ]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                run = future.result()
                runs[run.module][run.configuration] = run
                counted = Counter(run.outcomes.values())
                summary = ", ".join(
                    f"{counted[outcome]} {outcome}" for outcome in OUTCOMES if counted[outcome]
                )
                print(
                    f"[{done:>2}/{len(futures)}] {run.seconds:6.1f} s  {_short(run.module):<42}"
                    f" {run.configuration:<8} {run.problem or summary}",
                    flush=True,
                )
        except BaseException:
            runner.stop()
            pool.shutdown(cancel_futures=True)
            raise
    return runs


def print_table(runs: dict[str, dict[Configuration, Run]], absent: list[str]) -> None:
    heading = "".join(f"{outcome:>6}" for outcome in OUTCOMES) + f"{'s':>8}"
    print(f"\n{'':<42} |{'without the plugin':^32} |{'with it':^32}")
    print(f"{'module':<42} |{heading} |{heading}")
    for module, pair in runs.items():
        cells = " |".join(f"{pair[each].counts()}{pair[each].seconds:8.1f}" for each in CONFIGURATIONS)
        print(f"{_short(module):<42} |{cells}")
    totals = []
    for each in CONFIGURATIONS:
        counted = Counter(outcome for pair in runs.values() for outcome in pair[each].outcomes.values())
        seconds = sum(pair[each].seconds for pair in runs.values())
        totals.append("".join(f"{counted[outcome]:>6}" for outcome in OUTCOMES) + f"{seconds:8.1f}")
    print(f"{'in all':<42} |{' |'.join(totals)}")
    for module in absent:
        print(f"{_short(module):<42} | not in this version")


def print_differences(differences: list[Difference]) -> None:
    print(f"\nTests that differ, or fail in both: {len(differences)}")
    for difference in differences:
        print(f"  {difference.test}\n    {difference.without} -> {difference.with_}: {difference.verdict}")
        if difference.loss and difference.error:
            said = [line for line in difference.error.splitlines() if line.startswith("E  ")]
            print(f"    {said[0][4:].strip() if said else difference.error.strip()}"[:300])


def _short(module: str) -> str:
    return module.removeprefix("test/").removesuffix(".py")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run PyMongo's own suite without and with otel_retry.")
    parser.add_argument("--pymongo", metavar="VERSION", default=installed_version("pymongo"))
    parser.add_argument(
        "--modules", metavar="A,B", help="only these, for example test_csot,test_transactions"
    )
    parser.add_argument("--policy", default="current")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="modules at a time, each with its mongod"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was seen")
    options = parser.parse_args()
    names = options.modules.split(",") if options.modules else MODULES
    if unknown := set(names) - set(MODULES):
        parser.error(f"unknown modules {sorted(unknown)}; known: {', '.join(MODULES)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that every mongod is stopped

    started = time.monotonic()
    suite = prepare(options.pymongo)
    runner = Runner(suite, policy=options.policy, logs=CACHE / f"conformance-{suite.version}")
    modules, absent = suite.modules(names)
    print(
        f"PyMongo {suite.version}, policy {options.policy}, {len(modules)} modules, {options.jobs} at a time"
    )
    runs = run_all(runner, modules, options.jobs)
    print_table(runs, absent)

    differences = [
        difference
        for module, pair in runs.items()
        for difference in compare(module, pair, runner, suite.version)
    ]
    print_differences(differences)

    everything = [run for pair in runs.values() for run in pair.values()]
    problems = [
        f"{_short(run.module)} {run.configuration}: {run.problem}" for run in everything if run.problem
    ]
    # It warns where it could not do its work, which no test here should bring about.
    logged = Counter(line for run in everything for line in run.logged)
    problems += [f"otel_retry logged {count} x {line}" for line, count in logged.most_common()]
    losses = sum(difference.loss for difference in differences)
    seen = sum((Counter(run.seen) for run in everything), Counter[str]())
    problems += [
        f"otel_retry saw no {what}: this run proves nothing"
        for what in ("operations", "errors", "spans")
        if not seen[what] and (what, options.policy) != ("errors", "driver")  # which judges none
    ]
    print(
        f"\notel_retry saw {seen['operations']} operations and {seen['errors']} errors, made {seen['spans']} spans"
    )
    print(f"{losses} tests lost, {time.monotonic() - started:.0f} s")
    for problem in problems:
        print(f"FAILED {problem}")
    if options.json:
        facts = {"pymongo": suite.version, "policy": options.policy, "absent": absent}
        facts |= {
            "runs": [asdict(run) for run in everything],
            "differences": [asdict(d) for d in differences],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 1 if losses or problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
