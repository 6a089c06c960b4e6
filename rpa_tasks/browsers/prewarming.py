"""Pre-warm the browsers of the shops that will need one next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import structlog
from django.conf import settings

from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_errors import NoBrowser
from rpa_tasks.browsers.pool import start_in_slot
from rpa_tasks.browsers.providers.launch_settings import LaunchSettings
from rpa_tasks.browsers.recycling import records_in
from rpa_tasks.browsers.registry import BUSY, IDLE, QUARANTINED, Lock, Record
from rpa_tasks.browsers.slots import Slot, lock_unused_slot

log = structlog.get_logger(__name__)

RETRY_AFTER = 300.0  #: seconds until a failed start is repeated for the same shop


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
        """Start the browsers of the wanted shops. Each takes an empty slot, or the idle browser of another shop that
        was used longest ago.
        """
        wanted = self.wanted[: settings.AFTERTOUCH_RPA_WARM_BROWSERS]
        for shop in wanted:
            if self._may_try(shop.profile) and not _is_warm(shop):
                self._start(shop, {each.profile for each in wanted if each != shop})

    def _may_try(self, profile: str) -> bool:
        failed_at = self._failed.get(profile)
        return failed_at is None or time.monotonic() - failed_at >= RETRY_AFTER

    def _start(self, shop: WarmShop, kept: set[str]) -> None:
        try:
            with _lock_profile(shop.profile) as alone:
                # Checked again: a run may have started one before this process got the lock.
                if not alone or _is_warm(shop):
                    return
                with _lock_free_slot(shop.profile, kept) as slot:
                    if slot and slot.empty("other settings, or evicted"):
                        record = start_in_slot(slot, shop.profile, shop.shop, shop.launch)
                        slot.write(replace(record, state=IDLE, last_used_at=time.time()))
        except (NoBrowser, OSError) as error:
            log.warning("browser_not_prewarmed", profile=shop.profile, error=str(error))
            self._failed[shop.profile] = time.monotonic()


def _is_warm(shop: WarmShop) -> bool:
    """Return whether the shop has a browser with these settings, or one that is not idle."""
    return any(
        record.profile == shop.profile and (record.state != IDLE or record.launch == shop.launch.fingerprint)
        for record in records_in(IDLE, BUSY, QUARANTINED)
    )


@contextmanager
def _lock_profile(profile: str) -> Iterator[bool]:
    lock = Lock(registry.profile_lock(profile))
    taken = lock.try_acquire()
    try:
        yield taken
    finally:
        lock.release()


@contextmanager
def _lock_free_slot(profile: str, kept: set[str]) -> Iterator[Slot | None]:
    """Lock the shop's own slot, an empty one, or that of the idle browser that was used longest ago."""
    for number in _free_slots(profile, kept):
        with lock_unused_slot(number) as slot:
            if slot and (slot.record is None or _may_take(slot.record, profile, kept)):
                yield slot
                return
    yield None


def _free_slots(profile: str, kept: set[str]) -> list[int]:
    known = registry.read_records(settings.AFTERTOUCH_RPA_BROWSERS)
    if own := [slot for slot, record in known.items() if record and record.profile == profile]:
        return own
    usable = {slot: known[slot] for slot in known if slot <= settings.AFTERTOUCH_RPA_BROWSERS}
    idle = [record for record in usable.values() if record and _may_take(record, profile, kept)]
    oldest = sorted(idle, key=lambda record: record.last_used_at)
    return [*(slot for slot, record in usable.items() if record is None), *(record.slot for record in oldest)]


def _may_take(record: Record, profile: str, kept: set[str]) -> bool:
    return record.state == IDLE and (record.profile == profile or record.profile not in kept)
