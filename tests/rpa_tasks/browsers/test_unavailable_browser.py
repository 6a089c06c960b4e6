"""No browser can be had, and why."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest_django import Settings

from rpa_tasks.browsers import chromium, registry
from rpa_tasks.browsers.browser_errors import BROWSER_FAILED, DISK_FULL, PROFILE_BUSY, NoBrowser
from rpa_tasks.browsers.pool import AcquiredBrowser
from tests.rpa_tasks.browsers.browser_processes import eventually, read_slot_states

Acquire = Callable[..., AcquiredBrowser]


def test_acquire_without_chromium_names_path(acquire: Acquire, settings: Settings) -> None:
    settings.RPA_CHROMIUM_PATH = "/nowhere/chromium"
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert refused.value.reason == BROWSER_FAILED
    assert "/nowhere/chromium" in refused.value.detail
    assert read_slot_states() == {}


def test_acquire_with_failing_chromium_shows_its_output(acquire: Acquire, settings: Settings, tmp_path: Path) -> None:
    settings.RPA_CHROMIUM_PATH = str(_script(tmp_path, "echo 'missing library' >&2; exit 127"))
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert refused.value.reason == BROWSER_FAILED
    assert "missing library" in refused.value.detail
    assert read_slot_states() == {}


def test_chromium_output_is_cleaned_for_storage(acquire: Acquire, settings: Settings, tmp_path: Path) -> None:
    """A log that was cut under a browser goes on behind a hole of NUL bytes, which PostgreSQL refuses as text."""
    settings.RPA_CHROMIUM_PATH = str(_script(tmp_path, r"printf 'no\000display\377' >&2; exit 1"))
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert "no\ufffddisplay\ufffd" in refused.value.detail


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


def test_acquire_on_too_busy_machine_times_out(
    acquire: Acquire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(chromium, "SPAWNER", tmp_path / "late.py")
    monkeypatch.setattr(chromium, "START_TIMEOUT", 0.5)
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert refused.value.reason == BROWSER_FAILED
    assert read_slot_states() == {}


def test_acquire_without_disk_space_is_refused(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chromium, "MIN_FREE_BYTES", 2**62)
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert refused.value.reason == DISK_FULL
    assert read_slot_states() == {}


def test_acquire_with_unwritable_record_is_refused(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(record: registry.Record) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(registry, "write_record", full)
    with pytest.raises(NoBrowser) as refused:
        acquire("s1")
    assert refused.value.reason == DISK_FULL
    monkeypatch.undo()
    assert not acquire("s1").warm


@pytest.mark.browser
def test_disk_full_at_release_replaces_one_browser(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(record: registry.Record) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = acquire("s1")
    monkeypatch.setattr(registry, "write_record", full)
    first.release()
    monkeypatch.undo()

    second = acquire("s1")
    assert not second.warm
    assert second.slot == first.slot


@pytest.mark.browser
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
    assert not acquire("s1").warm


def _script(folder: Path, body: str) -> Path:
    path = folder / "chromium"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path
