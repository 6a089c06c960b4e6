"""Slow readers, and Redis outages."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from pytest_django import DjangoDbBlocker
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from config.environment import environment
from sessions.store.inbox import Post
from sessions.store.sessions import live_store
from sessions.websocket import hub
from tests.scheduling.api.serving import Gate
from tests.sessions.websocket.web_processes import Page, token, web
from tests.support.chat_hub import close_hub
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def slow_reader(address: str) -> Any:
    """It takes a few KB and then nothing."""
    host, port = address.split(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(WAIT_LIMIT)
        raw.connect((host, int(port)))
        raw.settimeout(None)
        url = f"ws://{address}/ws/v1/sessions/s1?token={quote(token())}"
        return connect(url, sock=raw.dup(), open_timeout=WAIT_LIMIT, max_queue=1, compression=None)


def push(count: int, session: str = "s1") -> None:
    """Write so many long messages into a session, as fast as it goes."""

    async def tell() -> None:
        for number in range(count):
            post = Post(session, f"m{number}", "system", "x" * 15_000)
            (posted,) = live_store().put_messages([post])
            await hub.hub().notify(session, hub.message_notification(post, posted))
        await close_hub()

    from sessions.frames import Frame

    live_store().note_activity([Frame(session, "ann")])
    asyncio.run(tell())


def test_slow_reader_is_closed_without_effect_on_others(address: str, initial_rows: None) -> None:
    with slow_reader(address) as lazy, Page(address, "s2") as eve:
        push(700)
        with pytest.raises(ConnectionClosed) as closed:
            read_all(lazy)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4408
        eve.send_frame("ping")
        eve.receive_until("pong")


@pytest.fixture(scope="module")
def gated_web(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[tuple[str, Gate]]:
    """A web process that ends connections soon and reaches Redis through a gate."""
    parts = urlsplit(environment().redis)
    gate = Gate(parts.port or 6379)
    url = environment().redis.replace(f":{parts.port}", f":{gate.port}")
    with django_db_blocker.unblock(), web(TEST_END_WITHIN="1", REDIS_URL=url) as address:
        yield address, gate
    gate.shut()


def test_reader_that_does_not_resume_is_cut_off(initial_rows: None, gated_web: tuple[str, Gate]) -> None:
    with slow_reader(gated_web[0]) as lazy:
        push(700)
        # It reads nothing; that it was cut shows in its own writing.
        ending = eventually_within(WAIT_LIMIT, lambda: fails(lambda: lazy.send('{"type":"ping"}')))
        assert isinstance(ending, ConnectionClosed)


def read_all(socket: Any) -> None:
    while True:
        socket.recv(WAIT_LIMIT)


def eventually_within(seconds: float, condition: Any) -> Any:
    import time

    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError("it did not happen")


def fails(act: Any) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None


def test_redis_outage_reports_errors_and_loses_no_message(initial_rows: None, gated_web: tuple[str, Gate]) -> None:
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
        eventually_within(WAIT_LIMIT, lambda: is_acknowledged(ann))
        eventually_within(WAIT_LIMIT, lambda: is_received_by_ping(bob, "m1"))
        assert [entry.cursor for entry in live_store().messages_since("s1", "0-0")] == sorted(
            {entry.cursor for entry in live_store().messages_since("s1", "0-0")}
        )
        assert sum('"m1"' in entry.body for entry in live_store().messages_since("s1", "0-0")) == 1


def is_acknowledged(page: Page) -> bool:
    page.send_frame("message", text="hello?", id="m1")
    while True:
        frame = page.receive()
        if frame.get("id") == "m1" and frame["type"] in ("ack", "error"):
            return bool(frame["type"] == "ack")


def is_received_by_ping(page: Page, name: str) -> bool:
    return any(frame.get("id") == name for frame in page.received_frames())
