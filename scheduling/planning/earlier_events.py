"""Read the customers' earlier events of a type, for conditions like “the first order” (`policy.node_conditions`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from uuid import UUID

from scheduling import sql
from scheduling.policy.node_conditions import COUNTED_SPAN, MOST_EARLIER, EventTimes


def load_event_times(customer_ids: Iterable[int], types: Iterable[str], occurred_at: datetime) -> dict[int, EventTimes]:
    """Return, by customer, the times of stored events of these types that count for events from `occurred_at` on.

    Call it after the locks.
    """
    found: dict[int, EventTimes] = defaultdict(dict)
    pairs = {
        "customers": sorted(set(customer_ids)), "types": sorted(set(types)), "since": occurred_at - COUNTED_SPAN,
        "most": MOST_EARLIER,
    }  # fmt: skip
    if pairs["customers"] and pairs["types"]:
        for customer_id, event_type, times in sql.rows(_EVENT_TIMES, pairs):
            found[customer_id][event_type] = times
    return found


def count_before(events: Iterable[tuple[UUID, Iterable[str]]]) -> dict[UUID, Mapping[str, int]]:
    """Return, by event, the number of events of some types that its customer had before it. Events may repeat."""
    asked = sorted({(event_id, kind) for event_id, types in events for kind in types})
    found: dict[UUID, dict[str, int]] = defaultdict(dict)
    if asked:
        event_ids, kinds = zip(*asked, strict=True)
        parameters = {"events": list(event_ids), "types": list(kinds), "most": MOST_EARLIER, "span": COUNTED_SPAN}
        for event_id, kind, count in sql.rows(_COUNT_BEFORE, parameters):
            found[event_id][kind] = count
    return dict(found)


_EVENT_TIMES = """
SELECT c.id, t.type, latest.times
FROM unnest(%(customers)b::bigint[]) AS c(id) CROSS JOIN unnest(%(types)b::text[]) AS t(type)
CROSS JOIN LATERAL (
    SELECT array_agg(occurred_at ORDER BY occurred_at) AS times FROM (
        SELECT e.occurred_at FROM scheduling_event AS e
        WHERE e.customer_id = c.id AND e.type = t.type AND e.occurred_at > %(since)s
        ORDER BY e.occurred_at DESC LIMIT %(most)s
    ) AS bounded
) AS latest
WHERE latest.times IS NOT NULL
"""

# Events of one transaction have one time of receipt and ids in the order of the batch.
_COUNT_BEFORE = """
SELECT v.event_id, v.type, counted.number
FROM unnest(%(events)b::uuid[], %(types)b::text[]) AS v(event_id, type)
JOIN scheduling_event AS own ON own.id = v.event_id
CROSS JOIN LATERAL (
    SELECT count(*) AS number FROM (
        SELECT 1 FROM scheduling_event AS e
        WHERE e.customer_id = own.customer_id AND e.type = v.type AND e.occurred_at > own.occurred_at - %(span)s
          AND (e.received_at, e.id) < (own.received_at, own.id)
        LIMIT %(most)s
    ) AS bounded
) AS counted
"""
