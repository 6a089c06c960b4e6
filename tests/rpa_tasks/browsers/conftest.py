"""A pool of its own for each test, real Chromium in it, nothing left of it afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from django.utils.timezone import now
from pytest_django import DjangoDbBlocker, Settings

from config.environment import ROOT, environment
from rpa_tasks.browsers import upkeep
from rpa_tasks.browsers.launch import LaunchSettings
from rpa_tasks.browsers.pool import AcquiredBrowser, acquire_browser
from rpa_tasks.models import ExecutionNode, Shop, TakeOver
from rpa_tasks.takeover import host as take_over_host
from rpa_tasks.takeover.host import TakeOverHost
from tests.rpa_tasks.browsers.browser_elsewhere import Elsewhere
from tests.rpa_tasks.browsers.browser_processes import (
    AcquiringProcess,
    extend_time_limits,
    list_pool_processes,
)
from tests.rpa_tasks.browsers.operator_page import OperatorPage, Platform
from tests.rpa_tasks.browsers.proxies import Echo, ProxyProcess
from tests.rpa_tasks.browsers.taking_over import Open, RunWithBrowser
from tests.rpa_tasks.core.conftest import Market
from tests.scheduling.api.serving import database_url
from tests.sessions.websocket.web_processes import web
from tests.support.chromium import find_chromium
from tests.support.thread_servers import serving_in_thread
from tests.support.waiting import WAIT_LIMIT, eventually


@pytest.fixture
def state(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty state directory. Short, as a UNIX socket's path must be; and on a disk, as a profile is."""
    folder = Path(tempfile.mkdtemp(prefix="pool-"))
    settings.AFTERTOUCH_STATE_DIR = folder
    settings.AFTERTOUCH_RPA_BROWSERS = 3
    extend_time_limits(monkeypatch)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pool(state: Path) -> Iterator[Path]:
    """A pool of browsers. Fails if a process of them is left over."""
    find_chromium()
    yield state
    # A take-over ends half a minute after its last operator has left.
    eventually(lambda: upkeep.end_unused() == 0, "browsers are still in use", within=WAIT_LIMIT)
    eventually(lambda: not list_pool_processes(state), "processes are left over")


@pytest.fixture
def acquire(pool: Path) -> Iterator[Callable[..., AcquiredBrowser]]:
    """Acquire in this process; all are released after the test."""
    lent: list[AcquiredBrowser] = []

    def acquire(profile: str = "s1", wait: float = WAIT_LIMIT, lease_no: int = 1, **more: Any) -> AcquiredBrowser:
        wanted = timedelta(seconds=wait)
        settings = {"launch": LaunchSettings(), "wait": wanted, "lease_no": lease_no} | more
        lent.append(acquire_browser(profile, f"shop/{profile}", **settings))
        return lent[-1]

    yield acquire
    for borrowed in lent:
        borrowed.release()


@pytest.fixture
def run(shop: Shop, acquire: Callable[..., AcquiredBrowser]) -> RunWithBrowser:
    market = Market()
    market.publish(task_type="act")
    pick = market.pick()
    assert pick is not None
    return RunWithBrowser(pick, acquire("pdd-s1", lease_no=pick.claim.lease_no))


@pytest.fixture
def start_acquiring_process(pool: Path) -> Iterator[Callable[..., AcquiringProcess]]:
    """Acquire in another process."""
    started: list[AcquiringProcess] = []

    def begin(*words: str, script: str = "acquiring_process.py", **environment: str) -> AcquiringProcess:
        environ = {**os.environ, "AFTERTOUCH_STATE_DIR": str(pool), **environment}
        started.append(AcquiringProcess(words, environ, script))
        return started[-1]

    yield begin
    for process in started:
        process.close()


class Site(ThreadingHTTPServer):
    """A shop's platform: `/login` hands out a lasting and a passing cookie; it remembers who came with which."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.visits: list[tuple[str, str]] = []  #: path, cookies

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Pages(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.visits.append((self.path, self.headers.get("Cookie", "")))
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        if self.path.startswith("/login"):
            self.send_header("Set-Cookie", "lasting=1; Max-Age=3600")
            self.send_header("Set-Cookie", "passing=1; HttpOnly")
        self.end_headers()
        self.wfile.write(f"<title>{self.path}</title><p>订单 {self.path}</p>".encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with serving_in_thread(site):
        yield site


@pytest.fixture
def elsewhere(tmp_path: Path, settings: Settings) -> Iterator[Elsewhere]:
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    browser = Elsewhere(tmp_path / "elsewhere")
    yield browser
    browser.process.kill()
    browser.process.wait()


@pytest.fixture(scope="module")
def addresses(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[list[str]]:
    """Two web processes."""
    with django_db_blocker.unblock(), web() as first, web() as second:
        yield [first, second]


@pytest.fixture
def shop(pool: Path, valkey: redis.Redis, transactional_db: None, settings: Settings) -> Shop:
    settings.AFTERTOUCH_NODE = "n1"
    ExecutionNode.objects.create(name="n1", seen_at=now() + timedelta(hours=1), started_at=now(), slots=3)
    market = Market()
    market.flow("act", needs_browser=True)
    return market.shop()


@pytest.fixture
def host(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Iterator[TakeOverHost]:
    """Host the take-overs of this process. An operator may come late: web processes start during a test."""
    for name in ("CONNECTED_WITHIN", "CONNECT_LIMIT"):
        monkeypatch.setattr(take_over_host, name, WAIT_LIMIT)
    host = TakeOverHost()
    host.start()
    yield host
    host.stop()


@pytest.fixture
def platform() -> Iterator[Platform]:
    platform = Platform()
    with serving_in_thread(platform):
        yield platform


@pytest.fixture
def open_page(addresses: list[str]) -> Iterator[Open]:
    opened: list[OperatorPage] = []

    def open_page(row: TakeOver, cookie: str, process: int = 0, **options: Any) -> OperatorPage:
        opened.append(OperatorPage(addresses[process], row.pk, cookie, **options))
        return opened[-1]

    yield open_page
    for each in opened:
        each.socket.close()


@pytest.fixture
def start_maintainer(pool: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start_maintainer() -> subprocess.Popen[bytes]:
        environ = {
            **os.environ, "AFTERTOUCH_STATE_DIR": str(pool), "DATABASE_URL": database_url(), "AFTERTOUCH_NODE": "n1",
            "REDIS_URL": environment().redis, "AFTERTOUCH_RPA_WARM_BROWSERS": "0", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        words = [sys.executable, "-m", "rpa_tasks.maintainer.main", "--parent", str(os.getpid())]
        started.append(subprocess.Popen(words, cwd=ROOT, env=environ, stdin=subprocess.PIPE))
        return started[-1]

    yield start_maintainer
    for process in started:
        assert process.stdin
        process.stdin.close()
        process.wait(WAIT_LIMIT)


@pytest.fixture
def echo(settings: Settings) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    settings.AFTERTOUCH_RPA_ECHO_URL = f"http://127.0.0.1:{server.server_address[1]}/"
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.0/8"]
    with serving_in_thread(server):
        yield settings.AFTERTOUCH_RPA_ECHO_URL


@pytest.fixture
def start_proxy() -> Iterator[Callable[..., ProxyProcess]]:
    started: list[ProxyProcess] = []

    def start(*words: str) -> ProxyProcess:
        started.append(ProxyProcess(*words))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        assert each.process.stdout
        each.process.stdout.close()
