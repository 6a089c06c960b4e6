"""A profile is a shop's login. It outlives browsers and is never seen by another shop."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpa_tasks.browsers import registry
from rpa_tasks.browsers.pool import AcquiredBrowser
from tests.rpa_tasks.pool.actors import cookies, kill, visit

pytestmark = pytest.mark.browser
Lend = Callable[..., AcquiredBrowser]


def test_a_login_survives_the_end_of_the_browser(lend: Lend, site: Any) -> None:
    first = lend("s1")
    assert visit(first.port, f"{site.url}/login", site) == "none"
    first.release(dirty=True)  # ended, as by an eviction

    second = lend("s1")
    assert not second.warm
    assert set(visit(second.port, f"{site.url}/orders", site).split("; ")) == {"lasting=1", "passing=1"}


def test_a_login_survives_any_number_of_browsers(lend: Lend, site: Any) -> None:
    borrowed = lend("s1")
    visit(borrowed.port, f"{site.url}/login", site)
    for _ in range(3):
        borrowed.release(dirty=True)
        borrowed = lend("s1")
    assert set(visit(borrowed.port, f"{site.url}/orders", site).split("; ")) == {"lasting=1", "passing=1"}


def test_another_shop_is_not_logged_in(lend: Lend, site: Any) -> None:
    one = lend("s1")
    visit(one.port, f"{site.url}/login", site)

    assert visit(lend("s2").port, f"{site.url}/orders", site) == "none"


def test_a_shop_that_takes_the_slot_is_not_logged_in(lend: Lend, site: Any, settings: Any) -> None:
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    one = lend("s1")
    visit(one.port, f"{site.url}/login", site)
    one.release()

    assert visit(lend("s2").port, f"{site.url}/orders", site) == "none"


def test_cookies_can_be_cleared(lend: Lend, site: Any) -> None:
    borrowed = lend("s1")
    visit(borrowed.port, f"{site.url}/login", site)
    assert cookies(borrowed.port) == {"lasting": "1", "passing": "1"}
    borrowed.clear_cookies()
    assert cookies(borrowed.port) == {}


def test_cleared_cookies_do_not_come_back_with_the_next_browser(lend: Lend, site: Any) -> None:
    borrowed = lend("s1")
    visit(borrowed.port, f"{site.url}/login", site)
    borrowed.release(dirty=True)
    borrowed = lend("s1")
    borrowed.clear_cookies()
    kill(borrowed.pid)  # no chance to say what it has
    borrowed.release()

    assert "passing" not in cookies(lend("s1").port)


def test_nobody_else_may_read_a_profile(lend: Lend, site: Any) -> None:
    borrowed = lend("s1")
    visit(borrowed.port, f"{site.url}/login", site)
    borrowed.release(dirty=True)

    kept = borrowed.profile_dir / ".session-cookies.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    for folder in (registry.profile_dir("s1"), registry.browsers_dir(), registry.browser_logs_dir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_no_secret_of_the_worker_reaches_the_browser(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://secret")
    monkeypatch.setenv("AFTERTOUCH_TASK_ID", "of-some-run")
    environ = Path(f"/proc/{lend('s1').pid}/environ").read_text()

    assert "AFTERTOUCH_BROWSER=" in environ
    assert "secret" not in environ
    assert "AFTERTOUCH_TASK_ID" not in environ
