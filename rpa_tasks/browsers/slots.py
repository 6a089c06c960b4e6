"""Find a slot for the browser of a shop.

Only the holder of a slot's lock changes the slot. Only the holder of a profile's lock starts a browser on it. While
another process evicts a shop's browser, the shop finds its own slot locked. It waits until the record names another
shop; the end of the old browser is proven by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from django.conf import settings

from rpa_tasks.browsers import registry, shutdown
from rpa_tasks.browsers.registry import BUSY, IDLE, QUARANTINED, Lock, Record


class Slot:
    """A slot whose lock this process has."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.record: Record | None = None
        self._lock = Lock(registry.slot_lock(number))

    @property
    def held(self) -> bool:
        return self._lock.held

    def try_acquire(self) -> bool:
        """Try to take the slot and read its record."""
        if not self._lock.try_acquire():
            return False
        self.record = registry.read_record(self.number)
        return True

    def write(self, record: Record) -> None:
        registry.write_record(record)
        self.record = record

    def empty(self, why: str) -> bool:
        """End the slot's browser. Returns False, and quarantines the slot, if the end is not proven."""
        if self.record is None:
            return True
        if not shutdown.end_browser(self.record, why):
            self.write(replace(self.record, state=QUARANTINED, reason=why))
            return False
        registry.delete_record(self.number)
        self.record = None
        return True

    def release(self) -> None:
        self._lock.release()


@contextmanager
def lock_unused_slot(number: int) -> Iterator[Slot | None]:
    """Lock the slot for a moment; None if another process has it."""
    slot = Slot(number)
    if not slot.try_acquire():
        yield None
        return
    try:
        yield slot
    finally:
        slot.release()


def take_slot(profile_id: str, *, may_start: bool) -> Slot | None:
    """Try once to take a slot for the shop. The caller has the profile's lock.

    The order is: the shop's own browser, an empty slot, one whose worker process died, the idle browser that was used
    longest ago. The slot is locked and holds the shop's own browser or none. Raises `OSError`, for example on a full
    disk.
    """
    if own := records_of_profile(profile_id):
        return next((slot for record in own if (slot := _try_own_slot(record.slot, profile_id))), None)
    if not may_start:
        return None
    return next((slot for number in _slots_by_preference() if (slot := _try_empty_slot(number))), None)


def records_of_profile(profile_id: str) -> list[Record]:
    """Return the records that name this profile; at most one."""
    known = registry.read_records(settings.AFTERTOUCH_RPA_BROWSERS).values()
    return [record for record in known if record and record.profile == profile_id]


def _slots_by_preference() -> list[int]:
    known = registry.read_records(settings.AFTERTOUCH_RPA_BROWSERS)
    usable = range(1, settings.AFTERTOUCH_RPA_BROWSERS + 1)
    browsers = [record for slot, record in known.items() if record and slot in usable]
    empty = [slot for slot, record in known.items() if record is None and slot in usable]
    busy = [record.slot for record in browsers if record.state == BUSY]
    idle = sorted((record for record in browsers if record.state == IDLE), key=lambda record: record.last_used_at)
    return [*empty, *busy, *(record.slot for record in idle)]


def _try_own_slot(number: int, profile_id: str) -> Slot | None:
    slot = Slot(number)
    if not slot.try_acquire():
        return None
    if slot.record and slot.record.profile == profile_id and slot.record.state != QUARANTINED:
        return slot
    slot.release()
    return None


def _try_empty_slot(number: int) -> Slot | None:
    slot = Slot(number)
    if not slot.try_acquire():
        return None
    try:
        if (slot.record is None or slot.record.state != QUARANTINED) and slot.empty("evicted"):
            return slot
    except BaseException:
        slot.release()
        raise
    slot.release()
    return None
