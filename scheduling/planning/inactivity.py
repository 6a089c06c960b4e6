"""Who stays away: `customer.inactive` for customers without interaction for 30 days, once an absence."""

from __future__ import annotations

from time import monotonic

from django.conf import settings
from django.db import transaction

from scheduling import sql
from scheduling.dispatch.dispatcher import doorbell
from scheduling.planning.ingest import NewEvent, record_events

SOURCE = "aftertouch"
BATCH = 500
LONGEST = 3.0  #: seconds after which a scan begins no other batch: the worker has other passes to run


def scan() -> int:
    """Raise an event for each customer who has been away too long, for `LONGEST` at most. Returns how many; the next
    scan goes on with the rest.

    The event's id names the last activity, so that a scan that runs twice, or dies before it notes what it did,
    raises nothing twice.
    """
    ends_at, raised = monotonic() + LONGEST, 0
    while True:
        count = _scan_batch()
        raised += count
        if count < BATCH or monotonic() >= ends_at:
            return raised


def _scan_batch() -> int:
    with transaction.atomic():
        away = sql.rows(_AWAY, {"after": settings.AFTERTOUCH_INACTIVE_AFTER, "limit": BATCH})
        if not away:
            return 0
        record_events(
            [
                NewEvent(
                    source=SOURCE,
                    event_id=f"inactive:{user_id}:{last_active_at.isoformat()}",
                    type="customer.inactive",
                    user_id=user_id,
                    data={"last_active_at": last_active_at.isoformat()},
                )
                for _, user_id, last_active_at in away
            ],
            announce=doorbell.ring,
        )
        sql.count(_NOTE, {"ids": [row[0] for row in away]})
    return len(away)


# The locks are taken in the order of ids, as every writer does; SKIP LOCKED lets two scans share the work.
_AWAY = """
WITH away AS MATERIALIZED (
    SELECT id FROM scheduling_customer
    WHERE last_active_at IS NOT NULL AND (inactive_since IS NULL OR NOT inactive_since = last_active_at)
      AND last_active_at < statement_timestamp() - %(after)s
    ORDER BY last_active_at LIMIT %(limit)s
)
SELECT id, user_id, last_active_at FROM scheduling_customer
WHERE id IN (SELECT id FROM away) AND last_active_at < statement_timestamp() - %(after)s
ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
"""

_NOTE = "UPDATE scheduling_customer SET inactive_since = last_active_at WHERE id = ANY(%(ids)b)"
