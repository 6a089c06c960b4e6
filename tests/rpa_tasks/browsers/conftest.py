"""A pool of its own for each test, real Chromium in it, nothing left of it afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rpa_tasks.browsers import recycling
from rpa_tasks.browsers.chromium import NAMES
from rpa_tasks.browsers.pool import AcquiredBrowser, acquire_browser
from tests.rpa_tasks.browsers.browser_processes import (
    AcquiringProcess,
    eventually,
    extend_time_limits,
    list_pool_processes,
)


@pytest.fixture
def state(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty state directory. Short, as a UNIX socket's path must be; and on a disk, as a profile is."""
    folder = Path(tempfile.mkdtemp(prefix="pool-"))
    settings.AFTERTOUCH_STATE_DIR = folder
    settings.AFTERTOUCH_RPA_BROWSERS = 3
    extend_time_limits(monkeypatch)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pool(state: Path) -> Iterator[Path]:
    """Where browsers can be borrowed. Fails where a process of them is left over."""
    if not any(shutil.which(name) for name in NAMES):
        pytest.skip("missing service: chromium")
    yield state
    eventually(lambda: recycling.end_unused() == 0, "browsers are still in use")
    recycling.end_unrecorded()
    eventually(lambda: not list_pool_processes(state), "processes are left over")


@pytest.fixture
def acquire(pool: Path) -> Iterator[Callable[..., AcquiredBrowser]]:
    """Borrow in this process; what a test does not give back is given back."""
    lent: list[AcquiredBrowser] = []

    def acquire(profile: str = "s1", wait: float = 20, lease_no: int = 1) -> AcquiredBrowser:
        lent.append(acquire_browser(profile, f"shop/{profile}", wait=timedelta(seconds=wait), lease_no=lease_no))
        return lent[-1]

    yield acquire
    for borrowed in lent:
        borrowed.release()


@pytest.fixture
def start_acquiring_process(pool: Path) -> Iterator[Callable[..., AcquiringProcess]]:
    """Borrow in another process."""
    started: list[AcquiringProcess] = []

    def begin(*words: str, **environment: str) -> AcquiringProcess:
        started.append(AcquiringProcess(words, {**os.environ, "AFTERTOUCH_STATE_DIR": str(pool), **environment}))
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
    thread = Thread(target=site.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield site
    site.shutdown()
    thread.join()
    site.server_close()
