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
from scheduling.models import Attempt, Complaint, Event, FailedTask, HarassmentRule, Touch, Verdict, WhatIfRun
from scheduling.operations import failed_tasks, retention
from scheduling.operations.failed_tasks import Actor
from scheduling.planning import ingest
from tests.scheduling.core.conftest import deliver, deliver_at_last, fall_due, pass_time, rows
from tests.scheduling.core.programs import is_connected, program, waits_for_a_lock

pytestmark = pytest.mark.django_db(transaction=True)
ANN = Actor("ann")
OLD = 100  #: days


@pytest.fixture
def once(happen: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Like `happen`, `OLD` days ago as far as the ids know; what is stored is moved there by `pass_time`."""

    def once(*args: Any, **changes: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(ingest, "new_id", _old_id)
            return happen(*args, **changes)

    return once


def _old_id() -> UUID:
    return UUID(int=first_id_at(datetime.now(UTC) - timedelta(days=OLD)).int + getrandbits(70))


def test_a_delivered_touch_goes_with_what_was_tried_and_decided_and_then_its_event(matrix: Any, once: Any) -> None:
    matrix.node()
    deliver_at_last(*once().task_ids)
    assert (Touch.objects.count(), Verdict.objects.count(), Attempt.objects.count()) == (1, 1, 1)
    pass_time(days=OLD)

    assert retention.delete_expired_rows() == {
        "scheduling_failedtask": 0, "scheduling_touch": 1, "scheduling_event": 1, "scheduling_bulkaction": 0,
        "rpa_tasks_job": 0, "rpa_tasks_scheduledround": 0, "scheduling_disabledtarget": 0,
    }  # fmt: skip
    assert not any(model.objects.exists() for model in (Touch, Verdict, Attempt, Event))


def test_what_is_younger_stays(matrix: Any, once: Any) -> None:
    matrix.node()
    deliver_at_last(*once().task_ids)
    pass_time(days=89)

    assert not any(retention.delete_expired_rows().values())


def test_a_touch_that_waits_stays_and_its_event_with_it(matrix: Any, once: Any) -> None:
    matrix.node(delay=timedelta(days=200), expires_after=timedelta(days=300))
    (task_id,) = once().task_ids
    pass_time(days=OLD)

    assert not any(retention.delete_expired_rows().values())
    (row,) = deliver_at_last(task_id)
    assert row.state == "delivered"


def test_a_touch_is_kept_from_its_end_not_from_its_beginning(matrix: Any, once: Any) -> None:
    matrix.node(delay=timedelta(days=95), expires_after=timedelta(days=300))
    (task_id,) = once().task_ids
    pass_time(days=OLD)
    deliver_at_last(task_id)

    assert not any(retention.delete_expired_rows().values())


def test_what_a_rule_still_counts_stays(matrix: Any, once: Any) -> None:
    HarassmentRule.objects.filter(kind="dedupe").update(window=timedelta(days=180))
    matrix.node()
    deliver_at_last(*once().task_ids)
    pass_time(days=OLD)

    assert not any(retention.delete_expired_rows().values())


def test_what_may_still_reach_the_goal_of_its_node_stays(matrix: Any, once: Any) -> None:
    matrix.node(goal_event="order.paid", goal_within=timedelta(days=180))
    deliver_at_last(*once().task_ids)
    pass_time(days=OLD)

    assert not any(retention.delete_expired_rows().values())


# --- idempotency ------------------------------------------------------------------------------------------------------


def test_an_event_is_known_for_ninety_days_however_soon_its_touches_go(
    matrix: Any, once: Any, happen: Any, settings: Settings
) -> None:
    settings.AFTERTOUCH_RETENTION_DAYS = 7
    matrix.node()
    deliver_at_last(*once(event_id="paid-1").task_ids)
    pass_time(days=80)
    assert retention.delete_expired_rows()["scheduling_touch"] == 1

    again = happen(event_id="paid-1")

    assert (again.duplicate, again.task_ids) == (True, ())
    pass_time(days=11)
    assert retention.delete_expired_rows()["scheduling_event"] == 1
    assert not happen(event_id="paid-1").duplicate


def test_an_event_that_is_forgotten_while_it_is_told_again_is_a_duplicate(
    once: Any, happen: Any, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the insert that met it and the question what it had planned."""
    once(event_id="paid-1")
    pass_time(days=OLD)
    ask = sql.rows

    def forget_first(statement: str, parameters: Any) -> Any:
        if "array_agg" in statement:
            monkeypatch.setattr(sql, "rows", ask)
            assert elsewhere(retention.delete_expired_rows)["scheduling_event"] == 1
        return ask(statement, parameters)

    monkeypatch.setattr(sql, "rows", forget_first)
    again = happen(event_id="paid-1")
    assert (again.duplicate, again.task_ids) == (True, ())


# --- failed tasks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def failed(matrix: Any, hook: Any, once: Any, receiver: Any) -> FailedTask:
    """As old as its event."""
    hook.idempotent = False
    hook.save()
    matrix.node(channel=hook)
    receiver.script = [422]
    deliver_at_last(*once().task_ids)
    row = FailedTask.objects.get()
    FailedTask.objects.filter(pk=row.pk).update(id=_old_id())
    return FailedTask.objects.get()


def test_an_open_failed_task_stays_with_its_touch(failed: FailedTask) -> None:
    pass_time(days=OLD)

    assert not any(retention.delete_expired_rows().values())
    assert failed_tasks.retry_failed_task(failed.pk, ANN)


def test_one_that_was_archived_goes_and_in_the_same_pass_its_touch_and_its_event(failed: FailedTask) -> None:
    failed_tasks.archive_failed_task(failed.pk, ANN)
    pass_time(days=OLD)

    assert list(retention.delete_expired_rows().values())[:3] == [1, 1, 1]


def test_a_predecessor_stays_as_long_as_the_touch_that_it_was_published_again_as(
    failed: FailedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one asks whether it is in doubt, and a job of RPA hangs on the first of them."""
    monkeypatch.setattr(failed_tasks, "new_id", _old_id)
    again = failed_tasks.retry_failed_task(failed.pk, ANN)
    pass_time(days=OLD)

    assert list(retention.delete_expired_rows().values())[:3] == [1, 0, 0]
    deliver_at_last(again)
    pass_time(days=OLD)
    assert retention.delete_expired_rows()["scheduling_touch"] == 1
    assert Touch.objects.get().pk == failed.task_id
    assert list(retention.delete_expired_rows().values())[1:3] == [1, 1]


def test_of_publishing_again_and_forgetting_an_ignored_one_only_one_happens(failed: FailedTask, elsewhere: Any) -> None:
    failed_tasks.ignore_failed_task(failed.pk, ANN)
    pass_time(days=OLD)

    with transaction.atomic():
        again = failed_tasks.retry_failed_task(failed.pk, ANN)
        assert not any(elsewhere(retention.delete_expired_rows).values())  # it waits for nobody
    assert Touch.objects.get(pk=str(again)).retry_of == failed.task_id


# --- races ------------------------------------------------------------------------------------------------------------


def test_what_somebody_has_locked_is_left_for_the_next_pass(matrix: Any, once: Any, elsewhere: Any) -> None:
    matrix.node()
    mine, other = (deliver_at_last(*once(user=user).task_ids)[0] for user in ("ann", "bob"))
    pass_time(days=OLD)

    with transaction.atomic():
        Touch.objects.select_for_update().get(pk=str(mine.pk))
        assert elsewhere(retention.delete_expired_rows)["scheduling_touch"] == 1
    assert [row.pk for row in rows([mine.pk])] == [mine.pk]
    assert not Touch.objects.filter(pk=str(other.pk)).exists()
    assert retention.delete_expired_rows()["scheduling_touch"] == 1


def test_passes_that_race_with_each_other_and_with_deliveries_delete_what_is_over_and_nothing_else(
    matrix: Any, once: Any, race: Any
) -> None:
    matrix.node(guard_cap="ignore", guard_dedupe="ignore")
    over = [once(user=f"over-{number}").task_ids[0] for number in range(40)]
    deliver_at_last(*over)
    waiting = [once(user=f"waiting-{number}").task_ids[0] for number in range(40)]
    pass_time(days=OLD)
    Touch.objects.filter(pk__in=waiting).update(expires_at=datetime.now(UTC) + timedelta(days=1))
    fall_due(*waiting)

    race(4, lambda number: deliver(waiting) if number % 2 else retention.delete_expired_rows())

    assert sorted(Touch.objects.values_list("pk", "state")) == sorted((each, "delivered") for each in waiting)
    assert set(Verdict.objects.values_list("touch_id", flat=True)) == set(waiting)
    assert set(Attempt.objects.values_list("touch_id", flat=True)) == set(waiting)
    assert Event.objects.count() == 40


def test_a_complaint_about_a_touch_that_is_being_forgotten_names_none(
    matrix: Any, once: Any, happen: Any, elsewhere: Any
) -> None:
    matrix.node()
    (row,) = deliver_at_last(*once().task_ids)
    pass_time(days=OLD)

    with transaction.atomic():
        happen("complaint.received", data={"task_id": str(row.pk)})
        assert elsewhere(retention.delete_expired_rows)["scheduling_touch"] == 0  # the complaint holds it
    assert Complaint.objects.get().touch_id == row.pk
    assert retention.delete_expired_rows()["scheduling_touch"] == 1
    assert Complaint.objects.get().touch_id is None


def test_a_complaint_goes_with_its_event(once: Any) -> None:
    once("complaint.received")
    pass_time(days=OLD)

    assert retention.delete_expired_rows()["scheduling_event"] == 1
    assert not Complaint.objects.exists()


@pytest.mark.faults
def test_a_pass_that_is_killed_in_the_middle_of_a_batch_has_deleted_all_of_it_or_nothing(
    matrix: Any, once: Any, elsewhere: Any
) -> None:
    matrix.node()
    task_ids = [deliver_at_last(*once(user=user).task_ids)[0].pk for user in ("ann", "bob")]
    pass_time(days=OLD)

    with transaction.atomic():
        Verdict.objects.select_for_update().get(touch_id=task_ids[1])  # the attempts are deleted, then it waits here
        with program(FORGETTING) as forgetting:
            assert wait_until(lambda: elsewhere(lambda: waits_for_a_lock("forgetting")), 120)
            forgetting.kill()
    assert wait_until(lambda: not elsewhere(lambda: is_connected("forgetting")), 120)
    assert (Touch.objects.count(), Verdict.objects.count(), Attempt.objects.count()) == (2, 2, 2)

    assert retention.delete_expired_rows()["scheduling_touch"] == 2
    assert (Verdict.objects.count(), Attempt.objects.count()) == (0, 0)


FORGETTING = """
import django
django.setup()
from django.db import connection
from scheduling.operations import retention
connection.settings_dict["OPTIONS"]["application_name"] = "forgetting"
retention.delete_expired_rows()
"""


# --- many -------------------------------------------------------------------------------------------------------------


def test_a_pass_ends_in_time_and_the_next_goes_on(matrix: Any, once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    for number in range(5):
        once("order.paid", user=f"user-{number}")
    pass_time(days=OLD)
    late = datetime.now(UTC)

    assert retention.delete_expired_in_table(retention.EVENTS, ends_at=late) == 2
    assert retention.delete_expired_in_table(retention.EVENTS, ends_at=late + timedelta(minutes=5)) == 3


def test_rows_that_stay_do_not_hide_those_behind_them(matrix: Any, once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    monkeypatch.setattr(retention, "_reached", {})
    matrix.node()
    for number in range(2):
        once(user=f"waiting-{number}")  # its touch waits, so it stays
    for number in range(3):
        once("order.paid", user=f"user-{number}")
    pass_time(days=OLD)
    late = datetime.now(UTC)

    assert [retention.delete_expired_in_table(retention.EVENTS, ends_at=late) for _ in range(3)] == [0, 2, 1]
    Touch.objects.all().delete()
    assert retention.delete_expired_in_table(retention.EVENTS, ends_at=late) == 2, "not round the end"
    assert not Event.objects.exists()


def test_a_batch_is_found_by_the_key_among_many(matrix: Any, once: Any) -> None:
    """Among 30,000 rows, all old, of which most stay: each step through an index, none of them through the table."""
    node = matrix.node()
    deliver_at_last(*once().task_ids)
    customer = Touch.objects.get().customer_id
    _many_open(30_000, customer, node)
    pass_time(days=OLD)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE scheduling_touch, scheduling_event, scheduling_verdict, scheduling_attempt")
    before = datetime.now(UTC)
    end = first_id_at(before)
    batch = retention._created_between(retention.TOUCHES, retention.START, end)
    events = retention._created_between(retention.EVENTS, retention.START, end)
    assert len(batch) == len(events) == retention.BATCH

    plans = {
        "touches": _plan(deletion._LOCK_TOUCHES, ids=batch, before=before),
        "events": _plan(retention._LOCK_EVENTS, ids=events, before=before),
        "next": _plan(
            "SELECT task_id FROM scheduling_touch WHERE task_id > %(after)s AND task_id < %(before)s"
            " ORDER BY task_id LIMIT 1000", after=batch[-1], before=first_id_at(before),
        ),
    }  # fmt: skip
    for name, plan in plans.items():
        assert "Seq Scan on scheduling_touch" not in plan, f"{name}:\n{plan}"
        assert "Seq Scan on scheduling_event" not in plan, f"{name}:\n{plan}"
    assert "scheduling_touch_pkey" in plans["next"]


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
            INSERT INTO scheduling_touch (task_id, root_id, state, priority, due_at, planned_at, parked, attempt,
                lease_no, hints, reason, created_at, event_id, node_id, node_version, customer_id, chat_id, expires_at,
                content_type, counts_toward_cap)
            SELECT id, id, 'scheduled', 1, now(), now(), '', 0, 0, 0, '', now(), id, %s, 1, %s, '',
                now() + interval '1 year', '', true
            FROM scheduling_event WHERE source = 'many'
            """,
            [node.pk, customer],
        )


def _plan(statement: str, **parameters: Any) -> str:
    return "\n".join(row[0] for row in sql.rows(f"EXPLAIN {statement}", parameters))


# --- the house --------------------------------------------------------------------------------------------------------


def test_every_table_that_points_at_one_of_these_is_thought_of() -> None:
    """A new foreign key to a table that is deleted from would stop the deleting: add it to `retention`, and here."""
    pointing = sql.rows(
        """
        SELECT DISTINCT conrelid::regclass::text, confrelid::regclass::text FROM pg_constraint
        WHERE contype = 'f' AND confrelid IN ('scheduling_touch'::regclass, 'scheduling_event'::regclass,
            'scheduling_failedtask'::regclass, 'rpa_tasks_job'::regclass, 'rpa_tasks_run'::regclass)
        """,
        {},
    )
    assert {tuple(row) for row in pointing} == {
        ("scheduling_touch", "scheduling_event"),
        ("scheduling_complaint", "scheduling_event"),
        ("scheduling_complaint", "scheduling_touch"),
        ("rpa_tasks_run", "rpa_tasks_job"),
        ("rpa_tasks_evidence", "rpa_tasks_run"),
    }


def test_ids_are_in_the_order_of_time() -> None:
    earlier = datetime.now(UTC)
    assert first_id_at(earlier - timedelta(seconds=2)) < new_id() < first_id_at(
        datetime.now(UTC) + timedelta(seconds=2)
    )  # fmt: skip


# --- what is kept of people -------------------------------------------------------------------------------------------


def test_sessions_of_the_back_office_and_replays_go_when_they_are_over(db: None) -> None:
    for days in (-1, 1):
        Session.objects.create(session_key=f"s{days}", expire_date=datetime.now(UTC) + timedelta(days=days))
    for days in (OLD, 1):
        WhatIfRun.objects.create(created_at=datetime.now(UTC) - timedelta(days=days), draft="", days=7)
    tasks.delete_expired_data()
    assert [each.session_key for each in Session.objects.all()] == ["s1"]
    assert WhatIfRun.objects.count() == 1
