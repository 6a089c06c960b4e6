"""Ended touches lie in the partition of their end. A pass creates partitions ahead and drops expired ones."""

from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise

import pytest
from django.db import transaction
from django.utils.timezone import now

from scheduling import sql
from scheduling.ledger import ends, partitions
from scheduling.ledger.partitions import ENDED, REST, Partition
from scheduling.ledger.touches import touch_ledger
from scheduling.ledger.transitions import Settlement
from scheduling.models import Complaint, EndMark, FailedTask, Touch
from scheduling.models.touch import MOST_VERDICTS
from scheduling.operations import retention
from scheduling.policy.guards import HOLD, SEND, GuardVerdict
from tests.scheduling.core.conftest import deliver, fall_due
from tests.support.claims import claim_touches
from tests.support.second_connection import act_behind_locks
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

LEASE = timedelta(seconds=45)
OLD = Partition(f"{ENDED}_20250106", datetime(2025, 1, 6, tzinfo=UTC), datetime(2025, 1, 13, tzinfo=UTC))
rolled_back = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)


def find_part(task_id):
    """Return the table that stores a touch."""
    ((table,),) = sql.rows(
        "SELECT tableoid::regclass::text FROM scheduling_touch WHERE task_id = %(id)s", {"id": task_id}
    )
    return str(table)


def drop_partitions():
    """As after weeks without a pass."""
    for each in partitions.list_partitions():
        sql.execute(f"DROP TABLE {each.name}", {})


@pytest.fixture
def delivered(matrix, record_event):
    """Delivered touches of many customers."""
    matrix.node()

    def deliver(count, at=None):
        ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(count)]
        fall_due(*ids)
        touch_ledger.settle({claim: Settlement("delivered") for claim in claim_touches(ids)})
        if at:
            Touch.objects.filter(pk__in=ids).update(settled_at=at)
        return ids

    return deliver


# --- moves ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def claim(matrix, record_event):
    """A touch that a worker holds."""
    matrix.node()
    (task_id,) = record_event().task_ids
    fall_due(task_id)
    assert find_part(task_id) == "scheduling_touch_live"
    (claim,) = claim_touches([task_id])
    return claim


@rolled_back
@each_row("state", ["delivered", "suppressed", "cancelled", "failed", "unknown"])
def test_touch_moves_to_the_partition_of_its_end_with_all_columns(state, claim):
    before = Touch.objects.values().get()

    touch_ledger.settle({claim: Settlement(state, "why")})

    after = Touch.objects.values().get()
    changed = {name for name in before if before[name] != after[name]}
    assert changed - {"wakeups"} == {"state", "reason", "lease_until", "settled_at"}
    part = next(each for each in partitions.list_partitions() if each.name == find_part(claim.task_id))
    assert part.since <= after["settled_at"] < part.until


@committed
def test_cancel_that_waits_for_settled_touch_finds_none(claim):
    """An UPDATE across partitions would fail here: the row was moved to another partition."""
    (cancelled,) = act_behind_locks(
        lambda: touch_ledger.settle({claim: Settlement("delivered")}),
        lambda: touch_ledger.cancel([claim.task_id], reason="late"),
    )
    assert cancelled == set()
    assert Touch.objects.get().state == "delivered"


@committed
def test_racing_settlements_end_touch_once(claim, race):
    settled = race(8, lambda number: touch_ledger.settle({claim: Settlement("delivered", str(number))}))

    assert sorted(map(len, settled)) == [0] * 7 + [1]
    assert Touch.objects.count() == 1


# --- the log of a touch -----------------------------------------------------------------------------------------------


@rolled_back
def test_touch_keeps_first_and_latest_verdicts(matrix, record_event):
    matrix.node()
    (task_id,) = record_event().task_ids
    verdicts = [GuardVerdict(SEND), *(GuardVerdict(HOLD, "cap", observed=str(number)) for number in range(55))]
    for verdict in verdicts:
        Touch.objects.filter(pk=task_id).update(due_at=now() - LEASE)
        (locked,), at = touch_ledger.lock_due([task_id])
        assert at is not None
        decision = Settlement("scheduled", verdict.rule, verdict=verdict)
        touch_ledger.write_decisions({decision: [locked.task_id]}, at=at, lease=LEASE)

    kept = Touch.objects.get().verdicts
    assert len(kept) == MOST_VERDICTS
    assert [kept[0].decision, kept[1].observed, kept[-1].observed] == ["send", str(56 - MOST_VERDICTS), "54"]


# --- creation ---------------------------------------------------------------------------------------------------------


@rolled_back
def test_create_partitions_covers_two_spans_ahead():
    drop_partitions()

    assert partitions.create_partitions() == 3
    assert partitions.create_partitions() == 0

    parts = partitions.list_partitions()
    assert all(earlier.until == later.since for earlier, later in pairwise(parts))
    assert parts[0].since <= now()
    assert parts[-1].until > now() + timedelta(days=14)


@rolled_back
def test_touch_without_partition_moves_there_later(delivered):
    drop_partitions()
    (task_id,) = delivered(1)
    assert find_part(task_id) == REST

    partitions.create_partitions()

    assert find_part(task_id) in {each.name for each in partitions.list_partitions()}


@committed
def test_racing_passes_create_each_partition_once(race):
    before = partitions.list_partitions()
    sql.execute(f"DROP TABLE {before[-1].name}", {})

    assert sorted(race(4, lambda _: partitions.create_partitions())) == [0, 0, 0, 1]
    assert partitions.list_partitions() == before


@rolled_back
def test_create_partitions_leaves_many_rows_in_rest(delivered, monkeypatch):
    """All of them moved in one transaction, and workers settled nothing for minutes."""
    monkeypatch.setattr(partitions, "MOST_MOVED", 2)
    drop_partitions()
    ids = delivered(3)

    assert partitions.create_partitions() == 2

    parts = partitions.list_partitions()
    assert now() < parts[0].since <= now() + timedelta(days=1)
    assert {find_part(each) for each in ids} == {REST}
    assert partitions.create_partitions() == 0


# --- dropping ---------------------------------------------------------------------------------------------------------


@rolled_back
def test_drop_expired_partition_keeps_what_is_needed(delivered, record_event):
    partitions._create_partition(OLD)
    gone, failed, repeated = delivered(3, OLD.since + timedelta(days=1))
    FailedTask.objects.create(task_id=failed, origin="touch", failure="failed", payload={}, attempts=[])
    (again,) = record_event(user="user-9").task_ids
    Touch.objects.filter(pk=again).update(retry_of=repeated)
    complaint = Complaint.objects.get(event_id=record_event("complaint.received").id)
    Complaint.objects.update(touch=gone)
    assert {find_part(each) for each in (gone, failed, repeated)} == {OLD.name}

    partitions.drop_expired_partitions(OLD.until - timedelta(seconds=1))
    assert OLD in partitions.list_partitions()
    partitions.drop_expired_partitions(OLD.until)

    assert OLD not in partitions.list_partitions()
    assert {find_part(each) for each in (failed, repeated)} == {REST}
    assert not Touch.objects.filter(pk=gone).exists()
    complaint.refresh_from_db()
    assert complaint.touch_id is None


@rolled_back
def test_partition_stays_while_too_many_rows_are_needed_or_a_reader_has_not_read_it(delivered, monkeypatch):
    partitions._create_partition(OLD)
    (task_id,) = delivered(1, OLD.since + timedelta(days=1))
    failed = FailedTask.objects.create(task_id=task_id, origin="touch", failure="failed", payload={}, attempts=[])
    with monkeypatch.context() as patched:
        patched.setattr(partitions, "MOST_MOVED", 0)
        assert partitions.drop_expired_partitions(OLD.until) == 0
    failed.delete()
    EndMark.objects.create(reader="slow", settled_at=OLD.since, task_id=task_id, ceiling=OLD.since)
    retention.delete_expired_rows()
    assert find_part(task_id) == OLD.name

    ends.drop_reader("slow")
    retention.delete_expired_rows()
    assert OLD not in partitions.list_partitions()


@committed
@pytest.mark.parametrize("step", ["drop", "create"])
def test_ends_during_a_rotation_are_not_lost(step, delivered, record_event, monkeypatch):
    """The pass waits for a table, and workers that settle touches wait behind it."""
    monkeypatch.setattr(partitions, "LOCK_WAIT", WAIT_LIMIT)
    with transaction.atomic():
        partitions._create_partition(OLD)
    failed, _ = delivered(2, OLD.since)
    FailedTask.objects.create(task_id=failed, origin="touch", failure="failed", payload={}, attempts=[])
    if step == "create":
        drop_partitions()
    due = [record_event(user=f"late-{number}").task_ids[0] for number in range(6)]
    fall_due(*due)
    held = f"{OLD.name} IN ACCESS SHARE MODE" if step == "drop" else f"{REST} IN ROW EXCLUSIVE MODE"
    rotate = partial(partitions.drop_expired_partitions, OLD.until) if step == "drop" else partitions.create_partitions

    act_behind_locks(lambda: sql.execute(f"LOCK TABLE {held}", {}), rotate, lambda: deliver(due))

    assert {find_part(each) for each in due} <= {each.name for each in partitions.list_partitions()} | {REST}
    assert set(Touch.objects.values_list("pk", flat=True)) == {*due, *([failed] if step == "drop" else [])}
    assert set(Touch.objects.values_list("state", flat=True)) == {"delivered"}
