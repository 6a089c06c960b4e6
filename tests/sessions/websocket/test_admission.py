"""Revoked tokens, origins, and frames above the rate of a connection."""

import threading

import pytest
from websockets.exceptions import ConnectionClosed

from sessions import tokens
from sessions.frames import Frame
from sessions.store import client
from sessions.store.sessions import live_store
from sessions.websocket import connection
from tests.sessions.websocket.test_consumer import deadline
from tests.sessions.websocket.test_limits import end_of, page, run, until
from tests.sessions.websocket.web_processes import Page

pytestmark = pytest.mark.django_db(transaction=True)


def issue(api, session="s1", role="user"):
    return str(api("POST", f"/sessions/{session}/token", {"user_id": "ann", "role": role}).json()["token"])


def test_revoked_token_closes_sockets_of_all_processes(api, second_address, open_page):
    old = issue(api)
    with Page(second_address, token=old) as second:
        pages = [open_page(token=old), second]
        assert second.receive()["type"] == "welcome"
        agent, other = open_page(token=issue(api, role="agent"), role="agent"), open_page("s2", token=issue(api, "s2"))
        assert api("DELETE", "/sessions/s1/token?role=user").status_code == 204
        assert {page.close_code() for page in pages} == {(4401, "token: revoked")}
        assert not Page.is_accepted(second_address, old)
        assert Page.is_accepted(second_address, issue(api)), "a later token is valid"
    assert agent.received_frames() == other.received_frames() == []
    assert api("DELETE", "/sessions/s1/token").status_code == 204
    assert agent.close_code() == (4401, "token: revoked")


def test_revocation_without_notification_closes_socket(api, open_page):
    """The channel layer lost the notification; the process reads revocations itself."""
    page = open_page(token=issue(api))
    tokens.revoke_tokens(live_store().server, "s1", ["user"])
    assert page.close_code() == (4401, "token: revoked")


def test_connections_racing_a_revocation_all_end(api, address):
    """A socket either finds the revocation when it connects or is open when the notification arrives."""
    tokens = [issue(api, f"s{number}") for number in range(8)]
    go, ends = threading.Barrier(9), []

    def connect(number):
        go.wait()
        with Page(address, f"s{number}", token=tokens[number]) as page:
            ends.append(page.close_code())

    threads = [threading.Thread(target=connect, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    go.wait()
    for number in range(8):
        assert api("DELETE", f"/sessions/s{number}/token").status_code == 204
    for thread in threads:
        thread.join()
    assert ends == [(4401, "token: revoked")] * 8


def test_revocation_is_later_than_clock_that_went_back(valkey):
    server = live_store().server
    shard = client.shard_of("s1")
    latest = int(valkey.time()[0] + 600) * 1_000_000
    valkey.zadd(client.REVOKED[shard], {"other\nuser": latest})
    at = tokens.revoke_tokens(server, "s1", ["user"])
    issued_at = tokens.read_issue_time(server, "s1")
    assert latest < at < issued_at
    assert tokens.is_revoked(server, "s1", "user", at - 1)
    assert not tokens.is_revoked(server, "s1", "user", issued_at)
    found = tokens.list_revocations(server, [at - 1] * client.SHARDS)
    assert [each.session_id for each in found[shard]] == ["s1"]


def test_origin_list_limits_pages(initial_rows, second_address):
    answers = {}
    for origin in ("https://shop.example.com", "https://evil.example.com", "null", None):
        with Page(second_address, origin=origin) as page:
            try:
                answers[origin] = page.receive()["type"]
            except ConnectionClosed as closed:
                answers[origin] = closed.rcvd.code if closed.rcvd else None
    assert answers == {
        "https://shop.example.com": "welcome", "https://evil.example.com": 4406, "null": 4406, None: "welcome",
    }  # fmt: skip


def test_customer_frame_above_rate_renews_session(initial_rows, valkey, monkeypatch):
    monkeypatch.setattr(connection, "BURST", 0.0)
    monkeypatch.setattr(connection, "RATE", 0.0)
    live_store().note_activity([Frame("s1", "ann", "c1")])
    early = deadline() - 20_000
    valkey.zadd(client.DUE[client.shard_of("s1")], {"s1": early})

    async def scene():
        async with page() as (wire, _):
            wire.said.put_nowait({"type": "websocket.receive", "text": '{"type": "message", "text": "hi"}'})
            assert (await end_of(wire))["code"] == 4429
            await until(lambda: deadline() > early + 10_000)

    run(scene)
