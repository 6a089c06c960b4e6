"""An operator's page and a shop's platform, for tests of take-overs."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, sleep
from typing import Any
from urllib.parse import unquote

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.support.waiting import WAIT_LIMIT

#: The upper half is a button, the lower half a text field; the server notes what reaches them.
PAGE = """<!doctype html><meta charset="utf-8"><title>店铺后台</title>
<style>body { margin: 0; font: 28px sans-serif }
button, input { box-sizing: border-box; display: block; width: 100vw; height: 50vh; font: inherit }
button { background: #eef6ff; border: 0 } button.pressed { background: #0a7d38; color: #fff }</style>
<button onclick="this.className = 'pressed'; this.textContent = '已点击'; fetch('/clicked')">点我登录</button>
<input placeholder="用户名" oninput="fetch('/typed/' + encodeURIComponent(this.value))">"""

#: Its upper half asks a question, its lower half opens another tab.
ASKING = PAGE.replace("店铺后台", "验证").replace(
    "this.className = 'pressed'; this.textContent = '已点击'; fetch('/clicked')",
    "fetch('/answered/' + encodeURIComponent(prompt('验证码?')))",
).replace("<input", "<button onclick=\"window.open('/')\">新窗口</button><input")  # fmt: skip

#: Its upper half asks for files, and the server notes each; its lower half downloads a report.
FILES = """<!doctype html><meta charset="utf-8"><title>商品</title>
<style>body { margin: 0; font: 28px sans-serif } * { box-sizing: border-box }
button, a { display: block; width: 100vw; height: 50vh; font: inherit; background: #eef6ff; border: 0 }</style>
<input type="file" multiple hidden>
<button onclick="document.querySelector('input').click()">上传图片</button><a href="/report.csv">导出订单</a>
<script>document.querySelector("input").onchange = async (event) => {
    for (const file of event.target.files) {
        const bytes = new Uint8Array(await file.arrayBuffer());
        const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
        const text = [...hash].map((each) => each.toString(16).padStart(2, "0")).join("");
        await fetch(`/uploaded/${encodeURIComponent(file.name)}/${bytes.length}/${text}`);
    }
}</script>"""
REPORT = "订单,金额\n1001,59.90\n" * 10_000  #: several parts of a download


class Platform(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.noted: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Pages(BaseHTTPRequestHandler):
    server: Platform

    def do_GET(self) -> None:
        self.server.noted.append(unquote(self.path))
        pages = {"/": PAGE, "/asking": ASKING, "/files": FILES, "/report.csv": REPORT}
        text = pages.get(self.path, "").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        if self.path == "/report.csv":
            self.send_header("Content-Disposition", "attachment; filename*=UTF-8''%E8%AE%A2%E5%8D%95.csv")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def create_operator(name: str, *permissions: str) -> tuple[User, str]:
    """A member of staff with these permissions, and the cookie of a login."""
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions or ("take_over_shop",)))
    client = Client()
    client.force_login(user)
    return user, f"sessionid={client.cookies['sessionid'].value}"


class OperatorPage:
    """Acknowledges pictures and remembers the last state."""

    def __init__(self, address: str, take_over: int, cookie: str, *, origin: str = "", slow: bool = False) -> None:
        self.state: dict[str, Any] = {}
        self.notices: list[dict[str, Any]] = []  #: about files
        self.connection, self.pictures, self.slow = "", 0, slow
        self.size = (0, 0)
        self.socket = connect(
            f"ws://{address}/ws/v1/take-overs/{take_over}", origin=origin or f"http://{address}",  # type: ignore[arg-type]
            additional_headers={"Cookie": cookie}, open_timeout=WAIT_LIMIT, compression=None, max_size=None,
        ).__enter__()  # fmt: skip
        threading.Thread(target=self._ping, daemon=True).start()

    def _ping(self) -> None:
        """As pages do, also while the test waits for something else: one that is silent for 20 s is closed."""
        with suppress(ConnectionClosed):
            while True:
                self.send("ping")
                sleep(2)

    @property
    def controls(self) -> bool:
        return bool(self.connection) and self.state.get("controller") == self.connection

    def send(self, do: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"do": do, **fields}))

    def click(self, x: float, y: float) -> None:
        for type in ("mousePressed", "mouseReleased"):
            self.send("mouse", type=type, x=x, y=y, button="left", buttons=1, clicks=1, modifiers=0)

    def wait(self, condition: Callable[[], Any], otherwise: str) -> None:
        """Read messages until it is true."""
        ends_at = monotonic() + WAIT_LIMIT
        while not condition():
            assert monotonic() < ends_at, otherwise
            try:
                self._handle(self.socket.recv(0.1))
            except TimeoutError:
                continue

    def _handle(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            number, *self.size = struct.unpack(">IHH", message[:8])
            assert message[8:11] == b"\xff\xd8\xff", "no JPEG"
            self.pictures += 1
            if not self.slow:
                self.send("ack", number=number)
            return
        notice = json.loads(message)
        if notice["type"] == "welcome":
            self.connection = notice["connection"]
        elif notice["type"] == "state":
            self.state = notice
        else:
            self.notices.append(notice)

    def wait_for_close(self) -> int:
        with pytest.raises(ConnectionClosed) as closed:
            self.wait(lambda: False, "it is not closed")
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code
