"""Whatever process is killed: the next run gets exactly one working browser."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from rpa_tasks.browsers import devtools, pool, registry, upkeep
from rpa_tasks.browsers.browser_processes import release_singleton
from rpa_tasks.browsers.launch import PROFILE_BUSY, NoBrowser
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.supervisor.processes import all_processes
from tests.rpa_tasks.browsers.browser_processes import (
    AcquiringProcess,
    cookies,
    find_record,
    is_gone,
    kill,
    list_pool_processes,
    read_slot_states,
    suspend_browser,
)
from tests.support.thread_servers import serving_in_thread
from tests.support.waiting import eventually

Acquire = Callable[..., AcquiredBrowser]
Begin = Callable[..., AcquiringProcess]


def test_browser_of_killed_holder_is_ended_by_next(acquire: Acquire, start_acquiring_process: Begin) -> None:
    victim = start_acquiring_process("s1", "60")
    left = victim.read_reply()
    victim.kill()
    assert not is_gone(left["pid"])  # it outlives its holder

    fresh = acquire("s1")

    assert not fresh.warm
    assert is_gone(left["pid"])
    assert fresh.slot == left["slot"]
    assert read_slot_states() == {"s1": "busy"}


def test_slot_of_killed_holder_serves_other_shop(
    acquire: Acquire, start_acquiring_process: Begin, settings: Settings
) -> None:
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    victim = start_acquiring_process("s1", "60", AFTERTOUCH_RPA_BROWSERS="1")
    left = victim.read_reply()
    victim.kill()

    assert acquire("s2").slot == 1
    assert is_gone(left["pid"])
    assert read_slot_states() == {"s2": "busy"}


def test_forked_child_leaves_browser_lock(acquire: Acquire) -> None:
    borrowed = acquire("s1")
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(into)
        os.read(out, 1)  # runs until the order
        os._exit(0)
    try:
        borrowed.release()
        assert acquire("s1").warm
    finally:
        os.write(into, b"x")
        os.waitpid(child, 0)
        os.close(into)
        os.close(out)


def test_browser_death_during_run_leaves_usable_profile(acquire: Acquire) -> None:
    first = acquire("s1")
    kill(first.pid)
    assert (registry.profile_dir("s1") / "SingletonLock").is_symlink()
    first.release()
    assert read_slot_states() == {}

    second = acquire("s1")
    assert devtools.websocket_path(second.port)
    assert cookies(second.port) == {}


def test_hanging_browser_is_killed(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    first = acquire("s1")
    first.release()
    suspend_browser(first.pid, monkeypatch)

    second = acquire("s1")
    assert not second.warm
    assert is_gone(first.pid)


def test_lock_of_lost_container_is_removed_and_of_live_browser_kept(acquire: Acquire) -> None:
    profile = registry.profile_dir("s1")
    (profile / "SingletonLock").symlink_to("a-container-that-is-gone-999999999")
    (profile / "SingletonSocket").symlink_to("/nonexistent/org.chromium.x/SingletonSocket")

    assert devtools.websocket_path(acquire("s1").port)
    release_singleton(profile)
    assert (profile / "SingletonLock").is_symlink()


class _Impostor(BaseHTTPRequestHandler):
    """Answers as a browser would."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"webSocketDebuggerUrl": "ws://127.0.0.1:1/devtools/browser/impostor"}')

    def log_message(self, *_: Any) -> None:
        pass


def test_other_process_on_recorded_port_is_not_used(acquire: Acquire) -> None:
    first = acquire("s1")
    first.release()
    record = find_record("s1")
    assert record is not None
    impostor = HTTPServer(("127.0.0.1", 0), _Impostor)
    with serving_in_thread(impostor):
        port = impostor.server_address[1]
        registry.write_record(replace(record, port=port))
        second = acquire("s1")
        assert not second.warm
        assert second.port != port
        assert is_gone(first.pid)
        assert devtools.websocket_path(port).endswith("impostor")


def test_other_process_with_recorded_pid_is_kept(acquire: Acquire) -> None:
    """The browser died and its pid was reused."""
    first = acquire("s1")
    first.release()
    record = find_record("s1")
    assert record is not None
    kill(first.pid)
    registry.write_record(replace(record, pid=os.getpid()))

    assert not acquire("s1").warm  # and this process still runs


def test_daemon_with_recorded_session_is_kept(state: Path) -> None:
    """Its parent led a session of the same number, and is gone, too."""
    script = "import os,sys\nif os.fork(): print(os.getpid(), flush=True); sys.exit()\nimport time; time.sleep(600)"
    leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    with leader:
        assert leader.stdout
        session = int(leader.stdout.readline())
        leader.wait()
    daemon = eventually(lambda: [each.pid for each in all_processes() if each.session == session], "no daemon")[0]
    try:
        record = registry.Record(slot=1, state="idle", profile="s1", pid=session, ticks=1)
        assert pool.end_browser(record, "test")
        assert not is_gone(daemon)
    finally:
        kill(daemon)


@pytest.mark.parametrize("content", [b"{", b'{"state": "idle", "surprise": 1}'])
def test_unreadable_record_replaces_one_browser(acquire: Acquire, content: bytes) -> None:
    first = acquire("s1")
    first.release()
    registry.slot_record(first.slot).write_bytes(content)

    second = acquire("s1")
    assert is_gone(first.pid)
    assert devtools.websocket_path(second.port)
    upkeep.end_unfit()
    assert registry.read_record(first.slot) is None or first.slot == second.slot


def test_unrecorded_browser_is_ended_before_profile_is_used(acquire: Acquire) -> None:
    first = acquire("s1")
    first.release()
    registry.delete_record(first.slot)

    second = acquire("s1")
    assert not second.warm
    assert is_gone(first.pid)


def test_killed_holder_during_start_leaves_usable_slot(
    acquire: Acquire, start_acquiring_process: Begin, pool: Path
) -> None:
    victim = start_acquiring_process("s1", "60")
    eventually(lambda: read_slot_states() == {"s1": "busy"}, "it does not start")
    victim.kill()

    second = acquire("s1")
    assert devtools.websocket_path(second.port)
    second.release(dirty=True)
    eventually(lambda: list_pool_processes(pool) == [], "something of the first start is left")


def test_unstoppable_browser_is_quarantined(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    first = acquire("s1")
    monkeypatch.setattr(pool, "end_browser", lambda record, why: False)
    first.release(dirty=True)
    record = find_record("s1")
    assert record is not None
    assert (record.state, record.reason) == ("quarantined", "dirty")

    with pytest.raises(NoBrowser) as refused:
        acquire("s1", wait=0.2)
    assert refused.value.reason == PROFILE_BUSY
    assert acquire("s2").slot != first.slot

    monkeypatch.undo()
    upkeep.end_unfit()
    assert is_gone(first.pid)
    assert acquire("s1").slot == first.slot
