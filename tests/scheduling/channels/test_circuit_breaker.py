from __future__ import annotations

from scheduling.channels.base import Delivered, Outcome, Permanent, Transient, Unknown
from scheduling.delivery.lanes import Breaker, is_receiver_dead
from tests.support.tables import each_row

DEAD = Transient("connect")
ALIVE = Transient("http_503")


def broken(breaker: Breaker, now: float = 0.0, key: str = "a") -> None:
    for _ in range(5):
        breaker.record(key, DEAD, now)


@each_row(
    "outcome, dead",
    [
        (Transient("dns"), True),
        (Transient("connect"), True),
        (Transient("connect_timeout"), True),
        (Transient("tls"), True),
        (Transient("proxy"), True),
        (Unknown("timeout"), True),
        (Unknown("disconnected"), False),
        (Transient("no_time"), False),
        (Transient("http_503"), False),
        (Permanent("http_404"), False),
        (Delivered(), False),
    ],
)
def test_is_receiver_dead_by_outcome(outcome: Outcome, dead: bool) -> None:
    assert is_receiver_dead(outcome) is dead


def test_breaker_opens_target_after_five_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(2):
        breaker.record("a", ALIVE, 100.0)
        for _ in range(4):
            breaker.record("a", DEAD, 100.0)
        assert breaker.admit("a", 100.0) == 0
    for _ in range(200):  # of calls at the same time
        breaker.record("a", DEAD, 100.0)

    assert breaker.admit("a", 100.0) == 30
    assert breaker.admit("a", 129.0) == 1
    assert breaker.admit("b", 100.0) == 0
    assert breaker.resting_targets(110.0) == {"a": 20}


def test_breaker_admits_one_probe_that_decides() -> None:
    breaker = Breaker()
    broken(breaker)

    assert breaker.admit("a", 30.0) == 0
    assert breaker.admit("a", 30.0) == 30
    breaker.record("a", DEAD, 35.0)
    assert breaker.admit("a", 36.0) == 59

    assert breaker.admit("a", 95.0) == 0
    breaker.record("a", Delivered(), 95.1)
    assert breaker.admit("a", 95.2) == 0
    assert breaker.admit("a", 95.2) == 0
    assert breaker.resting_targets(95.2) == {}


def failed_probe(breaker: Breaker, now: float) -> float:
    """The rest after it."""
    assert breaker.admit("a", now) == 0
    breaker.record("a", DEAD, now)
    return breaker.admit("a", now)


def test_breaker_failed_probes_double_the_rest() -> None:
    """At 30 s for ever a touch that may wait for three days was judged 8,640 times."""
    breaker = Breaker()
    broken(breaker)
    now, rests = 30.0, []
    for _ in range(1_100):  # a week; doubled for so long, a number would be too large for a float
        rests.append(failed_probe(breaker, now))
        now += rests[-1]

    assert rests[:6] == [60, 120, 240, 480, 600, 600]
    assert set(rests[6:]) == {600}

    assert breaker.admit("a", now) == 0
    breaker.record("a", ALIVE, now)
    broken(breaker, now=now)
    assert breaker.admit("a", now) == 30, "a response begins anew"


@each_row("probes", [0, 5])
def test_breaker_lost_probe_costs_the_first_rest(probes: int) -> None:
    breaker = Breaker()
    broken(breaker)
    now = 30.0
    for _ in range(probes):
        now += failed_probe(breaker, now)
    breaker.admit("a", now)

    assert breaker.admit("a", now + 29) == 1
    assert breaker.admit("a", now + 30) == 0


def test_breaker_memory_is_bounded() -> None:
    breaker = Breaker(remember=3)
    for key in "abcd":
        broken(breaker, key=key)

    assert breaker.admit("a", 0.0) == 0
    assert set(breaker.resting_targets(0.0)) == {"b", "c", "d"}
