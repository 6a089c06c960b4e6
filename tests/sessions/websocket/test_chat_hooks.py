"""Webhooks of Chatwoot and Rocket.Chat, in the shapes that these systems send."""

import hashlib
import hmac
import json
import time

import pytest
from django.test import Client

from sessions.store import stats
from sessions.store.sessions import live_store
from tests.sessions.refusing_server import refuse_writes
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "chat-secret"

CHATWOOT_CONVERSATION = {
    "additional_attributes": {"browser": {"browser_name": "Chrome"}, "referer": "https://shop.example.com/"},
    "can_reply": True, "channel": "Channel::WebWidget", "id": 17, "inbox_id": 3, "status": "open",
    "contact_inbox": {"id": 9, "contact_id": 41, "inbox_id": 3, "source_id": "8f2e", "pubsub_token": "x"},
    "labels": ["vip", "x" * 65, "a\tb", 7], "custom_attributes": {}, "unread_count": 1, "timestamp": 1769846400,
    "meta": {
        "sender": {"id": 41, "name": "Ann", "email": "ann@example.com", "identifier": None, "type": "contact"},
        "assignee": {"id": 2, "name": "Bob", "type": "user"}, "team": None, "hmac_verified": False,
    },
}  # fmt: skip
CHATWOOT_MESSAGE = {
    "event": "message_created", "id": 501, "content": "where is my parcel?", "content_type": "text",
    "content_attributes": {}, "message_type": "incoming", "private": False, "source_id": None,
    "created_at": "2026-01-31T08:00:00.000Z", "account": {"id": 1, "name": "Shop"}, "inbox": {"id": 3, "name": "Web"},
    "sender": {"id": 41, "name": "Ann", "identifier": None, "email": "ann@example.com", "account": {"id": 1}},
    "conversation": CHATWOOT_CONVERSATION,
}  # fmt: skip
BOB = {"id": 2, "name": "Bob", "email": "bob@example.com", "type": "user"}

ROCKETCHAT = {
    "_id": "fasd6f5a4sd6f8a4sdf", "label": "Ann", "createdAt": "2026-01-31T08:00:00.000Z", "topic": "parcel",
    "lastMessageAt": "2026-01-31T08:00:05.000Z", "tags": ["vip"], "customFields": {}, "type": "Message",
    "visitor": {
        "_id": "sdfs5fe", "token": "abc", "name": "Ann", "username": "guest-3", "department": "sales",
        "email": [{"address": "ann@example.com"}], "phone": [{"phoneNumber": "55"}], "ip": "127.0.0.1",
        "browser": "Chrome 130", "os": "Linux", "customFields": {},
    },
    "agent": {"_id": "agentId", "username": "bob", "name": "Bob", "email": "bob@example.com"},
}  # fmt: skip


def said(text_at, **more):
    return {"u": {"_id": "u", "username": "guest-3"}, "_id": text_at, "username": "guest-3", "msg": "hi",
            "ts": f"2026-01-31T08:00:{text_at}Z", **more}  # fmt: skip


@pytest.fixture(autouse=True)
def secrets(settings, valkey, initial_rows):
    settings.AFTERTOUCH_CHATWOOT_SECRET = settings.AFTERTOUCH_ROCKETCHAT_TOKEN = SECRET


def post(system, body, headers):
    client = Client(enforce_csrf_checks=True)
    return client.post(f"/chat-hooks/{system}", body, content_type="application/json", headers=headers)


def chatwoot(payload, *, secret=SECRET, age=0, signed=""):
    body, sent_at = json.dumps(payload), str(int(time.time() - age))
    digest = hmac.new(secret.encode(), f"{sent_at}.{signed or body}".encode(), hashlib.sha256).hexdigest()
    return post("chatwoot", body, {"X-Chatwoot-Timestamp": sent_at, "X-Chatwoot-Signature": f"sha256={digest}"})


def rocketchat(payload, *, token=SECRET):
    return post("rocketchat", json.dumps(payload), {"X-RocketChat-Livechat-Token": token})


def outcomes(response):
    assert response.status_code == 200, response.content
    return list(json.loads(response.content)["outcomes"])


def session(session_id):
    return stats.session_snapshot(live_store(), session_id)


def test_chatwoot_messages_of_both_sides_count_once():
    assert outcomes(chatwoot(CHATWOOT_MESSAGE)) == ["counted"]
    found = session("chatwoot-3-17")
    assert (found.user_id, found.chat_id, found.tags) == ("chatwoot-41", "chatwoot-3", ("vip",))
    assert (found.state, found.last_agent_at) == ("armed", None)
    assert outcomes(chatwoot(CHATWOOT_MESSAGE)) == ["dropped"], "a repeat"
    answer = CHATWOOT_MESSAGE | {"id": 502, "message_type": "outgoing", "sender": BOB}
    assert outcomes(chatwoot(answer)) == ["counted"]
    assert session("chatwoot-3-17").last_agent_at


@each_row(
    "change",
    [{"private": True}, {"message_type": "activity"}, {"message_type": "template"}, {"event": "message_updated"},
     {"event": "conversation_typing_on", "is_private": True}, {"event": "webwidget_triggered"},
     {"message_type": "outgoing", "sender": {"id": 5, "name": "Bot", "type": "agent_bot"}}],
)  # fmt: skip
def test_chatwoot_events_that_are_no_frames_are_ignored(change):
    assert outcomes(chatwoot(CHATWOOT_MESSAGE | change)) == []


def test_chatwoot_typing_renews_and_resolved_closes():
    chatwoot(CHATWOOT_MESSAGE)
    before = session("chatwoot-3-17").deadline
    typing = {"event": "conversation_typing_on", "conversation": CHATWOOT_CONVERSATION, "is_private": False}
    assert outcomes(chatwoot(typing | {"user": {"id": 41, "name": "Ann", "type": "contact"}})) == ["counted"]
    assert session("chatwoot-3-17").deadline > before
    changed = CHATWOOT_CONVERSATION | {"event": "conversation_status_changed", "status": "resolved"}
    assert outcomes(chatwoot(changed)) == ["counted"]
    assert session("chatwoot-3-17").state == "closed"


@each_row("forged", [{"secret": "other"}, {"age": 301}, {"age": -301}, {"signed": "{}"}])
def test_chatwoot_hook_with_wrong_signature_is_refused(forged):
    assert chatwoot(CHATWOOT_MESSAGE, **forged).status_code == 401
    assert not session("chatwoot-3-17").armed_at


def test_rocketchat_messages_of_both_sides_count_once():
    payload = ROCKETCHAT | {"messages": [said("01.000"), said("02.500", agentId="agentId", username="bob")]}
    assert outcomes(rocketchat(payload)) == ["counted", "counted"]
    found = session("rocketchat-fasd6f5a4sd6f8a4sdf")
    assert (found.user_id, found.tags, found.state) == ("rocketchat-sdfs5fe", ("vip",), "armed")
    assert found.last_user_at
    assert found.last_agent_at
    assert outcomes(rocketchat(payload)) == ["dropped", "dropped"], "a repeat"
    odd = [said("03.000", editedAt="x"), said("04.000", navigation={}), said("05.000", closingMessage=True), 7]
    assert outcomes(rocketchat(ROCKETCHAT | {"messages": odd})) == []


def test_rocketchat_session_events_pause_resume_and_close():
    rocketchat(ROCKETCHAT | {"messages": [said("01.000")]})
    states = {}
    for kind in ("LivechatSessionForwarded", "LivechatSessionTaken", "LivechatSessionQueued", "LivechatSession"):
        assert outcomes(rocketchat(ROCKETCHAT | {"type": kind})) == ["counted"]
        states[kind] = session("rocketchat-fasd6f5a4sd6f8a4sdf").state
    assert list(states.values()) == ["paused", "armed", "paused", "closed"]
    assert outcomes(rocketchat(ROCKETCHAT | {"type": "LivechatEdit"})) == []


def test_hook_with_wrong_token_or_without_secret_is_refused(settings):
    assert rocketchat(ROCKETCHAT, token="other").status_code == 401
    assert post("rocketchat", "{}", {}).status_code == 401
    assert post("zendesk", "{}", {}).status_code == 404
    settings.AFTERTOUCH_ROCKETCHAT_TOKEN = ""
    assert rocketchat(ROCKETCHAT, token="").status_code == 404


@each_row(
    "payload, field",
    [
        (ROCKETCHAT | {"visitor": None, "type": "LivechatSession"}, "visitor"),
        (ROCKETCHAT | {"visitor": {"_id": ["a"]}, "type": "LivechatSession"}, "visitor"),
        (ROCKETCHAT | {"messages": [said("x")]}, "messages.ts"),
        (ROCKETCHAT | {"_id": "x" * 200, "messages": [said("01.000")]}, "session_id"),
    ],
)
def test_hook_with_unfit_payload_names_field(payload, field):
    response = rocketchat(payload)
    assert (response.status_code, json.loads(response.content)["errors"][0]["field"]) == (422, field)


def test_hook_with_unfit_conversation_names_field():
    for odd in ({"id": None}, {"id": [17]}, {"id": True}, {"inbox_id": 3.5}, {"meta": {"sender": {"id": {"a": 1}}}}):
        response = chatwoot(CHATWOOT_MESSAGE | {"conversation": CHATWOOT_CONVERSATION | odd})
        assert (response.status_code, json.loads(response.content)["errors"][0]["field"]) == (422, "conversation"), odd
    assert rocketchat([]).status_code == 200
    assert post("rocketchat", "{", {"X-RocketChat-Livechat-Token": SECRET}).status_code == 400


def test_hook_that_redis_refuses_returns_503(valkey):
    with refuse_writes(valkey, "OOM"):
        assert chatwoot(CHATWOOT_MESSAGE).status_code == 503
    assert outcomes(chatwoot(CHATWOOT_MESSAGE)) == ["counted"]
