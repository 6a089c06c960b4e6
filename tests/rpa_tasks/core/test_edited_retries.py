"""A failed job is edited and published again, checked against its flow, and with the window of its payload."""

from datetime import timedelta

import pytest

from rpa_tasks.jobs.payloads import key_of_payload
from rpa_tasks.models import DedupeWindow, Job
from scheduling.admin.failed_tasks.failed_task import list_changed_values
from scheduling.errors import Conflict, InvalidInput
from scheduling.operations.failed_tasks import Actor, retry_failed_task

pytestmark = pytest.mark.django_db
ANN = Actor("ann", reason="wrong page")


@pytest.fixture(autouse=True)
def _shop(market):
    market.shop()


def fail(market, **request):
    found = market.end(market.publish(**request).task_id)
    assert found
    return found


def test_edited_job_runs_new_payload_and_settles_original(market):
    market.flow(payload_schema={"type": "object", "properties": {"page": {"type": "integer"}}})
    row = fail(market, payload={"page": 1}, dedupe_key="k")
    with pytest.raises(InvalidInput) as refused:
        retry_failed_task(row.pk, ANN, payload={"page": "two"})
    assert [each.field for each in refused.value.errors] == ["payload.page"]
    row.refresh_from_db()
    assert (row.state, row.difference, Job.objects.count()) == ("open", None, 1)

    task_id = retry_failed_task(row.pk, ANN, payload={"page": 2}, priority=0)

    row.refresh_from_db()
    job = Job.objects.get(pk=task_id)
    assert (job.payload, job.dedupe_key, job.priority, job.root_id) == ({"page": 2}, "k", 0, task_id)
    assert (row.state, row.retried_as, row.actor_name) == ("retried", task_id, "ann")
    assert row.difference == {"before": {"page": 1}, "after": {"page": 2}}


def test_unedited_job_keeps_its_delivery_key(market):
    market.flow()
    row = fail(market, payload={"page": 1})
    job = Job.objects.get(pk=retry_failed_task(row.pk, ANN, payload={"page": 1.0}))
    row.refresh_from_db()
    assert (job.root_id, row.difference) == (row.root_id, None)


def test_value_of_another_type_is_an_edit(market):
    market.flow()
    row = fail(market, payload={"refund": 1, "sizes": [1]})
    job = Job.objects.get(pk=retry_failed_task(row.pk, ANN, payload={"refund": True, "sizes": [True]}))
    assert job.payload["refund"] is True
    row.refresh_from_db()
    assert sorted(tuple(each.values()) for each in list_changed_values(row.difference)) == [
        ("refund", "1", "true"), ("sizes", "[1]", "[true]"),
    ]  # fmt: skip


def test_edited_payload_claims_the_window_of_its_key(market):
    market.flow(dedupe_by="payload", dedupe_window=timedelta(days=1))
    row = fail(market, payload={"page": 1})
    task_id = retry_failed_task(row.pk, ANN, payload={"page": 2})
    assert Job.objects.get(pk=task_id).dedupe_key == key_of_payload({"page": 2})
    held = dict(DedupeWindow.objects.values_list("key", "task_id"))
    assert held == {key_of_payload({"page": 1}): row.task_id, key_of_payload({"page": 2}): task_id}
    assert market.publish(payload={"page": 2}).task_id == task_id


def test_edited_payload_of_a_held_window_is_a_conflict(market):
    market.flow(dedupe_by="payload", dedupe_window=timedelta(days=1))
    holder = market.publish(payload={"page": 2}).task_id
    market.end(holder, "succeeded")
    row = fail(market, payload={"page": 1})
    with pytest.raises(Conflict, match=str(holder)):
        retry_failed_task(row.pk, ANN, payload={"page": 2})
    row.refresh_from_db()
    assert (row.state, Job.objects.count(), DedupeWindow.objects.count()) == ("open", 2, 2)


@pytest.mark.django_db(transaction=True)
def test_concurrent_edits_of_a_job_publish_one(market, race):
    market.flow(dedupe_by="payload", dedupe_window=timedelta(days=1))
    row = fail(market, payload={"page": 0})

    def edit(number):
        try:
            retry_failed_task(row.pk, Actor(f"user{number}"), payload={"page": number + 1})
        except Conflict:
            return "conflict"
        return "published"

    assert sorted(race(2, edit)) == ["conflict", "published"]
    row.refresh_from_db()
    job = Job.objects.get(retry_of=row.task_id)
    assert (job.pk, job.payload) == (row.retried_as, row.difference["after"])
    assert DedupeWindow.objects.count() == 2
