"""Maintain unused browsers: end, check, recycle, pre-warm and describe them.

Each step holds the lock of a slot only as long as needed and skips slots in use. So the steps may run concurrently with
any number of runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import structlog
from django.conf import settings

from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.browser_processes import memory_by_session
from rpa_tasks.browsers.launch import BROWSER_WAIT, PROFILE_BUSY, LaunchSettings, NoBrowser
from rpa_tasks.browsers.pool import (
    Slot,
    acquire_browser,
    is_recorded_browser,
    recycling_reason,
)
from rpa_tasks.browsers.registry import BUSY, IDLE, QUARANTINED, Record, records_in

log = structlog.get_logger(__name__)

CHECK_INTERVAL = 60.0  #: seconds between two checks of an idle browser
PAGE_TIME_LIMIT = 10.0  #: seconds for the page of a check
IDLE_FOR = 600.0  #: seconds until an idle browser beyond the pre-warmed ones is ended
RETRY_AFTER = 300.0  #: seconds until a failed start is repeated for the same shop
PAGE = "data:text/html,<title>check</title>checked"
EMPTY = "empty"


def end_unfit() -> None:
    """End browsers whose worker process was killed, whose end was not proven before, or that are used up."""
    for slot, record in unused_slots_in(BUSY, QUARANTINED, IDLE):
        with skip_if_failing(slot.number):
            why = {BUSY: "its user died", QUARANTINED: "quarantined"}.get(record.state) or recycling_reason(record)
            if why and slot.empty(why) and record.state == QUARANTINED:
                log.info("slot_freed", slot=slot.number)


def check_idle() -> None:
    """Check the idle browsers that are due with a page; end those that fail.

    A browser can answer its port for hours but show no page. A check in the future counts as due: the clock was set
    back.
    """
    for slot, record in unused_slots_in(IDLE):
        if abs(time.time() - record.checked_at) < CHECK_INTERVAL:
            continue
        with skip_if_failing(slot.number):
            if why := _health_problem(record):
                log.warning("browser_unhealthy", slot=record.slot, profile=record.profile, why=why)
                slot.empty(why)
            else:
                slot.write(replace(record, checked_at=time.time()))


def _health_problem(record: Record) -> str:
    if not is_recorded_browser(record):
        return "not in order"
    if record.remote:  # it answers; a run on another node may use its pages
        return ""
    try:
        _, text = devtools.read_page(record.port, PAGE, timeout=PAGE_TIME_LIMIT)
    except devtools.NoAnswer as error:
        return f"check: {error}"[:200]
    return "" if text == "checked" else "check: the page was not shown"


def end_surplus() -> None:
    """End browsers that are idle too long, or in a slot beyond the setting.

    As many as are pre-warmed stay, those that were used last.
    """
    idle = sorted(records_in(IDLE), key=lambda record: record.last_used_at, reverse=True)
    stale = time.time() - IDLE_FOR
    surplus = {
        record.slot
        for rank, record in enumerate(idle)
        if record.slot > settings.AFTERTOUCH_RPA_BROWSERS
        or (rank >= settings.AFTERTOUCH_RPA_WARM_BROWSERS and record.last_used_at < stale)
    }
    for slot, record in unused_slots_in(IDLE):
        with skip_if_failing(slot.number):
            if slot.number in surplus and record in idle:  # not used since
                slot.empty("idle")


def end_unused() -> int:
    """End all unused browsers after the end of the worker. Returns how many browsers remain."""
    for slot, _ in unused_slots_in(IDLE, BUSY, QUARANTINED):
        with skip_if_failing(slot.number):
            slot.empty("the worker ended")
    return len(records_in(IDLE, BUSY))


def unused_slots_in(*states: str) -> Iterator[tuple[Slot, Record]]:
    """Yield the unused slots in these states with their records, each locked during its turn."""
    for record in records_in(*states):
        slot = Slot(record.slot)
        with skip_if_failing(record.slot):
            if not slot.try_acquire():
                continue
            try:
                if slot.record and slot.record.state in states:
                    yield slot, slot.record
            finally:
                slot.release()


@contextmanager
def skip_if_failing(slot: int) -> Iterator[None]:
    """Log an `OSError` at one slot, so that the loop reaches the later ones. The next pass tries again."""
    try:
        yield
    except OSError as error:
        log.warning("slot_skipped", slot=slot, error=str(error))


class WarmShop(NamedTuple):
    profile: str
    shop: str
    launch: LaunchSettings


class Prewarmer:
    def __init__(self) -> None:
        #: The shops that need a browser next, the first first. Another thread replaces the list.
        self.wanted: list[WarmShop] = []
        self._failed: dict[str, float] = {}  #: time of the failure by profile

    def prewarm(self) -> None:
        """Start the browsers of the wanted shops: acquire each without a wait and release it at once.

        Each takes an empty slot, or the idle browser of another shop that was used longest ago.
        """
        wanted = self.wanted[: settings.AFTERTOUCH_RPA_WARM_BROWSERS]
        for shop in wanted:
            failed_at = self._failed.get(shop.profile, float("-inf"))
            if time.monotonic() - failed_at < RETRY_AFTER or _is_warm(shop):
                continue
            kept = {each.profile for each in wanted}
            try:
                acquire_browser(
                    shop.profile, shop.shop, wait=timedelta(0), lease_no=0, launch=shop.launch, kept=kept
                ).release()
            except NoBrowser as error:
                if error.reason not in (PROFILE_BUSY, BROWSER_WAIT):
                    log.warning("browser_not_prewarmed", profile=shop.profile, error=str(error))
                    self._failed[shop.profile] = time.monotonic()


def _is_warm(shop: WarmShop) -> bool:
    """Return whether the shop has a browser with these settings, or one that is not idle."""
    return any(
        record.profile == shop.profile and (record.state != IDLE or record.launch == shop.launch.fingerprint)
        for record in records_in(IDLE, BUSY, QUARANTINED)
    )


def describe_slots() -> list[dict[str, Any]]:
    """Describe each slot, including empty ones. Instants are ISO 8601, UTC."""
    memory = memory_by_session()
    return [
        {
            "slot": slot,
            "state": record.state,
            "shop": record.shop,
            "profile": record.profile,
            "port": record.port or None,
            "uses": record.uses,
            "started_at": _format_instant(record.started_at),
            "last_used_at": _format_instant(record.last_used_at),
            "rss_mb": memory.get(record.pid, 0) // 2**20 if record.pid else 0,
            "reason": record.reason,
        }
        for slot, found in registry.read_records().items()
        for record in [found or Record(slot=slot, state=EMPTY)]
    ]


def _format_instant(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None
