"""What is over for long enough goes, with all that hangs on it; what is open, in doubt or still counted stays."""

from datetime import UTC, datetime, timedelta
from random import getrandbits
from uuid import UUID

import pytest
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import F

from config.local.processes import wait_until
from scheduling import sql, tasks
from scheduling.ids import first_id_at, new_id
from scheduling.ledger.touches import touch_ledger
from scheduling.ledger.transitions import Settlement
from scheduling.models import Complaint, Event, FailedTask, HarassmentRule, Touch
from scheduling.operations import failed_tasks, retention
from scheduling.operations.failed_tasks import Actor
from scheduling.planning import ingest
from tests.scheduling.core.conftest import deliver, deliver_when_due, fall_due, pass_time
from tests.scheduling.core.programs import is_connected, program, waits_for_a_lock
from tests.support.claims import claim_touches
from tests.support.waiting import WAIT_LIMIT

LEASE = timedelta(seconds=45)
rolled_back, committed = pytest.mark.django_db, pytest.mark.django_db(transaction=True)
ANN = Actor("ann")
OLD = 100  #: days


@pytest.fixture
def record_old_event(record_event, monkeypatch):
    """Like `record_event`, `OLD` days ago as far as the ids know; what is stored is moved there by `pass_time`."""

    def record_old_event(*args, **changes):
        with monkeypatch.context() as patched:
            patched.setattr(ingest, "new_id", _old_id)
            return record_event(*args, **changes)

    return record_old_event


def _old_id():
    return UUID(int=first_id_at(datetime.now(UTC) - timedelta(days=OLD)).int + getrandbits(70))


def end_touches(*task_ids):
    """As a worker that has delivered them, within the transaction of the test."""
    fall_due(*task_ids)
    touch_ledger.settle({claim: Settlement("delivered") for claim in claim_touches(list(task_ids))})
    Touch.objects.filter(pk__in=task_ids).update(reserved_at=F("settled_at"))


@pytest.fixture
def old_touches(matrix, record_old_event):
    """Touches of these customers that ended `OLD` days ago, when their events happened."""

    def old_touches(*users):
        matrix.node()
        task_ids = [record_old_event(user=user).task_ids[0] for user in users]
        end_touches(*task_ids)
        pass_time(days=OLD)
        return task_ids

    return old_touches


def delete_expired():
    """Return the number of deleted rows by table."""
    return {table: count for table, count in retention.delete_expired_rows().items() if count}


@rolled_back
def test_retention_deletes_touch_with_its_event_after_its_time(matrix, record_old_event):
    matrix.node()
    end_touches(*record_old_event().task_ids)
    record_old_event("complaint.received")
    pass_time(days=89)
    assert delete_expired() == {}
    pass_time(days=2)
    assert delete_expired() == {"scheduling_touch_ended_rest": 1, "scheduling_event": 2}
    assert not any(model.objects.exists() for model in (Touch, Event, Complaint))


@rolled_back
def test_retention_counts_from_the_touch_end(matrix, record_old_event):
    matrix.node(delay=timedelta(days=95), expires_after=timedelta(days=300))
    (task_id,) = record_old_event().task_ids
    pass_time(days=OLD)
    assert delete_expired() == {}, "it waits"
    end_touches(task_id)
    assert delete_expired() == {}, "it has ended just now"


@rolled_back
def test_retention_keeps_touches_counted_by_a_rule_or_for_a_goal(matrix, record_old_event):
    long, dedupe = timedelta(days=180), HarassmentRule.objects.filter(kind="dedupe")
    node = matrix.node(goal_event="order.paid", goal_within=long)
    end_touches(*record_old_event().task_ids)
    pass_time(days=OLD)

    assert delete_expired() == {}
    node.goal_event, node.goal_within = "", None
    node.save()
    dedupe.update(window=long)
    assert delete_expired() == {}
    dedupe.update(window=timedelta(days=3))
    assert delete_expired() == {"scheduling_touch_ended_rest": 1, "scheduling_event": 1}


# --- idempotency ------------------------------------------------------------------------------------------------------


@rolled_back
def test_event_is_known_as_duplicate_for_90_days(matrix, record_old_event, record_event, settings):
    settings.AFTERTOUCH_RETENTION_DAYS = 7
    matrix.node()
    end_touches(*record_old_event(event_id="paid-1").task_ids)
    pass_time(days=80)
    assert delete_expired() == {"scheduling_touch_ended_rest": 1}

    again = record_event(event_id="paid-1")

    assert (again.duplicate, again.task_ids) == (True, ())
    pass_time(days=11)
    assert delete_expired() == {"scheduling_event": 1}
    assert not record_event(event_id="paid-1").duplicate


@rolled_back
def test_retention_keeps_events_that_a_waiting_touch_may_count(matrix, record_old_event):
    """A touch that was planned with the count 1 was judged with 0, and suppressed, or got the text of a first order."""
    matrix.node()
    end_touches(*record_old_event().task_ids)
    earlier = {"field": "customer.events.material.downloaded.count", "op": "gte", "value": 1}
    node = matrix.node("again", trigger="order.paid", delay=timedelta(days=30), when={"all": [earlier]})
    pass_time(days=95)
    assert delete_expired() == {"scheduling_touch_ended_rest": 1}

    node.when = None
    node.save()
    assert delete_expired() == {"scheduling_event": 1}


@committed
def test_event_deleted_during_repeat_is_a_duplicate(record_old_event, record_event, second_connection, monkeypatch):
    """Between the insert that met it and the question what it had planned."""
    record_old_event(event_id="paid-1")
    pass_time(days=OLD)
    ask = sql.rows

    def delete_first(statement, parameters, **options):
        if "array_agg" in statement:
            monkeypatch.setattr(sql, "rows", ask)
            assert second_connection(retention.delete_expired_rows)["scheduling_event"] == 1
        return ask(statement, parameters, **options)

    monkeypatch.setattr(sql, "rows", delete_first)
    again = record_event(event_id="paid-1")
    assert (again.duplicate, again.task_ids) == (True, ())


# --- failed tasks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def failed(matrix, hook, record_old_event, receiver):
    """As old as its event."""
    hook.idempotent = False
    hook.save()
    matrix.node(channel=hook)
    receiver.script = [422]
    deliver_when_due(*record_old_event().task_ids)
    row = FailedTask.objects.get()
    FailedTask.objects.filter(pk=row.pk).update(id=_old_id())
    return FailedTask.objects.get()


@committed
def test_retention_keeps_failed_task_and_touch_until_it_is_handled(failed):
    pass_time(days=OLD)
    assert delete_expired() == {}
    failed_tasks.archive_failed_task(failed.pk, ANN)
    pass_time(days=OLD)
    assert list(delete_expired().values()) == [1, 1, 1], "in one pass"


@committed
def test_retention_keeps_touch_while_its_retry_exists(failed, monkeypatch):
    """That one asks whether it is in doubt, and a job of RPA hangs on the first of them."""
    monkeypatch.setattr(failed_tasks, "new_id", _old_id)
    again = failed_tasks.retry_failed_task(failed.pk, ANN)
    pass_time(days=OLD)

    assert delete_expired() == {"scheduling_failedtask": 1}
    deliver_when_due(again)
    pass_time(days=OLD)
    assert delete_expired() == {"scheduling_touch_ended_rest": 1}
    assert Touch.objects.get().pk == failed.task_id
    assert delete_expired() == {"scheduling_touch_ended_rest": 1, "scheduling_event": 1}


@committed
def test_retention_does_not_delete_during_retry(failed, second_connection):
    failed_tasks.ignore_failed_task(failed.pk, ANN)
    pass_time(days=OLD)

    with transaction.atomic():
        again = failed_tasks.retry_failed_task(failed.pk, ANN)
        assert second_connection(delete_expired) == {}  # it waits for no lock
    assert Touch.objects.get(pk=str(again)).retry_of == failed.task_id


# --- races ------------------------------------------------------------------------------------------------------------


@committed
def test_retention_racing_deliveries_deletes_only_old(old_touches, record_old_event, race):
    old_touches(*(f"over-{number}" for number in range(20)))
    waiting = [record_old_event(user=f"waiting-{number}").task_ids[0] for number in range(20)]
    pass_time(days=OLD)
    Touch.objects.filter(pk__in=waiting).update(expires_at=datetime.now(UTC) + timedelta(days=1))
    fall_due(*waiting)

    race(4, lambda number: deliver(waiting) if number % 2 else retention.delete_expired_rows())

    assert sorted(Touch.objects.values_list("pk", "state")) == sorted((each, "delivered") for each in waiting)
    assert Event.objects.count() == 20


@committed
def test_complaint_during_retention_loses_touch_only(old_touches, record_event, second_connection):
    (task_id,) = old_touches("ann")
    with transaction.atomic():
        record_event("complaint.received", data={"task_id": str(task_id)})
        assert second_connection(delete_expired) == {}, "the complaint holds it"
    assert Complaint.objects.get().touch_id == task_id
    assert delete_expired() == {"scheduling_touch_ended_rest": 1, "scheduling_event": 1}
    assert Complaint.objects.get().touch_id is None


@pytest.mark.processes
@pytest.mark.django_db(transaction=True)
def test_retention_killed_in_a_batch_deletes_nothing(matrix, record_old_event, record_event, second_connection):
    matrix.node()
    task_ids = [deliver_when_due(*record_old_event(user=user).task_ids)[0].pk for user in ("ann", "bob")]
    pass_time(days=OLD)

    complaint = Complaint.objects.get(event_id=record_event("complaint.received").id)
    Complaint.objects.update(touch=task_ids[1])
    with transaction.atomic():
        Complaint.objects.select_for_update().get(pk=complaint.pk)  # the pass has locked the touches and waits here
        with program(FORGETTING) as forgetting:
            assert wait_until(lambda: second_connection(lambda: waits_for_a_lock("forgetting")), WAIT_LIMIT)
            forgetting.kill()
    assert wait_until(lambda: not second_connection(lambda: is_connected("forgetting")), WAIT_LIMIT)
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


@rolled_back
def test_retention_continues_after_its_time_limit_and_passes_rows_that_are_kept(matrix, record_old_event, monkeypatch):
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


# --- deployment -------------------------------------------------------------------------------------------------------


@rolled_back
def test_retention_covers_every_foreign_key():
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


def test_ids_are_ordered_by_time():
    earlier = datetime.now(UTC)
    assert first_id_at(earlier - timedelta(seconds=2)) < new_id() < first_id_at(
        datetime.now(UTC) + timedelta(seconds=2)
    )  # fmt: skip


# --- what is kept of people -------------------------------------------------------------------------------------------


@committed  # the task closes the connection
def test_retention_deletes_admin_sessions():
    for days in (-1, 1):
        Session.objects.create(session_key=f"s{days}", expire_date=datetime.now(UTC) + timedelta(days=days))
    tasks.delete_expired_data()
    assert [each.session_key for each in Session.objects.all()] == ["s1"]
