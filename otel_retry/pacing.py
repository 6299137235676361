"""How fast and how often retries may come: values and arithmetic, no clock, no randomness, no sleep."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

TENTHS = 10
"""The bucket counts in tenths of a token, in integers: ten deposits of 0.1 are exactly one token."""

CAPACITY = 1000
"""Tokens. Seed 001, "Token Bucket": the same as the server's."""

_RETRY_COST = TENTHS
_SUCCESS_RETURN = 1  # RETRY_TOKEN_RETURN_RATE, 0.1 token (seed 001, rule 1)


class TokenBucket:
    """One client's budget for retries. Invariant: 0 <= tokens <= capacity, and
    tokens == capacity + deposited - consumed, whatever the threads do.
    """

    __slots__ = ("_consumed", "_denied", "_deposited", "_lock", "_tenths", "_top")

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._top = self._tenths = capacity * TENTHS
        self._consumed = self._deposited = self._denied = 0
        self._lock = threading.Lock()

    @property
    def capacity(self) -> float:
        return self._top / TENTHS

    @property
    def tokens(self) -> float:
        return self._tenths / TENTHS

    @property
    def consumed(self) -> float:
        """Tokens taken for retries since the start."""
        return self._consumed / TENTHS

    @property
    def deposited(self) -> float:
        """Tokens that came back since the start; what a full bucket spilled is not counted."""
        return self._deposited / TENTHS

    @property
    def denied(self) -> int:
        """Retries refused because the bucket was empty."""
        return self._denied

    def try_withdraw(self) -> bool:
        """Take the price of one retry, or nothing.

        Not a mere check: it changes the bucket, so it comes last, after everything else that could refuse the
        retry, or refused retries would cost tokens.
        """
        with self._lock:
            if self._tenths < _RETRY_COST:
                self._denied += 1
                return False
            self._tenths -= _RETRY_COST
            self._consumed += _RETRY_COST
            return True

    def deposit_first_success(self) -> None:
        """Seed 001, rule 1. This is on the path of every operation: a full bucket costs one read."""
        if self._tenths < self._top:
            self._deposit(_SUCCESS_RETURN)

    def deposit_retried_success(self) -> None:
        """Seed 001, rule 2."""
        self._deposit(_RETRY_COST + _SUCCESS_RETURN)

    def deposit_other_failure(self) -> None:
        """Seed 001, rule 3: a retry failed, but not by overload."""
        self._deposit(_RETRY_COST)

    def _deposit(self, tenths: int) -> None:
        with self._lock:
            added = min(tenths, self._top - self._tenths)
            self._tenths += added
            self._deposited += added

    def renew_lock(self) -> None:
        """After a fork another thread's hold on the lock would never end."""
        self._lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff with full jitter: `jitter * min(maximum, base * 2 ** n)` seconds."""

    base: float = 0.1
    maximum: float = 10.0
    first_exponent: int = 0

    def delay(self, retries: int, jitter: float, base: float | None = None) -> float:
        """The wait before the next retry, when `retries` were made already.

        `base` is the server's hint, if it gave one; the maximum holds for it too.
        """
        # 2 ** 64 passes every sane maximum; without the cap a persistent loop would build huge integers.
        exponent = min(retries + self.first_exponent, 64)
        ceiling = min(self.maximum, (self.base if base is None else base) * 2.0**exponent)
        if not math.isfinite(ceiling):
            ceiling = self.maximum
        return min(max(jitter, 0.0), 1.0) * max(ceiling, 0.0)
