"""Slow readers, and Redis outages."""

import asyncio
import socket
from urllib.parse import quote, urlsplit

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from config.environment import environment
from sessions.store.inbox import Post
from sessions.store.sessions import live_store
from sessions.websocket import hub
from tests.scheduling.api.serving import Gate
from tests.sessions.websocket.web_processes import Page, token, web
from tests.support.chat_hub import close_hub
from tests.support.waiting import WAIT_LIMIT, eventually

pytestmark = pytest.mark.django_db(transaction=True)


def slow_reader(address):
    """It takes a few KB and then nothing."""
    host, port = address.split(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(WAIT_LIMIT)
        raw.connect((host, int(port)))
        raw.settimeout(None)
        url = f"ws://{address}/ws/v1/sessions/s1?token={quote(token())}"
        return connect(url, sock=raw.dup(), open_timeout=WAIT_LIMIT, max_queue=1, compression=None)


def push(count, session="s1"):
    """Write so many long messages into a session, as fast as it goes."""

    async def tell():
        for number in range(count):
            post = Post(session, f"m{number}", "system", "x" * 15_000)
            (posted,) = live_store().put_messages([post])
            await hub.hub().notify(session, hub.message_notification(post, posted))
        await close_hub()

    from sessions.frames import Frame

    live_store().note_activity([Frame(session, "ann")])
    asyncio.run(tell())


def test_slow_reader_is_closed_without_effect_on_others(address, initial_rows):
    with slow_reader(address) as lazy, Page(address, "s2") as eve:
        push(700)
        with pytest.raises(ConnectionClosed) as closed:
            read_all(lazy)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4408
        eve.send_frame("ping")
        eve.receive_until("pong")


@pytest.fixture(scope="module")
def gated_web(django_db_setup, django_db_blocker):
    """A web process that ends connections soon and reaches Redis through a gate."""
    parts = urlsplit(environment().redis)
    gate = Gate(parts.port or 6379)
    url = environment().redis.replace(f":{parts.port}", f":{gate.port}")
    with django_db_blocker.unblock(), web(TEST_END_WITHIN="1", REDIS_URL=url) as address:
        yield address, gate
    gate.shut()


def test_reader_that_does_not_resume_is_cut_off(initial_rows, gated_web):
    with slow_reader(gated_web[0]) as lazy:
        push(700)
        # It reads nothing; that it was cut shows in its own writing.
        ending = eventually(lambda: fails(lambda: lazy.send('{"type":"ping"}')), pause=0.2)
        assert isinstance(ending, ConnectionClosed)


def read_all(socket):
    while True:
        socket.recv(WAIT_LIMIT)


def fails(act):
    try:
        act()
    except Exception as error:
        return error
    return None


def test_redis_outage_reports_errors_and_loses_no_message(initial_rows, gated_web):
    """Writers during the outage get an error. A repeated message is stored once, and missed ones come with a ping."""
    address, redis_gate = gated_web
    with Page(address) as ann, Page(address, role="agent") as bob:
        ann.receive_until("welcome")
        bob.receive_until("welcome")
        ann.send_frame("message", text="before", id="m0")
        bob.receive_until("message", id="m0")
        redis_gate.shut()
        ann.send_frame("message", text="hello?", id="m1")
        assert ann.receive_until("error", id="m1")["reason"] == "unavailable"
        ann.send_frame("ping")
        ann.receive_until("pong")
        redis_gate.open()
        eventually(lambda: is_acknowledged(ann), pause=0.2)  # a connection has a rate
        eventually(lambda: is_received_by_ping(bob, "m1"), pause=0.2)
        assert [entry.cursor for entry in live_store().messages_since("s1", "0-0")] == sorted(
            {entry.cursor for entry in live_store().messages_since("s1", "0-0")}
        )
        assert sum('"m1"' in entry.body for entry in live_store().messages_since("s1", "0-0")) == 1


def is_acknowledged(page):
    page.send_frame("message", text="hello?", id="m1")
    while True:
        frame = page.receive()
        if frame.get("id") == "m1" and frame["type"] in ("ack", "error"):
            return bool(frame["type"] == "ack")


def is_received_by_ping(page, name):
    return any(frame.get("id") == name for frame in page.received_frames())
