"""Tabs that a person left for another one, in a real Chromium that wakes the timers of their pages once a minute.

Playwright keeps each page visible and its timers in time, so this Chromium is a process of its own.
"""

import json
import os
import signal
import subprocess
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from config.local.processes import wait_until
from rpa_tasks.browsers import devtools
from rpa_tasks.models import Platform, Shop, TakeOver
from rpa_tasks.takeover.wire import Sealer, to_node_channel
from scheduling.models import Event
from sessions.store import stats
from sessions.store.sessions import live_store
from tests.scheduling.api.serving import process
from tests.sessions.websocket.web_processes import web
from tests.support.chromium import find_chromium
from tests.support.waiting import WAIT_LIMIT

#: Chromium throttles in turns of a minute, which no test can shorten. That timers run in a worker, which it never
#: throttles, is the subject of tests/sessions/websocket/test_chat_page.py.
pytestmark = pytest.mark.campaign

#: Chromium starts to throttle a page that is hidden for 5 minutes; here for a second.
FLAGS = ["--enable-features=IntensiveWakeUpThrottling:grace_period_seconds/1", "--headless=new", "--no-first-run"]
THROTTLED = 35  #: seconds between two turns of a page's timer: longer than a page of this test may be silent
#: A timer of the page, which shows when Chromium runs one.
TURNS = """window.turns = [];
(function turn() { turns.push(Date.now()); setTimeout(turn, 500); })();"""
LONGEST_PAUSE = "Math.max(...turns.slice(1).map((at, before) => at - turns[before])) / 1000"


class Tabs:
    """The tabs of one window. The last one that was opened is shown."""

    def __init__(self, port):
        self._port = port

    def open(self, url="about:blank"):
        path = devtools.websocket_path(self._port)
        opened = devtools.send_command(self._port, path, "Target.createTarget", timeout=WAIT_LIMIT, url=url)
        return Tab(self._port, opened["targetId"])

    def log_in(self, url, user):
        client = Client()
        client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        cookie = {"name": "sessionid", "value": client.cookies["sessionid"].value, "url": url}
        devtools.send_command(self._port, devtools.websocket_path(self._port), "Storage.setCookies", cookies=[cookie])


class Tab:
    def __init__(self, port, name):
        self._port, self._path = port, f"/devtools/page/{name}"

    def evaluate(self, script):
        answer = devtools.send_command(
            self._port, self._path, "Runtime.evaluate", timeout=WAIT_LIMIT, expression=script, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script, seconds=WAIT_LIMIT):
        assert wait_until(lambda: self.evaluate(f"Boolean({script})"), seconds, pause=0.5), script


@pytest.fixture(scope="module")
def site_url(django_db_setup, django_db_blocker):
    with django_db_blocker.unblock(), web() as address, process("manage.py", "watch_sessions"):
        yield f"http://{address}"


@pytest.fixture
def tabs(tmp_path):
    command = [find_chromium(), *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={tmp_path}"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    running = subprocess.Popen([*command, "about:blank"], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        port = tmp_path / "DevToolsActivePort"
        assert wait_until(lambda: port.exists() and bool(port.read_text()), WAIT_LIMIT)
        yield Tabs(int(port.read_text().split()[0]))
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@pytest.fixture
def take_over(transactional_db):
    """A take-over of `ops`, whose node is this test."""
    user = User.objects.create_superuser("ops")
    shop = Shop.objects.create(platform=Platform.objects.create(key="pdd", name="PDD"), shop_id="s1", name="Flagship")
    return TakeOver.objects.create(
        shop=shop, user=user, username="ops", lease_no=1, node="n1", key=b"k" * 32,
        lease_until=now() + timedelta(hours=1),
    )  # fmt: skip


def test_pages_of_hidden_tabs_are_heard_in_time(tabs, site_url, take_over, valkey):
    """A chat with a threshold of 30 s, and a take-over, whose connection ends after 20 s of silence."""
    call_command("bootstrap", verbosity=0)
    chat = tabs.open(f"{site_url}/demo/chat/?tag=new")
    for side in ("user", "agent"):
        chat.wait_for(f"document.querySelector('#{side}[data-state=open]')")
    chat.evaluate("document.querySelector('#user input').value = 'Hello'")
    chat.evaluate("document.querySelector('#user form').requestSubmit()")
    chat.wait_for("document.querySelector('#standing[data-kind=armed]')")
    session = chat.evaluate("new URLSearchParams(location.search).get('session')")
    chat.evaluate("""window.states = [];
        new MutationObserver((all) => states.push(...all.map((each) => each.target.dataset.state)))
            .observe(document.querySelector(".sides"), { subtree: true, attributeFilter: ["data-state"] });""")

    tabs.log_in(site_url, take_over.user)
    with valkey.pubsub() as node:
        node.subscribe(to_node_channel(take_over.pk))
        operator = tabs.open(site_url + reverse("admin:rpa_tasks_shop_take_over", args=[take_over.shop.pk]))
        operator.wait_for("document.readyState === 'complete' && document.getElementById('take-over')")
        tabs.open()
        for tab in (chat, operator):
            tab.evaluate(TURNS)
            assert tab.evaluate("document.hidden")
        for tab in (chat, operator):
            tab.wait_for(f"{LONGEST_PAUSE} > {THROTTLED}", 3 * 60 + WAIT_LIMIT)
        assert chat.evaluate("states") == []
        assert not Event.objects.filter(type="session.silent").exists()
        assert stats.session_snapshot(live_store(), session).state == "armed"
        heard = read_actions(node, take_over)
    assert len({each["connection"] for each in heard}) == 1
    assert {each["do"] for each in heard} == {"hello", "ping"}


def read_actions(node, take_over):
    """Return what the page of the take-over has sent to the node until now."""
    sealer = Sealer(bytes(take_over.key or b""), to_node_channel(take_over.pk))
    found = []
    while message := node.get_message(timeout=1):
        if message["type"] == "message":
            found.append(json.loads(sealer.open(message["data"]) or b""))
    return found
