"""Ended touches lie in the partition of their end. A pass creates partitions ahead and drops expired ones."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.utils.timezone import now

from config.local.processes import wait_until
from scheduling import sql
from scheduling.ledger import ends, partitions
from scheduling.ledger.partitions import ENDED, REST, Partition
from scheduling.ledger.touches import TouchDecision, touches
from scheduling.ledger.transitions import Settlement
from scheduling.models import Complaint, EndMark, FailedTask, Touch
from scheduling.models.touch_log import MOST_VERDICTS
from scheduling.operations import retention
from scheduling.policy.guards import HOLD, SEND, GuardVerdict
from tests.scheduling.core.conftest import deliver, fall_due
from tests.scheduling.core.programs import is_connected, program, waits_for_a_lock
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.second_connection import Race, SecondConnection
from tests.support.tables import each_row

LEASE = timedelta(seconds=45)
OLD = Partition(f"{ENDED}_20250106", datetime(2025, 1, 6, tzinfo=UTC), datetime(2025, 1, 13, tzinfo=UTC))
rolled_back = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)


def find_part(task_id: UUID) -> str:
    """Return the table that stores a touch."""
    ((table,),) = sql.rows(
        "SELECT tableoid::regclass::text FROM scheduling_touch WHERE task_id = %(id)s", {"id": task_id}
    )
    return str(table)


def drop_partitions() -> None:
    """As after weeks without a pass."""
    for each in partitions.list_partitions():
        sql.execute(f"DROP TABLE {each.name}", {})


@pytest.fixture
def delivered(matrix: MatrixBuilder, record_event: RecordEvent) -> Callable[..., list[UUID]]:
    """Delivered touches of many customers."""
    matrix.node()

    def deliver(count: int, at: datetime | None = None) -> list[UUID]:
        ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(count)]
        fall_due(*ids)
        touches.settle({claim: Settlement("delivered") for claim in touches.claim(ids, lease=LEASE)})
        if at:
            Touch.objects.filter(pk__in=ids).update(settled_at=at)
        return ids

    return deliver


# --- moves ------------------------------------------------------------------------------------------------------------


@rolled_back
def test_touch_leaves_live_table_when_it_ends(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    matrix.node()
    (task_id,) = record_event().task_ids
    fall_due(task_id)
    assert find_part(task_id) == "scheduling_touch_live"

    (claim,) = touches.claim([task_id], lease=LEASE)
    touches.settle({claim: Settlement("delivered")})

    row = Touch.objects.get()
    part = next(each for each in partitions.list_partitions() if each.name == find_part(task_id))
    assert row.settled_at is not None
    assert part.since <= row.settled_at < part.until


@rolled_back
@each_row("state", ["delivered", "suppressed", "cancelled", "failed", "unknown"])
def test_each_end_keeps_all_columns(state: str, matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    matrix.node()
    (task_id,) = record_event().task_ids
    Touch.objects.filter(pk=task_id).update(due_at=now() - LEASE)
    (claim,) = touches.claim([task_id], lease=LEASE)
    before = Touch.objects.values().get()

    touches.settle({claim: Settlement(state, "why")})

    after = Touch.objects.values().get()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"state", "reason", "lease_until", "settled_at", "wakeups"} - (
        {"wakeups"} if before["wakeups"] == 0 else set()
    )
    assert find_part(task_id).startswith(ENDED)


@committed
def test_cancel_that_waits_for_settled_touch_finds_none(
    matrix: MatrixBuilder, record_event: RecordEvent, second_connection: SecondConnection
) -> None:
    """An UPDATE across partitions would fail here: the row was moved to another partition."""
    matrix.node()
    (task_id,) = record_event().task_ids
    Touch.objects.filter(pk=task_id).update(due_at=now() - LEASE)
    (claim,) = touches.claim([task_id], lease=LEASE)
    found: list[set[UUID]] = []

    def cancel() -> None:
        try:
            found.append(touches.cancel([task_id], reason="late"))
        finally:
            connection.close()

    waiting = threading.Thread(target=cancel)
    with transaction.atomic():
        touches.settle({claim: Settlement("delivered")})
        waiting.start()
        assert wait_until(
            lambda: second_connection(lambda: bool(sql.rows("SELECT 1 FROM pg_locks WHERE NOT granted", {}))), 60
        )
    waiting.join(60)

    assert found == [set()]
    assert Touch.objects.get().state == "delivered"


@committed
def test_racing_settlements_end_touch_once(matrix: MatrixBuilder, record_event: RecordEvent, race: Race) -> None:
    matrix.node()
    (task_id,) = record_event().task_ids
    Touch.objects.filter(pk=task_id).update(due_at=now() - LEASE)
    (claim,) = touches.claim([task_id], lease=LEASE)

    settled = race(8, lambda number: touches.settle({claim: Settlement("delivered", str(number))}))

    assert sorted(map(len, settled)) == [0] * 7 + [1]
    assert Touch.objects.count() == 1


# --- the log of a touch -----------------------------------------------------------------------------------------------


@rolled_back
def test_touch_keeps_first_and_latest_verdicts(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    matrix.node()
    (task_id,) = record_event().task_ids
    verdicts = [GuardVerdict(SEND), *(GuardVerdict(HOLD, "cap", observed=str(number)) for number in range(60))]
    for verdict in verdicts:
        Touch.objects.filter(pk=task_id).update(due_at=now() - LEASE)
        (locked,), at = touches.lock_due([task_id])
        assert at is not None
        decision = TouchDecision(Settlement("scheduled", verdict.rule), verdict)
        touches.settle_batch({decision: [locked.task_id]}, at=at, lease=LEASE)

    kept = Touch.objects.get().verdicts
    assert len(kept) == MOST_VERDICTS
    assert [kept[0].decision, kept[1].observed, kept[-1].observed] == ["send", str(61 - MOST_VERDICTS), "59"]


# --- creation ---------------------------------------------------------------------------------------------------------


@rolled_back
def test_create_partitions_covers_two_spans_ahead() -> None:
    drop_partitions()

    assert partitions.create_partitions() == 3
    assert partitions.create_partitions() == 0

    parts = partitions.list_partitions()
    assert all(earlier.until == later.since for earlier, later in pairwise(parts))
    assert parts[0].since <= now()
    assert parts[-1].until > now() + timedelta(days=14)


@rolled_back
def test_touch_without_partition_moves_there_later(delivered: Callable[..., list[UUID]]) -> None:
    drop_partitions()
    (task_id,) = delivered(1)
    assert find_part(task_id) == REST

    partitions.create_partitions()

    assert find_part(task_id) in {each.name for each in partitions.list_partitions()}


@committed
def test_racing_passes_create_each_partition_once(race: Race) -> None:
    before = partitions.list_partitions()
    sql.execute(f"DROP TABLE {before[-1].name}", {})

    assert sorted(race(4, lambda _: partitions.create_partitions())) == [0, 0, 0, 1]
    assert partitions.list_partitions() == before


@rolled_back
def test_create_partitions_leaves_many_rows_in_rest(
    delivered: Callable[..., list[UUID]], monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_drop_expired_partition_keeps_what_is_needed(
    delivered: Callable[..., list[UUID]], record_event: RecordEvent
) -> None:
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
def test_partition_with_too_many_needed_rows_stays(
    delivered: Callable[..., list[UUID]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "MOST_MOVED", 0)
    partitions._create_partition(OLD)
    (failed,) = delivered(1, OLD.since)
    FailedTask.objects.create(task_id=failed, origin="touch", failure="failed", payload={}, attempts=[])

    assert partitions.drop_expired_partitions(OLD.until) == 0
    assert find_part(failed) == OLD.name


@rolled_back
def test_partition_that_a_reader_has_not_read_stays(delivered: Callable[..., list[UUID]]) -> None:
    partitions._create_partition(OLD)
    (unread,) = delivered(1, OLD.since + timedelta(days=1))
    EndMark.objects.create(reader="slow", settled_at=OLD.since, task_id=unread, ceiling=OLD.since)

    retention.delete_expired_rows()
    assert find_part(unread) == OLD.name
    ends.drop_reader("slow")
    retention.delete_expired_rows()
    assert OLD not in partitions.list_partitions()


ROTATING = """
import django
django.setup()
import sys
from datetime import UTC, datetime
from django.db import connection
from scheduling.ledger import ends, partitions
connection.settings_dict["OPTIONS"]["application_name"] = "rotating"
partitions.LOCK_WAIT = 600
if sys.argv[1] == "create":
    partitions.create_partitions()
else:
    partitions.drop_expired_partitions(datetime(2025, 1, 13, tzinfo=UTC))
"""


@committed
@pytest.mark.processes
@pytest.mark.parametrize(
    ("step", "held"),
    [
        ("drop", "scheduling_complaint IN ACCESS EXCLUSIVE MODE"),
        ("drop", f"{OLD.name} IN ACCESS SHARE MODE"),
        ("create", f"{REST} IN ROW EXCLUSIVE MODE"),
    ],
)
def test_pass_killed_in_rotation_loses_nothing(
    step: str, held: str, delivered: Callable[..., list[UUID]], record_event: RecordEvent,
    second_connection: SecondConnection,
) -> None:  # fmt: skip
    """The pass waits for the table `held`, and workers that settle touches wait behind it, until it is killed."""
    with transaction.atomic():
        partitions._create_partition(OLD)
    failed, gone = delivered(2, OLD.since)
    FailedTask.objects.create(task_id=failed, origin="touch", failure="failed", payload={}, attempts=[])
    if step == "create":
        drop_partitions()
    due = [record_event(user=f"late-{number}").task_ids[0] for number in range(20)]
    fall_due(*due)

    def settle(task_ids: list[UUID]) -> None:
        try:
            for task_id in task_ids:
                deliver([task_id])
        finally:
            connection.close()

    workers = [threading.Thread(target=settle, args=[due[number::2]]) for number in range(2)]
    with transaction.atomic():
        sql.execute(f"LOCK TABLE {held}", {})
        with program(ROTATING, step) as rotating:
            assert wait_until(lambda: second_connection(lambda: waits_for_a_lock("rotating")), 120)
            for worker in workers:
                worker.start()
            rotating.kill()
    assert wait_until(lambda: not second_connection(lambda: is_connected("rotating")), 120)
    for worker in workers:
        worker.join(120)
    assert Counter(Touch.objects.values_list("state", flat=True)) == {"delivered": 22 if step == "drop" else 20}
    if step == "drop":
        assert {find_part(each) for each in (failed, gone)} == {OLD.name}

    partitions.create_partitions()
    partitions.drop_expired_partitions(OLD.until)
    kept = set(Touch.objects.filter(settled_at__lt=OLD.until).values_list("pk", flat=True))
    assert kept == ({failed} if step == "drop" else set())
    assert Touch.objects.filter(state="delivered", settled_at__gt=OLD.until).count() == 20
