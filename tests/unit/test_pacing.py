from __future__ import annotations

import threading
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_retry.pacing import Backoff, TokenBucket


class BucketOracle:
    """The bucket as the seed's text says it, in exact fractions and without any of the real one's shortcuts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self.tokens = Fraction(capacity)

    def withdraw(self) -> bool:
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def deposit(self, amount: Fraction) -> None:
        self.tokens = min(self.capacity, self.tokens + amount)


MOVES = st.lists(st.sampled_from(["withdraw", "first", "retried", "other"]), max_size=200)


@given(capacity=st.integers(1, 5), moves=MOVES)
def test_the_bucket_counts_as_the_seed_says(capacity: int, moves: list[str]) -> None:
    bucket, oracle = TokenBucket(capacity=capacity), BucketOracle(capacity)
    for move in moves:
        if move == "withdraw":
            assert bucket.try_withdraw() == oracle.withdraw()
        elif move == "first":
            bucket.deposit_first_success()
            oracle.deposit(Fraction(1, 10))
        elif move == "retried":
            bucket.deposit_retried_success()
            oracle.deposit(Fraction(11, 10))
        else:
            bucket.deposit_other_failure()
            oracle.deposit(Fraction(1))
        assert bucket.tokens == float(oracle.tokens)
        assert 0 <= bucket.tokens <= bucket.capacity
        assert round(10 * (bucket.capacity + bucket.deposited - bucket.consumed)) == round(10 * bucket.tokens)


def test_a_new_bucket_is_full_and_holds_a_thousand() -> None:
    bucket = TokenBucket()
    assert bucket.capacity == bucket.tokens == 1000


def test_ten_first_successes_pay_for_one_retry() -> None:
    bucket = TokenBucket(capacity=1)
    assert bucket.try_withdraw()
    for _ in range(9):
        bucket.deposit_first_success()
        assert not bucket.try_withdraw()
    bucket.deposit_first_success()
    assert bucket.try_withdraw()


def test_denied_retries_are_counted_and_cost_nothing() -> None:
    bucket = TokenBucket(capacity=1)
    bucket.try_withdraw()
    assert not bucket.try_withdraw()
    assert (bucket.denied, bucket.consumed, bucket.tokens) == (1, 1, 0)


def test_many_threads_on_one_bucket_lose_no_token() -> None:
    bucket = TokenBucket(capacity=500)
    taken: list[int] = []

    def work() -> None:
        taken.append(sum(bucket.try_withdraw() for _ in range(50)))
        for _ in range(20):
            bucket.deposit_first_success()

    threads = [threading.Thread(target=work) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == bucket.consumed
    assert round(10 * bucket.tokens) == round(10 * (500 + bucket.deposited - bucket.consumed))
    assert bucket.denied == 64 * 50 - sum(taken)


def test_the_delays_are_those_of_the_seed() -> None:
    assert [Backoff().delay(retries, 1.0) for retries in range(5)] == [0.1, 0.2, 0.4, 0.8, 1.6]


@given(retries=st.integers(0, 10_000), jitter=st.floats(0, 1))
def test_no_delay_is_longer_than_ten_seconds_or_negative(retries: int, jitter: float) -> None:
    assert 0 <= Backoff().delay(retries, jitter) <= 10


@given(
    base=st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
    jitter=st.floats(allow_nan=False),
    retries=st.integers(0, 10_000),
)
def test_no_hint_of_a_server_makes_a_delay_that_cannot_be(
    base: float | None, jitter: float, retries: int
) -> None:
    assert 0 <= Backoff().delay(retries, jitter, base) <= 10


@pytest.mark.parametrize(("base", "expected"), [(None, 0.1), (0.05, 0.05), (30.0, 10.0)])
def test_a_servers_hint_takes_the_place_of_the_base(base: float | None, expected: float) -> None:
    assert Backoff().delay(0, 1.0, base) == expected
