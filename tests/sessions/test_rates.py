"""How often and how fast, under a clock that only the test moves."""

import time

from sessions.rates import Backoff, Bucket


def test_bucket_refills_at_rate_up_to_its_limit(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    quarter, burst, smallest = Bucket(2000), Bucket(20, 60), Bucket(1)
    assert (quarter.left(10_000), burst.left(10_000), smallest.left(10_000)) == (500, 60, 1)
    quarter.spend(500)
    now += 0.125
    assert (quarter.left(10_000), quarter.left(50)) == (250, 50)
    now += 3600
    assert (quarter.left(10_000), burst.left(10_000), smallest.left(10_000)) == (500, 60, 1)


def test_backoff_grows_until_reset():
    backoff = Backoff(0.2, 30)
    for number in range(20):
        longest = min(0.2 * 2**number, 30)
        assert longest / 2 <= backoff.next() <= longest
    backoff.reset()
    assert backoff.next() <= 0.2
