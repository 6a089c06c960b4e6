"""What the maintainer does about browsers that nobody is using. Each step takes the slot's lock for as long as it needs
it and leaves alone what somebody has, so all of it may run beside any number of borrowers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import structlog
from django.conf import settings

from rpa_tasks.browsers import places, registry, shutdown, wear
from rpa_tasks.browsers.browser_processes import marked_slots
from rpa_tasks.browsers.registry import BUSY, IDLE, QUARANTINED, Record
from rpa_tasks.browsers.slots import Slot, unused

log = structlog.get_logger(__name__)

IDLE_FOR = 600.0  #: seconds until an idle browser beyond the warm ones is ended


def end_abandoned() -> None:
    """Busy with a free lock: whoever had it was killed."""
    for slot in in_state(BUSY):
        slot.empty("its user died")


def end_unrecorded() -> None:
    """A browser of ours whose record was deleted by hand, or went with a disk that was full."""
    for number in marked_slots(str(places.browsers().resolve())):
        with unused(number) as slot:
            if slot and slot.record is None:
                shutdown.end(Record(slot=number, state=BUSY), "no record")


def free_quarantined() -> None:
    """Proven dead after all."""
    for slot in in_state(QUARANTINED):
        if slot.empty("quarantined"):
            log.info("slot_freed", slot=slot.number)


def end_worn() -> None:
    for slot in in_state(IDLE):
        assert slot.record is not None
        if why := wear.reason(slot.record):
            slot.empty(why)


def end_surplus() -> None:
    """Idle too long, or in a slot that the settings have taken away since. The warm ones, used last, stay."""
    idle = sorted(recorded(IDLE), key=lambda record: record.last_used_at, reverse=True)
    stale = time.time() - IDLE_FOR
    surplus = {
        record.slot
        for rank, record in enumerate(idle)
        if record.slot > settings.AFTERTOUCH_RPA_BROWSERS
        or (rank >= settings.AFTERTOUCH_RPA_WARM_BROWSERS and record.last_used_at < stale)
    }
    for slot in in_state(IDLE):
        if slot.number in surplus and slot.record in idle:  # not used since
            slot.empty("idle")


def end_unused() -> int:
    """Everything that nobody is using, as the worker is gone. Returns how many browsers are left."""
    for slot in in_state(IDLE, BUSY, QUARANTINED):
        slot.empty("the worker ended")
    return len(recorded(IDLE, BUSY))


def in_state(*states: str) -> Iterator[Slot]:
    """The slots in these states that nobody has, each locked while it is looked at."""
    for record in recorded(*states):
        with unused(record.slot) as slot:
            if slot and slot.record and slot.record.state in states:
                yield slot


def recorded(*states: str) -> list[Record]:
    """What the registry says, of all slots."""
    records = registry.records(settings.AFTERTOUCH_RPA_BROWSERS).values()
    return [record for record in records if record and record.state in states]
