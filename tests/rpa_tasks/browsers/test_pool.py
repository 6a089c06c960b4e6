"""A shop acquires its browser, releases it, and gets it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.launch import BROWSER_WAIT, PROFILE_BUSY, NoBrowser
from rpa_tasks.browsers.pool import AcquiredBrowser, Slot
from rpa_tasks.browsers.registry import IDLE, Lock, Record
from tests.rpa_tasks.browsers.browser_processes import AcquiringProcess, find_record, is_gone, read_slot_states, visit
from tests.rpa_tasks.browsers.conftest import Site
from tests.support.waiting import WAIT_LIMIT

Acquire = Callable[..., AcquiredBrowser]


def test_released_browser_is_warm_for_shop(acquire: Acquire) -> None:
    began = time.monotonic()
    first = acquire("s1", lease_no=7)
    assert timedelta(0) < first.waited <= timedelta(seconds=time.monotonic() - began)
    record = find_record("s1")
    assert record is not None
    assert (record.state, record.shop, record.lease_no, record.pid) == ("busy", "shop/s1", 7, first.pid)
    first.release()
    record = find_record("s1")
    assert record is not None
    assert (record.state, record.uses, record.lease_no) == ("idle", 1, 0)

    second = acquire("s1")
    assert (first.warm, second.warm) == (False, True)
    assert (first.pid, first.port) == (second.pid, second.port)
    first.release(dirty=True)  # once more: the browser has another holder
    assert read_slot_states() == {"s1": "busy"}
    assert devtools.websocket_path(second.port)


def test_exception_releases_browser_as_dirty(acquire: Acquire) -> None:
    with pytest.raises(RuntimeError), acquire("s1") as borrowed:
        raise RuntimeError
    assert is_gone(borrowed.pid)
    assert read_slot_states() == {}
    assert not acquire("s1").warm


def test_least_recently_used_browser_is_evicted(acquire: Acquire) -> None:
    pids = {}
    for shop in ("s1", "s2", "s3", "s1"):  # s2 is the one used longest ago
        borrowed = acquire(shop)
        pids[shop] = borrowed.pid
        borrowed.release()

    newcomer = acquire("s4")

    assert read_slot_states() == {"s1": "idle", "s3": "idle", "s4": "busy"}
    assert is_gone(pids["s2"])
    assert newcomer.slot == 2
    assert [acquire(shop).warm for shop in ("s1", "s3")] == [True, True]


def test_waiting_run_gets_released_slot(
    acquire: Acquire, start_acquiring_process: Callable[..., Any], settings: Settings
) -> None:
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    mine = acquire("s1")
    for profile, reason in (("s1", PROFILE_BUSY), ("s2", BROWSER_WAIT)):
        began = time.monotonic()
        with pytest.raises(NoBrowser) as refused:
            acquire(profile, wait=0.5)
        assert refused.value.reason == reason
        assert 0.5 <= time.monotonic() - began < WAIT_LIMIT
    assert devtools.websocket_path(mine.port)
    assert read_slot_states() == {"s1": "busy"}

    other: AcquiringProcess = start_acquiring_process("s2", "60", AFTERTOUCH_RPA_BROWSERS="1")
    mine.release()
    assert other.read_reply()["slot"] == 1
    assert read_slot_states() == {"s2": "busy"}
    assert is_gone(mine.pid)


def test_late_acquire_starts_no_browser(acquire: Acquire, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot becomes free at a moment when a start could not be over in time."""
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    holder = Lock(Path(settings.AFTERTOUCH_STATE_DIR) / "rpa" / "browsers" / "slot-1.lock")
    acquire("s1").release()
    assert holder.try_acquire()
    looks = []

    def late(_: float) -> None:
        looks.append(1)
        holder.release()

    monkeypatch.setattr("rpa_tasks.browsers.pool.time.sleep", late)
    with pytest.raises(NoBrowser) as refused:
        acquire("s2", wait=0.2)

    assert refused.value.reason == BROWSER_WAIT
    assert looks
    assert read_slot_states() == {"s1": "idle"}


def test_worn_browser_is_replaced(acquire: Acquire, settings: Settings) -> None:
    first = acquire("s1")
    first.release()
    second = acquire("s1")
    assert second.pid == first.pid
    settings.AFTERTOUCH_RPA_BROWSER_AGE = timedelta(0)
    second.release()

    assert is_gone(first.pid)
    assert acquire("s1").pid != first.pid


def test_pages_left_by_run_are_closed(acquire: Acquire, site: Site) -> None:
    borrowed = acquire("s1")
    visit(borrowed.port, f"{site.url}/orders", site)
    visit(borrowed.port, f"{site.url}/goods", site)
    assert len(devtools.list_tabs(borrowed.port)) == 3
    borrowed.release()

    again = acquire("s1")
    assert again.warm
    assert [page.url for page in devtools.list_tabs(again.port)] == ["about:blank"]


def test_slot_whose_record_cannot_be_read_is_not_locked(state: Path) -> None:
    registry.slot_record(1).mkdir()  # stands for an error of the disk
    with pytest.raises(IsADirectoryError):
        Slot(1).try_acquire()
    registry.slot_record(1).rmdir()
    again = Slot(1)
    assert again.try_acquire()
    again.release()


def test_removed_slot_is_not_used(acquire: Acquire, settings: Settings) -> None:
    for slot in (1, 2):
        registry.write_record(Record(slot=slot, state=IDLE, profile=f"s{slot}"))
    settings.AFTERTOUCH_RPA_BROWSERS = 1

    assert acquire("s3").slot == 1
    assert registry.read_record(2) is not None  # the maintainer's to end


def test_profile_dir_is_safe_and_unique_for_any_id(state: Path) -> None:
    for profile in ("店铺 1", "../escape", ".", "..", ".hidden", "a/b", "x" * 300):
        folder = registry.profile_dir(profile)
        assert folder.parent == state / "rpa" / "profiles"
        assert folder.is_dir()
        assert not folder.name.startswith(".")
        assert folder != registry.profile_dir(profile + "x")
    with pytest.raises(ValueError, match="needs an id"):
        registry.profile_dir("")
