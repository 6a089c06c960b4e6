"""A program in the place of a browser sends without end: each question to it has one limit for all it does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Event, Thread
from typing import Any, cast

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.server import ServerConnection, serve

from rpa_tasks.browsers import devtools
from rpa_tasks.browsers.registry import BUSY, Record
from rpa_tasks.models import TakeOver, TakeOverEnd
from rpa_tasks.takeover import host
from tests.support.thread_servers import serving_in_thread

SHORT = 0.5  #: seconds; limit of a question
LONG = 20.0  #: seconds until the program stops by itself, so that a failed test ends


class Events:
    """Stands for a `ClientConnection` in which one more event always waits. Then it returns it whatever the timeout."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + LONG

    def send(self, text: str) -> None:
        pass

    def recv(self, timeout: float) -> str:
        assert time.monotonic() < self._ends_at, "it reads on"
        return '{"method": "Target.targetCreated"}'


def test_command_among_endless_events_has_no_answer() -> None:
    with pytest.raises(devtools.NoAnswer):
        devtools.ask(cast("ClientConnection", Events()), "Browser.getVersion", timeout=SHORT)


class _Tabs(BaseHTTPRequestHandler):
    """Fifty tabs, whose closing is never answered."""

    closed: list[str]

    def do_GET(self) -> None:
        if self.path.startswith("/json/close"):
            self.closed.append(self.path)
            time.sleep(SHORT)
            return
        tabs: Any = [{"id": str(number), "type": "page", "url": "https://a.example/"} for number in range(50)]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(tabs if self.path == "/json/list" else tabs[0]).encode())

    do_PUT = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def test_many_tabs_that_do_not_close_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devtools, "CLOSE_TIMEOUT", SHORT)
    monkeypatch.setattr(_Tabs, "closed", [], raising=False)
    server = ThreadingHTTPServer((devtools.HOST, 0), _Tabs)
    with serving_in_thread(server):
        assert not devtools.reset_to_blank_page(server.server_address[1])
    assert 1 <= len(_Tabs.closed) < 50


HEAD = b"HTTP/1.1 200 OK\r\nX: "
BODY = b"HTTP/1.1 200 OK\r\n\r\n127.0.0.1 "


@pytest.fixture(params=[HEAD, BODY], ids=["in the head", "in the body"])
def trickling(request: pytest.FixtureRequest) -> Iterator[tuple[int, Event]]:
    """The port of a program that answers with one byte after the other, and whether it has ended by itself."""
    ended = Event()

    class Trickle(BaseRequestHandler):
        def handle(self) -> None:
            ends_at = time.monotonic() + LONG
            with suppress(OSError):
                self.request.sendall(request.param)
                while time.monotonic() < ends_at:
                    self.request.sendall(b" ")
                    time.sleep(SHORT / 10)
                ended.set()

    server = ThreadingTCPServer((devtools.HOST, 0), Trickle)
    with serving_in_thread(server):
        yield server.server_address[1], ended


def test_slow_answer_of_browser_has_one_limit(trickling: tuple[int, Event]) -> None:
    port, ended = trickling
    with pytest.raises(devtools.NoAnswer):
        devtools.websocket_path(port, timeout=SHORT)
    assert not ended.is_set()


@pytest.mark.usefixtures("state", "valkey")
def test_too_long_message_ends_a_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devtools, "LONGEST_ANSWER", 1_000)
    monkeypatch.setattr(host, "CONNECTED_WITHIN", LONG / 2)  # then it ends for want of an operator

    def send_long_event(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            connection.send(json.dumps({"method": "Page.unknown", "params": {"text": "x" * 1_000}}))
            for _ in connection:  # no command is answered
                pass

    row = TakeOver(pk=1, key=bytes(32))
    with serve(send_long_event, devtools.HOST, 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        browser = Record(slot=1, state=BUSY, profile="s1", port=server.socket.getsockname()[1], path="/", remote=True)
        relay = host.Relay(row, browser, lambda: None)
        assert asyncio.run(relay.relay()) == TakeOverEnd.BROWSER_LOST
