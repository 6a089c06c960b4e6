"""One name for all that comes of an event, from the front door to the receiver: the trace of W3C Trace Context.

An event that comes with a `traceparent` keeps its trace; any other begins one, whose id is the row's own. Log lines
about a touch carry it as `trace_id`, and a webhook hands it on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from uuid import UUID

import structlog

log = structlog.get_logger(__name__)


TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?\Z", re.ASCII | re.DOTALL)


def read_traceparent(value: object) -> UUID | None:
    """The trace that is named. None where none is, or not as the recommendation writes it: a trace that cannot be read
    begins anew, and nothing is refused because of it."""
    found = TRACEPARENT.match(value) if isinstance(value, str) else None
    if not found or not int(found[1], 16) or not int(found[2], 16):
        return None
    if value[:2] == "00" and found[3]:  # type: ignore[index]  # only later versions may be longer
        return None
    return UUID(found[1])


def traceparent(trace_id: UUID, touch: UUID) -> str:
    """The header of a request that is sent for this touch: the same span on each attempt."""
    return f"00-{trace_id.hex}-{touch.hex[16:]}-01"


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
