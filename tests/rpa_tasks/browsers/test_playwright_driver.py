"""A timed page and a picture; also as commands."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from config.environment import ROOT
from rpa_tasks.browsers import devtools, health, playwright_driver
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.browsers.registry import IDLE, Record
from tests.rpa_tasks.browsers.browser_processes import WAIT_LIMIT, kill, visit
from tests.rpa_tasks.browsers.conftest import Site

pytestmark = pytest.mark.browser
Acquire = Callable[..., AcquiredBrowser]


def check(port: int, profile: Path) -> dict[str, Any]:
    """As the maintainer does."""
    with health.run_examiner() as examiner:
        assert health._wait_for_examiner(examiner)
        return ask(examiner, port, profile)


def ask(examiner: subprocess.Popen[bytes], port: int, profile: Path) -> dict[str, Any]:
    record = Record(slot=1, state=IDLE, profile=profile.name, port=port)
    return health._ask_examiner(examiner, record)


def test_healthy_browser_passes_health_check(acquire: Acquire) -> None:
    borrowed = acquire("s1")
    began = time.monotonic()
    found = check(borrowed.port, borrowed.profile_dir)

    assert found["ok"], found
    assert 0 < found["seconds"] < time.monotonic() - began
    assert [page["url"] for page in devtools.list_tabs(borrowed.port)] == ["about:blank"]  # its tab is closed


def test_health_check_of_other_profile_fails(acquire: Acquire) -> None:
    borrowed = acquire("s1")
    found = check(borrowed.port, borrowed.profile_dir.with_name("s2"))

    assert not found["ok"]
    assert "another profile" in found["reason"]


def test_health_check_without_browser_fails(acquire: Acquire) -> None:
    borrowed = acquire("s1")
    kill(borrowed.pid)
    assert not check(borrowed.port, borrowed.profile_dir)["ok"]


def test_examiner_answers_no_dialog_of_a_browser_that_it_has_checked(acquire: Acquire) -> None:
    """A run may have acquired the browser since, and Playwright dismisses each dialog of a browser that it drives."""
    one, other = acquire("s1"), acquire("s2")
    with health.run_examiner() as examiner:
        assert health._wait_for_examiner(examiner)
        assert ask(examiner, one.port, one.profile_dir)["ok"]
        with open_confirmation(one.port) as answer_with_yes:
            assert ask(examiner, other.port, other.profile_dir)["ok"]  # time for the examiner
            assert answer_with_yes()


@contextmanager
def open_confirmation(port: int) -> Iterator[Callable[[], bool]]:
    """Let the page of the browser ask a question. Yield what answers it and returns the result in the page."""
    (page,) = devtools.list_tabs(port)
    with connect(page["webSocketDebuggerUrl"], proxy=None, max_size=None) as socket:

        def read_until(condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            while not condition(message := json.loads(socket.recv(timeout=WAIT_LIMIT))):
                pass
            return dict(message)

        def answer_with_yes() -> bool:
            socket.send(json.dumps({"id": 3, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}))
            return bool(read_until(lambda message: message.get("id") == 2)["result"]["result"]["value"])

        socket.send(json.dumps({"id": 1, "method": "Page.enable"}))
        expression = {"expression": "confirm('Ship the order?')"}
        socket.send(json.dumps({"id": 2, "method": "Runtime.evaluate", "params": expression}))
        read_until(lambda message: message.get("method") == "Page.javascriptDialogOpening")
        yield answer_with_yes


def test_snapshot_contains_page_of_the_run(acquire: Acquire, site: Site) -> None:
    borrowed = acquire("s1")
    visit(borrowed.port, f"{site.url}/orders", site)
    found = playwright_driver.take_snapshot(borrowed.port, timeout=WAIT_LIMIT)

    assert found.url == f"{site.url}/orders"
    assert found.title == "/orders"
    assert "订单" in found.html
    assert found.screenshot.startswith(b"\x89PNG")
    assert devtools.websocket_path(borrowed.port)  # looking does not end it


def test_snapshot_shows_latest_page(acquire: Acquire, site: Site) -> None:
    borrowed = acquire("s1")
    for number in range(4):
        visit(borrowed.port, f"{site.url}/page-{number}", site)
    assert playwright_driver.take_snapshot(borrowed.port, timeout=WAIT_LIMIT).title == "/page-3"


def test_snapshot_is_limited_to_one_megabyte(acquire: Acquire, site: Site) -> None:
    borrowed = acquire("s1")
    noise = (
        "<canvas id=c width=1366 height=900></canvas><script>const x=c.getContext('2d'),d=x.createImageData(1366,900);"
        "for(let i=0;i<d.data.length;i++)d.data[i]=i%4==3?255:Math.random()*256;x.putImageData(d,0,0);"
        "document.title='done';document.body.append('x'.repeat(2000000))</script>"
    )
    with playwright_driver._open_connection(borrowed.port, WAIT_LIMIT) as browser:
        page = browser.contexts[0].new_page()
        page.goto(f"{site.url}/orders")
        page.set_content(noise)
    result = _run("snapshot", "--port", str(borrowed.port), "--dir", str(borrowed.profile_dir / "shot"))

    assert result["title"] == "done"
    picture = (borrowed.profile_dir / "shot" / result["screenshot"]).read_bytes()
    assert picture.startswith(b"\xff\xd8")  # a JPEG, as the PNG was larger
    assert len(picture) <= playwright_driver.LIMIT
    assert (borrowed.profile_dir / "shot" / result["html"]).stat().st_size <= playwright_driver.LIMIT


def test_snapshot_command_without_browser_reports_error() -> None:
    assert "ECONNREFUSED" in _run("snapshot", "--port", "1", "--dir", "/nowhere", code=1)["error"]


def test_snapshot_of_hanging_page_times_out(acquire: Acquire, site: Site, tmp_path: Path) -> None:
    borrowed = acquire("s1")
    with playwright_driver._open_connection(borrowed.port, WAIT_LIMIT) as browser:
        page = browser.contexts[0].new_page()
        page.goto(f"{site.url}/orders")
        page.evaluate("setTimeout(() => { for (;;); }, 0)")
    ended = subprocess.run(
        [*COMMAND, "snapshot", "--port", str(borrowed.port), "--dir", str(tmp_path), "--timeout", "1"],
        cwd=ROOT,
        capture_output=True,
        timeout=3 * WAIT_LIMIT,
        check=False,
    )
    assert ended.returncode != 0
    borrowed.release(dirty=True)


COMMAND = [sys.executable, "-m", "rpa_tasks.browsers.playwright_driver"]


def _run(*words: str, code: int = 0) -> dict[str, Any]:
    ended = subprocess.run(
        [*COMMAND, *words, "--timeout", "60"], cwd=ROOT, capture_output=True, timeout=3 * WAIT_LIMIT, check=False
    )
    assert ended.returncode == code, ended.stderr
    return dict(json.loads(ended.stdout))
