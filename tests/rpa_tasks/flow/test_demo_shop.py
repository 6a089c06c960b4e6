"""The demo shop's site, as a browser asks it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from urllib.parse import urlencode, urlsplit

import pytest

from config.environment import ROOT
from examples.demo_shop.site import COOKIE
from tests.rpa_tasks.flow.conftest import Site


class Visitor:
    """A browser without a screen."""

    def __init__(self, url: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self.cookie = ""
        self.status = 0
        self.location = ""

    def ask(self, method: str, path: str, **fields: str) -> str:
        headers = {"Cookie": self.cookie, "Content-Type": "application/x-www-form-urlencoded"}
        self.connection.request(method, path, urlencode(fields) or None, headers)
        answer = self.connection.getresponse()
        self.status, self.location = answer.status, answer.getheader("Location", "")
        if cookie := answer.getheader("Set-Cookie"):
            self.cookie = cookie.partition(";")[0]
        return answer.read().decode()

    def get(self, path: str) -> str:
        return self.ask("GET", path)

    def log_in(self, shop: str = "s1") -> None:
        self.ask("POST", "/login", shop=shop)
        assert (self.status, self.location) == (303, "/orders")


@pytest.fixture
def visit(site: Site) -> Iterator[Callable[[], Visitor]]:
    visitors: list[Visitor] = []

    def visit() -> Visitor:
        visitors.append(Visitor(site.url))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.connection.close()


@pytest.fixture
def ann(visit: Callable[[], Visitor]) -> Visitor:
    """Logged in to s1."""
    visitor = visit()
    visitor.log_in()
    return visitor


def order_nos(page: str) -> list[str]:
    return re.findall(r'data-order="([^"]+)"', page)


def test_demo_shop_redirects_visitor_to_login(visit: Callable[[], Visitor]) -> None:
    stranger = visit()
    for method, path in (("GET", "/orders"), ("GET", "/messages"), ("POST", "/messages/reply"), ("GET", "/")):
        stranger.ask(method, path)
        assert (stranger.status, stranger.location) == (303, "/login")
    assert "<form" in stranger.get("/login")


@pytest.mark.parametrize("shop", ["", "../x", "<b>", "a" * 65, "店"])
def test_demo_shop_login_with_invalid_id_shows_error(visit: Callable[[], Visitor], shop: str) -> None:
    stranger = visit()
    assert 'role="alert"' in stranger.ask("POST", "/login", shop=shop)
    assert (stranger.status, stranger.cookie) == (400, "")


def test_demo_shop_lists_latest_orders_first_in_pages(ann: Visitor, site: Site) -> None:
    pages = [order_nos(ann.get(f"/orders?page={number}")) for number in (1, 2, 3)]
    assert [len(page) for page in pages] == [20, 20, 5]
    assert [number for page in pages for number in page] == [f"s1-{10000 + n}" for n in range(45, 0, -1)]
    assert order_nos(ann.get("/orders?page=99")) == pages[2]
    assert order_nos(ann.get("/orders?page=-1")) == pages[0]
    assert site.effects()["order_pages"] == 5
    assert site.effects()["position"] == 1045


def test_demo_shop_shipped_order_moves_to_top_with_new_version(ann: Visitor, site: Site) -> None:
    assert json.loads(site.ask("/admin/ship?shop=s1&order=s1-10002", post=True)) == {"shipped": ["s1-10002"]}
    page = ann.get("/orders")
    assert order_nos(page)[0] == "s1-10002"
    assert 'data-order="s1-10002" data-version="2" data-change="1046"\n        data-status="shipped"' in page
    assert json.loads(site.ask("/admin/ship?shop=s1&order=s1-10002", post=True)) == {"shipped": []}
    assert len(json.loads(site.ask("/admin/ship?shop=s1", post=True))["shipped"]) == 17


def test_demo_shop_accepts_reply_with_token_once(ann: Visitor, site: Site) -> None:
    assert ann.get("/messages").count('data-answered="0"') == 5
    reply = {"message": "s1-m2", "text": "On its way <b>", "token": "s1-m2"}
    ann.ask("POST", "/messages/reply", **reply)
    assert (ann.status, ann.location) == (303, "/messages")
    assert "Answered already" in ann.ask("POST", "/messages/reply", **reply)
    assert ann.status == 409
    assert "On its way &lt;b&gt;" in ann.get("/messages")
    effects = site.effects()
    assert effects["replies"] == {"s1-m1": 0, "s1-m2": 1, "s1-m3": 0, "s1-m4": 0, "s1-m5": 0}
    assert effects["refused_replies"]["s1-m2"] == 1


def test_demo_shop_accepts_reply_without_token_each_time(ann: Visitor, site: Site) -> None:
    for _ in range(2):
        ann.ask("POST", "/messages/reply", message="s1-m1", text="Hello")
    assert site.effects()["replies"]["s1-m1"] == 2


@pytest.mark.parametrize("fields", [{"message": "s2-m1", "text": "x"}, {"message": "s1-m1", "text": " "}, {}])
def test_demo_shop_refuses_reply_without_message_or_text(ann: Visitor, site: Site, fields: dict[str, str]) -> None:
    ann.ask("POST", "/messages/reply", **fields)
    assert ann.status == 400
    assert set(site.effects()["replies"].values()) == {0}


def test_demo_shop_separates_shops(ann: Visitor, visit: Callable[[], Visitor], site: Site) -> None:
    bob = visit()
    bob.log_in("s2")
    assert order_nos(bob.get("/orders"))[0].startswith("s2-")
    bob.ask("POST", "/messages/reply", message="s1-m1", text="x")
    assert bob.status == 400
    site.ask("/switch?expire_sessions=1&shop=s2")
    bob.get("/orders")
    ann.get("/orders")
    assert (bob.status, ann.status) == (303, 200)


def test_demo_shop_logout_ends_server_session(ann: Visitor) -> None:
    session = ann.cookie
    ann.ask("POST", "/logout")
    ann.cookie = session
    ann.get("/orders")
    assert (ann.status, ann.location) == (303, "/login")


def test_demo_shop_switches_take_effect(ann: Visitor, site: Site) -> None:
    assert json.loads(site.ask("/switch?captcha=1")) == {"captcha": True, "slow": 0.0, "sessions": 1}
    assert "Are you a robot?" in ann.get("/orders")
    assert ann.status == 429
    ann.ask("POST", "/login", shop="s1")
    assert ann.status == 429
    assert json.loads(site.ask("/switch?captcha=0&slow=0.01")) == {"captcha": False, "slow": 0.01, "sessions": 1}
    ann.get("/orders")
    assert ann.status == 200
    assert json.loads(site.ask("/switch?expire_sessions=1"))["sessions"] == 0
    ann.get("/orders")
    assert ann.status == 303
    assert site.effects()["turned_away"] == 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/switch?robots=1", 400),
        ("GET", "/switch?slow=fast", 400),
        ("GET", "/switch?slow=nan", 400),
        ("GET", "/orders?page=inf", 400),
        ("POST", "/admin/ship", 400),
        ("POST", "/admin/ship?shop=%00", 400),
        ("GET", "/admin/ship?shop=s1", 404),
        ("GET", "/nowhere", 404),
        ("GET", "/favicon.ico", 404),
    ],
)
def test_demo_shop_refuses_invalid_requests(ann: Visitor, method: str, path: str, status: int) -> None:
    ann.ask(method, path)
    assert ann.status == status
    ann.get("/orders")  # and the connection is still of use
    assert ann.status == 200


def test_demo_shop_refuses_too_long_form(ann: Visitor) -> None:
    ann.ask("POST", "/messages/reply", text="x" * 70_000)
    assert ann.status == 413


def test_demo_shop_admin_adds_entries(ann: Visitor, site: Site) -> None:
    assert json.loads(site.ask("/admin/order?shop=s1", post=True)) == {"order": "s1-10046"}
    assert json.loads(site.ask("/admin/message?shop=s1&text=%3Ci%3E", post=True)) == {"message": "s1-m6", "user": "u6"}
    assert order_nos(ann.get("/orders"))[0] == "s1-10046"
    assert "&lt;i&gt;" in ann.get("/messages")


def test_demo_shop_ignores_unreadable_cookie(visit: Callable[[], Visitor]) -> None:
    for cookie in ("=;;=", f"{COOKIE}=guessed", 'x="'):
        stranger = visit()
        stranger.cookie = cookie
        stranger.get("/orders")
        assert (stranger.status, stranger.location) == (303, "/login")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_demo_shop_command_serves_until_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "examples.demo_shop", "--port", "0", "--orders", "3"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            visitor = Visitor(process.stdout.readline().split()[-1])
            visitor.log_in()
            assert len(order_nos(visitor.get("/orders"))) == 3
            process.send_signal(number)
            assert process.wait(60) == 0
        finally:
            process.kill()
            visitor.connection.close()


def test_demo_shop_with_taken_port_names_it(site: Site) -> None:
    port = str(urlsplit(site.url).port)
    words = [sys.executable, "-m", "examples.demo_shop", "--port", port]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout) == (1, "")
    assert port in said.stderr
