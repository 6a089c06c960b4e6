"""Activity, tokens and closing over HTTP."""

from datetime import UTC, datetime, timedelta
from itertools import count

import pytest
import requests

from config.local.processes import wait_until
from scheduling.operations import commands
from sessions import tokens
from sessions.detection import policies
from sessions.models import SilencePolicy
from sessions.store import client
from sessions.store.sessions import live_store
from tests.scheduling.api.serving import Client
from tests.sessions.refusing_server import REFUSALS, refuse_writes
from tests.sessions.websocket.test_consumer import deadline
from tests.sessions.websocket.web_processes import Page
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT, eventually

pytestmark = pytest.mark.django_db(transaction=True)

ANN = {"user_id": "ann", "chat_id": "c1", "from": "user", "kind": "message"}


def test_activity_request_arms_session(api):
    answer = api("POST", "/sessions/s1/activity", ANN)
    assert answer.status_code == 200
    assert answer.json()["outcome"] == "counted"
    assert datetime.fromisoformat(answer.json()["deadline"]).timestamp() == pytest.approx(deadline() / 1000, abs=0.01)


def test_activity_batch_keeps_order_and_counts_outcomes(api):
    frames = [
        {"session_id": "s1", **ANN, "seq": 1},
        {"session_id": "s2", **ANN, "user_id": "bob"},
        {"session_id": "s1", **ANN, "from": "agent", "kind": "transfer"},
        {"session_id": "s1", **ANN, "seq": 1},
        {"session_id": "s3", **ANN, "from": "agent", "kind": "ping"},
    ]
    answer = api("POST", "/sessions/activity", frames).json()
    assert [each["outcome"] for each in answer["items"]] == ["counted", "counted", "counted", "dropped", "idle"]
    assert (answer["counted"], answer["dropped"], answer["idle"]) == (3, 1, 1)
    assert (deadline("s1"), deadline("s2") > 0) == (0, True)


def test_activity_batch_with_invalid_frame_stores_nothing(api):
    frames = [{"session_id": "s1", **ANN}, {"session_id": "", **ANN, "kind": "shout"}]
    answer = api("POST", "/sessions/activity", frames)
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["errors"]] == ["sessions.1.session_id", "sessions.1.kind"]
    assert deadline("s1") == 0


@each_row("count, status", [(0, 422), (500, 200), (501, 413)])
def test_activity_batch_size_is_limited(api, count, status):
    frames = [{"session_id": f"s{number}", **ANN} for number in range(count)]
    assert api("POST", "/sessions/activity", frames).status_code == status


@each_row(
    "change, field",
    [
        ({"user_id": ...}, "user_id"),
        ({"from": "robot"}, "from"),
        ({"kind": "transfer"}, "kind"),
        ({"seq": 1.5}, "seq"),
        ({"tags": ["a", ""]}, "tags.1"),
        ({"chat_id": "a\u0000"}, "activity.chat_id"),
        ({"at": "2026-01-01"}, "at"),
    ],
)
def test_activity_request_with_invalid_member_names_field(api, change, field):
    """`test_invalid_frame_names_field` has all limits of a frame."""
    body = {name: value for name, value in (ANN | change).items() if value is not ...}
    answer = api("POST", "/sessions/s1/activity", body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] in (field, field.rpartition(".")[2])


def test_activity_request_validates_session_id(api):
    assert api("POST", "/sessions/a%01b/activity", ANN).json()["errors"][0]["field"] == "session_id"
    assert api("POST", f"/sessions/{'x' * 129}/activity", ANN).json()["errors"][0]["field"] == "session_id"
    for odd in ("a%2Fb", "%E9%9D%99", "activity", "%7Bat%3As00%7D%3Adue", "a%20b"):
        assert api("POST", f"/sessions/{odd}/activity", ANN).status_code == 200


def test_token_admits_its_session_user_and_role(api, address):
    wish = {"user_id": "ann", "chat_id": "c1", "tag": "vip", "ttl_seconds": 60, "role": "agent"}
    before = datetime.now(UTC)
    answer = api("POST", "/sessions/s1/token", wish).json()
    issued_at = datetime.fromisoformat(answer["expires_at"]) - timedelta(seconds=60)
    assert before - timedelta(seconds=1) <= issued_at <= datetime.now(UTC)
    assert tokens.verify_token(answer["token"], "s1") == tokens.Admission("s1", "ann", "c1", "vip", "agent")
    with Page(address, token=answer["token"]) as page:
        assert page.receive()["role"] == "agent"


@each_row(
    "change, field",
    [
        ({"ttl_seconds": 3601}, "ttl_seconds"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"role": "boss"}, "role"),
        ({"user_id": ""}, "user_id"),
        ({"tag": "x" * 65}, "tag"),
    ],
)
def test_token_request_with_invalid_member_names_field(api, change, field):
    answer = api("POST", "/sessions/s1/token", {"user_id": "ann"} | change)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


@each_row(
    "change, field",
    [({"user_id": 7}, "user_id"), ({"chat_id": "a\u0000"}, "chat_id"), ({"seq": -1}, "seq"), ({"epoch": 1.5}, "epoch")],
)
def test_activity_batch_errors_name_fields_uniformly(api, change, field):
    answer = api("POST", "/sessions/activity", [{"session_id": "s1", **ANN}, {"session_id": "s2", **ANN, **change}])
    assert answer.status_code == 422
    assert {each["field"].partition(".int")[0].partition(".function")[0] for each in answer.json()["errors"]} >= {
        f"sessions.1.{field}"
    }


def test_activity_of_other_user_names_field(api):
    api("POST", "/sessions/s1/activity", ANN)
    before = deadline()
    for side, kind in (("user", "message"), ("agent", "message"), ("user", "close")):
        answer = api("POST", "/sessions/s1/activity", ANN | {"user_id": "eve", "from": side, "kind": kind})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "user_id")
    frames = [
        {"session_id": "s1", **ANN, "user_id": "eve"},
        {"session_id": "s2", **ANN},
    ]
    answer = api("POST", "/sessions/activity", frames).json()
    assert (answer["refused"], answer["counted"]) == (1, 1)
    assert [each["outcome"] for each in answer["items"]] == ["refused", "counted"]
    assert answer["items"][0]["errors"][0]["field"] == "sessions.0.user_id"
    assert deadline() == before
    assert api("GET", "/sessions/s1").json()["user_id"] == "ann"


def test_activity_with_new_epoch_accepts_lower_seq(api, address):
    def send(**more):
        answer = api("POST", "/sessions/s1/activity", ANN | more).json()
        return answer["outcome"], answer["dropped"]

    def stale():
        found = requests.get(f"http://{address}/metrics", timeout=WAIT_LIMIT).text
        lines = [line for line in found.splitlines() if line.startswith("aftertouch_frames_dropped_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if 'reason="stale_seq"' in line)

    before = stale()
    assert send(seq=9) == ("counted", None)
    assert send(seq=1) == ("dropped", "stale_seq")
    assert send(seq=1, epoch=2) == ("counted", None)
    assert send(seq=1, epoch="2") == ("dropped", "stale_seq")
    assert send(seq=10) == ("counted", None)
    assert eventually(lambda: stale() == before + 2)


def test_get_session_explains_the_policy(api):
    SilencePolicy.objects.create(key="new-vip", tags=["vip", "new"], after="customer", threshold=timedelta(seconds=90))
    policies.push_policies()
    api("POST", "/sessions/s1/activity", ANN | {"tags": ["vip", "sale"], "tag": "new"})
    found = api("GET", "/sessions/s1").json()
    assert (found["tags"], found["policy"], found["policy_tags"]) == (["new", "sale", "vip"], "new-vip", ["new", "vip"])
    assert (found["state"], found["awaited"], found["why"]) == ("armed", "agent", "armed")
    assert found["answer_policy"] == {"key": "new-vip", "tags": ["new", "vip"]}
    assert found["guide_policy"] == {"key": "default", "tags": []}


def test_get_session_returns_state_and_times(api):
    assert api("GET", "/sessions/s1").status_code == 404
    api("POST", "/sessions/s1/activity", ANN | {"kind": "ping", "tag": "vip"})
    found = api("GET", "/sessions/s1").json()
    assert found == {
        "session_id": "s1", "user_id": "ann", "chat_id": "c1", "state": "idle", "tags": ["vip"], "policy": "default",
        "policy_tags": [], "guide_policy": {"key": "default", "tags": []}, "answer_policy": None,
        "awaited": None, "why": "no_message", "deadline": None,
        "last_user_at": None, "last_agent_at": None, "nudges": 0,
    }  # fmt: skip
    noted = api("POST", "/sessions/s1/activity", ANN).json()
    api("POST", "/sessions/s1/activity", ANN | {"from": "agent", "kind": "resume"})
    found = api("GET", "/sessions/s1").json()
    assert (found["state"], found["awaited"], found["why"]) == ("armed", "customer", "armed")
    assert found["deadline"] >= noted["deadline"]
    assert found["last_user_at"] <= found["last_agent_at"] < found["deadline"]
    api("POST", "/sessions/s1/activity", ANN | {"from": "agent", "kind": "transfer"})
    assert api("GET", "/sessions/s1").json()["state"] == "paused"
    api("POST", "/sessions/s1/activity", ANN | {"from": "agent", "kind": "close"})
    assert api("GET", "/sessions/s1").json()["state"] == "closed"
    assert api("GET", f"/sessions/{'x' * 129}").json()["errors"][0]["field"] == "session_id"


def test_get_session_after_silence_counts_guide_message(api, chats):
    claim = chats.claimed_silence()
    assert api("GET", "/sessions/s1").json()["state"] == "silent"
    chats.store.confirm([claim])
    chats.deliver(claim)
    found = api("GET", "/sessions/s1").json()
    assert (found["state"], found["deadline"], found["nudges"]) == ("silent", None, 1)


def test_activity_above_rate_renews_known_sessions(api, valkey):
    """Chats whose renewals are refused fall silent together."""
    assert api("POST", "/sessions/s1/activity", ANN).status_code == 200
    slow = Client(api.address, commands.create_api_key("slow", ["sessions"], rate_per_minute=1))
    numbers = count()
    frames = [{"session_id": name, **ANN} for name in ("s1", "another")]

    def minute():
        return int(valkey.time()[0]) // 60

    def spend():
        return slow("POST", f"/sessions/new-{next(numbers)}/activity", ANN).status_code

    while True:  # until all of it falls into one minute: a new one brings a new allowance
        began = minute()
        assert wait_until(lambda: spend() == 429, WAIT_LIMIT)  # a Redis that is slow for a moment limits nothing
        early = deadline("s1") - 20_000
        valkey.zadd(client.DUE[client.shard_of("s1")], {"s1": early})
        renewal = slow("POST", "/sessions/s1/activity", ANN | {"kind": "ping"})
        renewed = deadline("s1")
        batch = slow("POST", "/sessions/activity", frames)
        refused = [slow("POST", "/sessions/activity", frames[1:]) for _ in range(2)]
        refused.append(slow("POST", "/sessions/s1/token", {"user_id": "ann"}))
        if minute() == began:
            break
    assert renewal.status_code == 200
    assert renewed > early + 10_000, "jitter takes at most 5 s"
    assert batch.status_code == 200
    assert [each["outcome"] for each in batch.json()["items"]] == ["counted", "dropped"]
    assert batch.json()["items"][1]["dropped"] == "rate"
    assert [each.status_code for each in refused] == [429] * 3
    assert int(refused[1].headers["Retry-After"]) >= 1


def test_posted_message_of_agent_appears_and_counts(api, open_page):
    SilencePolicy.objects.filter(key="default").update(after="customer")
    policies.push_policies()
    ann = open_page()
    ann.send_frame("message", text="anyone?", id="m1")
    ann.receive_until("ack")
    bot = api("POST", "/sessions/s1/messages", {"from": "bot", "text": "one moment"})
    assert bot.json()["duplicate"] is False
    assert ann.receive_until("message", **{"from": "bot"})["text"] == "one moment"
    assert api("GET", "/sessions/s1").json()["awaited"] == "agent", "a bot does not answer for an agent"
    answers = [api("POST", "/sessions/s1/messages", {"text": "hello", "id": "a1"}).json() for _ in range(2)]
    assert answers == [{"id": "a1", "duplicate": False}, {"id": "a1", "duplicate": True}]
    assert ann.receive_until("message", **{"from": "agent"})["text"] == "hello"
    assert api("GET", "/sessions/s1").json()["awaited"] is None
    assert len(live_store().messages_since("s1", "0-0")) == 3


@each_row(
    "body, field",
    [({"text": " "}, "text"), ({"text": "x" * 4097}, "text"), ({}, "text"), ({"text": "x", "from": "user"}, "from"),
     ({"text": "x", "id": "x" * 65}, "id")],
)  # fmt: skip
def test_posted_message_with_invalid_member_names_field(api, body, field):
    answer = api("POST", "/sessions/s1/messages", body)
    assert (answer.status_code, answer.json()["errors"][0]["field"].rpartition(".")[2]) == (422, field)


def test_repeated_posted_message_does_not_answer_later_one(api, open_page):
    SilencePolicy.objects.filter(key="default").update(after="customer")
    policies.push_policies()
    ann = open_page()
    for name in ("m1", "m2"):
        ann.send_frame("message", text="anyone?", id=name)
        ann.receive_until("ack")
        assert api("POST", "/sessions/s1/messages", {"text": "hello", "id": "a1"}).json()["duplicate"] is (name == "m2")
    found = api("GET", "/sessions/s1").json()
    assert (found["awaited"], found["state"]) == ("agent", "armed")


def test_posted_message_to_unknown_or_closed_session_returns_404(api):
    for sender in ("agent", "bot"):
        assert api("POST", "/sessions/s1/messages", {"from": sender, "text": "hi"}).status_code == 404
    api("POST", "/sessions/s1/activity", ANN)
    api("DELETE", "/sessions/s1")
    assert api("POST", "/sessions/s1/messages", {"text": "hi"}).status_code == 404
    assert live_store().messages_since("s1", "0-0") == []


def test_delete_session_closes_it_and_its_connections(api, open_page):
    ann, bob = open_page(), open_page(role="agent")
    ann.send_frame("message", text="hi", id="m1")
    ann.receive_until("ack")
    assert api("DELETE", "/sessions/s1").status_code == 204
    assert ann.close_code()[0] == bob.close_code()[0] == 1000
    assert deadline() == 0
    assert live_store().messages_since("s1", "0-0") == []
    assert api("DELETE", "/sessions/s1").status_code == 204


def test_session_requests_without_redis_return_503(server_without_redis, initial_rows):
    api = Client(server_without_redis, commands.create_api_key("gateway", ["sessions"]))
    check_all_return_503(api)
    check_503(api("DELETE", "/sessions/s1"))
    check_503(api("POST", "/sessions/s1/token", {"user_id": "ann"}))
    check_503(api("DELETE", "/sessions/s1/token"))
    check_503(api("POST", "/sessions/s1/messages", {"text": "hi"}))
    with Page(server_without_redis.removeprefix("http://")) as page:
        assert page.close_code()[0] == 1013


def check_all_return_503(api):
    check_503(api("POST", "/sessions/s1/activity", ANN))
    check_503(api("POST", "/sessions/activity", [{"session_id": "s1", **ANN}]))


def check_503(answer):
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize("code", REFUSALS)
def test_session_requests_with_full_redis_return_503(api, open_page, valkey, code):
    """A full one is there, and answers. (It still takes a close, which gives memory back.)"""
    ann = open_page()
    with refuse_writes(valkey, code):
        check_all_return_503(api)
        ann.send_frame("message", text="hi", id="m1")
        assert ann.receive_until("error", id="m1")["reason"] == "unavailable"
    assert api("POST", "/sessions/s1/activity", ANN).status_code == 200
