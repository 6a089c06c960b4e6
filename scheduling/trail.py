"""The lines of the log by which one event is followed from the front door to its end, with nothing but `grep`.

Each names many touches, as `trace/touch`, because a line costs as much as naming fifty: none is written for each touch
of a burst. The log channel's own line says `trace_id`, as do failures.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import structlog

log = structlog.get_logger(__name__)

LINE = 50  #: touches. A pipe keeps a write whole up to 4,096 bytes; beyond that, lines of two processes would mix


def name(trace_id: UUID | None, task_id: UUID | str) -> str:
    """Without a trace where none is at hand: the line of the event names trace and touch together."""
    return f"{trace_id.hex if trace_id else ''}/{task_id}"


def say(action: str, touches: Iterable[str], **shared: object) -> None:
    """Only after the commit: what is rolled back has not happened."""
    names = list(touches)
    for start in range(0, len(names), LINE):
        part = names[start : start + LINE]
        log.info(action, **shared, count=len(part), touches=part)
