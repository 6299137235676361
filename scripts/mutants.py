"""Break each rule once and see a test go red: `make mutants`.

Each mutant is one edit of the package, made in a copy. The tests named for it run against the copy; if they still
pass, the rule has no test, and that is a failure here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands in `file` exactly once, becomes `new`."""

    rule: str
    file: str
    old: str
    new: str
    tests: str = "tests/unit/test_machine.py tests/unit/test_pacing.py tests/unit/test_drivers.py"


MUTANTS = (
    Mutant(
        "the budget is checked",
        "machine.py",
        "self._budget is not None and not self._budget.try_withdraw()):",
        "self._budget is not None and self._budget.try_withdraw() is None):",
    ),
    Mutant(
        "the token is taken before the sleep, not after it",
        "machine.py",
        "        if self._breaks(Rule.BUDGET, self._budget is not None and not self._budget.try_withdraw()):\n"
        "            return Reason.BUDGET\n",
        "",
    ),
    Mutant(
        "the token is taken last, after the deadline was asked",
        "machine.py",
        "        delay = self._delay_before_retry(failure, decision)\n",
        "        if self._budget is not None and not self._budget.try_withdraw():\n            return Reason.BUDGET\n"
        "        delay = self._delay_before_retry(failure, decision)\n",
    ),
    Mutant(
        "the error raised is the last that may have written",
        "machine.py",
        "            return self._error\n        return failure.error",
        "            return failure.error\n        return failure.error",
    ),
    Mutant(
        "an error that hides the attempt gives way to the one before",
        "machine.py",
        "failure.kind in _TELLS_OF_NO_ATTEMPT or NO_WRITES_PERFORMED in failure.labels",
        "NO_WRITES_PERFORMED in failure.labels",
    ),
    Mutant(
        "success after a retry deposits",
        "machine.py",
        "self._budget.deposit_retried_success()  # seed 001, rule 2",
        "pass",
    ),
    Mutant(
        "success at once deposits",
        "machine.py",
        "self._budget.deposit_first_success()  # seed 001, rule 1",
        "pass",
    ),
    Mutant(
        "a retry that fails otherwise deposits",
        "machine.py",
        "self._budget.deposit_other_failure()  # seed 001, rule 3",
        "pass",
    ),
    Mutant(
        "five retries, not four or six",
        "machine.py",
        "limit is not None and self.retries >= limit",
        "limit is not None and self.retries + 1 >= limit",
    ),
    Mutant(
        "attempts count from 1",
        "machine.py",
        "number=self.retries + 1,",
        "number=self.retries,",
    ),
    Mutant(
        "the backoff counts from 0",
        "policy.py",
        'BACKPRESSURE = Rules(name="backpressure", bucket=True, overload_retries=5)',
        'BACKPRESSURE = Rules(name="backpressure", bucket=True, overload_retries=5, backoff=Backoff(first_exponent=1))',
    ),
    Mutant(
        "jitter scales the backoff",
        "pacing.py",
        "return min(max(jitter, 0.0), 1.0) * max(ceiling, 0.0)",
        "return max(ceiling, 0.0)",
    ),
    Mutant(
        "no wait is longer than the maximum",
        "pacing.py",
        "min(self.maximum, (self.base if base is None else base) * 2.0**exponent)",
        "(self.base if base is None else base) * 2.0**exponent",
    ),
    Mutant(
        "the bucket never holds more than its capacity",
        "pacing.py",
        "added = min(tenths, self._top - self._tenths)",
        "added = tenths",
    ),
    Mutant(
        "an overload limits the rest of the operation",
        "machine.py",
        "self._overloaded = self._overloaded or failure.overloaded",
        "self._overloaded = failure.overloaded",
    ),
    Mutant(
        "nothing is repeated in a transaction",
        "machine.py",
        "            situation.in_transaction\n            and self._facts.kind",
        "            False\n            and self._facts.kind",
    ),
    Mutant(
        "a write that may have been applied is not sent twice",
        "machine.py",
        "            failure.nothing_executed\n            or situation.retryable",
        "            True\n            or situation.retryable",
    ),
    Mutant(
        "an unacknowledged write is never repeated",
        "machine.py",
        "self._breaks(Rule.ACKNOWLEDGED, not situation.acknowledged)",
        "self._breaks(Rule.ACKNOWLEDGED, False)",
    ),
    Mutant(
        "retryReads and retryWrites gate",
        "machine.py",
        "self._breaks(Rule.ENABLED, not self._facts.enabled)",
        "self._breaks(Rule.ENABLED, False)",
    ),
    Mutant(
        "an overloaded server is deprioritised",
        "machine.py",
        "situation.sharded or (failure.overloaded and self._rules.deprioritises_overloaded)",
        "situation.sharded",
    ),
    Mutant(
        "each command of a bulk write has its own limit",
        "machine.py",
        "        self.retries = 0\n        self._error = None\n        self._overloaded = False\n\n    def _deposit",
        "        self._error = None\n        self._overloaded = False\n\n    def _deposit",
    ),
    Mutant(
        "once means once",
        "policies/once.py",
        "return context.retries < 1",
        "return context.retries < 2",
    ),
    Mutant(
        "two socket timeouts end a persistent read",
        "policies/persistent.py",
        "context.network_timeouts < 2",
        "context.network_timeouts < 3",
    ),
    Mutant(
        "without a deadline one retry",
        "policies/specified.py",
        "context.overload_seen or context.retries < 1 or context.remaining is not None",
        "True",
    ),
    Mutant(
        "the driver's state is prepared before the wait",
        "drivers.py",
        "        execution.prepare(step)\n        if step.delay:\n            sleep(step.delay)",
        "        if step.delay:\n            sleep(step.delay)\n        execution.prepare(step)",
    ),
    Mutant(
        "all attempts carry one txnNumber",
        "pymongo/seam/operation.py",
        "        self._retrying = True\n        if self._bulk",
        "        self._retrying = True\n        if self._session is not None and self._retryable and not self._is_read:\n"
        "            self._session._start_retryable_write()\n        if self._bulk",
        "tests/spec/test_writes.py",
    ),
    Mutant(
        "a commit goes on with w: majority once it has failed otherwise",
        "pymongo/seam/operation.py",
        "transaction.attempt = max(0, transaction.attempt - 1)",
        "transaction.attempt = 0",
        "tests/spec/test_pymongo_defects.py",
    ),
    Mutant(
        "a transaction is not begun twice by a bulk write",
        "pymongo/seam/operation.py",
        "            self.otr_transaction_state = self._session._transaction.state\n        if machine",
        "            pass\n        if machine",
        "tests/spec/test_overload_in_transactions.py",
    ),
    Mutant(
        "a stale error of a client bulk write is forgotten",
        "pymongo/seam/operation.py",
        '        result["error"] = None',
        "        pass",
        "tests/spec/test_pymongo_defects.py",
    ),
    Mutant(
        "a bulk write that has begun no command is not marked as one under way",
        "pymongo/seam/operation.py",
        'if getattr(self._bulk, "current_run", self._bulk) is not None:',
        "if True:",
        "tests/chaos/test_defects_found.py",
    ),
    Mutant(
        "an insert of a bulk write does not count as one that recognises its own document",
        "pymongo/seam/operation.py",
        "single = len(statements) == 1 and self._bulk is None",
        "single = len(statements) == 1",
        "tests/chaos/test_defects_found.py",
    ),
    Mutant(
        "a policy's delay is checked to be a sane number",
        "policy.py",
        "    if not 0 <= delay <= LONGEST_DELAY:  # a NaN is neither",
        "    if not 0 <= delay <= LONGEST_DELAY and delay == delay:",
        "tests/hostile/test_policies.py",
    ),
    Mutant(
        "a fault is logged without the application's error",
        "logs.py",
        "        fault.__context__ = fault.__cause__ = None  # it ends here: nobody else will look at it\n",
        "",
        "tests/unit/test_logs.py",
    ),
    Mutant(
        "no array gives a value away",
        "telemetry/query_text.py",
        "        elif self._raw:\n            if",
        "        elif self._raw or depth > 2:\n            if",
        "tests/hostile/test_values.py -k text_of_a_query",
    ),
    Mutant(
        "a setting that is an address is not repeated",
        "config.py",
        '    if scheme:\n        text = f"{before}://…"\n',
        "",
        "tests/hostile/test_passwords.py -k wrong_setting",
    ),
)


def survives(mutant: Mutant, python: str) -> tuple[bool, float]:
    """Whether the tests still pass with this edit, and how long they took."""
    with tempfile.TemporaryDirectory(prefix="otel_retry-mutant-") as folder:
        copy = Path(folder)
        # The whole project is copied and the tests run there, so that no path can lead back to the original.
        for name in ("otel_retry", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "otel_retry" / mutant.file
        source = target.read_text()
        if source.count(mutant.old) != 1:
            sys.exit(f"{mutant.file} no longer holds exactly once what this mutant edits: {mutant.rule}")
        target.write_text(source.replace(mutant.old, mutant.new))
        began = time.monotonic()
        done = subprocess.run(
            [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in {0, 1}:
            sys.exit(f"the tests did not run for: {mutant.rule}\n{done.stdout}\n{done.stderr}")
        return done.returncode == 0, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the mutants whose rule contains this text")
    chosen = [mutant for mutant in MUTANTS if parser.parse_args().only in mutant.rule]
    survivors = []
    for number, mutant in enumerate(chosen, 1):
        alive, seconds = survives(mutant, sys.executable)
        print(
            f"[{number}/{len(chosen)}] {'SURVIVED' if alive else 'killed  '} {seconds:5.1f} s  {mutant.rule}",
            flush=True,
        )
        if alive:
            survivors.append(mutant)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
