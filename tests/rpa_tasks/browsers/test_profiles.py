"""A profile is a shop's login. It outlives browsers and is never seen by another shop."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest_django import Settings

from rpa_tasks.browsers import devtools, pool, registry
from rpa_tasks.browsers.launch import BROWSER_FAILED, LaunchSettings, NoBrowser
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.browsers.registry import Record
from tests.rpa_tasks.browsers.browser_processes import cookies, kill, read_slot_states, suspend_browser, visit
from tests.rpa_tasks.browsers.conftest import Site

Acquire = Callable[..., AcquiredBrowser]


def test_login_survives_several_browsers_in_private_files(acquire: Acquire, site: Site) -> None:
    borrowed = acquire("s1")
    assert visit(borrowed.port, f"{site.url}/login", site) == "none"
    for _ in range(2):
        borrowed.release(dirty=True)  # ended, as by an eviction
        borrowed = acquire("s1")
        assert not borrowed.warm
    assert set(visit(borrowed.port, f"{site.url}/orders", site).split("; ")) == {"lasting=1", "passing=1"}

    kept = registry.profile_dir("s1") / ".session-cookies.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    for folder in (registry.profile_dir("s1"), registry.browsers_dir(), registry.browser_logs_dir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_other_shop_in_same_slot_has_no_login_cookies(acquire: Acquire, site: Site, settings: Settings) -> None:
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    one = acquire("s1")
    visit(one.port, f"{site.url}/login", site)
    one.release()

    assert visit(acquire("s2").port, f"{site.url}/orders", site) == "none"


def test_cleared_cookies_are_not_restored(acquire: Acquire, site: Site) -> None:
    borrowed = acquire("s1")
    visit(borrowed.port, f"{site.url}/login", site)
    borrowed.release(dirty=True)
    borrowed = acquire("s1")
    assert cookies(borrowed.port) == {"lasting": "1", "passing": "1"}
    borrowed.clear_cookies()
    assert cookies(borrowed.port) == {}
    kill(borrowed.pid)  # no chance to write its state
    borrowed.release()

    assert "passing" not in cookies(acquire("s1").port)


def test_browser_that_restores_no_login_does_not_start(
    acquire: Acquire, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed = acquire("s1")
    visit(borrowed.port, f"{site.url}/login", site)
    borrowed.release(dirty=True)
    start = pool.start_browser

    def start_and_suspend(record: Record, launch: LaunchSettings) -> Record:
        running = start(record, launch)
        patch.setattr(devtools, "TIMEOUT", 1.0)
        suspend_browser(running.pid, patch)
        return running

    with monkeypatch.context() as patch:
        patch.setattr(pool, "start_browser", start_and_suspend)
        with pytest.raises(NoBrowser) as refused:
            acquire("s1")
    assert refused.value.reason == BROWSER_FAILED
    assert read_slot_states() == {}
    assert cookies(acquire("s1").port) == {"lasting": "1", "passing": "1"}


@pytest.mark.parametrize(
    "text",
    [
        "[",
        json.dumps([{"name": "n", "value": "v", "domain": "", "path": "/"}]),
        f'[{{"name": "n", "value": {"[" * 400}{"]" * 400}, "domain": "a.example", "path": "/"}}]',
    ],
    ids=["no JSON", "refused", "too deep for the browser"],
)
def test_bad_file_of_cookies_prevents_no_start(acquire: Acquire, text: str) -> None:
    """Programs of the shop can write it."""
    pool.session_cookies("s1").write_text(text)
    assert cookies(acquire("s1").port) == {}


def test_browser_environment_contains_no_worker_secret(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://secret")
    monkeypatch.setenv("AFTERTOUCH_TASK_ID", "of-some-run")
    environ = Path(f"/proc/{acquire('s1').pid}/environ").read_text()

    assert "AFTERTOUCH_BROWSER=" in environ
    assert "secret" not in environ
    assert "AFTERTOUCH_TASK_ID" not in environ
