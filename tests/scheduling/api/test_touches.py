"""Asking about touches, calling them off, and asking what an event would do."""

from datetime import UTC, datetime, timedelta

import pytest
from django.test import Client as DjangoClient

from scheduling.ids import new_id
from scheduling.models import Attempt, Customer, Event, Pause, Touch, Verdict
from scheduling.operations import queries
from tests.scheduling.api.serving import cloud_event
from tests.support.tables import each_row
from tests.support.touch_logs import add_attempts, add_verdicts

pytestmark = pytest.mark.django_db(transaction=True)

SHAPE = {
    "task_id", "delivery_key", "retry_of", "retried_as", "event", "node", "user_id", "chat_id", "state", "reason",
    "paused_by", "priority", "due_at", "planned_at", "expires_at", "created_at", "settled_at", "attempt",
    "content_type", "verdicts", "attempts", "receipts",
}  # fmt: skip


@pytest.fixture
def touch(transactional_db, matrix, record_event):
    matrix.node(delay=timedelta(hours=1))
    return Touch.objects.get(pk=record_event(event_id="e1", chat_id="c1").task_ids[0])


def test_touch_shows_all_members(api, touch):
    at = datetime(2026, 3, 1, tzinfo=UTC)
    add_verdicts(touch.pk, Verdict(at, "hold", "cap", 4, "3", "3", at))
    add_attempts(touch.pk, Attempt(1, 1, at, outcome="transient", reason="timeout"))

    shown = api.get(f"/touches/{touch.task_id}").json()

    assert shown.keys() == SHAPE
    assert shown["event"] == {
        "source": "shop", "id": "e1", "type": "material.downloaded", "trace_id": touch.event_id.hex,
    }  # fmt: skip
    assert (shown["node"], shown["user_id"], shown["chat_id"], shown["state"]) == ("guide", "ann", "c1", "scheduled")
    assert shown["delivery_key"] == shown["task_id"] == str(touch.task_id)
    assert shown["verdicts"] == [
        {
            "at": "2026-03-01T00:00:00Z", "decision": "hold", "rule": "cap", "rule_version": 4, "observed": "3",
            "limit": "3", "next_eligible_at": "2026-03-01T00:00:00Z",
        }
    ]  # fmt: skip
    assert shown["attempts"][0] | {"reason": "timeout", "outcome": "transient", "number": 1} == shown["attempts"][0]


def test_missing_touch_is_not_found(api):
    for method, path in (("GET", f"/touches/{new_id()}"), ("POST", f"/touches/{new_id()}/cancel")):
        answer = api(method, path)
        assert (answer.status_code, answer.headers["Content-Type"]) == (404, "application/problem+json")
    answer = api.get("/touches/seven")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "task_id")


def test_touch_cursor_is_stable_when_rows_are_added(api, matrix, record_event):
    matrix.node()
    made = [str(record_event(user=f"u{number}").task_ids[0]) for number in range(6)]

    first = api.get("/touches", limit=3).json()
    record_event(user="newcomer")
    second = api.get("/touches", limit=3, cursor=first["next"]).json()

    assert [item["task_id"] for page in (first, second) for item in page["items"]] == made[::-1]
    assert second["next"] is None  # though the page is full


def test_touch_list_of_a_rare_node_advances_the_cursor(touch, key, matrix, record_event, monkeypatch):
    """In this process: the bound is a constant."""
    monkeypatch.setattr(queries, "SEARCHED_TOUCHES", 2)
    matrix.node("often", trigger="order.paid")
    for number in range(4):
        record_event("order.paid", user=f"u{number}")

    pages, cursor = [], ""
    while cursor is not None:
        given = {"node": "guide", "limit": 1, "cursor": cursor}
        page = DjangoClient().get("/api/v1/touches", given, headers={"Authorization": f"Bearer {key}"}).json()
        pages.append([item["task_id"] for item in page["items"]])
        cursor = page["next"]

    assert pages == [[], [], [str(touch.task_id)]]


def test_touch_filters_narrow_the_list(api, matrix, record_event):
    matrix.node("guide")
    matrix.node("paid", trigger="order.paid")
    guide = record_event(user="ann", event_id="e1", source="shop").task_ids[0]
    paid = record_event("order.paid", user="bob", event_id="e1", source="app").task_ids[0]
    Touch.objects.filter(pk=paid).update(state="cancelled", lease_until=None)

    def found(**filters):
        return {item["task_id"] for item in api.get("/touches", **filters).json()["items"]}

    both = {str(guide), str(paid)}
    assert found() == found(event="e1") == both
    assert found(user="ann") == found(node="guide") == found(event="e1", source="shop") == {str(guide)}
    assert found(state="cancelled") == found(source="app") == {str(paid)}
    assert found(event=str(Event.objects.get(source="app").pk)) == {str(paid)}
    assert found(user="ann", node="paid") == found(event="e2") == found(user="nobody") == set()


@each_row(
    "query, field",
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"cursor": "!"}, "cursor"),
        ({"cursor": "AAAA"}, "cursor"),
        ({"cursor": "ключ"}, "cursor"),
        ({"state": "sleeping"}, "state"),
        ({"user": "a\0"}, "user"),
        ({"node": "n" * 300}, "node"),
    ],
)
def test_touch_query_errors_name_the_field(api, query, field):
    answer = api.get("/touches", **query)
    assert (answer.status_code, [error["field"] for error in answer.json()["errors"]]) == (422, [field])


def test_touch_is_cancelled_once(api, touch):
    answer = api("POST", f"/touches/{touch.task_id}/cancel")
    assert (answer.status_code, answer.json()["state"], answer.json()["reason"]) == (200, "cancelled", "by:api:shop")
    assert api("POST", f"/touches/{touch.task_id}/cancel").status_code == 409


def test_retried_touch_names_its_successor(api, touch):
    again = Touch.objects.get(pk=touch.pk)
    again.pk = new_id()
    again.retry_of = touch.pk
    again.save(force_insert=True)

    assert api.get(f"/touches/{touch.pk}").json()["retried_as"] == str(again.pk)
    shown = api.get(f"/touches/{again.pk}").json()
    assert (shown["retry_of"], shown["delivery_key"]) == (str(touch.pk), str(touch.pk))


def test_preview_shows_outcome_and_stores_nothing(api, matrix):
    matrix.node(delay=timedelta(minutes=15))
    answer = api("POST", "/preview", cloud_event(time="2026-03-01T00:00:00Z"))

    (item,) = answer.json()["items"]
    assert answer.status_code == 200
    assert (item["node"], item["channel"], item["template"]) == ("guide", "log", "guide")
    assert item["due_at"] == "2026-03-01T00:15:00Z"
    assert (item["planned"], item["steps"]) == (True, [{"step": "delay", "at": "2026-03-01T00:15:00Z"}])
    assert item["verdict"]["decision"] in ("send", "suppress")
    assert item["body"].startswith("hi")
    assert item["locale"] == "zh-hans"
    assert not Event.objects.exists()
    assert not Touch.objects.exists()
    Pause.objects.create(scope="node:guide")
    (item,) = api("POST", "/preview", cloud_event()).json()["items"]
    assert (item["verdict"]["decision"], item["verdict"]["rule"]) == ("hold", "paused")
    assert api("POST", "/preview", cloud_event(subject=...)).status_code == 422
    batch = {"Content-Type": "application/cloudevents-batch+json"}
    assert api("POST", "/preview", [cloud_event("e1"), cloud_event("e2")], headers=batch).status_code == 422


def test_preview_of_an_imagined_customer_judges_its_values(api, matrix):
    matrix.node(when={"all": [{"field": "customer.tags", "op": "contains", "value": "new"},
                                    {"field": "customer.level", "op": "eq", "value": "vip"}]},
                template=matrix.template("city", body="{{ customer.attributes.city }}"))  # fmt: skip
    (unknown,) = api("POST", "/preview", cloud_event()).json()["items"]
    chosen = {"level": "vip", "tag": ["new", "b2b"], "attributes": '{"city": "上海"}'}
    (imagined,) = api("POST", "/preview", cloud_event(), params=chosen).json()["items"]
    assert (unknown["planned"], imagined["planned"], imagined["body"]) == (False, True, "上海")
    assert not Customer.objects.exists()


@each_row(
    "given, field",
    [
        ({"attributes": "{"}, "attributes"),
        ({"attributes": "[]"}, "attributes"),
        ({"attributes": '{"1": 2}'}, "attributes.1"),
        ({"tag": [" x"]}, "tag"),
        ({"level": "x" * 41}, "level"),
    ],
)
def test_preview_of_an_invalid_imagined_customer_names_the_field(api, given, field):
    answer = api("POST", "/preview", cloud_event(), params=given)
    assert answer.status_code == 422
    assert field in answer.json()["errors"][0]["field"]


def test_pause_and_resume_a_scope(api, matrix):
    matrix.node()
    paused = api("POST", "/pause", {"scope": "node:guide", "reason": "wrong price"})
    assert (paused.status_code, paused.json()["scope"]) == (200, "node:guide")
    assert "wrong price" in Pause.objects.get().reason
    assert "api:shop" in Pause.objects.get().reason
    assert api("POST", "/pause", {"scope": "node:guide"}).status_code == 200
    assert api("POST", "/resume", {"scope": "node:guide"}).json() == {"scope": "node:guide", "resumed": True}
    assert api("POST", "/resume", {"scope": "node:guide"}).status_code == 404


@each_row("scope", ["everything", "node:nowhere", "channel:", "", "node:\0", 7, None])
def test_pause_invalid_scope_is_refused(api, scope):
    answer = api("POST", "/pause", {"scope": scope})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "scope")
    assert not Pause.objects.exists()
