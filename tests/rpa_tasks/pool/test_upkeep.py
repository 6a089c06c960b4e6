"""What the maintainer does with browsers that nobody is using, step by step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rpa_tasks.browsers import health, recycling, registry, warmth
from rpa_tasks.browsers.pool import AcquiredBrowser
from tests.rpa_tasks.pool.actors import BorrowerProcess, eventually, hang, is_gone, kill, record_of, states

pytestmark = pytest.mark.browser
Lend = Callable[..., AcquiredBrowser]


def test_the_browser_of_a_killed_borrower_is_ended(borrower: Callable[..., BorrowerProcess]) -> None:
    victim = borrower("s1", "60")
    left = victim.hear()
    recycling.end_abandoned()
    assert not is_gone(left["pid"])  # it is not abandoned yet

    victim.kill()
    recycling.end_abandoned()
    assert is_gone(left["pid"])
    assert states() == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    [("AFTERTOUCH_RPA_BROWSER_AGE", timedelta(0)), ("AFTERTOUCH_RPA_BROWSER_MEMORY_MB", 1)],
)
def test_worn_browsers_are_ended_but_not_busy_ones(lend: Lend, settings: Any, setting: str, value: Any) -> None:
    idle, busy = lend("s1"), lend("s2")
    idle.release()
    recycling.recycle_old()
    assert states() == {"s1": "idle", "s2": "busy"}

    setattr(settings, setting, value)
    recycling.recycle_old()
    assert states() == {"s2": "busy"}
    assert not is_gone(busy.pid)


def test_only_the_warm_ones_stay_for_long(lend: Lend, settings: Any) -> None:
    settings.AFTERTOUCH_RPA_WARM_BROWSERS = 1
    for shop in ("s1", "s2", "s3"):
        lend(shop).release()
    recycling.end_surplus()
    assert set(states()) == {"s1", "s2", "s3"}

    for shop, minutes in (("s1", 11), ("s2", 5), ("s3", 60)):
        _used(shop, minutes)
    recycling.end_surplus()
    assert set(states()) == {"s2"}  # s1 and s3 are beyond the one that stays, and older than ten minutes


def test_a_warm_one_stays_however_long_it_is_idle(lend: Lend, settings: Any) -> None:
    settings.AFTERTOUCH_RPA_WARM_BROWSERS = 1
    lend("s1").release()
    _used("s1", 600)
    recycling.end_surplus()
    assert states() == {"s1": "idle"}


def test_slots_that_the_settings_took_away_are_emptied(lend: Lend, settings: Any) -> None:
    one, two = lend("s1"), lend("s2")
    one.release()
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    recycling.end_surplus()
    assert states() == {"s1": "idle", "s2": "busy"}

    two.release()
    recycling.end_surplus()
    assert states() == {"s1": "idle"}


def test_the_shops_that_ran_last_are_kept_warm(lend: Lend, settings: Any) -> None:
    for shop in ("s1", "s2", "s3"):
        lend(shop).release()
    recycling.end_unused()
    settings.AFTERTOUCH_RPA_WARM_BROWSERS = 2
    warmth.Prewarmer().prewarm()

    assert states() == {"s3": "idle", "s2": "idle"}
    assert lend("s3").warm


def test_no_browser_is_warmed_where_a_slot_is_lacking(lend: Lend, settings: Any) -> None:
    for shop in ("s1", "s2"):
        lend(shop).release()
    recycling.end_unused()
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    busy = lend("s3")
    warmth.Prewarmer().prewarm()

    assert states() == {"s3": "busy"}
    assert not is_gone(busy.pid)


def test_a_shop_whose_browser_does_not_start_is_not_tried_at_every_pass(lend: Lend, settings: Any) -> None:
    lend("s1").release()
    recycling.end_unused()
    chromium, settings.RPA_CHROMIUM_PATH = settings.RPA_CHROMIUM_PATH, "/nowhere"
    keeper = warmth.Prewarmer()
    keeper.prewarm()
    settings.RPA_CHROMIUM_PATH = chromium
    keeper.prewarm()
    assert states() == {}

    keeper._failed["s1"] -= warmth.RETRY_AFTER
    keeper.prewarm()
    assert states() == {"s1": "idle"}


def test_the_last_uses_are_remembered_in_order(state: Any) -> None:
    for number in range(registry.USES_KEPT + 5):
        registry.record_use(f"s{number}", "shop")
    registry.record_use("s60", "shop")

    assert len(registry.last_uses()) == registry.USES_KEPT
    assert [use.profile for use in registry.last_uses()[:2]] == ["s60", "s68"]


def test_a_healthy_browser_passes_and_is_not_asked_again_at_once(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed = lend("s1")
    borrowed.release()
    health.check_idle()
    record = record_of("s1")
    assert record is not None
    assert record.pid == borrowed.pid
    assert record.baseline > 0
    assert time.time() - record.checked_at < 60

    monkeypatch.setattr(health, "_run_examiner", None)  # whoever asked for one would fail
    health.check_idle()


def test_a_busy_browser_is_left_alone(lend: Lend) -> None:
    lend("s1")
    health.check_idle()
    record = record_of("s1")
    assert record is not None
    assert record.checked_at == 0


def test_a_browser_that_cannot_show_a_page_is_ended(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PAGE_TIME_LIMIT", 1.0)
    borrowed = lend("s1")
    borrowed.release()
    hang(borrowed.pid, monkeypatch)
    health.check_idle()

    assert is_gone(borrowed.pid)
    assert states() == {}


def test_an_examiner_that_does_not_start_costs_no_browser(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    lend("s1").release()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    health.check_idle()

    assert states() == {"s1": "idle"}


def test_a_sick_browser_does_not_cost_a_healthy_one(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examiner is asked about both; the first one hangs it."""
    sick, healthy = lend("s1"), lend("s2")
    sick.release()
    healthy.release()
    hang(sick.pid, monkeypatch, limit=5.0)
    health.check_idle()

    assert is_gone(sick.pid)
    assert states() == {"s2": "idle"}


def test_an_examiner_that_hangs_costs_one_browser_a_look(
    lend: Lend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for shop in ("s1", "s2", "s3"):
        lend(shop).release()
    hanging = tmp_path / "examiner"
    hanging.write_text("#!/bin/sh\necho '{\"ready\": true}'\nexec sleep 600\n")
    hanging.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(health, "PAGE_TIME_LIMIT", 0.0)
        patched.setattr(sys, "executable", str(hanging))
        health.check_idle()
    left = set(states())
    assert len(left) == 2

    health.check_idle()
    assert set(states()) == left  # asked by an examiner that works


def test_a_dead_browser_is_cleared_away(lend: Lend) -> None:
    borrowed = lend("s1")
    borrowed.release()
    kill(borrowed.pid)
    health.check_idle()
    assert states() == {}


@pytest.mark.parametrize(
    ("seconds", "baseline", "complains"),
    [(0.1, 0.0, False), (0.4, 0.01, False), (1.4, 0.5, False), (1.5, 0.5, True), (0.6, 0.1, True)],
)
def test_three_times_slower_is_too_slow(seconds: float, baseline: float, complains: bool) -> None:
    """Unless it is so fast that nobody would notice."""
    assert bool(health._health_problem({"ok": True, "seconds": seconds}, baseline)) is complains


def test_the_back_office_sees_each_slot(lend: Lend) -> None:
    borrowed = lend("s1")
    described = eventually(
        lambda: recycling.describe_slots() if recycling.describe_slots()[0]["rss_mb"] > 20 else None, "no memory"
    )

    assert [entry["state"] for entry in described] == ["busy", "empty", "empty"]
    assert described[0]["port"] == borrowed.port
    assert described[0]["shop"] == "shop/s1"
    assert described[0]["started_at"].endswith("+00:00")
    assert set(described[0]) == set(described[1]) == {
        "slot", "state", "shop", "profile", "port", "uses", "started_at", "last_used_at", "rss_mb", "reason",
    }  # fmt: skip


def _used(shop: str, minutes: float) -> None:
    record = record_of(shop)
    assert record is not None
    registry.write_record(replace(record, last_used_at=time.time() - minutes * 60))
