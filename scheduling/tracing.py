"""Connect everything that an event causes by one trace id (W3C Trace Context).

An event with a `build_traceparent` keeps its trace. Any other event uses the id of its row. Log lines about a touch
carry it as `trace_id`, and a webhook passes it on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from uuid import UUID

import structlog

log = structlog.get_logger(__name__)


TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?\Z", re.ASCII | re.DOTALL)


def read_traceparent(value: object) -> UUID | None:
    """Return the trace id of a header, or None if it is absent or invalid.

    An invalid header does not reject the request: the event then gets a new trace.
    """
    found = TRACEPARENT.match(value) if isinstance(value, str) else None
    if not found or not int(found[1], 16) or not int(found[2], 16):
        return None
    if value[:2] == "00" and found[3]:  # type: ignore[index]  # only later versions may be longer
        return None
    return UUID(found[1])


def build_traceparent(trace_id: UUID, touch: UUID) -> str:
    """Return the header for a request about this touch. All attempts share one span."""
    return f"00-{trace_id.hex}-{touch.hex[16:]}-01"


TOUCHES_PER_LINE = (
    50  #: touches per line. A pipe writes up to 4,096 bytes whole; longer lines of two processes would mix
)


def trace_label(trace_id: UUID | None, task_id: UUID | str) -> str:
    """Return `trace/touch`. Without a known trace the first part is empty; the event's log line has both."""
    return f"{trace_id.hex if trace_id else ''}/{task_id}"


def log_touches(action: str, touches: Iterable[str], **shared: object) -> None:
    """Log an action on touches. Call it after the commit, because a rolled-back action did not happen."""
    names = list(touches)
    for start in range(0, len(names), TOUCHES_PER_LINE):
        part = names[start : start + TOUCHES_PER_LINE]
        log.info(action, **shared, count=len(part), touches=part)
