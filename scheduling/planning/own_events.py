"""Record the events that Aftertouch raises itself: ends of touches that nodes follow, and `customer.inactive`.

A periodic pass reads ended touches (`ledger.ends`), so delivery has no part in it. Its mark moves in the transaction
that stores the events. A killed pass repeats nothing and loses nothing. The event id holds the delivery key: a message
that an operator published again is recorded once in each state.

Without a node that follows others, the pass reads nothing. A node that starts to follow others sees the ends after its
publication.

A customer is inactive after `AFTERTOUCH_INACTIVE_AFTER`, once for each absence. The activity that frames report is
stored here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from time import monotonic
from uuid import UUID

import structlog
from django.conf import settings
from django.db import OperationalError, transaction

from scheduling import sql
from scheduling.configuration import snapshot
from scheduling.configuration.snapshot import Snapshot
from scheduling.ledger import ends, locks
from scheduling.ledger.anonymization import read_erasure_times
from scheduling.ledger.ends import EndedTouch
from scheduling.models import Touch
from scheduling.planning.ingest import NewEvent, record_and_publish
from scheduling.policy.matrix import END_TYPES, LARGEST_ORIGIN, SOURCE, TOUCH_TYPES, compose_end_data, read_depth
from scheduling.policy.specs import EventSpec

log = structlog.get_logger(__name__)

READER = "follow-ups"
BATCH = 500  #: events per transaction
LONGEST_PASS = 3.0  #: seconds after which a pass starts no further batch, so that the worker can run other passes


def record_ends() -> int:
    """Record the followed ends of touches, for at most `LONGEST_PASS` seconds. Return the number of events.

    The next pass continues with the rest, also after another transaction held a customer for too long.
    """
    stops_at, recorded, more = monotonic() + LONGEST_PASS, 0, True
    while more and monotonic() < stops_at:
        try:
            count, more = _record_end_batch()
        except OperationalError as error:
            if not sql.is_lock_timeout(error):
                raise
            log.info("follow_ups_delayed", error=str(error))
            return recorded
        recorded += count
    return recorded


def _record_end_batch() -> tuple[int, bool]:
    """Record one batch. Return the number of events, and whether more ends can be read at once."""
    config = snapshot.current()
    followed = config.followed_ends
    if not followed:
        ends.drop_reader(READER)
        return 0, False
    with transaction.atomic():
        found, more = ends.take_ends(READER, most=BATCH, since=config.changed_at)
        events = build_end_events([each for each in found if each.node_id in followed.get(each.state, ())], config)
        if events:
            record_and_publish(events)
    return len(events), more


def build_end_events(ended: Sequence[EndedTouch], config: Snapshot) -> list[NewEvent]:
    """Return the events of these ends. Lock their customers: an erased one must not come back as a new one.

    The end of a touch that the depth limit suppressed is left out, and one that an operator has taken back.
    """
    if not ended:
        return []
    sql.limit_lock_waits(settings.TIMEOUTS.event_lock)
    users = locks.lock_remaining(each.customer_id for each in ended)
    # Cancelled and suppressed touches that were planned again: the new touch has an end of its own. Read after the
    # lock, which an undo holds until its commit.
    unsent = [each.task_id for each in ended if each.state in ("cancelled", "suppressed")]
    again = Touch.objects.filter(retry_of__in=unsent).values_list("retry_of", flat=True)
    taken_back = set(again) if unsent else set()
    causes = load_causes({each.event_id for each in ended})
    found = []
    for each in ended:
        if each.task_id in taken_back:
            continue
        cause, node, user_id = causes.get(each.event_id), config.nodes.get(each.node_id), users.get(each.customer_id)
        if not (cause and node and user_id) or read_depth(cause.type, cause.data) > node.most_depth:
            continue
        kind, at = END_TYPES[each.state], each.settled_at
        data = compose_end_data(node, each.task_id, each.root_id, each.reason, cause)
        found.append(NewEvent(SOURCE, f"{kind}:{each.root_id}", kind, user_id, each.chat_id, at, data, cause.trace))
    return found


def load_causes(event_ids: set[UUID]) -> dict[UUID, EventSpec]:
    """Return the events that planned touches, by id."""
    parameters = {"ids": sorted(event_ids), "types": sorted(TOUCH_TYPES), "most": 4 * LARGEST_ORIGIN}
    return {row[0]: EventSpec(*row) for row in sql.rows(_CAUSES, parameters)}


# Large data of other systems is not passed on, so it is not read either.
_CAUSES = """
SELECT id, source, event_id, type, occurred_at, user_id, chat_id,
       CASE WHEN type = ANY(%(types)b) OR octet_length(data::text) <= %(most)s THEN data ELSE '{}' END, trace_id
FROM scheduling_event WHERE id = ANY(%(ids)b::uuid[])
"""


# --- inactive customers -----------------------------------------------------------------------------------------------


def scan_inactive_customers() -> int:
    """Raise an event for each inactive customer, for at most `LONGEST_PASS` seconds. Return the number of events.

    The next scan continues with the rest. The event id contains the last activity. A scan that repeats, or dies before
    it stores its progress, therefore raises no event twice.
    """
    ends_at, raised = monotonic() + LONGEST_PASS, 0
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
        record_and_publish(
            [
                NewEvent(
                    source=SOURCE,
                    event_id=f"inactive:{user_id}:{last_active_at.isoformat()}",
                    type="customer.inactive",
                    user_id=user_id,
                    data={"last_active_at": last_active_at.isoformat()},
                )
                for _, user_id, last_active_at in inactive
            ]
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
            erased = [new[user_id] for user_id, at in read_erasure_times(new).items() if seen[user_id] <= at]
            if erased:
                sql.execute(_DELETE, {"ids": erased})
            customers |= new
        sql.execute(_RAISE, {"ids": list(customers.values()), "at": [seen[user_id] for user_id in customers]})
    return set(customers)


_DELETE = "DELETE FROM scheduling_customer WHERE id = ANY(%(ids)b)"
_RAISE = """
UPDATE scheduling_customer AS c SET last_active_at = v.at
FROM unnest(%(ids)b::bigint[], %(at)b::timestamptz[]) AS v(id, at)
WHERE c.id = v.id AND (c.last_active_at IS NULL OR c.last_active_at < v.at)
"""
