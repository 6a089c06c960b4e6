from __future__ import annotations

import pytest

from scheduling.channels.base import Delivered, Outcome, Permanent, Transient, Unknown
from scheduling.channels.breaker import Breaker, is_dead

DEAD = Transient("connect")
ALIVE = Transient("http_503")


def broken(breaker: Breaker, now: float = 0.0, key: str = "a") -> None:
    for _ in range(5):
        breaker.record(key, DEAD, now)


@pytest.mark.parametrize(
    ("outcome", "dead"),
    [
        (Transient("dns"), True),
        (Transient("connect"), True),
        (Transient("connect_timeout"), True),
        (Transient("tls"), True),
        (Unknown("timeout"), True),
        (Unknown("disconnected"), False),
        (Transient("no_time"), False),
        (Transient("http_503"), False),
        (Permanent("http_404"), False),
        (Delivered(), False),
    ],
)
def test_what_counts_as_dead(outcome: Outcome, dead: bool) -> None:
    assert is_dead(outcome) is dead


def test_four_failures_in_a_row_are_forgiven() -> None:
    breaker = Breaker()
    for _ in range(4):
        breaker.record("a", DEAD, 0.0)
    assert breaker.admit("a", 0.0) == 0

    breaker.record("a", ALIVE, 0.0)
    for _ in range(4):
        breaker.record("a", DEAD, 0.0)

    assert breaker.admit("a", 0.0) == 0


def test_the_fifth_shuts_the_target_for_30_seconds_and_no_other() -> None:
    breaker = Breaker()
    broken(breaker, now=100.0)

    assert breaker.admit("a", 100.0) == 30
    assert breaker.admit("a", 129.0) == 1
    assert breaker.admit("b", 100.0) == 0
    assert breaker.shut(110.0) == {"a": 20}


def test_then_one_probe_is_let_through_and_its_fate_decides() -> None:
    breaker = Breaker()
    broken(breaker)

    assert breaker.admit("a", 30.0) == 0
    assert breaker.admit("a", 30.0) == 30
    breaker.record("a", DEAD, 35.0)
    assert breaker.admit("a", 36.0) == 29

    assert breaker.admit("a", 65.0) == 0
    breaker.record("a", Delivered(), 65.1)
    assert breaker.admit("a", 65.2) == 0
    assert breaker.admit("a", 65.2) == 0
    assert breaker.shut(65.2) == {}


def test_a_probe_that_never_reports_costs_one_rest() -> None:
    breaker = Breaker()
    broken(breaker)
    breaker.admit("a", 30.0)

    assert breaker.admit("a", 59.0) == 1
    assert breaker.admit("a", 60.0) == 0


def test_memory_is_bounded() -> None:
    breaker = Breaker(remember=3)
    for key in "abcd":
        broken(breaker, key=key)

    assert breaker.admit("a", 0.0) == 0
    assert set(breaker.shut(0.0)) == {"b", "c", "d"}
