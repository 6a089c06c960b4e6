"""The demo shop's site, as a browser asks it."""

import http.client
import json
import re
import signal
import subprocess
import sys
from urllib.parse import urlencode, urlsplit

import pytest

from config.environment import ROOT
from examples.demo_shop.site import COOKIE


class Visitor:
    """A browser without a screen."""

    def __init__(self, url):
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self.cookie = ""
        self.status = 0
        self.location = ""

    def ask(self, method, path, **fields):
        headers = {"Cookie": self.cookie, "Content-Type": "application/x-www-form-urlencoded"}
        self.connection.request(method, path, urlencode(fields) or None, headers)
        answer = self.connection.getresponse()
        self.status, self.location = answer.status, answer.getheader("Location", "")
        if cookie := answer.getheader("Set-Cookie"):
            self.cookie = cookie.partition(";")[0]
        return answer.read().decode()

    def get(self, path):
        return self.ask("GET", path)

    def log_in(self, shop="s1"):
        self.ask("POST", "/login", shop=shop)
        assert (self.status, self.location) == (303, "/orders")


@pytest.fixture
def visit(site):
    visitors = []

    def visit():
        visitors.append(Visitor(site.url))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.connection.close()


@pytest.fixture
def ann(visit):
    """Logged in to s1."""
    visitor = visit()
    visitor.log_in()
    return visitor


def order_nos(page):
    return re.findall(r'data-order="([^"]+)"', page)


def test_demo_shop_redirects_visitor_to_login(visit):
    stranger = visit()
    stranger.cookie = f"{COOKIE}=guessed"
    for method, path in (("GET", "/orders"), ("GET", "/messages"), ("POST", "/messages/reply"), ("GET", "/")):
        stranger.ask(method, path)
        assert (stranger.status, stranger.location) == (303, "/login")
    assert "<form" in stranger.get("/login")
    assert 'role="alert"' in stranger.ask("POST", "/login", shop="../x")
    assert stranger.status == 400


def test_demo_shop_switches_take_effect(ann, site):
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


def test_demo_shop_refuses_invalid_requests(ann, site):
    for method, path, status in (
        ("GET", "/switch?slow=nan", 400),
        ("GET", "/orders?page=inf", 400),
        ("POST", "/admin/ship?shop=%00", 400),
        ("GET", "/admin/ship?shop=s1", 404),
        ("POST", "/messages/reply", 400),
    ):
        ann.ask(method, path)
        assert ann.status == status, path
    assert set(site.effects()["replies"].values()) == {0}
    ann.get("/orders")  # and the connection is still of use
    assert ann.status == 200
    ann.ask("POST", "/messages/reply", text="x" * 70_000)
    assert ann.status == 413


def test_demo_shop_command_serves_until_signal():
    command = [sys.executable, "-m", "examples.demo_shop", "--port", "0", "--orders", "3"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            visitor = Visitor(process.stdout.readline().split()[-1])
            visitor.log_in()
            assert len(order_nos(visitor.get("/orders"))) == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            visitor.connection.close()
