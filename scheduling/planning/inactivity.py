"""Raise `customer.inactive` for inactive customers, once for each absence, and store activity that frames report.

The threshold is `AFTERTOUCH_INACTIVE_AFTER`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from time import monotonic

from django.conf import settings
from django.db import transaction

from scheduling import sql
from scheduling.dispatch.dispatcher import background_publisher
from scheduling.ledger import locks
from scheduling.ledger.anonymization import read_erasure_times
from scheduling.planning.ingest import NewEvent, record_events
from scheduling.policy.journeys import SOURCE

BATCH = 500
LONGEST_SCAN = 3.0  #: seconds after which a scan starts no further batch, so that the worker can run other passes


def scan_inactive_customers() -> int:
    """Raise an event for each inactive customer, for at most `LONGEST_SCAN` seconds. Return the number of events.

    The next scan continues with the rest. The event id contains the last activity. A scan that repeats, or dies before
    it stores its progress, therefore raises no event twice.
    """
    ends_at, raised = monotonic() + LONGEST_SCAN, 0
    while True:
        count = _scan_batch()
        raised += count
        if count < BATCH or monotonic() >= ends_at:
            return raised


def _scan_batch() -> int:
    with transaction.atomic():
        inactive = locks.lock_inactive(settings.AFTERTOUCH_INACTIVE_AFTER, BATCH)
        if not inactive:
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
                for _, user_id, last_active_at in inactive
            ],
            publish_wakeups=background_publisher.submit,
        )
        sql.execute(_NOTE, {"ids": [row[0] for row in inactive]})
    return len(inactive)


_NOTE = "UPDATE scheduling_customer SET inactive_since = last_active_at WHERE id = ANY(%(ids)b)"


def update_last_active(seen: Mapping[str, datetime]) -> set[str]:
    """Store customers' last activity, by user id, and insert unknown customers. The time never decreases.

    Activity from before the request of an erasure is dropped: the erased customer stays erased.

    Return the user ids that need no retry. Another transaction holds the others: the caller retries them later.
    """
    if not seen:
        return set()
    with sql.brief_lock_waits():
        # A watcher runs this between two checks of its deadlines, so it waits for no customer's lock.
        customers = locks.lock_free_users(sorted(seen))
        unknown = {user_id: (at, None) for user_id, at in seen.items() if user_id not in customers}
        if unknown:
            new = locks.insert_customers(unknown)
            _delete_erased(new, seen)
            customers |= new
        sql.execute(_RAISE, {"ids": list(customers.values()), "at": [seen[user_id] for user_id in customers]})
    return set(customers)


def _delete_erased(new: Mapping[str, int], seen: Mapping[str, datetime]) -> None:
    erased = [new[user_id] for user_id, at in read_erasure_times(new).items() if seen[user_id] <= at]
    if erased:
        sql.execute(_DELETE, {"ids": erased})


_DELETE = "DELETE FROM scheduling_customer WHERE id = ANY(%(ids)b)"
_RAISE = """
UPDATE scheduling_customer AS c SET last_active_at = v.at
FROM unnest(%(ids)b::bigint[], %(at)b::timestamptz[]) AS v(id, at)
WHERE c.id = v.id AND (c.last_active_at IS NULL OR c.last_active_at < v.at)
"""
