"""Who stays away for 30 days is noticed once, however many look."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils.timezone import now

from scheduling.models import Customer, Event
from scheduling.planning import inactivity
from tests.scheduling.core.conftest import pass_time

pytestmark = pytest.mark.django_db


@pytest.fixture
def away(happen: Any) -> None:
    """Ann left 31 days ago, Bob 29 days ago; nobody knows when Cid was there."""
    happen("x", user="ann")
    pass_time(days=2)
    happen("x", user="bob")
    pass_time(days=29)
    Customer.objects.create(user_id="cid")


def raised() -> list[str]:
    return sorted(Event.objects.filter(type="customer.inactive").values_list("user_id", flat=True))


def test_who_is_away_too_long_is_noticed_once_an_absence(away: Any) -> None:
    assert inactivity.scan_inactive_customers() == 1
    assert inactivity.scan_inactive_customers() == 0
    assert raised() == ["ann"]
    pass_time(days=365)
    assert inactivity.scan_inactive_customers() == 1
    assert raised() == ["ann", "bob"], "a year away is still one absence"


def test_who_came_back_and_left_again_is_noticed_again(away: Any, happen: Any) -> None:
    inactivity.scan_inactive_customers()
    happen("x", user="ann")
    assert inactivity.scan_inactive_customers() == 0
    pass_time(days=31)
    inactivity.scan_inactive_customers()
    assert raised() == ["ann", "ann", "bob"]


def test_an_absence_plans_the_touch_of_its_node(matrix: Any, away: Any) -> None:
    from scheduling.models import Touch

    matrix.node("come-back", trigger="customer.inactive", delay=timedelta(hours=24))
    inactivity.scan_inactive_customers()
    touch = Touch.objects.get()
    assert touch.customer.user_id == "ann"
    assert timedelta(hours=23) < touch.due_at - now() < timedelta(hours=25)


def test_more_than_a_batch_are_all_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inactivity, "BATCH", 7)
    Customer.objects.bulk_create(
        Customer(user_id=f"user-{number}", last_active_at=now() - timedelta(days=40)) for number in range(21)
    )
    assert inactivity.scan_inactive_customers() == 21
    assert len(raised()) == 21


def test_a_scan_that_dies_before_it_notes_what_it_did_raises_nothing_twice(
    away: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inactivity.scan_inactive_customers()
    Customer.objects.update(inactive_since=None)
    inactivity.scan_inactive_customers()
    assert raised() == ["ann"]


@pytest.mark.django_db(transaction=True)
def test_two_scans_at_once_notice_each_absence_once(race: Any) -> None:
    Customer.objects.bulk_create(
        Customer(user_id=f"user-{number}", last_active_at=now() - timedelta(days=40)) for number in range(60)
    )
    race(4, lambda number: inactivity.scan_inactive_customers())
    inactivity.scan_inactive_customers()
    assert raised() == sorted(f"user-{number}" for number in range(60))


def test_scan_that_takes_too_long_ends_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inactivity, "BATCH", 2)
    monkeypatch.setattr(inactivity, "LONGEST_SCAN", 0.0)
    long_ago = now() - timedelta(days=40)
    Customer.objects.bulk_create(Customer(user_id=f"user-{number}", last_active_at=long_ago) for number in range(5))
    assert [inactivity.scan_inactive_customers() for _ in range(4)] == [2, 2, 1, 0]
    assert len(raised()) == 5
