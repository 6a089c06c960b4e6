"""What the pool's tests do to browsers and processes, and how they look at them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.environment import ROOT
from rpa_tasks.browsers import chromium, devtools, pool, registry, upkeep
from rpa_tasks.browsers.browser_processes import MARKER, read_command_line
from rpa_tasks.supervisor.processes import all_processes, read_environment, read_process
from tests.support.waiting import WAIT_LIMIT, eventually

if TYPE_CHECKING:  # also imported by processes that run no tests
    import pytest


BROWSER_LIMIT = 30.0  #: seconds; some tests wait until it is over
#: How long a browser may take before this process gives it up.
LIMITS = (
    (pool, "ALIVE_WITHIN"), (chromium, "START_TIMEOUT"), (devtools, "TIMEOUT"), (devtools, "CLOSE_TIMEOUT"),
    (pool, "ANSWER_WITHIN"), (pool, "CLOSE_TIMEOUT"), (upkeep, "PAGE_TIME_LIMIT"),
    (chromium, "PROOF_TIMEOUT"), (chromium, "DIRECT_TIMEOUT"),
    (chromium, "ATTACH_TIMEOUT"),
)  # fmt: skip


def extend_time_limits(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """A browser that only waits for a processor is none that hangs. Without `monkeypatch` until the process ends."""
    for module, name in LIMITS:
        (monkeypatch.setattr if monkeypatch else setattr)(module, name, BROWSER_LIMIT)


def suspend_browser(pid: int, monkeypatch: pytest.MonkeyPatch, *, limit: float = 1.0) -> None:
    """Stop the browser with SIGSTOP; its next user notices soon."""
    monkeypatch.setattr(pool, "ANSWER_WITHIN", limit)
    monkeypatch.setattr(pool, "ALIVE_WITHIN", limit)
    os.kill(pid, signal.SIGSTOP)


@contextmanager
def sleeping(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has these arguments and does nothing."""
    words = [sys.executable, "-c", "import time; time.sleep(600)", *arguments]
    with subprocess.Popen(words, env=env) as process:
        try:
            eventually(lambda: read_command_line(process.pid) == " ".join(words), "it does not start")
            yield process
        finally:
            process.kill()


class AcquiringProcess:
    """See acquiring_process.py."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
        )

    def read_reply(self) -> dict[str, Any]:
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], WAIT_LIMIT)[0], "the holder says nothing"
        return dict(json.loads(self.process.stdout.readline()))

    def request(self, word: str) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n".encode())
        return self.read_reply()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def list_pool_processes(state: Path) -> list[int]:
    """Processes that have anything to do with the browsers of this state directory."""
    return [
        process.pid
        for process in all_processes()
        if read_environment(process.pid).get(MARKER, "").startswith(str(state))
        or f"--user-data-dir={state}/" in read_command_line(process.pid)
    ]


def is_gone(pid: int) -> bool:
    process = read_process(pid)
    return process is None or process.gone


def kill(pid: int) -> None:
    """At once, and seen to be gone."""
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_gone(pid), f"{pid} does not die")


def visit(port: int, url: str, site: Any) -> str:
    """Open the page; returns the cookies that came with it. The browser has the answer by then, with the cookies in it:
    the site notes a visit before."""
    before = len(site.visits)
    opened = devtools.open_tab(port, url, timeout=WAIT_LIMIT)
    path = url.removeprefix(site.url)
    eventually(lambda: (opened, path) in _list_pages(port), f"no {url}")
    return next(cookies or "none" for visited, cookies in site.visits[before:] if visited == path)


def _list_pages(port: int) -> list[tuple[str, str]]:
    """Return id and title of each page; nothing while the browser is too busy to answer."""
    with suppress(devtools.NoAnswer):
        found = devtools.send_command(port, devtools.websocket_path(port), "Target.getTargets")["targetInfos"]
        return [(page["targetId"], page["title"]) for page in found]
    return []


def cookies(port: int) -> dict[str, str]:
    found = devtools.list_cookies(port, devtools.websocket_path(port))
    return {cookie["name"]: cookie["value"] for cookie in found}


def find_record(profile: str) -> registry.Record | None:
    found = registry.read_records().values()
    return next((record for record in found if record and record.profile == profile), None)


def read_slot_states() -> dict[str, str]:
    """By profile."""
    return {record.profile: record.state for record in registry.read_records().values() if record}
