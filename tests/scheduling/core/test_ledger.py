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
from django.db.models.functions import Now
from django.utils.timezone import now

from scheduling import sql
from scheduling.ledger.touches import touches
from scheduling.ledger.transitions import AGE_UNKNOWN, Claim, Settlement
from scheduling.models import Touch
from tests.scheduling.core.conftest import held_by_second_connection, sendings

LEASE = timedelta(seconds=45)
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def waiting(matrix: Any, record_event: Any) -> Callable[..., list[UUID]]:
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


def test_concurrent_claims_have_one_winner(waiting: Any) -> None:
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


def test_concurrent_dispatches_return_each_row_once(waiting: Any) -> None:
    task_ids = waiting(60)
    start = threading.Barrier(8)

    def race() -> list[UUID]:
        start.wait()
        taken: list[UUID] = []
        try:
            while hints := touches.dispatch_due(horizon=timedelta(seconds=30), limit=7):
                taken += [hint.task_id for hint in hints]
        finally:
            connection.close()
        return taken

    with ThreadPoolExecutor(8) as pool:
        handed_over = [task_id for taken in pool.map(lambda _: race(), range(8)) for task_id in taken]

    assert sorted(handed_over) == sorted(task_ids)


def test_dispatch_skips_locked_row(waiting: Any) -> None:
    """Dispatch never waits for the transaction of another; what it skips falls to the next pass."""
    locked, free = waiting(2)
    lock = lambda: Touch.objects.select_for_update().get(pk=locked)  # noqa: E731
    with held_by_second_connection(lock, commit=True), sql.limit_statement_time(5):
        assert [hint.task_id for hint in touches.dispatch_due(horizon=timedelta(seconds=30))] == [free]
    assert [hint.task_id for hint in touches.dispatch_due(horizon=timedelta(seconds=30))] == [locked]


def test_stale_claim_settles_nothing(waiting: Any) -> None:
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


def test_early_claim_is_empty_and_owes_a_wakeup(waiting: Any) -> None:
    (task_id,) = waiting(1, seconds=20)
    touches.dispatch_due(horizon=timedelta(seconds=30))

    assert touches.claim([task_id], lease=LEASE) == []
    (hint,) = touches.premature_wakeups([task_id])
    assert hint.task_id == task_id
    assert hint.due_at > now()


def test_row_due_after_early_claim_owes_a_wakeup(waiting: Any) -> None:
    """A hint that is a few milliseconds early finds nothing to claim; as it asks what was early, it is due."""
    (task_id,) = waiting(1, seconds=20)
    touches.dispatch_due(horizon=timedelta(seconds=30))
    assert touches.claim([task_id], lease=LEASE) == []
    Touch.objects.update(due_at=Now())

    (hint,) = touches.premature_wakeups([task_id])
    assert hint.due_at > now()


def test_dispatch_ignores_rows_beyond_the_horizon(waiting: Any) -> None:
    waiting(1, seconds=90)
    assert touches.dispatch_due(horizon=timedelta(seconds=30)) == []


def test_lost_wakeup_returns_with_doubled_lease(waiting: Any) -> None:
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


def test_wakeup_behind_backlog_is_not_repeated(waiting: Any) -> None:
    (task_id,) = waiting(1)
    touches.dispatch_due(horizon=timedelta(seconds=30))
    expire_lease(task_id)

    touches.requeue_expired(trusted_since={1: now() - timedelta(minutes=5)})

    row = Touch.objects.get()
    assert row.state == "queued"
    assert row.lease_until is not None
    assert row.lease_until > now()


def pass_time_for_touch(seconds: int) -> None:
    """Let time pass for the only touch, with its lease over by then."""
    move = timedelta(seconds=seconds)
    row = Touch.objects.get()
    lease = {"lease_until": now() - timedelta(seconds=1)} if row.lease_until else {}
    queued_at = row.queued_at and row.queued_at - move
    Touch.objects.update(due_at=row.due_at - move, queued_at=queued_at, **lease)


def test_wakeup_of_unknown_age_is_trusted_two_minutes(waiting: Any) -> None:
    """A lost one would else wait until the queue is empty, which in a mass mailing takes hours."""
    waiting(1, seconds=25)
    touches.dispatch_due(horizon=timedelta(seconds=30))
    for seconds, state in ((130, "queued"), (20, "scheduled")):  # 105 and 125 seconds past due
        pass_time_for_touch(seconds)
        assert touches.requeue_expired(trusted_since={1: AGE_UNKNOWN}) == 1
        assert Touch.objects.get().state == state


@pytest.mark.parametrize(("hours", "times"), [(1, 4), (3, 8)])
def test_long_backlog_repeats_few_wakeups(waiting: Any, hours: int, times: int) -> None:
    waiting(1)
    assert len(touches.dispatch_due(horizon=timedelta(seconds=30))) == 1
    repeated = 0
    for _ in range(hours * 120):
        pass_time_for_touch(30)
        touches.requeue_expired(trusted_since={1: AGE_UNKNOWN})
        repeated += len(touches.dispatch_due(horizon=timedelta(seconds=30)))
    assert repeated == times


def test_claim_after_requeue_succeeds(waiting: Any) -> None:
    (task_id,) = waiting(1)
    assert Touch.objects.get().state == "scheduled"
    assert [claim.task_id for claim in touches.claim([task_id], lease=LEASE)] == [task_id]


def test_cancel_skips_touch_marked_as_sending(waiting: Any) -> None:
    first, second = waiting(2)
    touches.mark_sending(sendings(claim_one(first)))
    assert touches.cancel([first, second], reason="by:ann") == {second}


def test_cancelled_claim_is_not_marked_as_sending(waiting: Any) -> None:
    (task_id,) = waiting(1)
    claim = claim_one(task_id)

    assert touches.cancel([task_id], reason="by:ann") == {task_id}

    assert touches.mark_sending(sendings(claim)) == {}
    row = Touch.objects.get()
    assert (row.state, row.reason, row.attempt, row.lease_until) == ("cancelled", "by:ann", 0, None)


def test_mark_sending_twice_marks_once(waiting: Any) -> None:
    (task_id,) = waiting(1)
    claim = claim_one(task_id)
    assert touches.mark_sending(sendings(claim)) == {task_id: None}
    assert touches.mark_sending(sendings(claim)) == {}
    assert Touch.objects.get().attempt == 1


def test_mark_sending_needs_enough_lease(waiting: Any) -> None:
    (task_id,) = waiting(1)
    claim = claim_one(task_id)
    assert touches.mark_sending(sendings(claim), margin=timedelta(minutes=1)) == {}


def test_resume_paused_spreads_due_times(waiting: Any) -> None:
    task_ids = waiting(40)
    for claim in touches.claim(task_ids, lease=LEASE):
        touches.settle({claim: Settlement("scheduled", "paused", parked="all")})
    assert touches.dispatch_due(horizon=timedelta(days=1)) == []
    assert touches.paused_scopes() == ["all"]

    assert touches.resume_paused("all", spread=timedelta(minutes=2)) == 40

    due = sorted(Touch.objects.values_list("due_at", flat=True))
    assert due[-1] - due[0] > timedelta(seconds=30)
    assert due[-1] < now() + timedelta(minutes=2)
    assert touches.paused_scopes() == []


def test_resume_paused_keeps_later_due_times(waiting: Any) -> None:
    (task_id,) = waiting(1)
    claim, later = claim_one(task_id), now() + timedelta(days=1)
    touches.settle({claim: Settlement("scheduled", "paused", due_at=later, parked="all")})

    assert touches.resume_paused("all", spread=timedelta(minutes=2)) == 1

    row = Touch.objects.get()
    assert (row.parked, row.due_at) == ("", later)


def test_lease_constraint_requires_a_lease(waiting: Any) -> None:
    from django.db import IntegrityError

    waiting(1)
    with pytest.raises(IntegrityError, match="touch_leased_iff_lease"):
        Touch.objects.update(state="running")
