"""A shop uses a browser that runs elsewhere: a second real Chromium, which the pool does not own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings
from websockets.sync.client import connect

from rpa_tasks.browsers import devtools, registry, upkeep
from rpa_tasks.browsers.launch import BROWSER_FAILED, LaunchSettings, NoBrowser
from rpa_tasks.browsers.pool import AcquiredBrowser
from tests.rpa_tasks.browsers.browser_elsewhere import Elsewhere
from tests.rpa_tasks.browsers.browser_processes import find_record, is_gone, kill, read_slot_states, visit
from tests.rpa_tasks.browsers.conftest import Site
from tests.support.waiting import WAIT_LIMIT

Acquire = Callable[..., AcquiredBrowser]


def test_run_uses_browser_elsewhere_and_leaves_it_running(
    acquire: Acquire, elsewhere: Elsewhere, site: Site, pool: Path
) -> None:
    first = acquire("s1", launch=elsewhere.launch)
    visit(first.port, f"{site.url}/orders", site)
    assert f"{site.url}/orders" in elsewhere.list_pages()
    first.release()
    assert elsewhere.list_pages() == ["about:blank"]

    second = acquire("s1", launch=elsewhere.launch)
    assert (second.port, second.warm) == (first.port, True)
    second.release()
    upkeep.end_unused()
    assert read_slot_states() == {}
    assert is_gone(first.pid)
    assert elsewhere.process.poll() is None

    third = acquire("s1", launch=elsewhere.launch)
    visit(third.port, f"{site.url}/orders", site)
    third.release(dirty=True)
    assert elsewhere.list_pages() == ["about:blank"]
    assert read_slot_states() == {}


def test_former_node_of_a_shop_closes_no_page_of_its_run(
    acquire: Acquire, elsewhere: Elsewhere, site: Site, settings: Settings, pool: Path, tmp_path: Path
) -> None:
    """The shop has moved. Its former node still has a forwarder and ends it at any time."""
    acquire("s1", launch=elsewhere.launch).release()
    settings.AFTERTOUCH_STATE_DIR = tmp_path / "n2"
    run = acquire("s1", launch=elsewhere.launch)
    visit(run.port, f"{site.url}/orders", site)
    settings.AFTERTOUCH_STATE_DIR = pool
    upkeep.end_unused()
    assert read_slot_states() == {}
    assert f"{site.url}/orders" in elsewhere.list_pages()

    settings.AFTERTOUCH_STATE_DIR = tmp_path / "n2"
    run.release()
    upkeep.end_unused()
    assert elsewhere.list_pages() == ["about:blank"]
    settings.AFTERTOUCH_STATE_DIR = pool


def test_lost_forwarder_or_browser_elsewhere_is_not_used(
    acquire: Acquire, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    first = acquire("s1", launch=elsewhere.launch)
    first.release()
    kill(first.pid)
    second = acquire("s1", launch=elsewhere.launch)
    assert not second.warm
    assert devtools.websocket_path(second.port) == devtools.websocket_path(elsewhere.port)
    second.release()

    elsewhere.process.kill()
    elsewhere.process.wait()
    with pytest.raises(NoBrowser) as refused:
        acquire("s1", launch=elsewhere.launch)
    assert refused.value.reason == BROWSER_FAILED
    assert read_slot_states() == {}

    again = Elsewhere(tmp_path / "elsewhere", elsewhere.port)
    try:
        assert not acquire("s1", launch=elsewhere.launch).warm
    finally:
        again.process.kill()
        again.process.wait()


@contextmanager
def open_confirmation(port: int) -> Iterator[Callable[[], bool]]:
    """Let the page of the browser ask a question. Yield what answers it and returns the result in the page."""
    (page,) = devtools.list_tabs(port)
    with connect(f"ws://{devtools.HOST}:{port}/devtools/page/{page.id}", proxy=None, max_size=None) as socket:

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


def test_health_check_touches_no_page_elsewhere_and_finds_its_end(acquire: Acquire, elsewhere: Elsewhere) -> None:
    """A run of the shop may use the browser through another node."""
    acquire("s1", launch=elsewhere.launch).release()
    with open_confirmation(elsewhere.port) as answer_with_yes:
        upkeep.check_idle()
        assert answer_with_yes()
    record = find_record("s1")
    assert record
    assert (record.state, record.checked_at > 0) == ("idle", True)

    registry.write_record(replace(record, checked_at=0))
    elsewhere.process.kill()
    elsewhere.process.wait()
    upkeep.check_idle()
    assert read_slot_states() == {}


def test_health_check_answers_no_question_of_a_page(acquire: Acquire) -> None:
    acquired = acquire("s1")
    acquired.release()
    with open_confirmation(acquired.port) as answer_with_yes:
        upkeep.check_idle()
        assert answer_with_yes()
    assert read_slot_states() == {"s1": "idle"}


def test_browser_at_private_address_needs_permission(acquire: Acquire, settings: Settings) -> None:
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = []
    with pytest.raises(NoBrowser, match="AFTERTOUCH_ALLOWED_PRIVATE_HOSTS"):
        acquire("s1", launch=LaunchSettings(cdp_url="http://127.0.0.1:9"))
