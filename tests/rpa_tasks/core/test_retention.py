"""Jobs that are over go with their runs and evidence; what may still be published again, or delivers a touch, stays."""

import threading
from datetime import UTC, datetime, timedelta
from random import getrandbits
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.utils.timezone import now

from rpa_tasks.jobs.retention import JOBS
from rpa_tasks.models import Evidence, Job, Run
from scheduling.ids import first_id_at
from scheduling.models import FailedTask
from scheduling.operations import retention

pytestmark = pytest.mark.django_db(transaction=True)
OLD = timedelta(days=100)


@pytest.fixture
def make_ended_job(market):
    """A job that ended long ago, with a run and its log."""
    market.shop()
    market.flow()

    def make_ended_job(state="succeeded", **changes):
        task_id = UUID(int=first_id_at(datetime.now(UTC) - OLD).int + getrandbits(70))
        Job.objects.filter(pk=market.publish(dedupe_key=str(task_id)).task_id).update(
            **{"task_id": task_id, "state": state, "lease_until": None, "settled_at": now() - OLD} | changes
        )
        job = Job.objects.get(pk=str(task_id))
        run = Run.objects.create(job=job, number=1, lease_no=1, started_at=now() - OLD, outcome="business")
        Evidence.objects.create(run=run, kind="log", content=b"x")
        return job

    return make_ended_job


def test_retention_deletes_ended_jobs_with_runs_and_evidence(make_ended_job):
    make_ended_job()
    make_ended_job("cancelled")
    make_ended_job("queued")

    assert retention.delete_expired_rows()["rpa_tasks_job"] == 2
    assert (Job.objects.count(), Run.objects.count(), Evidence.objects.count()) == (1, 1, 1)


def test_retention_keeps_job_of_failed_task_and_its_retries(make_ended_job):
    first = make_ended_job("failed")
    second = make_ended_job("failed", retry_of=first.pk)
    FailedTask.objects.create(origin="rpa_job", task_id=second.pk, failure="failed", reason="x", fingerprint="x")
    assert retention.delete_expired_rows()["rpa_tasks_job"] == 0

    FailedTask.objects.all().delete()
    assert [retention.delete_expired_rows()["rpa_tasks_job"] for _ in range(3)] == [1, 1, 0]


def test_retention_keeps_job_of_existing_touch(make_ended_job, matrix, record_event):
    """Or the touch, sent once more, would publish a second job."""
    matrix.node(delay=timedelta(days=1))
    (task_id,) = record_event().task_ids
    make_ended_job(touch_key=task_id)
    assert retention.delete_expired_rows()["rpa_tasks_job"] == 0

    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM scheduling_touch")
    assert retention.delete_expired_rows()["rpa_tasks_job"] == 1


def test_retention_skips_job_whose_run_is_being_settled(make_ended_job, race):
    """The end of a run is written in one transaction: until its commit the row is locked, and running to all others."""
    job = make_ended_job("running", lease_until=now())
    written, looked = threading.Event(), threading.Event()

    def delete_job():
        return retention.delete_expired_in_table(JOBS, ends_at=datetime.now(UTC) + timedelta(seconds=60))

    def act(number):
        if number:
            assert written.wait(60)
            try:
                return delete_job()
            finally:
                looked.set()
        with transaction.atomic():
            Job.objects.select_for_update(no_key=True).get(pk=job.pk)
            Run.objects.create(job=job, number=2, lease_no=2, started_at=now() - OLD, outcome="succeeded")
            Job.objects.filter(pk=job.pk).update(state="succeeded", lease_until=None, settled_at=now() - OLD)
            written.set()
            assert looked.wait(60)
        return 0

    assert race(2, act) == [0, 0]
    assert Run.objects.filter(job=job).count() == 2
    assert delete_job() == 1
    assert not Run.objects.exists()
