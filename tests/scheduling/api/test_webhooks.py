"""Clients edit outgoing webhooks, list their messages and have them sent again."""

from datetime import timedelta

import pytest

from scheduling import sql
from scheduling.models import WebhookMessage, WebhookSubscription
from scheduling.webhooks import put_subscription
from tests.support.second_connection import act_behind_locks

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
GIVEN = {"url": "https://example.com/in", "secret": SECRET, "events": ["pause.changed"], "filter": {"node": ["guide"]}}


def test_client_creates_changes_lists_replays_and_retires(api):
    created = api("PUT", "/webhooks/crm", GIVEN)
    assert created.status_code == 200, created.text
    assert SECRET not in created.text
    assert created.json()["state"] == "ok"
    hook = WebhookSubscription.objects.get()
    at = sql.now()
    for number in range(3):
        WebhookMessage.objects.create(
            subscription=hook, type="pause.changed", object_key="pause:all", occurred_at=at, data={"number": number},
            state="delivered",
        )  # fmt: skip
    page = api.get("/webhooks/crm/deliveries", limit=2, state="delivered").json()
    assert [each["data"]["number"] for each in page["items"]] == [2, 1]
    rest = api.get("/webhooks/crm/deliveries", cursor=page["next"]).json()
    assert [each["data"]["number"] for each in rest["items"]] == [0]
    span = {"from": (at - timedelta(hours=1)).isoformat(), "to": (at + timedelta(hours=1)).isoformat()}
    assert api("POST", "/webhooks/crm/replay", span).json() == {"count": 3}
    assert api("POST", "/webhooks/crm/replay", span).json() == {"count": 0}
    assert api("POST", "/webhooks/crm/test").json() == {"written": True}
    assert api.get("/webhooks").json()["items"][0]["waiting"] == 4
    changed = api("PUT", "/webhooks/crm", {"enabled": False}).json()
    assert (changed["enabled"], changed["events"]) == (False, ["pause.changed"])
    assert api("DELETE", "/webhooks/crm").status_code == 204
    assert api.get("/webhooks/crm").status_code == 404
    assert api("PUT", "/webhooks/crm", {"enabled": True}).status_code == 422


def test_error_names_each_wrong_field(api):
    wrong = {"url": "http://10.0.0.1/", "secret": "short", "events": ["other"], "filter": {"user": ["x"]}}
    answer = api("PUT", "/webhooks/Crm", wrong)
    assert answer.status_code == 422
    assert {each["field"] for each in answer.json()["errors"]} == {"key", "url", "secret", "events", "filter"}
    wrong = {"secret": " ".join([SECRET] * 11), "events": ["pause.changed"] * 2, "filter": {"shop": ["pdd/s1", "s2"]}}
    answer = api("PUT", "/webhooks/crm", GIVEN | wrong)
    assert {each["field"] for each in answer.json()["errors"]} == {"secret", "events", "filter.shop"}
    api("PUT", "/webhooks/crm", GIVEN)
    answer = api("POST", "/webhooks/crm/replay", {"from": "yesterday", "to": "2026-11-23T08:00:00"})
    assert answer.status_code == 422
    assert {each["field"] for each in answer.json()["errors"]} == {"from", "to"}


def test_two_clients_create_a_webhook_at_once(api):
    """The later one changes the row that it could not see."""
    (answer,) = act_behind_locks(
        lambda: put_subscription("crm", GIVEN, actor="first"),
        lambda: api("PUT", "/webhooks/crm", {**GIVEN, "filter": {}}),
    )
    assert answer.status_code == 200, answer.text
    assert WebhookSubscription.objects.get().filter == {}
