"""What pages download during a run goes into the run's directory, and with it. Browser, command and guard are real."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from django.db import connection

from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.jobs import wakeups
from rpa_tasks.jobs.publish import request_cancel
from rpa_tasks.models import Evidence, Job, Run
from rpa_tasks.worker import runner
from tests.rpa_tasks.browsers.browser_processes import read_slot_states
from tests.rpa_tasks.core.conftest import Market
from tests.rpa_tasks.core.test_runner import script
from tests.rpa_tasks.isolation.conftest import kind as kind  # a fixture
from tests.support.thread_servers import serving_in_thread
from tests.support.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)
CONTENT = "订单,金额\n1001,59.90\n"

PLAYWRIGHT = """
import os, pathlib
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    browser = playwright.chromium.connect_over_cdp(f"http://127.0.0.1:{param['debug_port']}")
    page = browser.contexts[0].new_page()
    page.goto(param["site"])
    with page.expect_download() as download:
        page.click("#report")
    kept = download.value.path()
    download.value.save_as("report.csv")
    found = {"below": kept.is_relative_to(os.getcwd()), "text": pathlib.Path("report.csv").read_text()}
    print(json.dumps({"result": found}), flush=True)
"""
#: A client that sets nothing up. It waits for the file %s, by the browser's own name.
PLAIN = """
import os, pathlib, urllib.request
from websockets.sync.client import connect
folder = pathlib.Path(os.environ["AFTERTOUCH_DOWNLOADS"])
before = {"folder": folder.relative_to(os.getcwd()).as_posix(), "before": sorted(os.listdir(folder))}
address = f"http://127.0.0.1:{param['debug_port']}/json/new?{param['site']}"
tab = json.load(urllib.request.urlopen(urllib.request.Request(address, method="PUT")))
with connect(tab["webSocketDebuggerUrl"], proxy=None) as page:
    while not (folder / "%(file)s").exists():
        words = "document.querySelector('%(link)s')?.click()" if not os.listdir(folder) else ""
        page.send(json.dumps({"id": 1, "method": "Runtime.evaluate", "params": {"expression": words}}))
        page.recv()
        time.sleep(0.5)
print(json.dumps({"result": before}), flush=True)
"""


class Reports(BaseHTTPRequestHandler):
    """A page with two downloads; the second has no end."""

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/":
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<a id=report href=/report>one</a> <a id=endless href=/endless>two</a>")
            return
        self.send_header("Content-Disposition", f"attachment; filename={self.path[1:]}.csv")
        self.end_headers()
        self.wfile.write(CONTENT.encode())
        while self.path == "/endless":
            time.sleep(0.05)
            self.wfile.write(b"x" * 10_000)  # raises an error when the browser has gone

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Reports)
    server.daemon_threads = True
    with serving_in_thread(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.fixture
def run(pool: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", lambda _: None)
    market = Market()
    market.shop()

    def run(text: str, **flow: Any) -> Run:
        number = Job.objects.count()
        market.flow(f"act{number}", command=script(text), needs_browser=True, param_style="flat", **flow)
        task = market.publish(task_type=f"act{number}", payload={"site": site}).task_id
        assert runner.run_startable_jobs(("high", "normal", "low")) == 1
        return Run.objects.get(job_id=task)

    return run


def list_files(state: Path) -> list[str]:
    """The files of runs and downloads that are left in the state directory."""
    runs = registry.runs_dir().glob("*/*")
    loads = [path for path in state.rglob("*") if path.name.startswith(("report", "endless"))]
    return [str(path) for path in (*runs, *loads)]


@pytest.mark.parametrize("kind", [isolation.BUBBLEWRAP], indirect=True)
def test_clicked_downloads_are_in_the_directory_of_their_run(kind: str, run: Callable[..., Run], pool: Path) -> None:
    """By Playwright, then by a client that sets nothing up, in the same browser."""
    first = run(PLAYWRIGHT)
    assert first.outcome == "succeeded", first.detail
    assert Job.objects.get(pk=first.job_id).result == {"below": True, "text": CONTENT}
    plain = run(PLAIN % {"file": "report.csv", "link": "#report"})
    assert (plain.outcome, plain.warm) == ("succeeded", True), plain.detail
    assert Job.objects.get(pk=plain.job_id).result == {"folder": "Downloads", "before": []}
    assert list_files(pool) == []
    assert read_slot_states() == {"pdd-s1": "idle"}


ENDLESS = PLAIN % {"file": "endless.csv.crdownload", "link": "#endless"}


def test_download_that_runs_at_the_end_is_stopped_with_its_browser(run: Callable[..., Run], pool: Path) -> None:
    ended = run(ENDLESS)
    assert ended.outcome == "succeeded", ended.detail
    assert read_slot_states() == {}
    eventually(lambda: list_files(pool) == [], "a part of the download is left")


def test_cancelled_run_leaves_no_part_of_a_download(run: Callable[..., Run], pool: Path) -> None:
    def cancel() -> None:
        try:
            eventually(lambda: list(pool.rglob("endless.csv.crdownload")), "no download begins")
            request_cancel(Job.objects.get().pk, by="ann")
        finally:
            connection.close()

    canceller = Thread(target=cancel)
    canceller.start()
    ended = run(f"{ENDLESS}time.sleep(600)")
    canceller.join()
    assert ended.outcome == "cancelled", ended.detail
    assert read_slot_states() == {}
    eventually(lambda: list_files(pool) == [], "a part of the download is left")


def test_page_that_goes_on_downloading_leaves_nothing(run: Callable[..., Run], pool: Path) -> None:
    """Also while the evidence of the failed run shows the page to another client."""
    busy = "?.click(); setInterval(() => document.querySelector('#report').click(), 50)"
    text = PLAIN.replace("?.click()", busy) % {"file": "report.csv", "link": "#report"}
    ended = run(f"{text}sys.exit(70)")
    assert (ended.outcome, ended.exit_code) == ("transient", 70), ended.detail
    assert {each.kind for each in Evidence.objects.all()} >= {"screenshot"}
    eventually(lambda: list_files(pool) == [], "a download is left")
