"""Measure a take-over of a browser: time from a click to its picture, and processor time of one stream."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
from websockets.sync.client import ClientConnection, connect

from benchmarks.environment import Bench, processor_seconds, wait_until
from benchmarks.results import percentile
from benchmarks.scenarios.rpa import EXECUTION
from benchmarks.scenarios.sockets import WEB
from config.local.processes import select_port

GOAL_CLICK, GOAL_RATE = 300.0, 5.0
#: A click changes the colour of the whole page; `/moving` changes it in each frame.
STILL = (
    "<!doctype html><title>still</title><body style='margin:0;height:100vh;background:#fff'"
    " onclick=\"this.style.background = this.style.background == 'black' ? 'white' : 'black'\">"
)
MOVING = (
    "<!doctype html><title>moving</title><body style='margin:0;font:40px sans-serif'><script>let n = 0;"
    "(function draw() { document.body.textContent = '\u8ba2\u5355 '.repeat(300) + n++; requestAnimationFrame(draw) })()"
    "</script>"
)


def takeover(bench: Bench) -> None:
    port = select_port()
    with _serve_pages() as site, bench.core(), bench.running(*EXECUTION) as node, \
            bench.running(*WEB, "--port", str(port)) as web:  # fmt: skip
        row, cookie = _start_take_over()
        page = _Page(port, row.pk, cookie)
        page.wait(lambda: page.controls and page.shown)
        for _ in range(bench.repeat):
            _measure_clicks(bench, page, f"{site}/", bench.size(100, 30))
            _measure_stream(bench, page, f"{site}/moving", [node, web], bench.size(30, 10))
        page.socket.close()
        _end_take_over(row)


def _measure_clicks(bench: Bench, page: _Page, url: str, count: int) -> None:
    page.open(url, "still")
    took = []
    for _ in range(count):
        page.settle()
        seen, at = page.pictures, time.perf_counter()
        for kind in ("mousePressed", "mouseReleased"):
            page.send("mouse", type=kind, x=300, y=300, button="left", buttons=1, clicks=1, modifiers=0)
        page.wait(lambda seen=seen: page.pictures > seen)
        took.append((time.perf_counter() - at) * 1000)
    for share in (50, 99):
        bench.figures.add(
            "takeover", f"click → picture: p{share}", percentile(took, share), "ms",
            goal=GOAL_CLICK if share == 99 else None, note=f"{count} clicks on the loopback",
        )  # fmt: skip


def _measure_stream(bench: Bench, page: _Page, url: str, programs: list[psutil.Process], seconds: int) -> None:
    page.open(url, "moving")
    parts = {
        "node without browser": lambda: processor_seconds(programs[:1]),
        "browser": _read_browser_seconds, "web process": lambda: processor_seconds(programs[1:]),
        "Valkey": lambda: processor_seconds([bench.servers["Valkey"]]),
    }  # fmt: skip
    before = {name: read() for name, read in parts.items()}
    seen, size, at = page.pictures, page.received, time.perf_counter()
    page.wait(lambda: time.perf_counter() - at > seconds)
    took = time.perf_counter() - at
    rate = (page.pictures - seen) / took
    bench.figures.add("takeover", "pictures of a moving page", rate, "/s", goal=GOAL_RATE)
    bench.figures.add("takeover", "a picture", (page.received - size) / (page.pictures - seen) / 1024, "KB")
    for name, read in parts.items():
        bench.figures.add("takeover", f"processor time of a stream: {name}", (read() - before[name]) / took * 100, "%")


def _read_browser_seconds() -> float:
    """Browsers have left their worker's tree, so they are found by their command line."""
    total = 0.0
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        if any("/rpa/profiles/" in word for word in process.info["cmdline"] or ()) and process.info["cpu_times"]:
            total += sum(process.info["cpu_times"][:2])
    return total


def _start_take_over() -> tuple[Any, str]:
    """Start a take-over of a new shop by a new operator. Returns its row and the cookie of a login."""
    from django.conf import settings
    from django.contrib.auth.models import User
    from django.test import Client

    from rpa_tasks.models import ExecutionNode, Platform, Shop
    from rpa_tasks.takeover import leases

    platform, _ = Platform.objects.get_or_create(key="takeover")
    shop, _ = Shop.objects.get_or_create(platform=platform, shop_id="s1")
    user = User.objects.create_superuser("bench-operator")
    client = Client()
    client.force_login(user)
    wait_until(ExecutionNode.objects.exists, 60, "the report of the node")
    row = leases.start_take_over(shop.pk, user=user, address="127.0.0.1")
    return row, f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}"


def _end_take_over(row: Any) -> None:
    """End it and delete its row, which other scenarios do not expect."""
    from rpa_tasks.models import TakeOver
    from rpa_tasks.takeover import leases

    leases.request_end(row, leases.TakeOverEnd.ENDED)
    wait_until(lambda: not TakeOver.objects.filter(ended_at=None).exists(), 60, "the end of the take-over")
    TakeOver.objects.all().delete()


class _Page:
    """A page of the back office: acknowledges each picture."""

    def __init__(self, port: int, take_over: int, cookie: str) -> None:
        self.pictures = self.received = 0
        self.state: dict[str, Any] = {}
        self.connection = ""
        address = f"127.0.0.1:{port}"
        self.socket = self._connect(address, take_over, cookie)

    def _connect(self, address: str, take_over: int, cookie: str) -> ClientConnection:
        url, found = f"ws://{address}/ws/v1/take-overs/{take_over}", []

        def try_once() -> bool:
            try:
                found.append(connect(
                    url, origin=f"http://{address}", additional_headers={"Cookie": cookie}, compression=None,  # type: ignore[arg-type]
                    max_size=None,
                ))  # fmt: skip
            except OSError:
                return False
            return True

        wait_until(try_once, 60, "the web process")
        return found[0]

    @property
    def controls(self) -> bool:
        return bool(self.connection) and self.state.get("controller") == self.connection

    @property
    def shown(self) -> str:
        return str(self.state.get("shown", ""))

    def send(self, do: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"do": do, **fields}))

    def open(self, url: str, title: str) -> None:
        self.send("go", url=url)
        self.wait(lambda: any(tab["title"] == title for tab in self.state["tabs"]))

    def settle(self) -> None:
        """Wait until no picture has come for a while: the next one is of the next click."""
        until = time.perf_counter() + 0.4
        seen = self.pictures
        self.wait(lambda: time.perf_counter() > until)
        if self.pictures > seen:
            self.settle()

    def wait(self, condition: Callable[[], Any]) -> None:
        ends_at, pinged_at = time.monotonic() + 120, 0.0
        while not condition():
            assert time.monotonic() < ends_at, "the take-over does not answer"
            if time.monotonic() - pinged_at > 2:
                self.send("ping")
                pinged_at = time.monotonic()
            try:
                message = self.socket.recv(0.05)
            except TimeoutError:
                continue
            self._handle(message)

    def _handle(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self.pictures += 1
            self.received += len(message)
            self.send("ack", number=struct.unpack(">I", message[:4])[0])
            return
        notice = json.loads(message)
        if notice["type"] == "welcome":
            self.connection = notice["connection"]
        elif notice["type"] == "state":
            self.state = notice


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write((MOVING if self.path == "/moving" else STILL).encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _serve_pages() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
