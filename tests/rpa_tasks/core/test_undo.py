"""The undo of a cancelled job and of a retried one: no second run, no lost job, and the window stays with its job."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.utils.timezone import now

from rpa_tasks.jobs import dead_letters, personal_data
from rpa_tasks.jobs.payloads import CHECK_KEY
from rpa_tasks.jobs.publish import request_cancel
from rpa_tasks.models import DedupeWindow, Flow, Job
from scheduling.errors import AftertouchError
from scheduling.ids import new_id
from scheduling.operations import failed_tasks, undo
from scheduling.operations.failed_tasks import Actor

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def shop(market):
    market.flow(dedupe_by="task_type", dedupe_window=timedelta(days=1))
    market.shop()


@pytest.fixture
def ann(db):
    user = User.objects.create_user("ann")
    user.user_permissions.set(Permission.objects.filter(content_type__app_label__in=("rpa_tasks", "scheduling")))
    return Actor("ann", user, "r")


@pytest.fixture
def take_back(ann):
    """Offer the undo of an act on one row and take it. Return "done", or why it was refused."""

    def take_back(act, key, **given):
        assert ann.user
        if act == "job.cancel":
            given = {"digests": dead_letters.digest_jobs([key])} | given
        try:
            undo.undo_act(undo.offer_undo(ann.user, act, [key], given=given), ann)
        except AftertouchError as error:
            return str(error)
        return "done"

    return take_back


def cancelled(market, **given):
    due = now() + timedelta(hours=2)
    job = market.publish(payload={"page": 1}, delay=timedelta(hours=1), deadline=due, source="api:crm", **given).task_id
    request_cancel(job, by="ann")
    return Job.objects.get(pk=job)


def test_undone_cancel_publishes_the_job_again_with_its_window(market, take_back):
    old = cancelled(market)
    assert take_back("job.cancel", old.pk) == "done"
    again = Job.objects.get(retry_of=old.pk)
    same = ("root_id", "payload", "due_at", "deadline", "source", "priority", "dedupe_key")
    assert {name: getattr(again, name) for name in same} == {name: getattr(old, name) for name in same}
    assert again.state == "scheduled"
    assert DedupeWindow.objects.get().task_id == again.pk
    assert take_back("job.cancel", old.pk) == "another job of the same key was published since"


def test_undone_cancel_keeps_touch_and_requests(market, take_back):
    touch = new_id()
    old = cancelled(market, touch_key=touch)
    Job.objects.filter(pk=old.pk).update(requests=3, failures=1)
    assert take_back("job.cancel", old.pk) == "done"
    again = Job.objects.get(retry_of=old.pk)
    assert (again.touch_key, again.requests, again.failures) == (touch, 3, 1)
    assert market.publish(touch_key=touch).task_id == again.pk
    request_cancel(again.pk, by="ann")
    assert personal_data.erase_jobs_of_touches([touch]) == 2, "the first job has a payload too"
    assert set(Job.objects.values_list("payload__page", flat=True)) == {None}


def test_cancel_of_an_erased_job_is_not_undone(market, take_back):
    old = cancelled(market, touch_key=(touch := new_id()))
    digests = dead_letters.digest_jobs([old.pk])
    personal_data.erase_jobs_of_touches([touch])
    assert "was cancelled before it ran" in take_back("job.cancel", old.pk, digests=digests)


def test_cancel_is_not_undone_after_the_schema_of_the_flow_changed(market, take_back):
    old = cancelled(market)
    Flow.objects.update(payload_schema={"type": "object", "required": ["shelf"]})
    assert "shelf" in take_back("job.cancel", old.pk)


def test_cancel_of_a_login_check_is_not_undone(market, take_back):
    old = cancelled(market)
    Job.objects.filter(pk=old.pk).update(dedupe_key=f"{CHECK_KEY}{old.pk}")
    assert "was cancelled before it ran" in take_back("job.cancel", old.pk)


def test_undone_cancel_and_a_publish_of_the_same_key_leave_one_waiting_job(market, take_back, race):
    old = cancelled(market)
    acts = (lambda: take_back("job.cancel", old.pk), lambda: market.publish(payload={"page": 2}))
    race(2, lambda number: acts[number]())
    assert Job.objects.filter(state__in=("scheduled", "queued")).count() == 1


def test_stop_of_a_running_job_is_not_undone(market, take_back):
    market.publish()
    pick = market.pick()
    assert pick is not None
    assert request_cancel(pick.claim.task_id, by="ann") == "cancel_requested"
    assert "was cancelled before it ran" in take_back("job.cancel", pick.claim.task_id)


@pytest.fixture
def retried(market, ann):
    row = market.end(market.publish().task_id)
    assert row
    return row, failed_tasks.retry_failed_task(row.pk, ann)


def withdraw(take_back, row, new_id):
    return take_back("failed_task.retry", row.pk, retried={str(row.pk): str(new_id)}, as_new=False)


def test_undone_retry_deletes_the_job_and_gives_its_window_back(retried, take_back):
    row, new_id = retried
    assert DedupeWindow.objects.get().task_id == new_id
    assert withdraw(take_back, row, new_id) == "done"
    row.refresh_from_db()
    assert (row.state, Job.objects.filter(pk=new_id).exists()) == ("open", False)
    assert DedupeWindow.objects.get().task_id == row.task_id


def test_retried_job_has_the_touch_until_the_undo(market, ann, take_back):
    touch = new_id()
    job = market.publish(touch_key=touch).task_id
    row = market.end(job)
    assert row
    new_id_of_job = failed_tasks.retry_failed_task(row.pk, ann)
    assert Job.objects.get(touch_key=touch).pk == new_id_of_job
    assert withdraw(take_back, row, new_id_of_job) == "done"
    assert Job.objects.get(touch_key=touch).pk == job


def test_retry_that_covers_another_request_or_runs_is_not_undone(retried, market, take_back):
    assert market.publish().because == "waiting"
    assert withdraw(take_back, *retried) == "the retry has started already"
    Job.objects.update(requests=1)
    assert market.pick() is not None
    assert withdraw(take_back, *retried) == "the retry has started already"
