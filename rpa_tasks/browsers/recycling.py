"""Maintain unused browsers: end, recycle and describe them.

Each step holds the lock of a slot only as long as needed and skips slots in use. So the steps may run concurrently with
any number of runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import structlog
from django.conf import settings

from rpa_tasks.browsers import registry, shutdown
from rpa_tasks.browsers.browser_processes import marked_slots, memory_by_session
from rpa_tasks.browsers.registry import BUSY, IDLE, QUARANTINED, Record
from rpa_tasks.browsers.slots import Slot, lock_unused_slot

log = structlog.get_logger(__name__)


def recycling_reason(record: Record) -> str:
    """Return why the browser must be recycled (uses, age or memory), or ""."""
    if record.uses >= settings.AFTERTOUCH_RPA_BROWSER_USES:
        return "uses"
    if time.time() - record.started_at >= settings.AFTERTOUCH_RPA_BROWSER_AGE.total_seconds():
        return "age"
    if memory_by_session().get(record.pid, 0) // 2**20 >= settings.AFTERTOUCH_RPA_BROWSER_MEMORY_MB:
        return "memory"
    return ""


IDLE_FOR = 600.0  #: seconds until an idle browser beyond the pre-warmed ones is ended


def end_abandoned() -> None:
    """End busy browsers whose lock is free: their worker process was killed."""
    for slot in unused_slots_in(BUSY):
        slot.empty("its user died")


def end_unrecorded() -> None:
    """End browsers of this node without a record: it was deleted by hand, or lost on a full disk."""
    for number in marked_slots(str(registry.browsers_dir().resolve())):
        with lock_unused_slot(number) as slot:
            if slot and slot.record is None:
                shutdown.end_browser(Record(slot=number, state=BUSY), "no record")


def free_quarantined() -> None:
    """Free quarantined slots whose processes have ended since."""
    for slot in unused_slots_in(QUARANTINED):
        if slot.empty("quarantined"):
            log.info("slot_freed", slot=slot.number)


def recycle_old() -> None:
    for slot in unused_slots_in(IDLE):
        assert slot.record is not None
        if why := recycling_reason(slot.record):
            slot.empty(why)


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
    for slot in unused_slots_in(IDLE):
        if slot.number in surplus and slot.record in idle:  # not used since
            slot.empty("idle")


def end_unused() -> int:
    """End all unused browsers after the end of the worker. Returns how many browsers remain."""
    for slot in unused_slots_in(IDLE, BUSY, QUARANTINED):
        slot.empty("the worker ended")
    return len(records_in(IDLE, BUSY))


def unused_slots_in(*states: str) -> Iterator[Slot]:
    """Yield the unused slots in these states, each locked during its turn."""
    for record in records_in(*states):
        with lock_unused_slot(record.slot) as slot:
            if slot and slot.record and slot.record.state in states:
                yield slot


def records_in(*states: str) -> list[Record]:
    """Return the records in these states, of all slots."""
    records = registry.read_records(settings.AFTERTOUCH_RPA_BROWSERS).values()
    return [record for record in records if record and record.state in states]


EMPTY = "empty"


def describe_slots() -> list[dict[str, Any]]:
    """Describe each slot, including empty ones. Instants are ISO 8601, UTC."""
    memory = memory_by_session()
    return [
        {
            "slot": slot,
            "state": record.state if record else EMPTY,
            "shop": record.shop if record else "",
            "profile": record.profile if record else "",
            "port": record.port or None if record else None,
            "uses": record.uses if record else 0,
            "started_at": _format_instant(record.started_at) if record else None,
            "last_used_at": _format_instant(record.last_used_at) if record else None,
            "rss_mb": memory.get(record.pid, 0) // 2**20 if record and record.pid else 0,
            "reason": record.reason if record else "",
        }
        for slot, record in registry.read_records(settings.AFTERTOUCH_RPA_BROWSERS).items()
    ]


def _format_instant(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None
