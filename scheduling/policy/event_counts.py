"""Count a customer's earlier events of a type, for conditions like “the first order”. Pure.

Earlier are the events that were stored before this one. Those count that occurred within `COUNTED_SPAN` before it, or
later. The count of an event therefore never changes while its touches wait. Counts end at `MOST_EARLIER`, so that a
customer with many events costs no more.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

MOST_EARLIER = 100  #: earlier events of a type are counted up to this number
COUNTED_SPAN = timedelta(days=90)

#: By event type, when a customer's stored events occurred: the latest `MOST_EARLIER`, in order.
EventTimes = dict[str, list[datetime]]


def add_event_time(times: EventTimes, event_type: str, occurred_at: datetime) -> None:
    kept = times.setdefault(event_type, [])
    insort(kept, occurred_at)
    del kept[:-MOST_EARLIER]


def count_recent(times: Mapping[str, Sequence[datetime]], occurred_at: datetime) -> dict[str, int]:
    """Return the number of events by type that count for an event that occurred at this time."""
    since = occurred_at - COUNTED_SPAN
    return {event_type: len(kept) - bisect_right(kept, since) for event_type, kept in times.items()}
