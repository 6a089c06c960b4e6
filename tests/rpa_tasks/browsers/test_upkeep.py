"""The maintainer's steps with unused browsers."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pytest_django import Settings

from rpa_tasks.browsers import devtools, registry, upkeep
from rpa_tasks.browsers import pool as browser_pool
from rpa_tasks.browsers.browser_processes import read_command_line
from rpa_tasks.browsers.launch import LaunchSettings
from rpa_tasks.browsers.pool import AcquiredBrowser, Slot
from rpa_tasks.browsers.registry import IDLE, Record
from rpa_tasks.supervisor.processes import all_processes
from tests.rpa_tasks.browsers.browser_processes import (
    find_record,
    is_gone,
    kill,
    read_slot_states,
)
from tests.support.waiting import eventually

Acquire = Callable[..., AcquiredBrowser]


def test_end_unfit_ends_only_idle_browsers(acquire: Acquire, settings: Settings) -> None:
    idle, busy = acquire("s1"), acquire("s2")
    idle.release()
    upkeep.end_unfit()
    assert read_slot_states() == {"s1": "idle", "s2": "busy"}

    settings.AFTERTOUCH_RPA_BROWSER_MEMORY_MB = 1
    upkeep.end_unfit()
    assert read_slot_states() == {"s2": "busy"}
    assert not is_gone(busy.pid)


def record_idle(**minutes: float) -> None:
    """Record idle browsers, whose processes are gone, with the minutes since their last use. `s1` is in slot 1."""
    for profile, ago in minutes.items():
        last_used_at = time.time() - ago * 60
        slot = int(profile.removeprefix("s"))
        registry.write_record(Record(slot=slot, state=IDLE, profile=profile, last_used_at=last_used_at))


def test_end_surplus_keeps_recent_and_warm_browsers(state: Path, settings: Settings) -> None:
    settings.AFTERTOUCH_RPA_WARM_BROWSERS = 1
    record_idle(s1=2, s2=1, s3=3)
    upkeep.end_surplus()
    assert set(read_slot_states()) == {"s1", "s2", "s3"}

    record_idle(s1=11, s2=5, s3=60)
    upkeep.end_surplus()
    assert set(read_slot_states()) == {"s2"}  # s1 and s3 are beyond the one that stays, and older than ten minutes
    record_idle(s2=600)
    upkeep.end_surplus()
    assert set(read_slot_states()) == {"s2"}


def test_end_surplus_empties_removed_slots(state: Path, settings: Settings) -> None:
    record_idle(s1=1, s2=1)
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    user = Slot(2)
    assert user.try_acquire()
    upkeep.end_surplus()
    assert set(read_slot_states()) == {"s1", "s2"}

    user.release()
    upkeep.end_surplus()
    assert set(read_slot_states()) == {"s1"}


def prewarm(*profiles: str, keeper: upkeep.Prewarmer | None = None) -> None:
    keeper = keeper or upkeep.Prewarmer()
    keeper.wanted = [upkeep.WarmShop(each, f"shop/{each}", LaunchSettings(window="800x600")) for each in profiles]
    keeper.prewarm()


def test_prewarm_starts_browsers_with_their_settings(acquire: Acquire, settings: Settings) -> None:
    settings.AFTERTOUCH_RPA_WARM_BROWSERS = 2
    acquire("s1").release()  # with other settings
    prewarm("s1", "s2", "s3")

    assert read_slot_states() == {"s1": "idle", "s2": "idle"}
    assert acquire("s1", launch=LaunchSettings(window="800x600")).warm


def test_prewarm_evicts_idle_browser_used_longest_ago(pool: Path, settings: Settings) -> None:
    settings.AFTERTOUCH_RPA_BROWSERS = 2
    record_idle(s1=2, s2=1)
    prewarm("s3")
    assert read_slot_states() == {"s2": "idle", "s3": "idle"}
    prewarm("s3", "s4")
    assert read_slot_states() == {"s3": "idle", "s4": "idle"}


def test_prewarm_without_free_slot_starts_nothing(acquire: Acquire, settings: Settings) -> None:
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    busy = acquire("s3")
    prewarm("s1", "s3")

    assert read_slot_states() == {"s3": "busy"}
    assert not is_gone(busy.pid)


def test_failed_prewarm_is_retried_later(acquire: Acquire, settings: Settings) -> None:
    chromium, settings.RPA_CHROMIUM_PATH = settings.RPA_CHROMIUM_PATH, "/nowhere"
    keeper = upkeep.Prewarmer()
    prewarm("s1", keeper=keeper)
    settings.RPA_CHROMIUM_PATH = chromium
    prewarm("s1", keeper=keeper)
    assert read_slot_states() == {}

    keeper._failed["s1"] -= upkeep.RETRY_AFTER
    prewarm("s1", keeper=keeper)
    assert read_slot_states() == {"s1": "idle"}


def read_checked_at(shop: str) -> float:
    record = find_record(shop)
    assert record is not None
    return record.checked_at


def test_check_idle_looks_at_idle_browsers_now_and_then(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed, _ = acquire("s1"), acquire("busy")
    borrowed.release()
    began = time.time()
    upkeep.check_idle()
    checked_at = read_checked_at("s1")
    assert began <= checked_at <= time.time()
    assert read_checked_at("busy") == 0

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "CHECK_INTERVAL", 3600.0)  # also for a machine that stalls
        upkeep.check_idle()
        assert read_checked_at("s1") == checked_at
        record = find_record("s1")
        assert record is not None
        registry.write_record(replace(record, checked_at=time.time() + 86_400))  # the clock was set back
        upkeep.check_idle()
        assert checked_at < read_checked_at("s1") <= time.time()
        assert record.pid == borrowed.pid

        record = find_record("s1")
        assert record is not None
        registry.write_record(replace(record, checked_at=0))
        kill(borrowed.pid)
        upkeep.check_idle()
    assert read_slot_states() == {"busy": "busy"}


def test_check_idle_ends_browser_that_answers_but_shows_no_page(
    acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed, other = acquire("s1"), acquire("s2")
    borrowed.release()
    other.release()
    read_page = devtools.read_page

    def read_soon(port: int, url: str, *, timeout: float) -> tuple[int, str]:
        return read_page(port, url, timeout=1.0 if port == borrowed.port else timeout)

    monkeypatch.setattr(devtools, "read_page", read_soon)
    monkeypatch.setattr(devtools, "TIMEOUT", 5.0)
    monkeypatch.setattr(browser_pool, "ANSWER_WITHIN", 1.0)  # it is asked for its cookies, and cannot answer
    for process in all_processes():
        if process.session == borrowed.pid and "--type=zygote" in read_command_line(process.pid):
            os.kill(process.pid, signal.SIGSTOP)  # so it makes no process for a new page
    upkeep.check_idle()

    assert is_gone(borrowed.pid)
    assert read_slot_states() == {"s2": "idle"}


@pytest.mark.parametrize("step", [upkeep.end_unfit, upkeep.check_idle, upkeep.end_surplus, upkeep.end_unused])
@pytest.mark.parametrize("failing", ["lock", "record"])
def test_error_at_one_slot_does_not_stop_the_later_ones(
    state: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object], failing: str
) -> None:
    settings.AFTERTOUCH_RPA_WARM_BROWSERS = 0
    delete = registry.delete_record

    def delete_other(slot: int) -> None:
        if slot == 1:
            raise OSError(errno.EROFS, "Read-only file system")
        delete(slot)

    for slot in (1, 2):
        registry.write_record(Record(slot=slot, state=IDLE, profile=f"s{slot}"))
    if failing == "lock":
        registry.slot_lock(1).mkdir()  # stands for an error of the disk
    else:
        monkeypatch.setattr(registry, "delete_record", delete_other)
    step()
    assert set(read_slot_states()) == {"s1"}


def test_describe_slots_returns_each_slot(acquire: Acquire) -> None:
    borrowed = acquire("s1")
    described = eventually(
        lambda: upkeep.describe_slots() if upkeep.describe_slots()[0]["rss_mb"] > 20 else None, "no memory"
    )

    assert [entry["state"] for entry in described] == ["busy", "empty", "empty"]
    assert described[0]["port"] == borrowed.port
    assert described[0]["shop"] == "shop/s1"
    assert described[0]["started_at"].endswith("+00:00")
    assert set(described[0]) == set(described[1]) == {
        "slot", "state", "shop", "profile", "port", "uses", "started_at", "last_used_at", "rss_mb", "reason",
    }  # fmt: skip
