"""One action on all matching rows: each row once despite races and killed workers, at its rate, until stopped."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID, uuid4

import psycopg
import pytest
from django.contrib.auth import get_user_model
from django.db import OperationalError, connection, transaction
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from config.local.processes import wait_until
from scheduling import sql
from scheduling.errors import Conflict, InvalidInput
from scheduling.ids import first_id_at, new_id
from scheduling.ledger import failures
from scheduling.models import BulkAction, FailedTask, Touch, batch_job
from scheduling.operations import bulk_actions, failed_tasks, retention
from scheduling.operations.bulk_actions import FAILED_TASK_ACTIONS, TOUCH_ACTIONS
from scheduling.operations.failed_tasks import Actor
from tests.scheduling.api.serving import database_url
from tests.scheduling.core.conftest import LATER, deliver, fall_due, pass_time
from tests.scheduling.core.programs import is_connected, program, waits_for_a_lock
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
ANN = Actor("ann", reason="the receiver is back")


@pytest.fixture(autouse=True)
def _time_to_count(settings):
    settings.TIMEOUTS = replace(settings.TIMEOUTS, bulk_selection=60.0)


@pytest.fixture
def fail(matrix, record_event):
    """So many touches that failed because their text wants data that the event did not bring."""
    matrix.node(template=matrix.template("broken", body="{{ event.data.order_no }}"), guard_dedupe="ignore")

    def fail(count):
        task_ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(count)]
        deliver(task_ids)
        return list(FailedTask.objects.filter(task_id__in=task_ids).order_by("pk"))

    return fail


def finish(row):
    for _ in range(100):  # an action that repeats a batch without end fails its test soon
        if not bulk_actions.run_batch(row.pk, LATER):
            break
    row.refresh_from_db()
    return row


def start(action, rows=None, **options):
    """On the open failed tasks, or on the given rows."""
    rows = FailedTask.objects.filter(state="open") if rows is None else rows
    return bulk_actions.start_bulk_action(action, rows, ANN, **options)


def again():
    return list(Touch.objects.filter(retry_of__isnull=False).order_by("due_at"))


# --- what is done -------------------------------------------------------------------------------------------------


def test_bulk_action_covers_what_matched_at_its_start(fail):
    rows = fail(4)
    user = get_user_model().objects.create(username="ann")

    row = bulk_actions.start_bulk_action(
        "ignore", FailedTask.objects.filter(reason=rows[0].reason), Actor("ann", user, "noise")
    )
    (later,) = fail(1)
    failed_tasks.archive_failed_task(rows[1].pk, Actor("bob"))

    assert finish(row).state == "done"
    assert (row.total, row.done, row.skipped, row.failed) == (4, 3, 1, 0)
    told = FailedTask.objects.order_by().values_list("state", "actor", "actor_name", "action_reason").distinct()
    assert set(told) == {
        ("ignored", user.pk, "ann", "noise"), ("archived", None, "bob", ""), (later.state, None, "", "")
    }  # fmt: skip
    assert later.state == "open"


def test_bulk_retry_skips_what_another_user_ignored(fail):
    """One ignored task can be retried. A user who retries the open ones has not asked for it."""
    rows = fail(3)
    failed_tasks.ignore_failed_task(rows[0].pk, Actor("bob"))
    row = start("retry")
    failed_tasks.ignore_failed_task(rows[1].pk, Actor("bob"))

    assert finish(row).state == "done"
    assert (row.total, row.done, row.skipped) == (2, 1, 1)
    row = finish(start("retry", FailedTask.objects.all()))
    assert (row.total, row.done, row.skipped) == (2, 2, 0)


def test_bulk_resolve_skips_certain_failures(fail):
    """These tasks failed for certain: there is nothing that a person could find out."""
    fail(2)
    for action in ("delivered", "not_delivered"):
        row = start(action)
        assert (row.total, finish(row).done, row.skipped) == (0, 0, 0)


def test_bulk_failing_row_is_tried_once_and_stops_no_other(fail, monkeypatch):
    """A message that was unreadable is skipped: there is nothing to send again."""
    monkeypatch.setattr(bulk_actions, "BATCH", 1)
    rows = fail(3)
    FailedTask.objects.filter(pk=rows[1].pk).update(task_id=new_id())  # its touch cannot be found
    failures.record_unreadable_message("not_json", b"x", queue="ticks")

    row = finish(start("retry"))

    assert (row.state, row.done, row.failed, row.skipped) == ("done", 2, 1, 1)
    assert row.note.count(str(rows[1].pk)) == 1
    rows[1].refresh_from_db()
    assert rows[1].state == "open"


def test_bulk_cancel_cancels_matching_waiting_touches(matrix, record_event):
    node, other = matrix.node(delay=timedelta(hours=1)), matrix.node("other", delay=timedelta(hours=1))
    for user in ("ann", "bob"):
        record_event(user=user)
    sent = Touch.objects.filter(node=node).order_by("pk")[0]
    fall_due(sent.pk)
    deliver([sent.pk])

    row = finish(start("cancel", Touch.objects.filter(node=node)))

    assert (row.total, row.done) == (1, 1)
    ends = Touch.objects.filter(node=node).order_by("pk").values_list("state", "reason")
    assert list(ends) == [("delivered", ""), ("cancelled", "by:ann")]
    assert set(Touch.objects.filter(node=other).values_list("state", flat=True)) == {"scheduled"}


def test_cancel_running_locked_touch_does_not_wait(matrix, record_event):
    """The batch holds locks of other touches, and settling locks many in any order."""
    matrix.node()
    (task_id,) = record_event().task_ids
    Touch.objects.filter(pk=task_id).update(state="running", lease_no=1, lease_until=datetime.now(UTC))
    with psycopg.connect(database_url()) as settling:
        settling.execute("SELECT FROM scheduling_touch FOR UPDATE")
        with transaction.atomic():
            sql.rows("SELECT set_config('lock_timeout', '1s', true)", {})
            with pytest.raises(Conflict, match="running"):
                TOUCH_ACTIONS["cancel"].act(task_id, ANN)
    TOUCH_ACTIONS["cancel"].act(task_id, ANN)
    assert Touch.objects.get(pk=task_id).state == "cancelled"


# --- pace ---------------------------------------------------------------------------------------------------------


def test_rows_of_a_pass_follow_the_rate(fail, monkeypatch):
    monkeypatch.setattr(bulk_actions, "BATCH", 4)
    fail(12)
    row = start("retry", per_second=2)

    bulk_actions.continue_bulk_actions()

    due = [touch.due_at for touch in again()]
    assert [(later - sooner).total_seconds() for sooner, later in pairwise(due)] == [0.5] * 9, "those of five seconds"
    bulk_actions.continue_bulk_actions()
    assert len(again()) <= 11, "the others are due after the next pass"
    pass_time(seconds=4)  # a pass may come sooner after the turn of an action than its rows last
    bulk_actions.continue_bulk_actions()
    row.refresh_from_db()
    assert (row.state, row.done, len(again())) == ("done", 12, 12)


def test_slow_action_takes_no_rows_from_another(fail, monkeypatch):
    """The rows of a pass are those of the five seconds after the turn of their action."""
    rows = fail(13)
    archive = FAILED_TASK_ACTIONS["archive"].function

    real, late = sql.now, [timedelta(0)]

    def archive_slowly(key, actor):
        archive(key, actor)
        late[0] = timedelta(seconds=1)

    monkeypatch.setattr(sql, "now", lambda: real() + late[0])

    slow = replace(FAILED_TASK_ACTIONS["archive"], function=archive_slowly)
    monkeypatch.setitem(FAILED_TASK_ACTIONS, "archive", slow)
    start("archive", FailedTask.objects.filter(pk=rows[0].pk))
    start("retry", FailedTask.objects.exclude(pk=rows[0].pk), per_second=2)

    bulk_actions.continue_bulk_actions()

    assert len(again()) == 10


def test_slow_rate_and_outage_publish_no_burst(fail):
    fail(5)
    start("retry", per_second=0.1)
    for seconds, count in ((0, 1), (4, 1), (7, 2), (3600, 3)):
        pass_time(seconds=seconds)
        bulk_actions.continue_bulk_actions()
        assert len(again()) == count


# --- stopped ------------------------------------------------------------------------------------------------------


def test_bulk_action_cancelled_stops_before_next_batch(fail, monkeypatch):
    """Also where its worker has counted the try, and locks the action for the batch only now."""
    fail(3)
    row = start("retry", per_second=0.2)
    bulk_actions.continue_bulk_actions()

    bulk_actions.cancel_bulk_action(row.pk, Actor("bob"))

    pass_time(seconds=60)
    bulk_actions.continue_bulk_actions()
    with monkeypatch.context() as patched:
        patched.setattr(batch_job, "count_try", lambda *given: True)
        assert not bulk_actions.run_batch(row.pk, LATER)
    row.refresh_from_db()
    assert (row.state, row.ended_by, row.done, len(again())) == ("cancelled", "bob", 1, 1)
    with pytest.raises(Conflict, match="already ended"):
        bulk_actions.cancel_bulk_action(row.pk, Actor("bob"))


def test_cancel_bulk_action_does_not_wait_for_batch(fail, second_connection, settings):
    settings.TIMEOUTS = replace(settings.TIMEOUTS, bulk_cancel=0.1)
    fail(1)
    row = start("retry")

    def stop():
        with connection.cursor() as cursor:  # so that this test ends, whatever it waits for
            cursor.execute("SET lock_timeout = '10s'")
        bulk_actions.cancel_bulk_action(row.pk, Actor("bob"))

    with transaction.atomic():
        BulkAction.objects.select_for_update().get(pk=row.pk)
        with pytest.raises(Conflict, match="Try again in a moment"):
            second_connection(stop)
    row.refresh_from_db()
    assert row.state == "running"


def test_same_bulk_action_is_started_once_until_it_ends(fail, race):
    """A double click, or a client that asks again."""
    fail(1)
    assert sum(race(6, lambda number: _begun({"state": "open"}))) == 1
    finish(BulkAction.objects.get())
    assert _begun({"state": "open"})


def test_bulk_action_on_same_rows_or_with_same_filter_is_the_same(fail):
    """The API and the list name filters differently, and the list has more rows at the second click."""
    rows = fail(2)
    some = FailedTask.objects.filter(pk=rows[0].pk)
    assert _begun({"fingerprint": "x"})
    assert not _begun({"cause": "x"})
    assert not _begun({"fingerprint": "x"}, some)
    assert _begun({"cause": "x"}, some)
    start("archive", chosen={"fingerprint": "x"})


def test_concurrent_bulk_actions_respect_the_maximum(fail, race, monkeypatch):
    monkeypatch.setattr(bulk_actions, "MOST_RUNNING", 2)
    rows = fail(6)

    def begin(number):
        return _begun({"reason": f"{number}"}, FailedTask.objects.filter(pk=rows[number].pk))

    assert sum(race(6, begin)) == 2


def _begun(chosen, rows=None):
    try:
        start("ignore", rows, chosen=chosen)
    except Conflict:
        return False
    return True


# --- selection ----------------------------------------------------------------------------------------------------


def test_bulk_selection_is_bounded_in_rows_and_time(fail, monkeypatch, settings):
    fail(2)
    monkeypatch.setattr(bulk_actions, "MOST_ROWS", 1)
    with pytest.raises(InvalidInput, match="More than 1 rows match"):
        start("ignore")
    monkeypatch.setattr(bulk_actions, "MOST_ROWS", 2)
    slow = FailedTask.objects.annotate(waits=RawSQL("pg_sleep(5)::text", [])).exclude(waits="x")
    settings.TIMEOUTS = replace(settings.TIMEOUTS, bulk_selection=0.1)
    with pytest.raises(InvalidInput, match="Too many rows to search"):
        start("ignore", slow)
    assert not BulkAction.objects.exists()


# --- races and deaths ---------------------------------------------------------------------------------------------


def test_bulk_racing_workers_process_each_row_once(fail, race, monkeypatch):
    monkeypatch.setattr(bulk_actions, "BATCH", 3)
    rows = fail(14)
    row = start("retry", per_second=200)

    def work(number):
        batches = 0
        while BulkAction.objects.filter(pk=row.pk, state="running").exists():
            batches += bulk_actions.run_batch(row.pk, LATER)
        return batches

    assert sum(race(4, work)) == 4  # and one more, which ended it
    row.refresh_from_db()
    assert (row.state, row.done, row.skipped, row.failed) == ("done", 14, 0, 0)
    assert sorted(str(touch.retry_of) for touch in again()) == sorted(str(each.task_id) for each in rows)


def test_bulk_overlapping_actions_process_rows_once(fail, race):
    rows = fail(8)
    both = [
        start("retry"),
        start("retry", FailedTask.objects.exclude(pk=rows[0].pk), chosen={"state": "open"}),
    ]

    race(2, lambda number: bulk_actions.run_batch(both[number].pk, LATER))

    for row in both:
        finish(row)
    assert (sum(row.done for row in both), len(again())) == (8, 8)


@pytest.mark.processes
def test_bulk_worker_killed_in_batch_stores_nothing(fail, second_connection, monkeypatch):
    rows = fail(6)
    row = start("retry")

    with transaction.atomic():
        FailedTask.objects.select_for_update().get(pk=rows[3].pk)  # three are done, then it waits here
        with program(WORKING) as worker:
            assert wait_until(lambda: second_connection(lambda: waits_for_a_lock("bulk")), WAIT_LIMIT)
            second_connection(bulk_actions.continue_bulk_actions)  # no other worker runs it in that time
            worker.kill()
    assert wait_until(lambda: not second_connection(lambda: is_connected("bulk")), WAIT_LIMIT)
    row.refresh_from_db()
    assert (row.state, row.done, row.processed, again()) == ("running", 0, 0, [])

    pass_time(seconds=10)
    bulk_actions.continue_bulk_actions()
    row.refresh_from_db()
    assert (row.done, len(again())) == (6, 6)


def test_failing_action_ends_after_spaced_tries_and_stops_no_other(fail, settings):
    settings.TIMEOUTS = replace(settings.TIMEOUTS, bulk_batch=0.5)
    rows = fail(2)
    hung = start("archive")
    with psycopg.connect(database_url()) as other:
        other.execute("SELECT FROM scheduling_failedtask WHERE id = %s FOR UPDATE", [rows[0].pk])
        for number in range(batch_job.MAX_TRIES):
            if number == 1:
                well = start("ignore", FailedTask.objects.filter(pk=rows[1].pk))
            for _pass in range(2):  # a worker that restarts has more time than one pass
                bulk_actions.continue_bulk_actions()
                hung.refresh_from_db()
                assert (hung.state, hung.tries) == ("running", number + 1)
            BulkAction.objects.update(retry_at=Now())
        bulk_actions.continue_bulk_actions()
    hung.refresh_from_db()
    well.refresh_from_db()
    assert (hung.state, hung.processed) == ("failed", 0)
    assert "could not be finished" in hung.note
    assert (well.state, well.done) == ("done", 1)


def test_bulk_batch_with_lost_database_is_repeated(fail, monkeypatch):
    rows = fail(3)
    row = start("ignore")
    ignore = FAILED_TASK_ACTIONS["ignore"].function

    def lose(key, actor):
        if key == rows[1].pk:
            raise OperationalError("the connection is lost")
        ignore(key, actor)

    with monkeypatch.context() as patched:
        patched.setitem(FAILED_TASK_ACTIONS, "ignore", replace(FAILED_TASK_ACTIONS["ignore"], function=lose))
        bulk_actions.continue_bulk_actions()
    row.refresh_from_db()
    assert (row.state, row.processed, row.note) == ("running", 0, "")
    pass_time(seconds=10)
    assert (finish(row).done, row.failed) == (3, 0)


WORKING = """
import django
django.setup()
from django.db import connection
from scheduling.operations import bulk_actions
connection.settings_dict["OPTIONS"]["application_name"] = "bulk"
bulk_actions.continue_bulk_actions()
"""


# --- kept and forgotten -------------------------------------------------------------------------------------------


def test_retention_deletes_ended_bulk_actions_only(fail):
    def old():
        return UUID(int=first_id_at(datetime.now(UTC) - timedelta(days=100)).int + uuid4().int % 2**60)

    for state in ("running", "done", "cancelled"):
        key = old()
        BulkAction.objects.create(
            id=key, action="ignore", actor_name="ann", per_second=1, state=state,
            ended_at=None if state == "running" else datetime.now(UTC),
        )  # fmt: skip
    pass_time(days=89)
    assert retention.delete_expired_rows()["scheduling_bulkaction"] == 0
    pass_time(days=11)
    assert retention.delete_expired_rows()["scheduling_bulkaction"] == 2
    assert BulkAction.objects.get().state == "running"
