"""What each slot holds, in one small file a slot. Written by rename and only by who has the slot's lock; read by all.

A record is written before its browser is started and removed after the browser is proven gone. So a browser of ours
lives only under the profile that some record names, whatever was killed in between.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass

from rpa_tasks.browsers import places

IDLE, BUSY, QUARANTINED = "idle", "busy", "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A slot and its browser. Instants are seconds since the epoch."""

    slot: int
    state: str  #: `busy` with a free lock: whoever had it died
    shop: str = ""
    profile: str = ""
    pid: int = 0  #: 0: it was about to be started
    ticks: int = 0  #: the process's start, in clock ticks since boot: tells it from a later one with the same pid
    port: int = 0
    path: str = ""  #: of its DevTools address; has a random part that no other browser knows
    uses: int = 0
    lease_no: int = 0
    started_at: float = 0.0
    last_used_at: float = 0.0
    checked_at: float = 0.0
    baseline: float = 0.0  #: seconds of its first timed navigation
    reason: str = ""


def read(slot: int) -> Record | None:
    """None: no browser. A file that says nothing readable counts as a browser whose user died."""
    try:
        found = json.loads(places.slot_record(slot).read_bytes())
        return Record(**{**found, "slot": slot})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return Record(slot=slot, state=BUSY, reason="unreadable")


def write(record: Record) -> None:
    """OSError where the disk is full; the old record then stands."""
    path = places.slot_record(record.slot)
    draft = path.with_suffix(".tmp")  # one is enough: only one process has the lock
    try:
        draft.write_text(json.dumps(dataclasses.asdict(record)))
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def forget(slot: int) -> None:
    """The slot has no browser any more."""
    places.slot_record(slot).unlink(missing_ok=True)


def slots(most: int) -> list[int]:
    """1 to `most`, and those beyond that still hold a browser since `most` was lowered."""
    beyond = {
        int(found[1]) for name in os.listdir(places.browsers()) if (found := re.match(r"slot-(\d+)\.json$", name))
    }
    return sorted(beyond.union(range(1, most + 1)))


def records(most: int) -> dict[int, Record | None]:
    return {slot: read(slot) for slot in slots(most)}
