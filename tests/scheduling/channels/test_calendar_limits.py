"""Limits of a vendor for each day and month, planned and counted in a real Redis."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from scheduling.channels import quota
from scheduling.channels.base import CalendarQuota, Quota
from scheduling.channels.quota import Grant, QuotaGate, SlotRequest, list_period_starts

ZERO, MINUTE, HOUR, DAY = timedelta(0), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
KEY = "webhook:shop"
LIMITED = (CalendarQuota(20, "day"),)


@pytest.fixture
def gate(server, valkey_url, monkeypatch):
    """Its days are 24 hours from the start of this quarter of an hour; three of them are a month."""
    first = datetime.now(UTC).replace(second=0, microsecond=0)
    first -= timedelta(minutes=first.minute % 15)

    def list_starts(period, now, longest):
        step = DAY if period == "day" else 3 * DAY
        return [first + number * step for number in range(int((longest + DAY) / step) + 2)]

    monkeypatch.setattr(quota, "list_period_starts", list_starts)
    made = QuotaGate.connect(valkey_url, margin=ZERO)
    yield made
    made.close()


def reserve_days(gate, count, quotas=LIMITED, *, priority=1, longest=10 * DAY, slot_came=False):
    """Return the day of each slot; -1 for a slot that comes too late."""
    requests = [SlotRequest(longest, slot_came)] * count
    return count_days(gate.reserve(quotas, {(KEY, priority): requests})[KEY, priority])


def count_days(waits):
    return [-1 if wait is None else -int(-wait // DAY) for wait in waits]


def test_count_of_a_month_outlives_the_day_of_another_row(gate, server):
    """Two channel rows with one receiver share its counts."""
    gate.acquire((CalendarQuota(20, "month"),), {KEY: 1})
    gate.acquire(LIMITED, {KEY: 1})

    (name,) = server.keys("*:used")
    assert timedelta(milliseconds=server.pttl(name)) > 3 * DAY


def test_list_period_starts_follows_the_zone(settings):
    settings.TIME_ZONE = "Europe/Berlin"
    before_change = datetime(2026, 10, 24, 21, 30, tzinfo=UTC)  # 23:30 there; the next day has 25 hours
    days = list_period_starts("day", before_change, DAY)
    months = list_period_starts("month", before_change, timedelta(days=80))

    assert [at.astimezone(UTC).isoformat() for at in days] == [
        "2026-10-23T22:00:00+00:00", "2026-10-24T22:00:00+00:00", "2026-10-25T23:00:00+00:00",
    ]  # fmt: skip
    assert [at.date().isoformat() for at in months] == [
        "2026-10-01",
        "2026-11-01",
        "2026-12-01",
        "2027-01-01",
        "2027-02-01",
    ]


def test_reserve_full_day_continues_on_the_next(gate):
    assert reserve_days(gate, 50) == [0] * 20 + [1] * 20 + [2] * 10
    assert reserve_days(gate, 15) == [2] * 10 + [3] * 5


def test_reserve_spreads_each_day_by_the_window(gate):
    quotas = (Quota(5, MINUTE), CalendarQuota(8, "day"))
    waits = gate.reserve(quotas, {(KEY, 1): [SlotRequest(10 * DAY)] * 16})[KEY, 1]

    assert [round((wait or ZERO) / MINUTE) for wait in waits[:8]] == [0] * 5 + [1] * 3
    later = [(wait or ZERO) - (waits[8] or ZERO) for wait in waits[8:]]
    assert [round(wait / MINUTE) for wait in later] == [0] * 5 + [1] * 3


def test_reserve_month_bounds_its_days(gate):
    quotas = (CalendarQuota(20, "day"), CalendarQuota(30, "month"))
    assert reserve_days(gate, 45, quotas) == [0] * 20 + [1] * 10 + [3] * 15


def test_reserve_counts_granted_slots_once(gate):
    reserve_days(gate, 10)
    assert gate.acquire(LIMITED, {KEY: 10}) == {KEY: Grant(10, ZERO)}

    assert reserve_days(gate, 12) == [0] * 10 + [1] * 2


def test_reserve_unused_slots_are_free_after_their_quarter(gate, server):
    """Their touches were suppressed, or their worker was killed."""
    reserve_days(gate, 20)
    (ahead,) = server.keys("at:quota:*:ahead:1")
    ((part, count),) = server.hgetall(ahead).items()
    server.delete(*server.keys("at:quota:*:plan:1"), ahead)
    server.hset(ahead, str(int(part) - 900_000_000), count)

    assert reserve_days(gate, 21) == [0] * 20 + [1]
    assert list(server.hgetall(ahead).values()) == ["20", "1"]


def test_reserve_slot_of_another_day_after_expiry_is_not_taken(gate):
    assert reserve_days(gate, 25, longest=HOUR / 60) == [0] * 20 + [-1] * 5
    assert reserve_days(gate, 1) == [1]


def test_reserve_high_priority_passes_the_plan_of_the_day(gate):
    reserve_days(gate, 40)

    assert reserve_days(gate, 21, priority=0) == [0] * 20 + [1]
    assert reserve_days(gate, 1, priority=2) == [2]


def test_acquire_racing_gates_grant_exactly_the_limit(gate, valkey_url):
    gates = [QuotaGate.connect(valkey_url) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        asked = threads.map(lambda each: [each.acquire(LIMITED, {KEY: 2})[KEY].granted for _ in range(5)], gates)
        granted = sum(sum(each) for each in asked)
    for each in gates:
        each.close()

    assert granted == 20
    refused = gate.acquire(LIMITED, {KEY: 1})[KEY]
    assert refused.granted == 0
    assert DAY - HOUR < refused.next_in <= DAY


def test_reserve_touch_whose_day_is_used_up_gets_another(gate):
    reserve_days(gate, 20)
    assert reserve_days(gate, 5, slot_came=True) == [0] * 5
    gate.acquire(LIMITED, {KEY: 20})

    assert reserve_days(gate, 5, slot_came=True) == [1] * 5
