"""No browser can be had, and why."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest_django import Settings

from config.celery.application import refuse_snap
from rpa_tasks.browsers import chromium, registry
from rpa_tasks.browsers.browser_processes import processes_on_profile, unowned_processes
from rpa_tasks.browsers.launch import (
    BROWSER_FAILED,
    DISK_FULL,
    PROFILE_BUSY,
    LaunchSettings,
    NoBrowser,
    find_program,
)
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.checks import check_browser_program
from rpa_tasks.flow_sdk.flow import Misused, open_browser
from tests.rpa_tasks.browsers.browser_processes import read_slot_states
from tests.support.waiting import eventually

Acquire = Callable[..., AcquiredBrowser]


def test_acquire_without_chromium_names_path(acquire: Acquire, settings: Settings) -> None:
    settings.RPA_CHROMIUM_PATH = "/nowhere/chromium"
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert refused.value.reason == BROWSER_FAILED
    assert "/nowhere/chromium" in refused.value.detail
    assert read_slot_states() == {}


@pytest.mark.parametrize("kind", ["link", "script"])
def test_chromium_of_snap_is_refused_with_the_remedy(
    acquire: Acquire, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On Ubuntu /snap/bin/chromium is a link to `snap`, and /usr/bin/chromium-browser a script that starts it."""
    program, started = tmp_path / "chromium", tmp_path / "started"
    if kind == "link":
        (tmp_path / "snap").write_text(f"#!/bin/sh\n: > {started}\n")
        program.symlink_to(tmp_path / "snap")
    else:
        program.write_text(f'#!/bin/sh\n: > {started}\nexec /snap/bin/chromium "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    worker = SimpleNamespace(app=SimpleNamespace(amqp=SimpleNamespace(queues=SimpleNamespace(consume_from=["high"]))))

    settings.RPA_CHROMIUM_PATH = ""  # found on the PATH: other flows may need no browser
    refuse_snap("worker", worker, None)
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert refused.value.reason == BROWSER_FAILED
    assert f"{program} is a snap" in refused.value.detail
    assert "Install Google Chrome" in refused.value.detail
    assert [each.id for each in check_browser_program()] == ["rpa_tasks.W007"]

    settings.RPA_CHROMIUM_PATH = str(program)
    with pytest.raises(SystemExit, match=f"RPA_CHROMIUM_PATH: {program} is a snap"):
        refuse_snap("worker", worker, None)
    assert [each.id for each in check_browser_program()] == ["rpa_tasks.E003"]
    monkeypatch.setenv("RPA_CHROMIUM_PATH", str(program))
    with pytest.raises(Misused, match=f"RPA_CHROMIUM_PATH: {program} is a snap"), open_browser():
        pass
    assert not started.exists()


def test_chromium_beside_a_snap_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("chromium", "exec /snap/bin/chromium"), ("google-chrome", "exec /opt/google/chrome/chrome")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("") == str(tmp_path / "google-chrome")


def test_acquire_with_failing_chromium_shows_its_output(acquire: Acquire, settings: Settings, tmp_path: Path) -> None:
    """A log that was cut under a browser goes on behind a hole of NUL bytes, which PostgreSQL refuses as text."""
    settings.RPA_CHROMIUM_PATH = str(_script(tmp_path, r"printf 'no\000display\377' >&2; exit 1"))
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert refused.value.reason == BROWSER_FAILED
    assert "no\ufffddisplay\ufffd" in refused.value.detail
    assert read_slot_states() == {}


def test_chromium_without_answer_is_ended(
    acquire: Acquire, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended together with what it started."""
    settings.RPA_CHROMIUM_PATH = str(_script(tmp_path, "sleep 1000 & trap '' TERM; while :; do sleep 1; done"))
    monkeypatch.setattr(chromium, "START_TIMEOUT", 1.0)
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert refused.value.reason == BROWSER_FAILED
    assert read_slot_states() == {}


def test_browser_is_ended_if_no_thread_can_start(
    acquire: Acquire, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RPA_CHROMIUM_PATH = str(_script(tmp_path, "while :; do sleep 1; done"))

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(NoBrowser, match="can't start new thread") as refused:
            acquire("s1")
    assert refused.value.reason == BROWSER_FAILED
    assert read_slot_states() == {}
    assert list(processes_on_profile(str(registry.profile_dir("s1")))) == []


@pytest.mark.parametrize(
    "launch",
    [LaunchSettings(proxy_url="http://127.0.0.1:9"), LaunchSettings(cdp_url="http://127.0.0.1:9")],
    ids=["proxy", "elsewhere"],
)
def test_forwarder_that_fails_shows_its_output(
    acquire: Acquire, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: LaunchSettings
) -> None:
    """It ends before it reads its order."""
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1:9"]
    python = _script(tmp_path, "exec 0<&-; echo 'no memory' >&2; exit 1")
    started = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        started(thread)
        if thread.name == "browser":
            thread.join()

    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(threading.Thread, "start", start_late)
    with pytest.raises(NoBrowser, match="no memory") as refused:
        acquire("s1", launch=launch)
    assert refused.value.reason == BROWSER_FAILED
    assert read_slot_states() == {}


def fail_on_full_disk(record: registry.Record) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_acquire_on_full_disk_is_refused(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((chromium, "MIN_FREE_BYTES", 2**62), (registry, "write_record", fail_on_full_disk)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            with pytest.raises(NoBrowser) as refused:
                acquire("s1")
        assert (refused.value.reason, read_slot_states()) == (DISK_FULL, {}), name
    assert not acquire("s1").warm


def test_disk_full_at_release_replaces_one_browser(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    first = acquire("s1")
    with monkeypatch.context() as patch:
        patch.setattr(registry, "write_record", fail_on_full_disk)
        first.release()

    second = acquire("s1")
    assert not second.warm
    assert second.slot == first.slot


def test_profile_opened_by_a_person_is_refused(acquire: Acquire) -> None:
    """A person logs in by hand. The pool must not end that browser."""
    profile = registry.profile_dir("s1")
    words = [chromium.find_chromium(), *chromium._launch_flags(profile)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as own:
        try:
            eventually((profile / "SingletonLock").is_symlink, "it does not start")
            with pytest.raises(NoBrowser) as refused:
                acquire("s1")
            assert refused.value.reason == PROFILE_BUSY
            assert own.poll() is None
        finally:
            own.terminate()
    eventually(lambda: not unowned_processes(str(profile)), "its children do not end")
    assert not acquire("s1").warm


def _script(folder: Path, body: str) -> Path:
    path = folder / "chromium"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path
