"""A shop's browser starts with its own proxy, language, time zone, window, flags and extensions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.browser_processes import read_command_line
from rpa_tasks.browsers.chromium import find_extensions
from rpa_tasks.browsers.launch import PROXY_FAILED, LaunchSettings, NoBrowser
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.supervisor.processes import all_processes
from tests.rpa_tasks.browsers.browser_processes import find_record, is_gone, kill, read_slot_states
from tests.rpa_tasks.browsers.proxies import PASSWORD, SOURCE, USER, ProxyProcess
from tests.support.waiting import WAIT_LIMIT, eventually

Acquire = Callable[..., AcquiredBrowser]


def build_launch(proxy: ProxyProcess, **other: Any) -> LaunchSettings:
    return LaunchSettings(**{"proxy_url": proxy.url, "username": USER, "password": PASSWORD, **other})


def evaluate(port: int, url: str, expression: str) -> Any:
    """Open the page and return what the expression gives there."""
    tab = devtools.open_tab(port, url, timeout=WAIT_LIMIT)

    def ask(words: str) -> Any:
        answer = devtools.send_command(
            port, f"/devtools/page/{tab}", "Runtime.evaluate", timeout=WAIT_LIMIT,
            expression=words, returnByValue=True, awaitPromise=True,
        )  # fmt: skip
        return answer["result"].get("value")

    def is_loaded() -> bool:
        with suppress(devtools.NoAnswer):  # the tab changes its process on the way to the page
            return bool(ask("location.href + document.readyState") == f"{url}complete")
        return False

    eventually(is_loaded, f"no {url}")
    return ask(expression)


@pytest.mark.parametrize("kind", ["http", "socks5"])
def test_browser_uses_proxy_whose_password_shows_nowhere(
    acquire: Acquire, start_proxy: Any, echo: str, kind: str
) -> None:
    """It is in no command line, environment or file."""
    proxy = start_proxy(kind)
    browser = acquire("s1", launch=build_launch(proxy))

    assert evaluate(browser.port, echo, "document.body.innerText") == f"You are {SOURCE}"
    sizes = (
        "Promise.all([1, 2, 3].map(n => fetch('/', {method: 'POST', body: 'x'.repeat(n * 70000)}).then(r => r.text())))"
    )
    assert evaluate(browser.port, echo, sizes) == ["70000", "140000", "210000"]
    seen = b""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name not in (str(proxy.process.pid), str(os.getpid())):
            with suppress(OSError):
                seen += (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    for file in registry.browser_root().rglob("*"):
        with suppress(OSError):
            seen += file.read_bytes() if file.is_file() else b""
    assert b"forwarder.py" in seen
    assert [word for word in (USER, PASSWORD) if word.encode() in seen] == []
    assert set(proxy.read_targets()) == {echo.removeprefix("http://").strip("/")}


@pytest.mark.parametrize(("kind", "wrong"), [("http", {"password": "x"}), ("socks5", {"username": "", "password": ""})])
def test_refused_password_starts_no_run(
    acquire: Acquire, start_proxy: Any, echo: str, kind: str, wrong: dict[str, str]
) -> None:
    proxy = start_proxy(kind)
    with pytest.raises(NoBrowser) as refused:
        acquire("s1", launch=build_launch(proxy, **wrong))

    assert refused.value.reason == PROXY_FAILED
    assert wrong["password"] == "x" or PASSWORD not in str(refused.value)
    assert read_slot_states() == {}
    assert set(proxy.read_targets()) == {"refused"}


def test_proxy_that_is_not_used_or_gone_is_refused(acquire: Acquire, start_proxy: Any, echo: str) -> None:
    gone = start_proxy("http")
    gone.read_targets()
    unused = start_proxy("http", "127.0.0.1")
    for proxy, problem in ((gone, "The echo page"), (unused, "sees this node's address 127.0.0.1")):
        with pytest.raises(NoBrowser, match=problem) as refused:
            acquire("s1", launch=build_launch(proxy))
        assert refused.value.reason == PROXY_FAILED


def test_killed_forwarder_is_noticed_and_none_outlives_its_browser(
    acquire: Acquire, start_proxy: Any, echo: str
) -> None:
    launch = build_launch(start_proxy("socks5"))
    acquire("s1", launch=launch).release()
    (forwarder,) = _find_forwarders()
    kill(forwarder)

    second = acquire("s1", launch=launch)
    assert not second.warm
    assert evaluate(second.port, echo, "document.body.innerText") == f"You are {SOURCE}"
    (forwarder,) = _find_forwarders()
    kill(second.pid)
    eventually(lambda: is_gone(forwarder), "the forwarder outlives its browser")


def _find_forwarders() -> list[int]:
    record = find_record("s1")
    assert record
    session = [each.pid for each in all_processes() if each.session == record.pid]
    return [pid for pid in session if "forwarder.py" in read_command_line(pid)]


def test_browser_has_language_time_zone_window_and_flags(acquire: Acquire, echo: str) -> None:
    launch = LaunchSettings(
        language="pt-BR", timezone="America/Sao_Paulo", window="1111x777", flags=("--user-agent=Kiosk 7",)
    )
    browser = acquire("s1", launch=launch)
    found = evaluate(
        browser.port, echo,
        "[navigator.language, Intl.DateTimeFormat().resolvedOptions().timeZone, window.outerWidth, window.outerHeight,"
        " navigator.userAgent]",
    )  # fmt: skip
    assert found == ["pt-BR", "America/Sao_Paulo", 1111, 777, "Kiosk 7"]
    headers = "fetch('/').then(answer => answer.headers.get('X-Languages'))"
    assert evaluate(browser.port, echo, headers).startswith("pt-BR,pt")


@pytest.fixture
def extensions(tmp_path: Path, settings: Settings) -> Path:
    folder = tmp_path / "extensions"
    made = folder / "greeter"
    made.mkdir(parents=True)
    script = {"matches": ["<all_urls>"], "js": ["greet.js"], "run_at": "document_start"}
    manifest = {"manifest_version": 3, "name": "Greeter", "version": "1.0", "content_scripts": [script]}
    (made / "manifest.json").write_text(json.dumps(manifest))
    (made / "greet.js").write_text("document.documentElement.dataset.greeter = 'here'")
    settings.AFTERTOUCH_RPA_EXTENSIONS_DIR = str(folder)
    return folder


def test_browser_loads_the_named_extensions(acquire: Acquire, echo: str, extensions: Path) -> None:
    greeting = "document.documentElement.dataset.greeter || ''"
    browser = acquire("s1", launch=LaunchSettings(extensions=("greeter",)))
    assert evaluate(browser.port, echo, greeting) == "here"
    browser.release()
    plain = acquire("s1", launch=LaunchSettings())
    assert not plain.warm
    assert evaluate(plain.port, echo, greeting) == ""


def test_extension_that_the_node_lacks_is_refused(acquire: Acquire, extensions: Path, settings: Settings) -> None:
    (extensions / "empty").mkdir()
    (extensions / "link").symlink_to("/etc")
    for name, problem in {"missing": "has no folder", "empty": "has no manifest", "link": "has no folder"}.items():
        with pytest.raises(NoBrowser, match=f"“{name}”.*{problem}"):
            acquire("s1", launch=LaunchSettings(extensions=(name,)))
        assert read_slot_states() == {}
    for folder, problem in {"": "is not set", "relative": "absolute", "/a,b": "comma"}.items():
        settings.AFTERTOUCH_RPA_EXTENSIONS_DIR = folder
        assert find_extensions(()) == []
        with pytest.raises(NoBrowser, match=problem):
            find_extensions(("greeter",))
