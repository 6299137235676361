"""The questions that the machine asks, in their order, and the text that asks each of them.

`otel-retry explain` prints them as the machine comes by; there is no second table.
"""

from __future__ import annotations

from enum import Enum


class Rule(Enum):
    """(where it is written, what must hold for another attempt)."""

    MENDABLE = (
        'seed 004, "Hard-coded rules"',
        "it is no validation, authorisation or programming error: those are raised at once",
    )
    SERVER_FOUND = (
        'seed 000 3a, seed 002, seed 003 "Executing Retryable Write Commands"',
        "a server was found for the retry; if not, the error before it is raised",
    )
    ENABLED = (
        'seed 000 "retryReads", seed 003 "retryWrites", seed 001',
        "the client's options allow it: reads need retryReads, writes retryWrites, generic commands both",
    )
    ACKNOWLEDGED = (
        'seeds 002, 003 "Unsupported Write Operations"',
        "the write is acknowledged: w: 0 is never repeated",
    )
    OUTSIDE_TRANSACTION = (
        'seed 003 "Retryable Writes Within Transactions", seed 000 2a',
        "it is in no transaction, or it is commit or abort, or the server rejected it for overload",
    )
    POLICY = ("seed 004, the policy", "the policy says so")
    AT_MOST_ONCE = (
        'seeds 002, 003 "Unsupported Write Operations", seed 004 "Retries and idempotence"',
        "nothing was executed, or MongoDB makes the repetition safe, or it is idempotent",
    )
    OVERLOAD_LIMIT = (
        "seed 001, rule 4",
        "once an overload was seen: not more retries than the limit, also under a deadline",
    )
    DEADLINE = (
        "seed 001, rule 4; seed 003, CSOT",
        "the wait ends before the deadline of timeoutMS; otherwise it is not even begun and costs no token",
    )
    BUDGET = ('seed 001, rule 4 and "Token Bucket"', "a token can be taken from the client's bucket")

    @property
    def citation(self) -> str:
        return self.value[0]

    @property
    def question(self) -> str:
        return self.value[1]
