"""Bulk actions on jobs over HTTP, and who may start, read and stop them."""

from uuid import UUID

import pytest
from django.utils.timezone import now

from rpa_tasks.jobs.dead_letters import record_failed_job
from rpa_tasks.models import Job, Platform, Shop
from scheduling.ids import new_id
from scheduling.models import BulkAction, FailedTask
from scheduling.operations import bulk_actions, commands
from tests.scheduling.api.serving import Client
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)
JOB = {"platform": "pdd", "task_type": "sync_order", "delay_seconds": 3_600}


def test_bulk_action_changes_matching_jobs(api):
    for shop_id in ("s1", "s2"):
        api("POST", "/rpa/jobs", {**JOB, "shop_id": shop_id})
    wish = {"action": "priority", "filter": {"platform": "pdd", "shop": "s1"}, "given": {"priority": "high"}}

    answer = api("POST", "/rpa/jobs/bulk", wish | {"reason": "sale", "per_second": 10})

    assert answer.status_code == 202, answer.text
    begun = answer.json()
    assert (begun["action"], begun["total"], begun["given"]) == ("priority", 1, {"priority": "high"})
    bulk_actions.continue_bulk_actions()
    assert api.get(f"/bulk-actions/{begun['id']}").json()["done"] == 1
    assert dict(Job.objects.values_list("shop__shop_id", "priority")) == {"s1": 0, "s2": 1}


def test_bulk_filters_select_jobs(api):
    for shop_id, change in {"s1": {"priority": "high"}, "s2": {"payload": {"note": "abc"}}}.items():
        api("POST", "/rpa/jobs", {**JOB, "shop_id": shop_id, **change})
    key = str(new_id())
    Job.objects.filter(shop__shop_id="s1").update(deadline=now(), reason="x", dedupe_key=key)
    Job.objects.filter(shop__shop_id="s2").update(state="queued", due_at=now())
    totals = {
        "": 2, "platform=pdd": 2, "shop=s1": 1, "task_type=sync_order": 2, "task_type=x": 0, "state=queued": 1,
        "reason=x": 1, "priority=high": 1, "status=due": 1, "status=late": 1, "q=s2": 1, "q=abc": 0, "payload=abc": 1,
        f"q={key}": 1, f"payload={key}": 1, f"q={new_id()}": 0,
    }  # fmt: skip
    found = {}
    for each in totals:
        wish = {"action": "cancel", "filter": dict([each.split("=")] if each else [])}
        begun = api("POST", "/rpa/jobs/bulk", wish).json()
        assert begun.get("filter") == wish["filter"], begun["errors"]
        found[each] = begun["total"]
        BulkAction.objects.all().delete()  # one on the same rows would be the same action
    assert found == totals


@each_row(
    "change, field",
    [
        ({"filter": {"payload__a": "1"}}, "filter.payload__a"),
        ({"filter": None}, "filter"),
        ({"filter": {"platform": "none"}}, "filter.platform"),
        ({"filter": {"shop": "none"}}, "filter.shop"),
        ({"filter": {"shop": "s1"}}, "filter.shop"),
        ({"filter": {"q": " "}}, "filter.q"),
        ({"filter": {"payload": "\u3000"}}, "filter.payload"),
        ({"action": "delete"}, "action"),
        ({"action": "priority"}, "given"),
        ({"action": "priority", "given": {"priority": "urgent"}}, "given.priority"),
        ({"given": {"node": "n1"}}, "given.node"),
        ({"action": "move", "given": {"node": "none"}}, "given.node"),
        ({"given": {"speed": 1}}, "given.speed"),
        ({"per_second": 1_000}, "per_second"),
    ],
)
def test_bulk_jobs_errors_name_the_field(api, change, field):
    Shop.objects.get_or_create(platform=Platform.objects.get_or_create(key="temu")[0], shop_id="s1")
    answer = api("POST", "/rpa/jobs/bulk", {"action": "cancel", "filter": {}, **change})
    assert answer.status_code == 422, answer.text
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert not BulkAction.objects.exists()


def test_bulk_jobs_scopes(api):
    api("POST", "/rpa/jobs", {**JOB, "shop_id": "s1", "payload": {"secret": "abc"}})
    keys = {
        scope: Client(api.address, commands.create_api_key(scope, [scope]))
        for scope in ("rpa.operate", "rpa.read", "failed-tasks")
    }
    wish = {"action": "cancel", "filter": {"payload": "abc"}}
    assert keys["rpa.read"]("POST", "/rpa/jobs/bulk", wish).status_code == 403
    assert keys["rpa.operate"]("POST", "/rpa/jobs/bulk", wish).status_code == 403  # it may not read payloads
    again = {"action": "run_again", "filter": {}}
    assert keys["rpa.operate"]("POST", "/rpa/jobs/bulk", again).status_code == 403  # it may not publish
    begun = api("POST", "/rpa/jobs/bulk", wish).json()
    assert begun["total"] == 1
    path = f"/bulk-actions/{begun['id']}"
    assert {scope: key.get(path).status_code for scope, key in keys.items()} == {
        "rpa.operate": 200, "rpa.read": 403, "failed-tasks": 403,
    }  # fmt: skip
    assert keys["failed-tasks"]("POST", f"{path}/cancel", {}).status_code == 403
    assert keys["rpa.operate"]("POST", f"{path}/cancel", {}).json()["state"] == "cancelled"


@pytest.mark.parametrize("handles", [True, False])
def test_bulk_run_again_retries_failed_tasks_only_with_their_scope(api, handles):
    task_id = api("POST", "/rpa/jobs", {**JOB, "shop_id": "s1"}).json()["task_id"]
    Job.objects.update(state="failed", settled_at=now(), lease_until=None, fresh=False)
    record_failed_job(UUID(task_id))
    scopes = ["rpa.operate", "rpa.publish", *(["failed-tasks"] if handles else [])]
    key = Client(api.address, commands.create_api_key("clerk", scopes))
    begun = key("POST", "/rpa/jobs/bulk", {"action": "run_again", "filter": {}})
    assert begun.status_code == 202, begun.text
    bulk_actions.continue_bulk_actions()
    assert FailedTask.objects.get().state == ("retried" if handles else "open")
    assert Job.objects.exclude(pk=task_id).get().retry_of == (UUID(task_id) if handles else None)
