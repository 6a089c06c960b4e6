"""What is over for long enough goes, with all that hangs on it; what is open, in doubt or still counted stays."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import getrandbits
from typing import Any
from uuid import UUID

import pytest
from django.contrib.sessions.models import Session
from django.db import connection, transaction
from pytest_django import Settings

from config.local.processes import wait_until
from scheduling import sql, tasks
from scheduling.ids import first_id_at, new_id
from scheduling.ledger import deletion
from scheduling.models import Complaint, Event, FailedTask, HarassmentRule, Touch
from scheduling.operations import failed_tasks, retention
from scheduling.operations.failed_tasks import Actor
from scheduling.planning import ingest
from tests.scheduling.core.conftest import deliver, deliver_when_due, fall_due, pass_time, rows
from tests.scheduling.core.programs import is_connected, program, waits_for_a_lock
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.second_connection import Race, SecondConnection

pytestmark = pytest.mark.django_db(transaction=True)
ANN = Actor("ann")
OLD = 100  #: days


@pytest.fixture
def record_old_event(record_event: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Like `happen`, `OLD` days ago as far as the ids know; what is stored is moved there by `pass_time`."""

    def record_old_event(*args: Any, **changes: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(ingest, "new_id", _old_id)
            return record_event(*args, **changes)

    return record_old_event


def _old_id() -> UUID:
    return UUID(int=first_id_at(datetime.now(UTC) - timedelta(days=OLD)).int + getrandbits(70))


def test_retention_deletes_touch_with_its_event(matrix: MatrixBuilder, record_old_event: Callable[..., Any]) -> None:
    matrix.node()
    deliver_when_due(*record_old_event().task_ids)
    assert [(len(each.verdicts), len(each.attempts)) for each in Touch.objects.all()] == [(1, 1)]
    pass_time(days=OLD)

    deleted = {table: count for table, count in retention.delete_expired_rows().items() if count}
    assert deleted == {"scheduling_touch_ended_rest": 1, "scheduling_event": 1}
    assert not any(model.objects.exists() for model in (Touch, Event))


def test_retention_keeps_younger_rows(matrix: MatrixBuilder, record_old_event: Callable[..., Any]) -> None:
    matrix.node()
    deliver_when_due(*record_old_event().task_ids)
    pass_time(days=89)

    assert not any(retention.delete_expired_rows().values())


def test_retention_keeps_waiting_touch_and_event(matrix: MatrixBuilder, record_old_event: Callable[..., Any]) -> None:
    matrix.node(delay=timedelta(days=200), expires_after=timedelta(days=300))
    (task_id,) = record_old_event().task_ids
    pass_time(days=OLD)

    assert not any(retention.delete_expired_rows().values())
    (row,) = deliver_when_due(task_id)
    assert row.state == "delivered"


def test_retention_counts_from_the_touch_end(matrix: MatrixBuilder, record_old_event: Callable[..., Any]) -> None:
    matrix.node(delay=timedelta(days=95), expires_after=timedelta(days=300))
    (task_id,) = record_old_event().task_ids
    pass_time(days=OLD)
    deliver_when_due(task_id)

    assert not any(retention.delete_expired_rows().values())


def test_retention_keeps_touches_counted_by_a_rule(matrix: MatrixBuilder, record_old_event: Callable[..., Any]) -> None:
    HarassmentRule.objects.filter(kind="dedupe").update(window=timedelta(days=180))
    matrix.node()
    deliver_when_due(*record_old_event().task_ids)
    pass_time(days=OLD)

    assert not any(retention.delete_expired_rows().values())


def test_retention_keeps_touches_counted_for_a_goal(
    matrix: MatrixBuilder, record_old_event: Callable[..., Any]
) -> None:
    matrix.node(goal_event="order.paid", goal_within=timedelta(days=180))
    deliver_when_due(*record_old_event().task_ids)
    pass_time(days=OLD)

    assert not any(retention.delete_expired_rows().values())


# --- idempotency ------------------------------------------------------------------------------------------------------


def test_event_is_known_as_duplicate_for_90_days(
    matrix: MatrixBuilder, record_old_event: Callable[..., Any], record_event: RecordEvent, settings: Settings
) -> None:
    settings.AFTERTOUCH_RETENTION_DAYS = 7
    matrix.node()
    deliver_when_due(*record_old_event(event_id="paid-1").task_ids)
    pass_time(days=80)
    assert retention.delete_expired_rows()["scheduling_touch_ended_rest"] == 1

    again = record_event(event_id="paid-1")

    assert (again.duplicate, again.task_ids) == (True, ())
    pass_time(days=11)
    assert retention.delete_expired_rows()["scheduling_event"] == 1
    assert not record_event(event_id="paid-1").duplicate


def test_event_deleted_during_repeat_is_a_duplicate(
    record_old_event: Callable[..., Any],
    record_event: RecordEvent,
    second_connection: SecondConnection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the insert that met it and the question what it had planned."""
    record_old_event(event_id="paid-1")
    pass_time(days=OLD)
    ask = sql.rows

    def delete_first(statement: str, parameters: Any, **options: Any) -> Any:
        if "array_agg" in statement:
            monkeypatch.setattr(sql, "rows", ask)
            assert second_connection(retention.delete_expired_rows)["scheduling_event"] == 1
        return ask(statement, parameters, **options)

    monkeypatch.setattr(sql, "rows", delete_first)
    again = record_event(event_id="paid-1")
    assert (again.duplicate, again.task_ids) == (True, ())


# --- failed tasks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def failed(
    matrix: MatrixBuilder, hook: Any, record_old_event: Callable[..., Any], receiver: ScriptedReceiver
) -> FailedTask:
    """As old as its event."""
    hook.idempotent = False
    hook.save()
    matrix.node(channel=hook)
    receiver.script = [422]
    deliver_when_due(*record_old_event().task_ids)
    row = FailedTask.objects.get()
    FailedTask.objects.filter(pk=row.pk).update(id=_old_id())
    return FailedTask.objects.get()


def test_retention_keeps_open_failed_task_and_touch(failed: FailedTask) -> None:
    pass_time(days=OLD)

    assert not any(retention.delete_expired_rows().values())
    assert failed_tasks.retry_failed_task(failed.pk, ANN)


def test_retention_deletes_archived_task_in_one_pass(failed: FailedTask) -> None:
    failed_tasks.archive_failed_task(failed.pk, ANN)
    pass_time(days=OLD)

    assert list(retention.delete_expired_rows().values())[:3] == [1, 1, 1]


def test_retention_keeps_touch_while_its_retry_exists(failed: FailedTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one asks whether it is in doubt, and a job of RPA hangs on the first of them."""
    monkeypatch.setattr(failed_tasks, "new_id", _old_id)
    again = failed_tasks.retry_failed_task(failed.pk, ANN)
    pass_time(days=OLD)

    assert list(retention.delete_expired_rows().values())[:3] == [1, 0, 0]
    deliver_when_due(again)
    pass_time(days=OLD)
    assert retention.delete_expired_rows()["scheduling_touch_ended_rest"] == 1
    assert Touch.objects.get().pk == failed.task_id
    assert list(retention.delete_expired_rows().values())[1:3] == [1, 1]


def test_retention_does_not_delete_during_retry(failed: FailedTask, second_connection: SecondConnection) -> None:
    failed_tasks.ignore_failed_task(failed.pk, ANN)
    pass_time(days=OLD)

    with transaction.atomic():
        again = failed_tasks.retry_failed_task(failed.pk, ANN)
        assert not any(second_connection(retention.delete_expired_rows).values())  # it waits for no lock
    assert Touch.objects.get(pk=str(again)).retry_of == failed.task_id


# --- races ------------------------------------------------------------------------------------------------------------


def test_retention_skips_locked_rows(
    matrix: MatrixBuilder, record_old_event: Callable[..., Any], second_connection: SecondConnection
) -> None:
    matrix.node()
    mine, other = (deliver_when_due(*record_old_event(user=user).task_ids)[0] for user in ("ann", "bob"))
    pass_time(days=OLD)

    with transaction.atomic():
        Touch.objects.select_for_update().get(pk=str(mine.pk))
        assert second_connection(retention.delete_expired_rows)["scheduling_touch_ended_rest"] == 1
    assert [row.pk for row in rows([mine.pk])] == [mine.pk]
    assert not Touch.objects.filter(pk=str(other.pk)).exists()
    assert retention.delete_expired_rows()["scheduling_touch_ended_rest"] == 1


def test_retention_racing_deliveries_deletes_only_old(
    matrix: MatrixBuilder, record_old_event: Callable[..., Any], race: Race
) -> None:
    matrix.node(guard_cap="ignore", guard_dedupe="ignore")
    over = [record_old_event(user=f"over-{number}").task_ids[0] for number in range(40)]
    deliver_when_due(*over)
    waiting = [record_old_event(user=f"waiting-{number}").task_ids[0] for number in range(40)]
    pass_time(days=OLD)
    Touch.objects.filter(pk__in=waiting).update(expires_at=datetime.now(UTC) + timedelta(days=1))
    fall_due(*waiting)

    race(4, lambda number: deliver(waiting) if number % 2 else retention.delete_expired_rows())

    assert sorted(Touch.objects.values_list("pk", "state")) == sorted((each, "delivered") for each in waiting)
    assert Event.objects.count() == 40


def test_complaint_during_retention_loses_touch_only(
    matrix: MatrixBuilder,
    record_old_event: Callable[..., Any],
    record_event: RecordEvent,
    second_connection: SecondConnection,
) -> None:
    matrix.node()
    (row,) = deliver_when_due(*record_old_event().task_ids)
    pass_time(days=OLD)

    with transaction.atomic():
        record_event("complaint.received", data={"task_id": str(row.pk)})
        assert (
            second_connection(retention.delete_expired_rows)["scheduling_touch_ended_rest"] == 0
        )  # the complaint holds it
    assert Complaint.objects.get().touch_id == row.pk
    assert retention.delete_expired_rows()["scheduling_touch_ended_rest"] == 1
    assert Complaint.objects.get().touch_id is None


def test_retention_deletes_complaint_with_its_event(record_old_event: Callable[..., Any]) -> None:
    record_old_event("complaint.received")
    pass_time(days=OLD)

    assert retention.delete_expired_rows()["scheduling_event"] == 1
    assert not Complaint.objects.exists()


@pytest.mark.processes
def test_retention_killed_in_a_batch_deletes_nothing(
    matrix: MatrixBuilder,
    record_old_event: Callable[..., Any],
    record_event: RecordEvent,
    second_connection: SecondConnection,
) -> None:
    matrix.node()
    task_ids = [deliver_when_due(*record_old_event(user=user).task_ids)[0].pk for user in ("ann", "bob")]
    pass_time(days=OLD)

    complaint = Complaint.objects.get(event_id=record_event("complaint.received").id)
    Complaint.objects.update(touch=task_ids[1])
    with transaction.atomic():
        Complaint.objects.select_for_update().get(pk=complaint.pk)  # the pass has locked the touches and waits here
        with program(FORGETTING) as forgetting:
            assert wait_until(lambda: second_connection(lambda: waits_for_a_lock("forgetting")), 120)
            forgetting.kill()
    assert wait_until(lambda: not second_connection(lambda: is_connected("forgetting")), 120)
    assert Touch.objects.count() == 2

    assert retention.delete_expired_rows()["scheduling_touch_ended_rest"] == 2


FORGETTING = """
import django
django.setup()
from django.db import connection
from scheduling.operations import retention
connection.settings_dict["OPTIONS"]["application_name"] = "forgetting"
retention.delete_expired_rows()
"""


# --- many -------------------------------------------------------------------------------------------------------------


def test_retention_resumes_after_time_limit(
    matrix: MatrixBuilder, record_old_event: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    for number in range(5):
        record_old_event("order.paid", user=f"user-{number}")
    pass_time(days=OLD)
    late = datetime.now(UTC)

    assert retention.delete_expired_in_table(retention.EVENTS, ends_at=late) == 2
    assert retention.delete_expired_in_table(retention.EVENTS, ends_at=late + timedelta(minutes=5)) == 3


def test_retention_passes_rows_that_are_kept(
    matrix: MatrixBuilder, record_old_event: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    monkeypatch.setattr(retention, "reached", {})
    matrix.node()
    for number in range(2):
        record_old_event(user=f"waiting-{number}")  # its touch waits, so it stays
    for number in range(3):
        record_old_event("order.paid", user=f"user-{number}")
    pass_time(days=OLD)
    late = datetime.now(UTC)

    assert [retention.delete_expired_in_table(retention.EVENTS, ends_at=late) for _ in range(3)] == [0, 2, 1]
    Touch.objects.all().delete()
    assert retention.delete_expired_in_table(retention.EVENTS, ends_at=late) == 2, "not round the end"
    assert not Event.objects.exists()


@pytest.mark.usefixtures("fresh_tables")
def test_retention_batch_uses_indexes(matrix: MatrixBuilder, record_old_event: Callable[..., Any]) -> None:
    """Among 30,000 rows, all old, of which most stay: each step through an index, none of them through the table."""
    node = matrix.node()
    deliver_when_due(*record_old_event().task_ids)
    customer = Touch.objects.get().customer_id
    _many_open(30_000, customer, node)
    pass_time(days=OLD)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE scheduling_touch_ended_rest, scheduling_event")
    before = datetime.now(UTC)
    end = first_id_at(before)
    batch = retention._created_between(retention.TOUCHES, retention.START, end)
    events = retention._created_between(retention.EVENTS, retention.START, end)
    assert len(batch) == len(events) == retention.BATCH

    plans = {
        "touches": _plan(deletion._LOCK_TOUCHES, ids=batch, before=before),
        "events": _plan(retention._LOCK_EVENTS, ids=events, before=before),
        "next": _plan(
            "SELECT task_id FROM scheduling_touch_ended_rest WHERE task_id > %(after)s AND task_id < %(before)s"
            " ORDER BY task_id LIMIT 1000", after=batch[-1], before=first_id_at(before),
        ),
    }  # fmt: skip
    for name, plan in plans.items():
        assert "Seq Scan on scheduling_touch_ended_rest" not in plan, f"{name}:\n{plan}"
        assert "Seq Scan on scheduling_event" not in plan, f"{name}:\n{plan}"
    assert "scheduling_touch_ended_rest_task_id_idx" in plans["next"]


def _many_open(count: int, customer: int, node: Any) -> None:
    """Touches that wait, each with its event, as old as the ids of `once`."""
    since = int((datetime.now(UTC) - timedelta(days=OLD)).timestamp() * 1000)
    ids = [UUID(int=((since + number) << 80) + number) for number in range(count)]
    sql.copy_rows(
        "COPY scheduling_event (id, source, event_id, type, occurred_at, received_at, customer_id, user_id, chat_id,"
        " data) FROM STDIN",
        [
            (each, "many", str(each), "x", datetime.now(UTC), datetime.now(UTC), customer, "ann", "", "{}")
            for each in ids
        ],
    )
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO scheduling_touch (task_id, root_id, state, priority, due_at, planned_at, paused_by, attempt,
                lease_no, wakeups, reason, created_at, event_id, node_id, node_version, customer_id, chat_id,
                expires_at, content_type, counts_toward_cap, settled_at)
            SELECT id, id, 'failed', 1, now(), now(), '', 0, 0, 0, '', now(), id, %s, 1, %s, '',
                now() + interval '1 year', '', true, now()
            FROM scheduling_event WHERE source = 'many'
            """,
            [node.pk, customer],
        )


def _plan(statement: str, **parameters: Any) -> str:
    return "\n".join(row[0] for row in sql.rows(f"EXPLAIN {statement}", parameters))


# --- deployment -------------------------------------------------------------------------------------------------------


def test_retention_covers_every_foreign_key() -> None:
    """A new reference to a table that is deleted from would stop the deleting: add it to `retention`, and here."""
    pointing = sql.rows(
        """
        SELECT DISTINCT conrelid::regclass::text, confrelid::regclass::text FROM pg_constraint
        WHERE contype = 'f' AND confrelid IN ('scheduling_event'::regclass,
            'scheduling_failedtask'::regclass, 'rpa_tasks_job'::regclass, 'rpa_tasks_run'::regclass)
        UNION SELECT substring(pg_get_functiondef(tgfoid) FROM 'is referenced by (\\w+)'), tgrelid::regclass::text
        FROM pg_trigger WHERE tgname = 'referred' AND tgrelid = 'scheduling_event'::regclass
        """,
        {},
    )
    assert {tuple(row) for row in pointing} == {
        ("scheduling_touch", "scheduling_event"),
        ("scheduling_complaint", "scheduling_event"),
        ("rpa_tasks_run", "rpa_tasks_job"),
        ("scheduling_failedtaskcomment", "scheduling_failedtask"),
        ("rpa_tasks_evidence", "rpa_tasks_run"),
    }


def test_ids_are_ordered_by_time() -> None:
    earlier = datetime.now(UTC)
    assert first_id_at(earlier - timedelta(seconds=2)) < new_id() < first_id_at(
        datetime.now(UTC) + timedelta(seconds=2)
    )  # fmt: skip


# --- what is kept of people -------------------------------------------------------------------------------------------


def test_retention_deletes_admin_sessions(db: None) -> None:
    for days in (-1, 1):
        Session.objects.create(session_key=f"s{days}", expire_date=datetime.now(UTC) + timedelta(days=days))
    tasks.delete_expired_data()
    assert [each.session_key for each in Session.objects.all()] == ["s1"]
