"""Acting on failed tasks over the API: as in the back office, with the key as the actor."""

from datetime import timedelta

import pytest

from scheduling.ids import new_id
from scheduling.ledger import failures
from scheduling.models import AuditEntry, BulkAction, FailedTask, Touch
from scheduling.operations import bulk_actions
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def fail(transactional_db, matrix, record_event):
    matrix.node(delay=timedelta(hours=1))

    def fail(state="failed", reason="http_500", **changes):
        (task_id,) = record_event(**changes).task_ids
        Touch.objects.filter(pk=task_id).update(state=state, reason=reason)
        failures.record_failed_touches([task_id])
        return FailedTask.objects.get(task_id=task_id)

    return fail


def test_failed_task_list_has_filters_and_pages(api, fail):
    first, second = fail(), fail("unknown", "timeout", user="bob")
    FailedTask.objects.filter(pk=second.pk).update(state="ignored", channel="hook", origin="message")
    (item,) = api.get("/failed-tasks", state="open").json()["items"]
    assert (item["id"], item["task_id"], item["state"]) == (str(first.pk), str(first.task_id), "open")
    assert (item["failure"], item["reason"], item["channel"]) == ("failed", "http_500", "log")
    assert item["payload"]
    assert item["delivery_key"] == str(first.task_id)

    def found(**filters):
        return [item["id"] for item in api.get("/failed-tasks", **filters).json()["items"]]

    assert found() == [str(second.pk), str(first.pk)]
    assert found(state="open") == found(reason="http_500") == found(channel="log") == found(origin="touch")
    assert found(state="open") == found(fingerprint=first.fingerprint) == [str(first.pk)]
    page = api.get("/failed-tasks", limit=1).json()
    rest = api.get("/failed-tasks", limit=1, cursor=page["next"]).json()
    assert [item["id"] for item in (*page["items"], *rest["items"])] == found()
    assert rest["next"] is None
    FailedTask.objects.filter(pk=second.pk).update(detail="no such number")
    assert found(q="such number") == [str(second.pk)]
    assert api.get("/failed-tasks", state="lost").status_code == 422


def test_actions_are_stored_with_the_key_as_actor(api, fail):
    row, other = fail(), fail(user="bob")
    told = api("POST", f"/failed-tasks/{row.pk}/retry", {"reason": "receiver is back"}).json()
    again = Touch.objects.get(pk=told["retried_as"])
    assert (told["state"], told["actor"], told["action_reason"]) == ("retried", "api:shop", "receiver is back")
    assert (again.retry_of, again.root_id) == (row.task_id, row.task_id)
    assert api("POST", f"/failed-tasks/{row.pk}/retry", {}).status_code == 409
    assert api("POST", f"/failed-tasks/{other.pk}/ignore", {}).json()["state"] == "ignored"
    assert api("POST", f"/failed-tasks/{other.pk}/archive", {"reason": "old"}).json()["state"] == "archived"


def test_resend_as_new_needs_confirmation(api, fail):
    row = fail("unknown", "timeout")
    path, edited = f"/failed-tasks/{row.pk}/retry", {"payload": {"body": "Hello"}}
    for body, field in (({"as_new": True}, "confirm"), (edited, "as_new")):
        refused = api("POST", path, body)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, field)
    told = api("POST", path, {**edited, "as_new": True, "confirm": True}).json()
    assert str(Touch.objects.get(pk=told["retried_as"]).root_id) == told["retried_as"]


def test_only_an_unknown_outcome_is_resolved_and_once(api, fail):
    certain, unknown = fail(), fail("unknown", "timeout", user="bob")
    path = f"/failed-tasks/{unknown.pk}/resolve"
    answer = api("POST", path, {})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "delivered")
    assert api("POST", path, {"delivered": True, "reason": "seen"}).json()["state"] == "resolved_delivered"
    assert api("POST", path, {"delivered": True}).status_code == 409
    assert api("POST", f"/failed-tasks/{certain.pk}/resolve", {"delivered": False}).status_code == 409


@each_row("action", ["retry", "resolve", "ignore", "archive"])
def test_action_on_missing_failed_task_is_not_found(api, action):
    body = {"delivered": True} if action == "resolve" else {}
    failed_id = new_id()
    answer = api("POST", f"/failed-tasks/{failed_id}/{action}", body)
    assert answer.status_code == 404
    assert answer.json()["detail"] == f"There is no failed task {failed_id}.", "a route that is gone says less"


# --- all that match -----------------------------------------------------------------------------------------------


def test_bulk_action_runs_and_is_cancelled_once(api, fail):
    rows = [fail(user=f"u{number}") for number in range(3)]
    other = fail(reason="http_400", user="other")
    wish = {"action": "retry", "filter": {"reason": "http_500"}, "reason": "it is back", "per_second": 0.2}

    answer = api("POST", "/failed-tasks/bulk", wish)

    assert answer.status_code == 202
    told = answer.json()
    assert (told["state"], told["total"], told["done"], told["per_second"]) == ("running", 3, 0, 0.2)
    assert told["actor"].startswith("api:")
    bulk_actions.continue_bulk_actions()
    path = f"/bulk-actions/{told['id']}"
    assert [api.get(path).json()[name] for name in ("state", "done", "reason")] == ["running", 1, "it is back"]
    assert api("POST", f"{path}/cancel", {}).json()["state"] == "cancelled"
    assert api("POST", f"{path}/cancel", {}).status_code == 409
    states = FailedTask.objects.filter(pk__in=[row.pk for row in (*rows, other)]).order_by("pk")
    assert list(states.values_list("state", flat=True)) == ["retried", "open", "open", "open"]
    totals = {"q=other": 1, "origin=touch": 3, "origin=message": 0, "state=all": 3, "state=ignored": 0}
    totals |= {"channel=x": 0, "channel=all": 0, "reason=all": 0}
    for chosen, total in totals.items():
        wish = {"action": "archive", "filter": dict([chosen.split("=")])}
        assert (chosen, api("POST", "/failed-tasks/bulk", wish).json()["total"]) == (chosen, total)
        BulkAction.objects.filter(action="archive").delete()
    touches = BulkAction.objects.create(action="cancel", actor_name="ann", per_second=1)
    for key in (new_id(), touches.pk):  # bulk actions of touches are not those of failed tasks
        assert api.get(f"/bulk-actions/{key}").status_code == 404
        assert api("POST", f"/bulk-actions/{key}/cancel", {}).status_code == 404


@each_row(
    "change, field",
    [
        ({"filter": {"payload__user_id": "ann"}}, "filter.payload__user_id"),
        ({"filter": {"state": "retried"}}, "filter.state"),
        ({"filter": None}, "filter"),
        ({"action": "cancel"}, "action"),
        ({"action": "again"}, "confirm"),
        ({"per_second": 1000}, "per_second"),
    ],
)
def test_bulk_action_errors_name_the_field(api, fail, change, field):
    fail()
    answer = api("POST", "/failed-tasks/bulk", {"action": "ignore", "filter": {}, **change})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert not BulkAction.objects.exists()


def test_retry_with_payload_sends_it_and_returns_the_difference(api, fail):
    row = fail()
    refused = api("POST", f"/failed-tasks/{row.pk}/retry", {"payload": {"body": "", "chat": 1}})
    assert refused.status_code == 422
    assert {each["field"] for each in refused.json()["errors"]} == {"payload.body", "payload.chat"}
    told = api("POST", f"/failed-tasks/{row.pk}/retry", {"reason": "typo", "payload": {"body": "Hello"}}).json()
    assert (told["state"], told["difference"]["after"]) == ("retried", {"subject": "", "body": "Hello"})
    again = Touch.objects.get(pk=told["retried_as"])
    assert (again.retry_of, again.root_id) == (row.task_id, again.pk)
    assert api("POST", f"/failed-tasks/{row.pk}/retry", {"payload": {"body": "Bye"}}).status_code == 409


def test_retry_with_payload_needs_a_scope_of_its_own(key_for, fail):
    row = fail()
    path, edited = f"/failed-tasks/{row.pk}/retry", {"payload": {"body": "Hello"}}
    assert key_for("failed-tasks")("POST", path, edited).status_code == 403
    row.refresh_from_db()
    assert row.state == "open"
    assert key_for("failed-tasks", "failed-tasks.edit")("POST", path, edited).status_code == 200


def test_comments_and_assignee_are_listed(api, fail):
    from django.contrib.auth.models import User

    row = fail()
    User.objects.create_user("olga", is_staff=True)
    api("POST", f"/failed-tasks/{row.pk}/comments", {"text": "vendor informed"})
    assert api("POST", f"/failed-tasks/{row.pk}/assign", {"user": "olga"}).json()["assignee"] == "olga"
    (item,) = api.get("/failed-tasks").json()["items"]
    assert (item["assignee"], item["state"]) == ("olga", "open")
    assert [(each["author"], each["text"]) for each in item["comments"]] == [("api:shop", "vendor informed")]
    assert api("POST", f"/failed-tasks/{row.pk}/assign", {"user": None}).json()["assignee"] is None
    assert api("POST", f"/failed-tasks/{row.pk}/assign", {"user": None}).status_code == 200
    entries = AuditEntry.objects.filter(object_id=str(row.pk)).order_by("pk")
    assert [each.changes for each in entries] == [[["assignee", None, "olga"]], [["assignee", "olga", None]]]
    assert {(each.action, each.actor, each.address) for each in entries} == {("changed", "api:shop", "127.0.0.1")}
    User.objects.create_user("guest")
    for user in ("nobody", "guest"):
        refused = api("POST", f"/failed-tasks/{row.pk}/assign", {"user": user})
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "user")
    for text in ("", "  ", "x" * 2_001):
        assert api("POST", f"/failed-tasks/{row.pk}/comments", {"text": text}).status_code == 422
    for note, body in (("comments", {"text": "x"}), ("assign", {"user": None})):
        assert api("POST", f"/failed-tasks/{new_id()}/{note}", body).status_code == 404
