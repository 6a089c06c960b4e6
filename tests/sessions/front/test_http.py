"""Activity, tokens and closing over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from scheduling import services
from sessions import tokens
from sessions.inbox import live as inbox
from tests.scheduling.api.serving import NOWHERE, Client, eventually
from tests.sessions.front.serving import Page, web
from tests.sessions.front.test_websocket import deadline
from tests.sessions.refusing import REFUSALS, refusing

pytestmark = pytest.mark.django_db(transaction=True)

ANN = {"user_id": "ann", "chat_id": "c1", "from": "user", "kind": "message"}


def test_a_frame_arms_the_session(api: Client) -> None:
    answer = api("POST", "/sessions/s1/activity", ANN)
    assert answer.status_code == 200
    assert answer.json()["outcome"] == "counted"
    assert datetime.fromisoformat(answer.json()["deadline"]).timestamp() == pytest.approx(deadline() / 1000, abs=0.01)


def test_a_replayed_seq_is_dropped(api: Client) -> None:
    outcomes = [api("POST", "/sessions/s1/activity", ANN | {"seq": seq}).json()["outcome"] for seq in (2, 2, 1, 3)]
    assert outcomes == ["counted", "dropped", "dropped", "counted"]


def test_a_batch_keeps_its_order_and_counts(api: Client) -> None:
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


def test_a_batch_in_which_one_does_not_fit_counts_for_nothing(api: Client) -> None:
    frames = [{"session_id": "s1", **ANN}, {"session_id": "", **ANN, "kind": "shout"}]
    answer = api("POST", "/sessions/activity", frames)
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["errors"]] == ["1.session_id", "1.kind"]
    assert deadline("s1") == 0


@pytest.mark.parametrize(("count", "status"), [(0, 422), (500, 200), (501, 413)])
def test_the_bounds_of_a_batch(api: Client, count: int, status: int) -> None:
    frames = [{"session_id": f"s{number}", **ANN} for number in range(count)]
    assert api("POST", "/sessions/activity", frames).status_code == status


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"user_id": ""}, "user_id"),
        ({"user_id": "x" * 201}, "user_id"),
        ({"user_id": ...}, "user_id"),
        ({"from": "robot"}, "from"),
        ({"kind": "shout"}, "kind"),
        ({"kind": "transfer"}, "kind"),
        ({"seq": -1}, "seq"),
        ({"seq": 1.5}, "seq"),
        ({"seq": 2**53}, "seq"),
        ({"tag": "x" * 65}, "tag"),
        ({"chat_id": "a\u0000"}, "activity.chat_id"),
        ({"at": "2026-01-01"}, "at"),
    ],
)
def test_a_field_that_does_not_fit_is_named(api: Client, change: dict[str, Any], field: str) -> None:
    body = {name: value for name, value in (ANN | change).items() if value is not ...}
    answer = api("POST", "/sessions/s1/activity", body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] in (field, field.rpartition(".")[2])


def test_an_odd_session_id_is_named_or_taken(api: Client) -> None:
    assert api("POST", "/sessions/a%01b/activity", ANN).json()["errors"][0]["field"] == "session_id"
    assert api("POST", f"/sessions/{'x' * 129}/activity", ANN).json()["errors"][0]["field"] == "session_id"
    for odd in ("a%2Fb", "%E9%9D%99", "activity", "%7Bat%3As00%7D%3Adue", "a%20b"):
        assert api("POST", f"/sessions/{odd}/activity", ANN).status_code == 200


def test_a_token_lets_in_for_its_session_user_and_side(api: Client, address: str) -> None:
    wish = {"user_id": "ann", "chat_id": "c1", "tag": "vip", "ttl_seconds": 60, "role": "agent"}
    answer = api("POST", "/sessions/s1/token", wish).json()
    left = datetime.fromisoformat(answer["expires_at"]) - datetime.now(UTC)
    assert 50 < left.total_seconds() <= 60
    assert tokens.read(answer["token"], "s1") == tokens.Admission("s1", "ann", "c1", "vip", "agent")
    with Page(address, token=answer["token"]) as page:
        assert page.hear()["role"] == "agent"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ttl_seconds": 3601}, "ttl_seconds"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"role": "boss"}, "role"),
        ({"user_id": ""}, "user_id"),
        ({"tag": "x" * 65}, "tag"),
    ],
)
def test_a_token_that_cannot_be(api: Client, change: dict[str, Any], field: str) -> None:
    answer = api("POST", "/sessions/s1/token", {"user_id": "ann"} | change)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


def test_deleting_a_session_closes_it_and_its_connections(api: Client, enter: Callable[..., Page]) -> None:
    ann, bob = enter(), enter(role="agent")
    ann.say("message", text="hi", id="m1")
    ann.hear_until("ack")
    assert api("DELETE", "/sessions/s1").status_code == 204
    assert ann.close_code()[0] == bob.close_code()[0] == 1000
    assert deadline() == 0
    assert inbox().since("s1", "0-0") == []
    assert api("DELETE", "/sessions/s1").status_code == 204


def test_another_scope_does_not_open_this_door(api: Client) -> None:
    stranger = Client(api.address, services.create_api_key("shop", ["events"]))
    assert stranger("POST", "/sessions/s1/activity", ANN).status_code == 403
    assert stranger("POST", "/sessions/s1/token", {"user_id": "ann"}).status_code == 403
    assert stranger("DELETE", "/sessions/s1").status_code == 403


@pytest.fixture
def cut_off(house: None) -> Iterator[str]:
    with web(REDIS_URL=NOWHERE, CELERY_BROKER_URL=NOWHERE) as address:
        yield address


def test_while_redis_is_away_everybody_is_told_to_come_again(cut_off: str) -> None:
    api = Client(f"http://{cut_off}", services.create_api_key("gateway", ["sessions"]))
    everybody_comes_again(api)
    comes_again(api("DELETE", "/sessions/s1"))
    assert eventually(lambda: api("POST", "/sessions/s1/token", {"user_id": "ann"})).status_code == 200
    with Page(cut_off) as page:
        assert page.close_code()[0] == 1013


def everybody_comes_again(api: Client) -> None:
    comes_again(api("POST", "/sessions/s1/activity", ANN))
    comes_again(api("POST", "/sessions/activity", [{"session_id": "s1", **ANN}]))


def comes_again(answer: Any) -> None:
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize("code", REFUSALS)
def test_while_redis_takes_nothing_everybody_is_told_to_come_again(
    api: Client, enter: Callable[..., Page], valkey: Any, code: str
) -> None:
    """A full one is there, and answers. (It still takes a close, which gives memory back.)"""
    ann = enter()
    with refusing(valkey, code):
        everybody_comes_again(api)
        ann.say("message", text="hi", id="m1")
        assert ann.hear_until("error", id="m1")["reason"] == "unavailable"
    assert api("POST", "/sessions/s1/activity", ANN).status_code == 200
