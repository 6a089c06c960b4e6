"""Erasure of a customer in jobs: nothing of the customer stays, and nothing runs without its payload."""

from datetime import timedelta

import pytest
from django.db import transaction

from rpa_tasks.jobs import personal_data
from rpa_tasks.jobs.queries import run_job_again
from rpa_tasks.models import Evidence, Flow, Job
from scheduling import sql
from scheduling.customers.erasure import ErasureDelayed, continue_erasures, request_erasure
from scheduling.errors import Conflict
from scheduling.ids import new_id
from scheduling.ledger.anonymization import Identity
from scheduling.models import FailedTask, Touch
from scheduling.operations.failed_tasks import Actor, retry_failed_task, withdraw_retry
from tests.scheduling.core.conftest import deliver
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db
USER = "ann-7731"
WHO = Identity(USER, addresses=("13800007731",))


@pytest.fixture(autouse=True)
def _shop(market):
    market.shop()
    market.flow()


def test_erasure_waits_for_a_running_job(market):
    market.publish(payload={"user_id": USER}, dedupe_key=f"refund:{USER}")
    pick = market.pick()
    job = Job.objects.get()
    with pytest.raises(ErasureDelayed):
        personal_data.erase_jobs_of_customer(WHO)
    market.settle(pick, result={"user": USER}, evidence={"log": USER.encode()})
    assert personal_data.erase_jobs_of_customer(WHO) == 1
    job.refresh_from_db()
    assert (job.payload, job.result, USER in job.dedupe_key, Evidence.objects.count()) == ({}, None, False, 0)


@each_row("by", ["touch", "client"])
def test_erasure_waits_for_a_job_that_serves_another_request(market, by):
    """It cancelled the job into which the touch of another customer was merged: that one ended with it."""
    Flow.objects.update(dedupe_by="task_type", dedupe_window=timedelta(hours=1))
    key = new_id()
    first = market.publish(touch_key=key, payload={"user_id": USER})
    other = market.publish(touch_key=new_id() if by == "touch" else None, payload={"user_id": "bob"})
    assert (other.task_id, other.because) == (first.task_id, "waiting")
    market.publish(payload={"user_id": USER}, dedupe_key="own", priority=2)

    for _ in range(2):
        with pytest.raises(ErasureDelayed), transaction.atomic():
            personal_data.erase_jobs_of_touches([key])
        if by == "touch":
            with pytest.raises(ErasureDelayed):
                personal_data.erase_jobs_of_customer(WHO)
    assert by == "client" or Job.objects.get(dedupe_key="own").state == "cancelled"
    pick = market.pick()
    job = Job.objects.get(pk=first.task_id)
    assert pick.claim.task_id == job.pk
    market.settle(pick, result={"user": USER})

    with transaction.atomic():
        assert personal_data.erase_jobs_of_touches([key]) == 1
    job.refresh_from_db()
    assert (job.state, job.payload, job.result) == ("succeeded", {}, None)


def test_erasure_cancels_a_repeated_job_whose_key_names_the_customer(market):
    """All its requests are about this customer."""
    for _ in range(2):
        market.publish(payload={"user_id": USER}, dedupe_key=f"refund:{USER}")
    assert personal_data.erase_jobs_of_customer(WHO) == 1
    assert [*Job.objects.values_list("state", "requests", "payload")] == [("cancelled", 2, {})]


def test_erasure_of_an_edited_job_empties_the_difference(market):
    """The customer was named by the edited payload only, so the first job stays."""
    market.publish(payload={"user_id": "other"})
    market.end(Job.objects.get().pk)
    retry_failed_task(FailedTask.objects.get().pk, Actor("ann"), payload={"user_id": USER})
    assert personal_data.erase_jobs_of_customer(WHO) == 1
    failed = FailedTask.objects.get()
    assert (failed.difference, USER in str(failed.payload)) == (None, False)


def test_erasure_empties_the_failed_task_of_a_job_of_a_touch(market):
    key = new_id()
    market.publish(payload={"customer": USER}, touch_key=key)
    market.end(Job.objects.get().pk)
    with transaction.atomic():
        assert personal_data.erase_jobs_of_touches([key]) == 1
    failed = FailedTask.objects.get()
    assert (failed.state, USER in str(failed.payload)) == ("archived", False)


@pytest.mark.django_db(transaction=True)
def test_delayed_erasure_cancels_the_customers_own_job_of_a_touch(market, matrix, record_event):
    """Its batch is rolled back, and the cancellation must not be."""
    market.shop("s2")
    Flow.objects.update(dedupe_by="task_type", dedupe_window=timedelta(hours=1))
    matrix.node("first")
    matrix.node("second")
    deliver(record_event(user=USER).task_ids)
    shared, own = Touch.objects.values_list("root_id", flat=True)
    for key, shop in ((shared, "s1"), (new_id(), "s1"), (own, "s2")):
        market.publish(shop, touch_key=key, payload={"user_id": USER})

    erasure = request_erasure(USER, actor="ann")
    continue_erasures()

    erasure.refresh_from_db()
    assert erasure.state == "running"
    found = dict(Job.objects.values_list("touch_key", "state"))
    assert (found[own], found[shared]) == ("cancelled", "queued")


@each_row("key", [None, "", f"refund:{USER}"])
def test_erased_job_never_runs_again(market, key):
    """A command would act in a shop without its parameters."""
    Flow.objects.update(dedupe_by="task_type")
    job = market.publish(payload={"user_id": USER}, dedupe_key=key).task_id
    market.end(job, "succeeded")
    for _ in range(2):
        personal_data.erase_jobs_of_customer(WHO)
    with pytest.raises(Conflict, match="erased"):
        run_job_again(job, Actor("ann"), due_at=sql.now())
    assert Job.objects.count() == 1


def test_erased_job_never_runs_again_by_a_failed_task_whose_retry_was_undone(market):
    market.publish(payload={"user_id": USER})
    market.end(Job.objects.get().pk)
    failed = FailedTask.objects.get()
    again = retry_failed_task(failed.pk, Actor("ann"), payload={"user_id": "bob"})
    personal_data.erase_jobs_of_customer(WHO)
    with transaction.atomic():
        withdraw_retry(str(failed.pk), Actor("ann"), retried={str(failed.pk): str(again)}, as_new=False)
    with pytest.raises(Conflict, match="erased"):
        retry_failed_task(failed.pk, Actor("ann"))
    assert Job.objects.count() == 1
