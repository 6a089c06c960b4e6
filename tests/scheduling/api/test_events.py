"""`POST /events` as senders use it: every content mode, once only, answered when it is stored."""

import json
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import requests

from scheduling.api.events import BATCH, STRUCTURED
from scheduling.models import Customer, Event, Touch
from tests.scheduling.api.serving import Client, cloud_event
from tests.support.second_connection import run_concurrently
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def test_structured_event_is_stored_with_touches(api, matrix):
    matrix.node(delay=timedelta(minutes=15))

    answer = api.event(cloud_event(time="2026-03-01T08:00:00+08:00"))

    event, touch = Event.objects.get(), Touch.objects.get()
    assert answer.status_code == 202
    assert answer.json() == {
        "accepted": 1,
        "duplicates": 0,
        "touches": [str(touch.task_id)],
        "events": [{"source": "/shop", "id": "e1", "duplicate": False, "touches": [str(touch.task_id)]}],
    }
    assert (event.source, event.event_id, event.type) == ("/shop", "e1", "material.downloaded")
    assert (event.user_id, event.chat_id, event.data) == ("ann", "c1", {"chat_id": "c1"})
    assert event.occurred_at == datetime(2026, 3, 1, tzinfo=UTC)
    assert touch.due_at == event.occurred_at + timedelta(minutes=15)


def test_event_trace_precedes_request_trace(api):
    theirs = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"  # the recommendation's example
    other = theirs.replace("4bf9", "0000")
    own = api.raw(json.dumps(cloud_event("own", traceparent=theirs)).encode(), traceparent=other)
    of_the_request = api.raw(json.dumps(cloud_event("request")).encode(), traceparent=theirs)
    none = api.event(cloud_event("none", traceparent="nonsense"))

    assert [each.status_code for each in (own, of_the_request, none)] == [202] * 3
    trace = UUID(theirs[3:35])
    traces = {event.event_id: event.trace for event in Event.objects.all()}
    assert traces == {"own": trace, "request": trace, "none": Event.objects.get(event_id="none").id}


def test_binary_event_is_read_from_headers(api):
    headers = {
        "ce-specversion": "1.0",
        "ce-id": "%E8%AE%A2%E5%8D%95-1",
        "ce-source": "/shop",
        "ce-type": "order.paid",
        "ce-subject": '"a \\"quoted\\" ann"',
        "ce-time": "2026-03-01T00:00:00Z",
        "ce-traceparent": "00-1-2-01",
    }
    answer = api("POST", "/events", {"chat_id": "c9", "amount": 3}, headers=headers)

    event = Event.objects.get()
    assert answer.status_code == 202
    assert (event.event_id, event.user_id, event.chat_id) == ("订单-1", 'a "quoted" ann', "c9")
    assert event.data == {"chat_id": "c9", "amount": 3}
    bare = {f"ce-{name}": value for name, value in cloud_event("bare", data=...).items()}
    assert api("POST", "/events", headers=bare).status_code == 202
    assert Event.objects.get(event_id="bare").data == {}


def test_batch_is_answered_in_order(api, matrix):
    matrix.node()
    answer = api.event(cloud_event("e1"), cloud_event("e2", subject="bob"), cloud_event("e1"))

    events = answer.json()["events"]
    assert [each["id"] for each in events] == ["e1", "e2", "e1"]
    assert [each["duplicate"] for each in events] == [False, False, True]
    assert events[0]["touches"] == events[2]["touches"]
    assert (answer.json()["accepted"], answer.json()["duplicates"]) == (2, 1)
    assert Touch.objects.count() == 2


@each_row(
    "at",
    [
        "2026-03-01T08:00:00Z",
        "2026-03-01t08:00:00z",
        "2026-03-01T08:00:00.123456789+00:00",
        "2026-03-01T16:00:00+08:00",
    ],
)
def test_event_time_formats_are_accepted(api, at):
    assert api.event(cloud_event(at, time=at)).status_code == 202
    assert Event.objects.get(event_id=at).occurred_at.replace(microsecond=0) == datetime(2026, 3, 1, 8, tzinfo=UTC)


@each_row(
    "text",
    ["👩‍👩‍👧‍👦", "שלום مرحبا", "é", "𠮷野家", "ＡＢＣ", "zero\u200bwidth", "字" * 10_000],
)
def test_event_text_is_stored_unchanged(api, text):
    assert api.event(cloud_event(text[:20], data={"text": text})).status_code == 202
    assert Event.objects.get(event_id=text[:20]).data == {"text": text}


def test_unusual_events_are_accepted(api):
    """With attributes of extensions, by a clock that is ahead, in any script, as plain JSON, without a length."""
    soon = datetime.now(UTC) + timedelta(minutes=4)
    event = cloud_event(
        subject="用户👩‍👧", traceparent="00-1-2-01", sequence=3, urgent=True, dataschema=None, time=soon.isoformat()
    )
    assert api("POST", "/events", event).status_code == 202
    assert Customer.objects.get().user_id == "用户👩‍👧"
    body = json.dumps(cloud_event("e2")).encode()
    headers = {"Authorization": f"Bearer {api.key}", "Content-Type": STRUCTURED}
    for sent in (iter([body[:10], body[10:]]), body + b" " * (1_048_576 - len(body))):  # the longest body
        answer = requests.post(f"{api.address}/api/v1/events", data=sent, headers=headers, timeout=WAIT_LIMIT)
        assert answer.status_code == 202, answer.text


def test_json_in_base64_is_stored_as_data(api):
    encoded = b64encode('{"order": {"no": "甲-1"}}'.encode()).decode()
    assert api.event(cloud_event(data=None, data_base64=encoded)).status_code == 202
    assert Event.objects.get().data == {"order": {"no": "甲-1"}}


def test_partial_batch_stores_its_valid_events_and_names_the_others(api, matrix):
    matrix.node(trigger="order.paid")
    api.event(cloud_event("known", type="order.paid"))
    batch = [
        cloud_event("e0", type="order.paid"), cloud_event("e1", subject="undefined"),
        cloud_event("known", type="order.paid"), "no event", cloud_event("e4", data={"n": [1, 2**70]}),
        cloud_event("e5"),
    ]  # fmt: skip
    answer = api("POST", "/events?partial=true", batch, headers={"Content-Type": BATCH})
    assert answer.status_code == 202
    results = answer.json()["results"]
    assert [each["index"] for each in results] == list(range(6))
    assert [each["status"] for each in results] == [
        "accepted", "refused", "duplicate", "refused", "refused", "accepted",
    ]  # fmt: skip
    assert [[error["field"] for error in each["errors"]] for each in results] == [
        [], ["events.1.subject"], [], ["events.3"], ["events.4.data.n.1"], [],
    ]  # fmt: skip
    assert [len(each["touches"]) for each in results] == [1, 0, 1, 0, 0, 0]
    assert set(Event.objects.values_list("event_id", flat=True)) == {"known", "e0", "e5"}

    whole = api("POST", "/events", batch, headers={"Content-Type": BATCH})
    assert (whole.status_code, Event.objects.count()) == (422, 3)


def test_partial_request_without_events_is_refused(api):
    for body, status in (([], 422), ({}, 422), ([cloud_event()] * 501, 413)):
        answer = api("POST", "/events?partial=true", body, headers={"Content-Type": BATCH})
        assert answer.status_code == status
    one = api("POST", "/events?partial=true", cloud_event(subject=""), headers={"Content-Type": STRUCTURED})
    assert [each["status"] for each in one.json()["results"]] == ["refused"]


def test_validation_handshake_of_a_webhook_is_answered(api):
    answer = api("OPTIONS", "/events?partial=true", headers={"WebHook-Request-Origin": "eventemitter.example.com"})
    assert (answer.status_code, answer.headers["Allow"]) == (200, "POST")
    assert answer.headers["WebHook-Allowed-Origin"] == "eventemitter.example.com"
    assert int(answer.headers["WebHook-Allowed-Rate"]) > 0
    assert "WebHook-Allowed-Origin" not in api("OPTIONS", "/events").headers


def test_concurrent_senders_get_their_own_receipts(api):
    answers = run_concurrently(40, lambda number: api.event(cloud_event(f"e{number}", subject=f"user{number % 7}")))
    assert [answer.json()["events"][0]["id"] for answer in answers] == [f"e{number}" for number in range(40)]
    assert Event.objects.count() == 40


def test_intake_without_broker_and_redis_is_fast(server_without_redis, key, matrix):
    matrix.node(delay=timedelta(0))
    lonely = Client(server_without_redis, key)
    lonely.event(cloud_event("first"))

    answers = [lonely.event(cloud_event(f"e{number}")) for number in range(60)]

    assert [answer.status_code for answer in answers] == [202] * 60
    quickest = sorted(answer.elapsed for answer in answers)[:15]  # the others tell about the machine
    assert quickest[-1] < timedelta(seconds=1)
    assert Touch.objects.count() == 61
