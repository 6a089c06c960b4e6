"""The moves of a row, and that no two can make the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils.timezone import now
from pytest_django import Settings

from scheduling import dispatch, sql
from scheduling.ledger.touches import touches
from scheduling.ledger.transitions import AGE_UNKNOWN, Claim, Settlement, WakeUp
from scheduling.models import Touch
from tests.scheduling.core.conftest import held_by_second_connection, sendings
from tests.support.matrix import MatrixBuilder, RecordEvent

LEASE = timedelta(seconds=45)
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def waiting(matrix: MatrixBuilder, record_event: RecordEvent) -> Callable[..., list[UUID]]:
    """Touches of many customers, due `seconds` from now."""
    matrix.node(delay=timedelta(days=1))

    def make(count: int, *, seconds: float = 0) -> list[UUID]:
        task_ids = [task_id for number in range(count) for task_id in record_event(user=f"user-{number}").task_ids]
        Touch.objects.filter(pk__in=task_ids).update(due_at=now() + timedelta(seconds=seconds))
        return task_ids

    return make


def claim_one(task_id: UUID) -> Claim:
    (claim,) = touches.claim([task_id], lease=LEASE)
    return claim


def expire_lease(*task_ids: UUID) -> None:
    Touch.objects.filter(pk__in=task_ids).update(lease_until=now() - timedelta(seconds=1))


def test_concurrent_claims_have_one_winner(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1)
    start = threading.Barrier(16)

    def race() -> int:
        start.wait()
        try:
            return len(touches.claim([task_id], lease=LEASE))
        finally:
            connection.close()

    with ThreadPoolExecutor(16) as pool:
        won = sum(pool.map(lambda _: race(), range(16)))

    assert won == 1
    assert Touch.objects.get().lease_no == 1


def test_concurrent_dispatches_return_each_row_once(waiting: Callable[..., list[UUID]]) -> None:
    task_ids = waiting(60)
    start = threading.Barrier(8)

    def race() -> list[UUID]:
        start.wait()
        taken: list[UUID] = []
        try:
            while wakeups := touches.dispatch_due(horizon=timedelta(seconds=30), limit=7):
                taken += [wakeup.task_id for wakeup in wakeups]
        finally:
            connection.close()
        return taken

    with ThreadPoolExecutor(8) as pool:
        handed_over = [task_id for taken in pool.map(lambda _: race(), range(8)) for task_id in taken]

    assert sorted(handed_over) == sorted(task_ids)


def test_dispatch_skips_locked_row(waiting: Callable[..., list[UUID]]) -> None:
    """Dispatch never waits for the transaction of another; what it skips falls to the next pass."""
    locked, free = waiting(2)
    lock = lambda: Touch.objects.select_for_update().get(pk=locked)  # noqa: E731
    with held_by_second_connection(lock, commit=True), sql.limit_statement_time(5):
        assert [wakeup.task_id for wakeup in touches.dispatch_due(horizon=timedelta(seconds=30))] == [free]
    assert [wakeup.task_id for wakeup in touches.dispatch_due(horizon=timedelta(seconds=30))] == [locked]


def test_stale_claim_settles_nothing(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1)
    stale = claim_one(task_id)
    expire_lease(task_id)
    with transaction.atomic():
        ((lapsed, _),) = touches.expired_runs()
        touches.settle({lapsed: Settlement("scheduled", due_at=now())})
    fresh = claim_one(task_id)

    assert touches.settle({stale: Settlement("delivered")}) == set()
    assert touches.mark_sending(sendings(stale)) == {}
    assert not touches.renew(stale, lease=LEASE)
    both = {stale: Settlement("failed", "smtp_550"), fresh: Settlement("delivered")}
    assert touches.settle(both) == {fresh}, "the ids alone do not tell them apart"
    assert Touch.objects.get().state == "delivered"


def test_early_claim_is_empty_and_owes_a_wakeup(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1, seconds=20)
    touches.dispatch_due(horizon=timedelta(seconds=30))

    assert touches.claim([task_id], lease=LEASE) == []
    (wakeup,) = touches.premature_wakeups([task_id])
    assert wakeup.task_id == task_id
    assert wakeup.due_at > now()


def test_row_due_after_early_claim_owes_a_wakeup(waiting: Callable[..., list[UUID]]) -> None:
    """A wake-up that is a few milliseconds early finds nothing to claim; as it asks what was early, it is due."""
    (task_id,) = waiting(1, seconds=20)
    touches.dispatch_due(horizon=timedelta(seconds=30))
    assert touches.claim([task_id], lease=LEASE) == []
    Touch.objects.update(due_at=Now())

    (wakeup,) = touches.premature_wakeups([task_id])
    assert wakeup.due_at > now()


def test_dispatch_ignores_rows_beyond_the_horizon(waiting: Callable[..., list[UUID]]) -> None:
    waiting(1, seconds=90)
    assert touches.dispatch_due(horizon=timedelta(seconds=30)) == []


def test_lost_wakeup_returns_with_doubled_lease(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1)
    waits = []
    for _ in range(3):
        touches.dispatch_due(horizon=timedelta(seconds=30))
        row = Touch.objects.get()
        assert row.lease_until is not None
        assert row.queued_at is not None
        waits.append(round((row.lease_until - row.queued_at).total_seconds()))
        expire_lease(task_id)
        assert touches.requeue_expired(trusted_since={}) == 1
        assert Touch.objects.get().state == "scheduled"
    assert waits == [10, 20, 40]


def test_wakeup_behind_backlog_is_not_repeated(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1)
    touches.dispatch_due(horizon=timedelta(seconds=30))
    expire_lease(task_id)

    before = row_version(task_id)

    assert touches.requeue_expired(trusted_since={1: now() - timedelta(minutes=5)}) == 0
    assert row_version(task_id) == before, "a backlog costs no writes"
    assert touches.requeue_expired(trusted_since={0: now() - timedelta(minutes=5)}) == 1, "its own queue is empty"
    assert Touch.objects.get().state == "scheduled"


def row_version(task_id: UUID) -> Any:
    return sql.rows("SELECT xmin::text, ctid::text FROM scheduling_touch WHERE task_id = %(id)s", {"id": task_id})


def pass_time_for_touch(seconds: int) -> None:
    """Let time pass for the only touch, with its lease over by then."""
    move = timedelta(seconds=seconds)
    row = Touch.objects.get()
    lease = {"lease_until": now() - timedelta(seconds=1)} if row.lease_until else {}
    queued_at = row.queued_at and row.queued_at - move
    Touch.objects.update(due_at=row.due_at - move, queued_at=queued_at, **lease)


def test_wakeup_of_unknown_age_is_trusted_two_minutes(waiting: Callable[..., list[UUID]]) -> None:
    """A lost one would else wait until the queue is empty, which in a mass mailing takes hours."""
    waiting(1, seconds=25)
    touches.dispatch_due(horizon=timedelta(seconds=30))
    for seconds, state in ((130, "queued"), (20, "scheduled")):  # 105 and 125 seconds past due
        pass_time_for_touch(seconds)
        assert touches.requeue_expired(trusted_since={1: AGE_UNKNOWN}) == int(state == "scheduled")
        assert Touch.objects.get().state == state


@pytest.mark.parametrize(("hours", "times"), [(1, 4), (3, 8)])
def test_long_backlog_repeats_few_wakeups(waiting: Callable[..., list[UUID]], hours: int, times: int) -> None:
    waiting(1)
    assert len(touches.dispatch_due(horizon=timedelta(seconds=30))) == 1
    repeated = 0
    for _ in range(hours * 120):
        pass_time_for_touch(30)
        touches.requeue_expired(trusted_since={1: AGE_UNKNOWN})
        repeated += len(touches.dispatch_due(horizon=timedelta(seconds=30)))
    assert repeated == times


def test_claim_after_requeue_succeeds(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1)
    assert Touch.objects.get().state == "scheduled"
    assert [claim.task_id for claim in touches.claim([task_id], lease=LEASE)] == [task_id]


def test_cancel_skips_touch_marked_as_sending(waiting: Callable[..., list[UUID]]) -> None:
    first, second = waiting(2)
    touches.mark_sending(sendings(claim_one(first)))
    assert touches.cancel([first, second], reason="by:ann") == {second}


def test_cancelled_claim_is_not_marked_as_sending(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1)
    claim = claim_one(task_id)

    assert touches.cancel([task_id], reason="by:ann") == {task_id}

    assert touches.mark_sending(sendings(claim)) == {}
    row = Touch.objects.get()
    assert (row.state, row.reason, row.attempt, row.lease_until) == ("cancelled", "by:ann", 0, None)


def test_mark_sending_twice_marks_once(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1)
    claim = claim_one(task_id)
    assert touches.mark_sending(sendings(claim)) == {task_id: None}
    assert touches.mark_sending(sendings(claim)) == {}
    assert Touch.objects.get().attempt == 1


def test_mark_sending_needs_enough_lease(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1)
    claim = claim_one(task_id)
    assert touches.mark_sending(sendings(claim), margin=timedelta(minutes=1)) == {}


def test_resume_paused_spreads_due_times(waiting: Callable[..., list[UUID]]) -> None:
    task_ids = waiting(40)
    for claim in touches.claim(task_ids, lease=LEASE):
        touches.settle({claim: Settlement("scheduled", "paused", paused_by="all")})
    assert touches.dispatch_due(horizon=timedelta(days=1)) == []
    assert touches.paused_scopes() == ["all"]

    assert touches.resume_paused("all", spread=timedelta(minutes=2)) == 40

    due = sorted(Touch.objects.values_list("due_at", flat=True))
    assert due[-1] - due[0] > timedelta(seconds=30)
    assert due[-1] < now() + timedelta(minutes=2)
    assert touches.paused_scopes() == []


def test_resume_paused_spreads_no_touch_beyond_its_expiry(waiting: Callable[..., list[UUID]]) -> None:
    """The pause ended in time, but the spread let touches expire."""
    task_ids = waiting(40)
    expires_at = now() + timedelta(minutes=2)
    Touch.objects.filter(pk__in=task_ids).update(paused_by="all", expires_at=expires_at)

    assert touches.resume_paused("all", spread=timedelta(days=1)) == 40

    assert max(Touch.objects.values_list("due_at", flat=True)) < expires_at


def test_resume_paused_keeps_later_due_times(waiting: Callable[..., list[UUID]]) -> None:
    (task_id,) = waiting(1)
    claim, later = claim_one(task_id), now() + timedelta(days=1)
    touches.settle({claim: Settlement("scheduled", "paused", due_at=later, paused_by="all")})

    assert touches.resume_paused("all", spread=timedelta(minutes=2)) == 1

    row = Touch.objects.get()
    assert (row.paused_by, row.due_at) == ("", later)


def test_lease_constraint_requires_a_lease(waiting: Callable[..., list[UUID]]) -> None:
    from django.db import IntegrityError

    waiting(1)
    with pytest.raises(IntegrityError, match="touch_leased_iff_lease"):
        Touch.objects.update(state="running")


# --- bounded dispatch -------------------------------------------------------------------------------------------------


def test_dispatch_holds_back_due_touches_beyond_window(waiting: Callable[..., list[UUID]]) -> None:
    task_ids = waiting(12)
    Touch.objects.filter(pk__in=task_ids[:3]).update(priority=0)

    first = touches.dispatch_due(window=5)
    assert sorted(wakeup.priority for wakeup in first) == [0, 0, 0, 1, 1, 1, 1, 1]
    assert touches.dispatch_due(window=5) == []

    claimed = [wakeup.task_id for wakeup in first if wakeup.priority == 1][:2]
    assert len(touches.claim(claimed, lease=LEASE)) == 2
    assert len(touches.dispatch_due(window=5)) == 2
    assert touches.seconds_until_due(timedelta(0)) is not None, "two are held back"


def test_dispatch_takes_important_and_early_touches_first(waiting: Callable[..., list[UUID]]) -> None:
    task_ids = waiting(6, seconds=-60)
    Touch.objects.filter(pk__in=task_ids[4:]).update(priority=0)
    Touch.objects.filter(pk=task_ids[3]).update(due_at=now() - timedelta(minutes=5))

    order = [touches.dispatch_due(limit=1)[0].task_id for _ in range(3)]
    assert set(order[:2]) == set(task_ids[4:])
    assert order[2] == task_ids[3]


def test_dispatch_ahead_is_bounded_for_each_moment(waiting: Callable[..., list[UUID]]) -> None:
    """A worker holds what is dispatched ahead in its memory until it is due."""
    herd, later = waiting(10, seconds=20), waiting(3, seconds=22)
    Touch.objects.filter(pk__in=herd).update(due_at=now() + timedelta(seconds=20))

    for expected in (4, 0):
        found = {wakeup.task_id for wakeup in touches.dispatch_due(horizon=timedelta(seconds=30), window=8)}
        assert len(found & set(herd)) == expected
        assert found >= set(later if expected else ())


def test_old_wakeups_do_not_fill_the_window(waiting: Callable[..., list[UUID]]) -> None:
    """A flushed broker loses a whole window. The rest need not wait until its leases expire."""
    waiting(8)
    assert len(touches.dispatch_due(window=4)) == 4
    ago = now() - timedelta(seconds=11)
    Touch.objects.filter(state="queued").update(queued_at=ago, due_at=ago)
    assert len(touches.dispatch_due(window=4)) == 4


def test_touches_dispatched_by_intake_do_not_fill_the_window(waiting: Callable[..., list[UUID]]) -> None:
    """A stream of new events would hold back retries and follow-ups of its priority."""
    fresh, older = waiting(4), waiting(2)
    Touch.objects.filter(pk__in=fresh).update(
        state="queued", queued_at=F("created_at"), lease_until=now() + timedelta(seconds=10), wakeups=1
    )
    assert {wakeup.task_id for wakeup in touches.dispatch_due(window=2)} == set(older)


def test_dispatch_pass_without_claims_ends(waiting: Callable[..., list[UUID]], settings: Settings) -> None:
    """On a worker for all queues, the pass occupies the process that would claim."""
    waiting(12)
    settings.AFTERTOUCH_DISPATCH_WINDOW = 3
    assert dispatch.dispatch_due_touches() == 3


def test_concurrent_dispatches_share_the_rows(waiting: Callable[..., list[UUID]]) -> None:
    waiting(30)
    start = threading.Barrier(4)

    def dispatch() -> list[UUID]:
        start.wait()
        try:
            return [wakeup.task_id for _ in range(4) for wakeup in touches.dispatch_due(window=10, limit=3)]
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        found = [each for part in [pool.submit(dispatch) for _ in range(4)] for each in part.result()]
    assert len(found) == len(set(found)) == Touch.objects.filter(state="queued").count()
    assert len(found) >= 10


def test_dispatch_pass_continues_while_workers_claim(
    waiting: Callable[..., list[UUID]], monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """The next pass starts seconds later. Only a window of touches would be delivered until then."""
    waiting(12)
    settings.AFTERTOUCH_DISPATCH_WINDOW = 3
    published: list[UUID] = []

    def claim(wakeups: list[WakeUp]) -> None:
        published.extend(wakeup.task_id for wakeup in wakeups)
        touches.claim([wakeup.task_id for wakeup in wakeups], lease=LEASE)

    monkeypatch.setattr(dispatch, "publish_wakeups", claim)
    assert dispatch.dispatch_due_touches() == 12
    assert len(set(published)) == 12
