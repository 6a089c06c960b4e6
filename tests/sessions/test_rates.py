"""How often and how fast, under a clock of our own."""

from __future__ import annotations

import pytest

from sessions.rates import Backoff, Bucket, Every


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_every_is_due_first_and_after_interval(clock: Clock) -> None:
    every = Every(2, clock)
    assert [every.is_due(), every.is_due()] == [True, False]
    clock.now += 1.9
    assert not every.is_due()
    clock.now += 0.2
    assert every.is_due()


def test_bucket_refills_at_rate_up_to_its_limit(clock: Clock) -> None:
    bucket = Bucket(2000, clock=clock)
    assert bucket.left(10_000) == 500
    bucket.spend(500)
    assert bucket.left(10_000) == 0
    clock.now += 0.125
    assert bucket.left(10_000) == 250
    assert bucket.left(50) == 50
    clock.now += 3600
    assert bucket.left(10_000) == 500


def test_overspent_bucket_refills_before_use(clock: Clock) -> None:
    bucket = Bucket(100, clock=clock)
    bucket.spend(35)
    clock.now += 0.0625
    assert bucket.left(10) < 0
    clock.now += 0.125
    assert bucket.left(10) == 8


def test_bucket_after_pause_holds_its_burst(clock: Clock) -> None:
    bucket = Bucket(20, 60, clock)
    clock.now += 3600
    assert sum(bucket.consume() for _ in range(1000)) == 60
    clock.now += 1
    assert [bucket.consume(12), bucket.consume(12), bucket.consume(8)] == [True, False, True]


def test_smallest_bucket_rate_permits_one(clock: Clock) -> None:
    bucket = Bucket(1, clock=clock)
    assert bucket.left(500) == 1


def test_backoff_grows_until_reset() -> None:
    backoff = Backoff(0.2, 30)
    waits = [backoff.next() for _ in range(20)]
    for number, wait in enumerate(waits):
        longest = min(0.2 * 2**number, 30)
        assert longest / 2 <= wait <= longest
    backoff.reset()
    assert backoff.next() <= 0.2
