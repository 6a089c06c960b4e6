"""Pre-warm browsers of the shops that ran last, in free slots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import structlog
from django.conf import settings

from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_errors import NoBrowser
from rpa_tasks.browsers.pool import start_in_slot
from rpa_tasks.browsers.recycling import records_in
from rpa_tasks.browsers.registry import BUSY, IDLE, QUARANTINED, Lock
from rpa_tasks.browsers.slots import Slot, lock_unused_slot

log = structlog.get_logger(__name__)

RETRY_AFTER = 300.0  #: seconds until a failed start is repeated for the same shop


class Prewarmer:
    def __init__(self) -> None:
        self._failed: dict[str, float] = {}  #: time of the failure by profile

    def prewarm(self) -> None:
        """Start browsers up to the number of pre-warmed ones, for the shops that ran last."""
        lacking = settings.AFTERTOUCH_RPA_WARM_BROWSERS - len(records_in(IDLE))
        for use in registry.last_uses():
            if lacking > 0 and self._may_try(use.profile) and not _has_browser(use.profile):
                lacking -= self._start(use)

    def _may_try(self, profile: str) -> bool:
        failed_at = self._failed.get(profile)
        return failed_at is None or time.monotonic() - failed_at >= RETRY_AFTER

    def _start(self, use: registry.Use) -> bool:
        try:
            with _lock_profile(use.profile) as alone, _lock_empty_slot() as slot:
                # Checked again: a run may have started one before this process got the lock.
                if not alone or slot is None or _has_browser(use.profile):
                    return False
                slot.write(replace(start_in_slot(slot, use.profile, use.shop), state=IDLE, last_used_at=use.at))
                return True
        except (NoBrowser, OSError) as error:
            log.warning("browser_not_prewarmed", profile=use.profile, error=str(error))
            self._failed[use.profile] = time.monotonic()
            return False


def _has_browser(profile: str) -> bool:
    return any(record.profile == profile for record in records_in(IDLE, BUSY, QUARANTINED))


@contextmanager
def _lock_profile(profile: str) -> Iterator[bool]:
    lock = Lock(registry.profile_lock(profile))
    taken = lock.try_acquire()
    try:
        yield taken
    finally:
        lock.release()


@contextmanager
def _lock_empty_slot() -> Iterator[Slot | None]:
    for number, record in registry.read_records(settings.AFTERTOUCH_RPA_BROWSERS).items():
        if record is None:
            with lock_unused_slot(number) as slot:
                if slot and slot.record is None:
                    yield slot
                    return
    yield None
