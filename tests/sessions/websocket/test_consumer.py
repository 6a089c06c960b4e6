"""What comes in over a WebSocket, what goes out, and what ends one."""

import json
from contextlib import suppress

import pytest
import requests
from websockets.exceptions import ConnectionClosed

from scheduling.models import Event
from sessions.frames import Frame
from sessions.store import client as keys
from sessions.store import inbox as inbox_module
from sessions.store import sessions, stats
from tests.scheduling.api.serving import cloud_event
from tests.sessions.websocket.web_processes import Page, token
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT, eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def ann(open_page):
    return open_page()


def test_user_and_agent_receive_messages(open_page):
    ann, bob = open_page(), open_page(role="agent")
    ann.send_frame("message", text="你好", id="m1")
    seen = bob.receive_until("message")
    assert (seen["from"], seen["text"], seen["id"]) == ("user", "你好", "m1")
    heard = {frame["type"]: frame for frame in (ann.receive(), ann.receive())}
    assert heard["message"] == seen
    assert heard["ack"] == {"type": "ack", "id": "m1", "duplicate": False}
    bob.send_frame("message", text="hello")
    answer = ann.receive_until("message", **{"from": "agent"})
    assert answer["text"] == "hello"
    assert answer["at"].endswith("+00:00")


def test_typing_reaches_only_other_side_and_is_not_stored(open_page):
    ann, second, bob = open_page(), open_page(), open_page(role="agent")
    ann.send_frame("typing")
    assert bob.receive_until("typing") == {"type": "typing", "from": "user"}
    assert second.received_frames() == []
    assert sessions.live_store().messages_since("s1", "0-0") == []


def test_ping_after_flush_arms_session_again(open_page):
    ann, bob = open_page(), open_page(role="agent")
    ann.send_frame("message", text="hi", id="m1")
    ann.receive_until("ack")
    sessions.live_store().server.client.flushall()
    ann.send_frame("ping")
    assert eventually(deadline)
    ann.send_frame("message", text="still here")
    assert bob.receive_until("message", text="still here")


def test_ping_of_user_who_wrote_arms_after_reconnect(open_page):
    ann = open_page()
    ann.send_frame("ping")
    ann.receive_until("pong")
    ann.send_frame("read")
    eventually(lambda: sessions.live_store().known(["s1"]) == [True])
    assert deadline() == 0
    ann.send_frame("ping", spoken=True)
    assert eventually(deadline)


def test_chat_after_flush_continues_with_old_cursor(open_page):
    ann, bob = open_page(), open_page(role="agent")
    ann.send_frame("message", text="before")
    cursor = bob.receive_until("message")["cursor"]
    sessions.live_store().server.client.flushall()
    ann.send_frame("message", text="after")
    assert bob.receive_until("message")["text"] == "after"
    assert open_page(cursor=cursor).receive_until("message")["text"] == "after"


def test_message_does_not_reach_other_session(open_page):
    ann, eve = open_page(), open_page("s2", user="eve")
    ann.send_frame("message", text="secret", id="m1")
    ann.receive_until("ack")
    assert eve.received_frames() == []


def test_message_repeated_after_reconnect_is_stored_once(open_page):
    bob = open_page(role="agent")
    ann = open_page()
    ann.send_frame("message", text="hi", id="m1")
    ann.receive_until("ack")
    ann.socket.close()
    ann = open_page()
    ann.send_frame("message", text="hi", id="m1")
    assert ann.receive_until("ack")["duplicate"] is True
    ann.send_frame("message", text="end", id="m2")
    assert [bob.receive_until("message")["text"] for _ in range(2)] == ["hi", "end"]


def test_repeated_message_with_old_seq_is_acknowledged(open_page):
    """Who was cut off before the acknowledgement came would repeat it for ever."""
    bob = open_page(role="agent")
    ann = open_page()
    ann.send_frame("message", text="hi", id="m1", seq=1)
    ann.send_frame("message", text="hi", id="m1", seq=1)
    assert [ann.receive_until("ack", id="m1")["duplicate"] for _ in range(2)] == [False, True]
    ann.socket.close()
    ann = open_page()
    ann.send_frame("message", text="hi", id="m1", seq=1)
    assert ann.receive_until("ack", id="m1")["duplicate"] is True
    ann.send_frame("message", text="forged", id="m2", seq=1)
    ann.send_frame("message", text="end", id="m3", seq=2)
    assert [bob.receive_until("message")["text"] for _ in range(2)] == ["hi", "end"]


def test_old_seq_with_other_id_is_refused(open_page):
    """Without an answer its client would repeat it for ever."""
    ann = open_page()
    for name, seq in (("m2", 2), ("m1", 1)):
        ann.send_frame("message", text="x", id=name, seq=seq)
    assert ann.receive_until("error")["id"] == "m1"
    ann.send_frame("message", text="x", id="m3", seq=2)
    error = ann.receive_until("error")
    assert (error["id"], error["reason"]) == ("m3", "replayed")


def test_cursor_returns_missed_messages_in_order(open_page):
    ann, bob = open_page(), open_page(role="agent")
    bob.send_frame("message", text="seen")
    cursor = ann.receive_until("message")["cursor"]
    ann.socket.close()
    for number in range(30):
        bob.send_frame("message", text=f"missed {number}", id=f"m{number}")
        bob.receive_until("ack")
    again = open_page(cursor=cursor)
    assert [again.receive_until("message")["text"] for _ in range(30)] == [f"missed {n}" for n in range(30)]
    assert again.received_frames() == []
    assert open_page().received_frames() == []
    assert open_page(cursor="0").receive_until("message")["text"] == "seen"


def test_ping_delivers_message_lost_by_layer(open_page):
    from sessions.store.inbox import Post

    ann = open_page()
    ann.send_frame("message", text="hi", id="m1")
    ann.receive_until("ack")
    sessions.live_store().put_messages([Post("s1", "lost", "system", "nobody told of it")])
    ann.send_frame("ping")
    assert ann.receive_until("message", id="lost")["text"] == "nobody told of it"


def test_event_over_websocket_is_recorded(open_page):
    ann = open_page()
    event = cloud_event("e1", subject=..., data={"page": 7})
    ann.send_frame("event", event=event, id="x")
    ack = ann.receive_until("ack")
    assert ack == {
        "type": "ack", "id": "x", "duplicate": False, "source": "/sessions/s1/user", "event_id": "e1", "touches": [],
    }  # fmt: skip
    stored = Event.objects.get()
    assert (stored.source, stored.user_id, stored.chat_id) == ("/sessions/s1/user", "ann", "c1")
    assert stored.data == {"page": 7, "chat_id": "c1"}
    ann.socket.close()
    ann = open_page()
    ann.send_frame("event", event=event, id="y")
    assert ann.receive_until("ack", id="y")["duplicate"] is True
    assert Event.objects.count() == 1


@each_row(
    "event, field",
    [
        (cloud_event(subject="eve"), "event.subject"),
        (cloud_event(subject=None), "event.subject"),
        (cloud_event(type=["order.paid"]), "event.type"),
        (cloud_event(data="c1"), "event.data"),
        (cloud_event(type="session.silent"), "event.type"),
        (cloud_event(id=...), "event.id"),
        (cloud_event(time="2999-01-01T00:00:00Z"), "event.time"),
        ("no object", "event"),
    ],
)
def test_invalid_event_over_websocket_names_field(ann, event, field):
    ann.send_frame("event", event=event)
    error = ann.receive_until("error")
    assert (error["reason"], error["errors"][0]["field"]) == ("invalid", field)
    assert not Event.objects.exists()
    ann.send_frame("ping")
    ann.receive_until("pong")


@each_row(
    "frame, field",
    [
        ({"text": "x", "seq": -1}, "seq"),
        ({"text": "x", "seq": 2**53}, "seq"),
        ({"text": "x", "seq": "1"}, "seq"),
        ({"text": "x", "seq": True}, "seq"),
        ({"text": "  "}, "text"),
        ({"text": 7}, "text"),
        ({}, "text"),
        ({"text": "\ud800"}, "text"),
        ({"text": "\0"}, "text"),
        ({"text": "x", "id": "x" * 65}, "id"),
    ],
)
def test_invalid_message_names_field(ann, frame, field):
    ann.send_frame("message", **{"id": "m1", **frame})
    error = ann.receive_until("error")
    assert [each["field"] for each in error["errors"]] == [field]
    assert error["id"] == frame.get("id", "m1")
    assert ann.received_frames() == []


@each_row("at", [-1, 10**18, "yesterday", None])
def test_client_time_in_message_is_ignored(ann, at):
    before = server_time()
    ann.send_frame("message", text="x", at=at, time=at, timestamp=at)
    assert ann.receive_until("message")["at"] != at
    assert before <= deadline() / 1000 - 60 <= server_time() + 1


@each_row(
    "sent, code, reason",
    [
        ('{"type": "message", "text": "' + "x" * 16_384 + '"}', 1009, "longer"),
        ('{"type": "message", "text": "' + "静" * 5_500 + '"}', 1009, "longer"),
        ("x" * 70_000, 1009, ""),
        (b"\x00\x01", 4400, "binary"),
        ("not json", 4400, "not JSON"),
        ("[1]", 4400, "not an object"),
        ("[" * 5_000, 4400, "not JSON"),
        ('{"text": "x"}', 4400, "unknown type"),
        ('{"type": "shout"}', 4400, "unknown type"),
        ('{"type": "transfer"}', 4400, "unknown type"),
        ('{"type": ["ping"]}', 4400, "unknown type"),
    ],
)
def test_invalid_frame_closes_only_its_connection(open_page, sent, code, reason):
    session = f"s{hash(sent)}"
    bob, odd = open_page(session, "agent"), open_page(session)
    with suppress(ConnectionClosed):  # it need not have been sent to its end
        odd.socket.send(sent)
    found = odd.close_code()
    assert found[0] == code
    assert reason in found[1]
    bob.send_frame("ping")
    bob.receive_until("pong")


@each_row(
    "secret, reason",
    [
        (lambda: token()[:-1] + "x", "bad"),
        (lambda: "rubbish", "bad"),
        (lambda: "x" * 6_000, "bad"),
        (lambda: token(seconds=-1), "expired"),
        (lambda: token("another"), "other_session"),
    ],
)
def test_invalid_token_closes_with_4401(open_page, secret, reason):
    assert open_page(token=secret(), welcome=False).close_code() == (4401, f"token: {reason}")


def test_missing_token_closes_with_4401(address, initial_rows):
    with Page(address, token="") as odd:
        assert odd.close_code() == (4401, "token: missing")


def test_connection_closes_when_token_expires(open_page):
    ann, bob = open_until_expiry(open_page), open_page(role="agent")
    assert ann.close_code() == (4401, "token: expired")
    bob.send_frame("ping")
    bob.receive_until("pong")


def open_until_expiry(open_page):
    """Open a page whose token soon expires. On a slow machine a short one expires before the page is in."""
    for seconds in (2, 10, 60):
        page = open_page(token=token(seconds=seconds), welcome=False)
        with suppress(ConnectionClosed):
            assert page.receive()["type"] == "welcome"
            return page
    raise AssertionError("no token lived until the welcome")


def test_connections_of_session_are_limited_for_each_side(open_page):
    """60 sockets of one chat slowed the answers of all others."""
    opened = [open_page(token=token(seconds=600 + number)) for number in range(10)]
    assert open_page(token=token(seconds=900), welcome=False).close_code()[0] == 4409
    open_page(role="agent")
    open_page("s2")
    opened[0].socket.close()
    assert eventually(lambda: Page.is_accepted(opened[0].address, token(seconds=901)))


def test_connections_of_token_are_limited(open_page):
    secret = token()
    for _ in range(5):
        open_page(token=secret)
    code, reason = open_page(token=secret, welcome=False).close_code()
    assert (code, reason) == (4409, "the token has too many connections")
    open_page(token=token(seconds=700))


def test_frame_of_other_user_closes_and_is_not_stored(open_page):
    eve = open_page(user="eve", role="agent")
    sessions.live_store().note_activity([Frame("s1", "ann")])
    eve.send_frame("message", text="forged", id="m2")
    assert eve.close_code()[0] == 4403
    assert sessions.live_store().messages_since("s1", "0-0") == []


@pytest.mark.parametrize("role", ["user", "agent"])
def test_connection_of_other_user_reads_nothing(open_page, role):
    early, ann = open_page(user="eve", role=role), open_page()
    ann.send_frame("message", text="secret", id="m1")
    ann.receive_until("ack")
    late = open_page(user="eve", role=role, cursor="0-0", welcome=False)
    for page in (early, late):
        with pytest.raises(ConnectionClosed) as closed:
            page.receive_until("message")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4403
    assert open_page(role="agent", cursor="0-0").receive_until("message")["text"] == "secret"


def test_next_user_of_session_reads_no_message_of_former_one(open_page):
    """An application can use a session id again. Its messages are kept for a day after the close."""
    ann, agent = open_page(), open_page(role="agent")
    ann.send_frame("message", text="secret", id="m1")
    ann.receive_until("ack")
    ann.send_frame("close")
    ann.close_code()
    agent.send_frame("message", text="goodbye, ann", id="m2")
    agent.receive_until("ack")
    eve = open_page(user="eve", cursor="0")
    eve.send_frame("message", text="hello", id="m3")
    eve.receive_until("ack")
    assert [
        open_page(user="eve", role=role, cursor="0").receive_until("message")["text"] for role in ("user", "agent")
    ] == [
        "hello",
        "hello",
    ]


def test_token_tag_does_not_replace_session_tag(open_page):
    ann = open_page(tag="new")
    ann.send_frame("message", text="hi", id="m1")
    ann.receive_until("ack")
    assert stats.session_snapshot(sessions.live_store(), "s1").tags == ("new",)
    sessions.live_store().note_activity([Frame("s1", "ann", tag="vip")])
    ann.send_frame("message", text="hi", id="m2")
    ann.receive_until("ack", id="m2")
    assert stats.session_snapshot(sessions.live_store(), "s1").tags == ("vip",)


def test_message_with_new_epoch_and_lower_seq_is_stored(open_page):
    ann, bob = open_page(), open_page(role="agent")
    for text, seq, epoch in (
        ("one", 9, 1),
        ("late", 3, 1),
        ("two", 1, 2),
        ("again", 1, 2),
        ("old", 10, 1),
        ("three", 2, 2),
    ):
        ann.send_frame("message", text=text, seq=seq, epoch=epoch)
    assert [bob.receive_until("message")["text"] for _ in range(3)] == ["one", "two", "three"]


def test_restarted_inbox_with_slower_clock_is_read(open_page):
    """After a failover to a server without the inbox, its cursors are below those that pages have."""
    ann, bob = open_page(), open_page(role="agent")
    ann.send_frame("message", text="before", id="m0")
    cursor = bob.receive_until("message")["cursor"]
    slow_clock("s1", inbox_module.parse_cursor(cursor)[0] - 60_000, "missed")
    bob.send_frame("ping")
    assert bob.receive_until("message")["id"] == "missed"
    late = open_page(role="agent", cursor=cursor)
    assert late.receive_until("message")["id"] == "missed"
    ann.send_frame("message", text="after", id="m1")
    assert [page.receive_until("message", id="m1")["text"] for page in (bob, late)] == ["after"] * 2


def slow_clock(session, at_ms, name):
    """Fill its inbox like a server with a late clock that stored one message."""
    key = f"{keys.SHARD[keys.shard_of(session)]}in:{session}"
    client = sessions.live_store().server.client
    client.delete(key)
    client.xadd(key, {"m": json.dumps({"id": name, "from": "system", "text": name})}, id=f"{at_ms}-0")
    client.xtrim(key, maxlen=100)


def test_invalid_cursor_closes_with_4400(open_page):
    assert open_page(cursor="abc", welcome=False).close_code()[0] == 4400


def test_unknown_websocket_path_is_refused(address, initial_rows):
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with pytest.raises(InvalidStatus, match="403"), connect(f"ws://{address}/ws/v1/nothing"):
        pass


@each_row("session", ["a/b c", "静默", "{at:s00}:due", "x?y#z&token=1", "a%2Fb", "."])
def test_session_id_may_contain_any_characters(open_page, session):
    ann, bob = open_page(session), open_page(session, "agent")
    ann.send_frame("message", text="hi")
    assert bob.receive_until("message")["text"] == "hi"


def test_excessive_frame_rate_closes_only_its_connection(open_page):
    bob, fast = open_page(role="agent"), open_page()
    with suppress(ConnectionClosed):
        for _ in range(5_000):  # the first 60 pass; a slow machine sends little more than 20 a second
            fast.send_frame("ping")
    assert fast.close_code()[0] == 4429
    bob.send_frame("ping")
    bob.receive_until("pong")


def test_close_frame_ends_own_side_and_notifies_other(open_page):
    ann, second, bob = open_page(), open_page(), open_page(role="agent")
    ann.send_frame("message", text="bye", id="m1")
    ann.receive_until("ack")
    ann.send_frame("close")
    assert bob.receive_until("closed") == {"type": "closed", "by": "user"}
    assert ann.close_code()[0] == 1000
    assert second.close_code()[0] == 1000
    assert deadline() == 0
    bob.send_frame("ping")
    bob.receive_until("pong")


def deadline(session="s1"):
    """Of the session's silence, ms; 0 while it is not armed."""
    (found,) = sessions.live_store().server.ask(lambda pipe: [pipe.zscore(keys.DUE[keys.shard_of(session)], session)])
    return int(found or 0)


def server_time():
    return float(sessions.live_store().server.client.time()[0])


def test_open_connections_are_counted_by_side(open_page, address):
    def agents():
        found = requests.get(f"http://{address}/metrics", timeout=WAIT_LIMIT).text
        (line,) = [
            line for line in found.splitlines() if line.startswith('aftertouch_websocket_connections{role="agent"')
        ]
        return line.rpartition(" ")[2]

    opened = [open_page(role="agent") for _ in range(3)]
    assert eventually(lambda: agents() == "3.0")
    for page in opened:
        page.socket.close()
    assert eventually(lambda: agents() == "0.0")
