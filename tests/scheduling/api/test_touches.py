"""Asking about touches, calling them off, and asking what an event would do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client as DjangoClient

from scheduling.ids import new_id
from scheduling.models import Attempt, Event, Pause, Touch, Verdict
from scheduling.operations import queries
from tests.scheduling.api.serving import Client, told

pytestmark = pytest.mark.django_db(transaction=True)

SHAPE = {
    "task_id", "delivery_key", "retry_of", "retried_as", "event", "node", "user_id", "chat_id", "state", "reason",
    "parked", "priority", "due_at", "planned_at", "expires_at", "created_at", "settled_at", "attempt", "content_type",
    "verdicts", "attempts",
}  # fmt: skip


@pytest.fixture
def touch(house: None, matrix: Any, happen: Callable[..., Any]) -> Touch:
    matrix.node(delay=timedelta(hours=1))
    return Touch.objects.get(pk=happen(event_id="e1", chat_id="c1").task_ids[0])


def test_a_touch_says_everything_about_itself(api: Client, touch: Touch) -> None:
    at = datetime(2026, 3, 1, tzinfo=UTC)
    Verdict.objects.create(
        touch=touch, at=at, decision="hold", rule="cap", rule_version=4, observed="3", limit="3", next_eligible_at=at
    )
    Attempt.objects.create(touch=touch, number=1, lease_no=1, started_at=at, outcome="transient", reason="timeout")

    told = api.get(f"/touches/{touch.task_id}").json()

    assert told.keys() == SHAPE
    assert told["event"] == {
        "source": "shop", "id": "e1", "type": "material.downloaded", "trace_id": touch.event_id.hex,
    }  # fmt: skip
    assert (told["node"], told["user_id"], told["chat_id"], told["state"]) == ("guide", "ann", "c1", "scheduled")
    assert told["delivery_key"] == told["task_id"] == str(touch.task_id)
    assert told["verdicts"] == [
        {
            "at": "2026-03-01T00:00:00Z",
            "decision": "hold",
            "rule": "cap",
            "rule_version": 4,
            "observed": "3",
            "limit": "3",
            "next_eligible_at": "2026-03-01T00:00:00Z",
        }
    ]
    assert told["attempts"][0] | {"reason": "timeout", "outcome": "transient", "number": 1} == told["attempts"][0]


def test_of_thousands_of_verdicts_the_latest_are_told(api: Client, touch: Touch) -> None:
    at = datetime(2026, 3, 1, tzinfo=UTC)
    Verdict.objects.bulk_create(
        Verdict(touch=touch, at=at, decision="hold", rule="target_down", observed=str(number)) for number in range(60)
    )
    for found in (api.get(f"/touches/{touch.task_id}").json(), *api.get("/touches").json()["items"]):
        assert [each["observed"] for each in found["verdicts"]] == [str(number) for number in range(10, 60)]


@pytest.mark.parametrize("path", ["/touches/{}", "/touches/{}/cancel"])
def test_a_touch_that_is_not_there(api: Client, path: str) -> None:
    answer = api("POST" if "cancel" in path else "GET", path.format(new_id()))
    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_an_id_that_is_none_is_named(api: Client) -> None:
    answer = api.get("/touches/seven")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "task_id")


def test_a_list_goes_on_where_it_stopped_while_new_ones_come(
    api: Client, matrix: Any, happen: Callable[..., Any]
) -> None:
    matrix.node()
    made = [str(happen(user=f"u{number}").task_ids[0]) for number in range(7)]

    first = api.get("/touches", limit=3).json()
    happen(user="newcomer")
    second = api.get("/touches", limit=3, cursor=first["next"]).json()
    last = api.get("/touches", limit=3, cursor=second["next"]).json()

    pages = [[item["task_id"] for item in page["items"]] for page in (first, second, last)]
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [task_id for page in pages for task_id in page] == made[::-1]
    assert last["next"] is None


def test_list_touches_of_a_rare_node_answers_and_its_cursor_moves_on(
    touch: Touch, key: str, matrix: Any, happen: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: the bound is a constant."""
    monkeypatch.setattr(queries, "SEARCHED_TOUCHES", 2)
    matrix.node("often", trigger="order.paid")
    for number in range(4):
        happen("order.paid", user=f"u{number}")

    pages, cursor = [], ""
    while cursor is not None:
        given = {"node": "guide", "limit": 1, "cursor": cursor}
        page = DjangoClient().get("/api/v1/touches", given, headers={"Authorization": f"Bearer {key}"}).json()
        pages.append([item["task_id"] for item in page["items"]])
        cursor = page["next"]

    assert pages == [[], [], [str(touch.task_id)]]


def test_a_full_last_page_has_no_next(api: Client, touch: Touch) -> None:
    assert api.get("/touches", limit=1).json()["next"] is None


def test_touches_are_found_by_user_event_node_and_state(api: Client, matrix: Any, happen: Callable[..., Any]) -> None:
    matrix.node("guide")
    matrix.node("paid", trigger="order.paid")
    guide = happen(user="ann", event_id="e1", source="shop").task_ids[0]
    paid = happen("order.paid", user="bob", event_id="e1", source="app").task_ids[0]
    Touch.objects.filter(pk=paid).update(state="cancelled", lease_until=None)

    def found(**filters: Any) -> set[str]:
        return {item["task_id"] for item in api.get("/touches", **filters).json()["items"]}

    both = {str(guide), str(paid)}
    assert found() == found(event="e1") == both
    assert found(user="ann") == found(node="guide") == found(event="e1", source="shop") == {str(guide)}
    assert found(state="cancelled") == found(source="app") == {str(paid)}
    assert found(event=str(Event.objects.get(source="app").pk)) == {str(paid)}
    assert found(user="ann", node="paid") == found(event="e2") == found(user="nobody") == set()


@pytest.mark.parametrize(
    ("query", "field"),
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
def test_a_question_that_cannot_be_meant(api: Client, query: dict[str, Any], field: str) -> None:
    answer = api.get("/touches", **query)
    assert (answer.status_code, [error["field"] for error in answer.json()["errors"]]) == (422, [field])


def test_a_touch_is_called_off_once(api: Client, touch: Touch) -> None:
    answer = api("POST", f"/touches/{touch.task_id}/cancel")
    assert (answer.status_code, answer.json()["state"], answer.json()["reason"]) == (200, "cancelled", "by:api:shop")
    assert api("POST", f"/touches/{touch.task_id}/cancel").status_code == 409


def test_a_touch_that_was_published_again_names_the_other(api: Client, touch: Touch) -> None:
    again = Touch.objects.get(pk=touch.pk)
    again.pk = new_id()
    again.retry_of = touch.pk
    again.save(force_insert=True)

    assert api.get(f"/touches/{touch.pk}").json()["retried_as"] == str(again.pk)
    told = api.get(f"/touches/{again.pk}").json()
    assert (told["retry_of"], told["delivery_key"]) == (str(touch.pk), str(touch.pk))


def test_a_preview_says_what_would_be_sent_and_stores_nothing(api: Client, matrix: Any) -> None:
    matrix.node(delay=timedelta(minutes=15))
    answer = api("POST", "/preview", told(time="2026-03-01T00:00:00Z"))

    (item,) = answer.json()["items"]
    assert answer.status_code == 200
    assert (item["node"], item["channel"], item["template"]) == ("guide", "log", "guide")
    assert item["due_at"] == "2026-03-01T00:15:00Z"
    assert item["verdict"]["decision"] in ("send", "suppress")
    assert item["body"].startswith("hi")
    assert not Event.objects.exists()
    assert not Touch.objects.exists()


def test_a_preview_says_why_not(api: Client, matrix: Any) -> None:
    matrix.node()
    Pause.objects.create(scope="node:guide")
    (item,) = api("POST", "/preview", told()).json()["items"]
    assert (item["verdict"]["decision"], item["verdict"]["rule"]) == ("hold", "paused")


def test_a_preview_of_what_is_no_event(api: Client) -> None:
    assert api("POST", "/preview", told(subject=...)).status_code == 422
    batch = {"Content-Type": "application/cloudevents-batch+json"}
    assert api("POST", "/preview", [told("e1"), told("e2")], headers=batch).status_code == 422


def test_pausing_and_going_on(api: Client, matrix: Any) -> None:
    matrix.node()
    paused = api("POST", "/pause", {"scope": "node:guide", "reason": "wrong price"})
    assert (paused.status_code, paused.json()["scope"]) == (200, "node:guide")
    assert "wrong price" in Pause.objects.get().reason
    assert "api:shop" in Pause.objects.get().reason
    assert api("POST", "/pause", {"scope": "node:guide"}).status_code == 200
    assert api("POST", "/resume", {"scope": "node:guide"}).json() == {"scope": "node:guide", "resumed": True}
    assert api("POST", "/resume", {"scope": "node:guide"}).status_code == 404


@pytest.mark.parametrize("scope", ["everything", "node:nowhere", "channel:", "", "node:\0", 7, None])
def test_a_scope_that_is_none(api: Client, scope: Any) -> None:
    answer = api("POST", "/pause", {"scope": scope})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "scope")
    assert not Pause.objects.exists()
