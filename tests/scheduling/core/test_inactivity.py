"""A customer inactive for 30 days is recorded once, by any number of passes."""

from datetime import timedelta

import pytest
from django.utils.timezone import now

from scheduling.models import Customer, Event
from scheduling.planning import own_events
from tests.scheduling.core.conftest import pass_time

pytestmark = pytest.mark.django_db


@pytest.fixture
def inactive_customers(record_event):
    """Ann was active 31 days ago, Bob 29 days ago, Cid at an unknown time."""
    record_event("x", user="ann")
    pass_time(days=2)
    record_event("x", user="bob")
    pass_time(days=29)
    Customer.objects.create(user_id="cid")


def list_inactive_events():
    return sorted(Event.objects.filter(type="customer.inactive").values_list("user_id", flat=True))


def test_inactivity_is_recorded_once_per_absence(inactive_customers):
    assert own_events.scan_inactive_customers() == 1
    assert own_events.scan_inactive_customers() == 0
    assert list_inactive_events() == ["ann"]
    pass_time(days=365)
    assert own_events.scan_inactive_customers() == 1
    assert list_inactive_events() == ["ann", "bob"], "a year away is still one absence"


def test_inactivity_is_recorded_again_after_return(inactive_customers, record_event):
    own_events.scan_inactive_customers()
    record_event("x", user="ann")
    assert own_events.scan_inactive_customers() == 0
    pass_time(days=31)
    own_events.scan_inactive_customers()
    assert list_inactive_events() == ["ann", "ann", "bob"]


def test_inactivity_event_plans_a_touch(matrix, inactive_customers):
    from scheduling.models import Touch

    matrix.node("come-back", trigger="customer.inactive", delay=timedelta(hours=24))
    own_events.scan_inactive_customers()
    touch = Touch.objects.get()
    assert touch.customer.user_id == "ann"
    assert timedelta(hours=23) < touch.due_at - now() < timedelta(hours=25)


def test_inactivity_scan_crash_repeats_no_event(inactive_customers):
    own_events.scan_inactive_customers()
    Customer.objects.update(inactive_since=None)
    own_events.scan_inactive_customers()
    assert list_inactive_events() == ["ann"]


@pytest.mark.django_db(transaction=True)
def test_concurrent_inactivity_scans_record_once(race):
    Customer.objects.bulk_create(
        Customer(user_id=f"user-{number}", last_active_at=now() - timedelta(days=40)) for number in range(60)
    )
    race(4, lambda number: own_events.scan_inactive_customers())
    own_events.scan_inactive_customers()
    assert list_inactive_events() == sorted(f"user-{number}" for number in range(60))


def test_inactivity_scan_resumes_after_time_limit(monkeypatch):
    monkeypatch.setattr(own_events, "BATCH", 2)
    monkeypatch.setattr(own_events, "LONGEST_PASS", 0.0)
    long_ago = now() - timedelta(days=40)
    Customer.objects.bulk_create(Customer(user_id=f"user-{number}", last_active_at=long_ago) for number in range(5))
    assert [own_events.scan_inactive_customers() for _ in range(4)] == [2, 2, 1, 0]
    assert len(list_inactive_events()) == 5
