"""Readers of ended touches get each end once, in order, and none that another transaction has not committed yet."""

from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models import Max

from scheduling import sql
from scheduling.ledger import ends
from scheduling.ledger.touches import touch_ledger
from scheduling.models import EndMark, Touch
from tests.scheduling.core.conftest import deliver_when_due, held_by_second_connection
from tests.support.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """A reader without a lag that has read all that ended before the test."""
    monkeypatch.setattr(ends, "WRITE_LAG", timedelta(0))
    take()


@pytest.fixture
def waiting(matrix, record_event):
    """Waiting touches of customers of their own."""
    matrix.node()
    return lambda count: [record_event(user=f"user-{number}").task_ids[0] for number in range(count)]


def take(most=500, reader="test"):
    """What all calls until the ceiling return."""
    found = []
    for _ in range(2):  # the first call reads up to the old ceiling and the second moves it
        while True:
            with transaction.atomic():
                batch = ends.take_ends(reader, most=most)
            found += [each.task_id for each in batch.ends]
            if not batch.more:
                break
    return found


def take_until(expected, act=take):
    """Take until that many ends were returned. A transaction of the server itself may delay the ceiling."""
    found = []

    def taken():
        found.extend(act())
        return len(found) >= expected

    eventually(taken)
    return found


def test_reader_returns_each_end_once_in_order(waiting):
    first, second, third = waiting(3)
    deliver_when_due(second)
    touch_ledger.cancel([first], reason="by:ann")
    assert take_until(2) == [second, first]
    deliver_when_due(third)
    assert take_until(1) == [third]
    assert take() == []


def test_reader_continues_inside_one_instant(waiting):
    ids = waiting(7)
    with transaction.atomic():
        touch_ledger.cancel(ids, reason="by:ann")
        Touch.objects.update(settled_at=Touch.objects.aggregate(last=Max("settled_at"))["last"])
    assert take_until(7, lambda: take(most=2)) == sorted(ids)


def test_end_committed_late_is_not_skipped(waiting):
    """Its time lies before one that is committed already."""
    late, early = waiting(2)
    with held_by_second_connection(lambda: touch_ledger.cancel([late], reason="by:ann"), commit=True):
        deliver_when_due(early)
        for _ in range(3):
            assert take() == []
    assert take_until(2) == [late, early]


def test_end_of_latest_transaction_is_not_skipped(waiting):
    """No later transaction has ended, so snapshots end before its id."""
    (late,) = waiting(1)
    with held_by_second_connection(lambda: touch_ledger.cancel([late], reason="by:ann"), commit=True):
        for _ in range(3):
            assert take() == []
    assert take_until(1) == [late]


def test_concurrent_readers_share_no_end(waiting, race):
    ids = waiting(40)
    touch_ledger.cancel(ids, reason="by:ann")
    found = take_until(40, lambda: [each for part in race(4, lambda _: take(most=3)) for each in part])
    assert sorted(found) == sorted(ids)


def test_readers_have_marks_of_their_own(waiting):
    """A new one starts now, or earlier if it asks for that."""
    take(reader="other")
    since = sql.now()
    ids = waiting(2)
    touch_ledger.cancel(ids, reason="by:ann")
    assert sorted(take_until(2)) == sorted(ids)
    assert sorted(take_until(2, lambda: take(reader="other"))) == sorted(ids)
    assert take(reader="new") == []
    ends.drop_reader("new")
    with transaction.atomic():
        ends.take_ends("new", since=since)
    assert sorted(take_until(2, lambda: take(reader="new"))) == sorted(ids)


@pytest.mark.parametrize("restored", [False, True])
def test_mark_of_another_server_skips_no_end(waiting, restored):
    """After a failover the server's clock may be behind, so marks lie in the future. A restored dump is in another
    cluster, whose transaction numbers start low again."""
    if restored:
        EndMark.objects.update(ceiling_xid=2**60)
    else:
        EndMark.objects.update(settled_at=sql.now() + timedelta(hours=1), ceiling=sql.now() + timedelta(hours=1))
    ids = waiting(2)
    touch_ledger.cancel(ids, reason="by:ann")
    assert set(take_until(2)) == set(ids)
