"""The moves of a row, and that no two can make the same one."""

from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils.timezone import now

from scheduling import dispatch, sql
from scheduling.ledger.touches import AGE_UNKNOWN, touch_ledger
from scheduling.ledger.transitions import Settlement
from scheduling.models import Touch
from tests.scheduling.core.conftest import expire_lease, held_by_second_connection, sendings
from tests.support.claims import claim_touches

LEASE, HORIZON = timedelta(seconds=45), timedelta(seconds=30)
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def waiting(matrix, record_event):
    """Touches of many customers, due `seconds` from now."""
    matrix.node(delay=timedelta(days=1))

    def make(count, *, seconds=0):
        task_ids = [task_id for number in range(count) for task_id in record_event(user=f"user-{number}").task_ids]
        Touch.objects.filter(pk__in=task_ids).update(due_at=now() + timedelta(seconds=seconds))
        return task_ids

    return make


def claim_one(task_id):
    (claim,) = claim_touches([task_id])
    return claim


def test_concurrent_dispatches_return_each_row_once(waiting, race):
    task_ids = waiting(40)

    def take(_):
        taken = []
        while wakeups := touch_ledger.dispatch_due(horizon=HORIZON, limit=7):
            taken += [wakeup.task_id for wakeup in wakeups]
        return taken

    assert sorted(task_id for taken in race(8, take) for task_id in taken) == sorted(task_ids)


def test_dispatch_skips_locked_row(waiting):
    """Dispatch never waits for the transaction of another; what it skips falls to the next pass."""
    locked, free = waiting(2)
    lock = lambda: Touch.objects.select_for_update().get(pk=locked)  # noqa: E731
    with held_by_second_connection(lock, commit=True), sql.limit_statement_time(5):
        assert [wakeup.task_id for wakeup in touch_ledger.dispatch_due(horizon=HORIZON)] == [free]
    assert [wakeup.task_id for wakeup in touch_ledger.dispatch_due(horizon=HORIZON)] == [locked]


def test_delivery_skips_locked_row(waiting):
    """It holds locks of customers, and who holds the touch may wait for one of these."""
    locked, free = waiting(2)
    lock = lambda: Touch.objects.select_for_update().get(pk=locked)  # noqa: E731
    with held_by_second_connection(lock, commit=True), sql.limit_statement_time(5):
        assert [row.task_id for row in touch_ledger.lock_due([locked, free])[0]] == [free]


def test_stale_claim_settles_nothing(waiting):
    (task_id,) = waiting(1)
    stale = claim_one(task_id)
    expire_lease(task_id)
    with transaction.atomic():
        ((lapsed, _),) = touch_ledger.expired_runs()
        touch_ledger.settle({lapsed: Settlement("scheduled", due_at=now())})
    fresh = claim_one(task_id)

    assert touch_ledger.settle({stale: Settlement("delivered")}) == set()
    assert touch_ledger.mark_sending(sendings(stale)) == {}
    both = {stale: Settlement("failed", "smtp_550"), fresh: Settlement("delivered")}
    assert touch_ledger.settle(both) == {fresh}, "the ids alone do not tell them apart"
    assert Touch.objects.get().state == "delivered"


def test_early_claim_is_empty_and_owes_a_wakeup(waiting):
    """Also where it is due as the worker asks what was early: it came a few milliseconds too soon."""
    (task_id,) = waiting(1, seconds=20)
    touch_ledger.dispatch_due(horizon=HORIZON)

    assert claim_touches([task_id]) == []
    for _ in ("early", "due"):
        (wakeup,) = touch_ledger.premature_wakeups([task_id])
        assert wakeup.task_id == task_id
        assert wakeup.due_at > now()
        Touch.objects.update(due_at=Now())


def test_lost_wakeup_returns_with_doubled_lease(waiting):
    (task_id,) = waiting(1)
    waits = []
    for _ in range(3):
        touch_ledger.dispatch_due(horizon=HORIZON)
        row = Touch.objects.get()
        assert row.lease_until is not None
        assert row.queued_at is not None
        waits.append(round((row.lease_until - row.queued_at).total_seconds()))
        expire_lease(task_id)
        assert touch_ledger.requeue_expired(trusted_since={}) == 1
        assert Touch.objects.get().state == "scheduled"
    assert waits == [10, 20, 40]


def test_wakeup_behind_backlog_is_not_repeated(waiting):
    (task_id,) = waiting(1)
    touch_ledger.dispatch_due(horizon=HORIZON)
    expire_lease(task_id)

    before = row_version(task_id)

    assert touch_ledger.requeue_expired(trusted_since={1: now() - timedelta(minutes=5)}) == 0
    assert row_version(task_id) == before, "a backlog costs no writes"
    assert touch_ledger.requeue_expired(trusted_since={0: now() - timedelta(minutes=5)}) == 1, "its own queue is empty"
    assert Touch.objects.get().state == "scheduled"


def row_version(task_id):
    return sql.rows("SELECT xmin::text, ctid::text FROM scheduling_touch WHERE task_id = %(id)s", {"id": task_id})


def pass_time_for_touch(seconds):
    """Let time pass for the only touch, with its lease over by then."""
    move = timedelta(seconds=seconds)
    row = Touch.objects.get()
    lease = {"lease_until": now() - timedelta(seconds=1)} if row.lease_until else {}
    queued_at = row.queued_at and row.queued_at - move
    Touch.objects.update(due_at=row.due_at - move, queued_at=queued_at, **lease)


def test_wakeup_of_unknown_age_is_trusted_two_minutes(waiting):
    """A lost one would else wait until the queue is empty, which in a mass mailing takes hours."""
    waiting(1, seconds=25)
    touch_ledger.dispatch_due(horizon=HORIZON)
    for seconds, state in ((130, "queued"), (20, "scheduled")):  # 105 and 125 seconds past due
        pass_time_for_touch(seconds)
        assert touch_ledger.requeue_expired(trusted_since={1: AGE_UNKNOWN}) == int(state == "scheduled")
        assert Touch.objects.get().state == state


def test_long_backlog_repeats_few_wakeups(waiting):
    waiting(1)
    assert len(touch_ledger.dispatch_due(horizon=HORIZON)) == 1
    repeated = 0
    for _ in range(60):  # an hour
        pass_time_for_touch(60)
        touch_ledger.requeue_expired(trusted_since={1: AGE_UNKNOWN})
        repeated += len(touch_ledger.dispatch_due(horizon=HORIZON))
    assert repeated == 4


def test_mark_sending_marks_once_with_enough_lease(waiting):
    (task_id,) = waiting(1)
    claim = claim_one(task_id)
    assert touch_ledger.mark_sending(sendings(claim), margin=timedelta(minutes=1)) == {}
    assert touch_ledger.mark_sending(sendings(claim)) == {task_id: None}
    assert touch_ledger.mark_sending(sendings(claim)) == {}
    assert Touch.objects.get().attempt == 1


def test_resume_paused_spreads_due_times(waiting):
    """But not beyond the expiry of a touch, and later due times stay."""
    later, *task_ids = waiting(30)
    mortal = task_ids[:8]
    for claim in claim_touches(task_ids):
        touch_ledger.settle({claim: Settlement("scheduled", "paused", paused_by="all")})
    much_later, soon = now() + timedelta(minutes=20), now() + timedelta(minutes=2)
    touch_ledger.settle({claim_one(later): Settlement("scheduled", "paused", due_at=much_later, paused_by="all")})
    Touch.objects.filter(pk__in=mortal).update(expires_at=soon)
    assert touch_ledger.dispatch_due(horizon=timedelta(minutes=30)) == []
    assert touch_ledger.paused_scopes() == ["all"]

    assert touch_ledger.resume_paused("all", spread=timedelta(minutes=10)) == 30

    due = dict(Touch.objects.values_list("pk", "due_at"))
    assert due.pop(later) == much_later
    assert max(due[task_id] for task_id in mortal) < soon
    assert max(due.values()) - min(due.values()) > timedelta(minutes=2)
    assert max(due.values()) < now() + timedelta(minutes=10)
    assert touch_ledger.paused_scopes() == []


# --- bounded dispatch -------------------------------------------------------------------------------------------------


def test_dispatch_holds_back_due_touches_beyond_window(waiting):
    task_ids = waiting(12)
    Touch.objects.filter(pk__in=task_ids[:3]).update(priority=0)

    first = touch_ledger.dispatch_due(window=5)
    assert sorted(wakeup.priority for wakeup in first) == [0, 0, 0, 1, 1, 1, 1, 1]
    assert touch_ledger.dispatch_due(window=5) == []

    claimed = [wakeup.task_id for wakeup in first if wakeup.priority == 1][:2]
    assert len(claim_touches(claimed)) == 2
    assert len(touch_ledger.dispatch_due(window=5)) == 2
    assert touch_ledger.seconds_until_due(timedelta(0)) is not None, "two are held back"


def test_dispatch_takes_important_and_early_touches_first(waiting):
    task_ids = waiting(6, seconds=-60)
    Touch.objects.filter(pk__in=task_ids[4:]).update(priority=0)
    Touch.objects.filter(pk=task_ids[3]).update(due_at=now() - timedelta(minutes=5))

    order = [touch_ledger.dispatch_due(limit=1)[0].task_id for _ in range(3)]
    assert set(order[:2]) == set(task_ids[4:])
    assert order[2] == task_ids[3]


def test_dispatch_ahead_is_bounded_for_each_moment(waiting):
    """A worker holds what is dispatched ahead in its memory until it is due."""
    herd, later = waiting(10, seconds=20), waiting(3, seconds=22)
    Touch.objects.filter(pk__in=herd).update(due_at=now() + timedelta(seconds=20))

    for expected in (4, 0):
        found = {wakeup.task_id for wakeup in touch_ledger.dispatch_due(horizon=HORIZON, window=8)}
        assert len(found & set(herd)) == expected
        assert found >= set(later if expected else ())


def test_old_wakeups_do_not_fill_the_window(waiting):
    """A flushed broker loses a whole window. The rest need not wait until its leases expire."""
    waiting(8)
    assert len(touch_ledger.dispatch_due(window=4)) == 4
    ago = now() - timedelta(seconds=11)
    Touch.objects.filter(state="queued").update(queued_at=ago, due_at=ago)
    assert len(touch_ledger.dispatch_due(window=4)) == 4


def test_touches_dispatched_by_intake_do_not_fill_the_window(waiting):
    """A stream of new events would hold back retries and follow-ups of its priority."""
    fresh, older = waiting(4), waiting(2)
    Touch.objects.filter(pk__in=fresh).update(
        state="queued", queued_at=F("created_at"), lease_until=now() + timedelta(seconds=10), wakeups=1
    )
    assert {wakeup.task_id for wakeup in touch_ledger.dispatch_due(window=2)} == set(older)


def test_dispatch_pass_without_claims_ends(waiting, settings):
    """On a worker for all queues, the pass occupies the process that would claim."""
    waiting(12)
    settings.AFTERTOUCH_DISPATCH_WINDOW = 3
    assert dispatch.dispatch_due_touches() == 3


def test_concurrent_dispatches_share_the_window(waiting, race):
    waiting(30)

    def take(_):
        return [wakeup.task_id for _ in range(4) for wakeup in touch_ledger.dispatch_due(window=10, limit=3)]

    found = [each for part in race(4, take) for each in part]
    assert len(found) == len(set(found)) == Touch.objects.filter(state="queued").count()
    assert len(found) >= 10


def test_dispatch_pass_continues_while_workers_claim(waiting, monkeypatch, settings):
    """The next pass starts seconds later. Only a window of touches would be delivered until then."""
    waiting(12)
    settings.AFTERTOUCH_DISPATCH_WINDOW = 3
    published = []

    def claim(wakeups):
        published.extend(wakeup.task_id for wakeup in wakeups)
        claim_touches([wakeup.task_id for wakeup in wakeups])

    monkeypatch.setattr(dispatch, "publish_wakeups", claim)
    assert dispatch.dispatch_due_touches() == 12
    assert len(set(published)) == 12
