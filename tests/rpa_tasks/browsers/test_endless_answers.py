"""A program in the place of a browser sends without end: each question to it has one limit for all it does."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest
from websockets.sync.client import ClientConnection

from rpa_tasks.browsers import devtools
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

    def do_GET(self) -> None:
        if self.path.startswith("/json/close"):
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
    server = ThreadingHTTPServer((devtools.HOST, 0), _Tabs)
    with serving_in_thread(server):
        began = time.monotonic()
        assert not devtools.reset_to_blank_page(server.server_address[1])
        assert time.monotonic() - began < LONG / 2
