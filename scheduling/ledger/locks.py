"""Lock rows in one global order: customers, communities, nodes, touches.

All writers do so. Each table is locked in the order of its key, so that two writers cannot deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from scheduling import sql
from scheduling.policy.matrix import Activity
from scheduling.policy.profile import Profile, read_profile
from scheduling.policy.specs import CustomerSpec

POLL = 0.02  #: seconds


def insert_customers(activity: Mapping[str, Activity]) -> dict[str, int]:
    """Insert users with their activity, except stored ones. Return the ids of the new rows by user id.

    An insert waits for another transaction that inserts the same user. Wait for no lock of a customer after it.
    """
    users = sorted(activity.items())
    rows = sql.rows(
        _INSERT_CUSTOMERS,
        {
            "user_ids": [user_id for user_id, _ in users],
            "active": [active_at for _, (active_at, _) in users],
            "talking": [talking_at for _, (_, talking_at) in users],
        },
    )
    return dict(rows)


def lock_customers_of_touches(task_ids: Sequence[UUID]) -> dict[int, CustomerSpec]:
    """Lock the customers of these touches in the order of their ids and return them by id."""
    rows = sql.rows(_LOCK_CUSTOMERS_OF_TOUCHES, {"ids": list(task_ids)})
    return {row[0]: CustomerSpec(*row) if row[-1] else CustomerSpec(*row[:-1]) for row in rows}


def await_customer_locks(limit: timedelta) -> bool:
    """Wait until the transactions that lock customers now have ended. Return whether they ended within the limit.

    It locks no row, so that later ones do not wait. Call it outside a transaction.
    """
    ends_at = time.monotonic() + limit.total_seconds()
    left = _list_lockers()
    while left and time.monotonic() < ends_at:
        time.sleep(POLL)
        left &= _list_lockers()
    return not left


def _list_lockers() -> set[str]:
    """Return the virtual ids of other transactions that have locked or changed customers."""
    return {row[0] for row in sql.rows(_LOCKERS, {})}


def load_profiles(customer_ids: Iterable[int]) -> dict[int, Profile]:
    """Return the profiles of those customers that have one. Call it after the lock, and only if one is needed."""
    rows = sql.rows(_PROFILES, {"ids": sorted(set(customer_ids))})
    return {customer_id: read_profile(attributes, tags) for customer_id, attributes, tags in rows}


def lock_customers_by_user_id(user_ids: Sequence[str]) -> dict[str, CustomerSpec]:
    """Lock the stored customers with these user ids. Return them by user id."""
    rows = sql.rows(_LOCK_CUSTOMERS_BY_USER_ID, {"user_ids": user_ids})
    return {row[1]: CustomerSpec(*row) for row in rows}


def lock_nodes(node_ids: Iterable[int]) -> set[int]:
    """Keep these nodes from deletion until the transaction ends. Return those that exist. Edits do not wait."""
    return {row[0] for row in sql.rows(_LOCK_NODES, {"ids": sorted(node_ids)})}


def lock_remaining(customer_ids: Iterable[int]) -> dict[int, str]:
    """Lock these customers, except erased ones. Return their user ids by id."""
    return dict(sql.rows(_LOCK_REMAINING, {"ids": sorted(set(customer_ids))}))


def lock_free_users(user_ids: Sequence[str]) -> dict[str, int]:
    """Lock those of the customers that no other transaction has locked. Return their ids by user id."""
    return {user_id: key for key, user_id in sql.rows(_LOCK_FREE_USERS, {"user_ids": user_ids})}


def locked_users(user_ids: Iterable[str]) -> set[str]:
    """Return the `user_ids` that another transaction holds locked now. Waits for no lock."""
    return {row[0] for row in sql.rows(_LOCKED_USERS, {"user_ids": sorted(set(user_ids))})}


def lock_inactive(after: timedelta, limit: int) -> list[tuple[int, str, datetime]]:
    """Lock up to `limit` free customers without activity for `after` that are not yet marked inactive.

    Return id, user id and last activity of each. Two scans at once share the work.
    """
    return [tuple(row) for row in sql.rows(_LOCK_INACTIVE, {"after": after, "limit": limit})]


def lock_communities(task_ids: Sequence[UUID]) -> None:
    """Lock the communities of these touches, after the customers. Create missing rows first.

    Needed only while a community cap is active. A row that is deleted while this waits for it is created again.
    """
    locked_all = False
    while not locked_all:
        sql.execute(_INSERT_COMMUNITIES, {"ids": list(task_ids)})
        ((locked_all,),) = sql.rows(_LOCK_COMMUNITIES, {"ids": list(task_ids)})


def delete_personal_chats(event_ids: Sequence[UUID]) -> int:
    """Delete the rows that exist only for the lock of these events' chats. Their ids may name a customer."""
    chats = [row[0] for row in sql.rows(_LOCK_PERSONAL_CHATS, {"events": list(event_ids)})]
    return sql.execute("DELETE FROM scheduling_community WHERE id = ANY(%(ids)b)", {"ids": chats}) if chats else 0


# A lock of a row holds one of its table until its transaction ends.
_LOCKERS = """
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = 'scheduling_customer'::regclass
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND mode IN ('RowShareLock', 'RowExclusiveLock') AND granted AND pid <> pg_backend_pid()
"""

_INSERT_CUSTOMERS = """
INSERT INTO scheduling_customer (user_id, name, level, locale, timezone, addresses, opted_out, created_at,
    last_active_at, conversation_at)
SELECT u.user_id, '', '', '', '', '{}', false, statement_timestamp(), u.active, u.talking
FROM unnest(%(user_ids)b::text[], %(active)b::timestamptz[], %(talking)b::timestamptz[]) AS u(user_id, active, talking)
ORDER BY u.user_id
ON CONFLICT (user_id) DO NOTHING
RETURNING user_id, id
"""

# A touch that runs now may be waiting again before the claim. Its customer is therefore locked too, and Presence is
# asked about it. No touch is claimed without its customer's lock.
_LOCK_CUSTOMERS_OF_TOUCHES = """
SELECT id, user_id, name, level, locale, timezone, opted_out, last_active_at, conversation_at,
       NULLIF(addresses, '{}')
FROM scheduling_customer WHERE id = ANY(ARRAY(
    SELECT customer_id FROM scheduling_touch_live
    WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued', 'running')
))
ORDER BY id FOR NO KEY UPDATE
"""

_PROFILES = """
SELECT customer_id, attributes, tags FROM scheduling_customerprofile WHERE customer_id = ANY(%(ids)b::bigint[])
"""

# A join: if the plan was made while the table was small, `= ANY` would compare each row with each user id.
_LOCK_CUSTOMERS_BY_USER_ID = """
SELECT c.id, c.user_id, c.name, c.level, c.locale, c.timezone, c.opted_out, c.last_active_at, c.conversation_at
FROM unnest(%(user_ids)b::text[]) AS u(user_id) JOIN scheduling_customer AS c ON c.user_id = u.user_id
ORDER BY c.id FOR NO KEY UPDATE OF c
"""

_LOCK_REMAINING = """
SELECT id, user_id FROM scheduling_customer WHERE id = ANY(%(ids)b::bigint[]) AND NOT starts_with(user_id, 'erased:')
ORDER BY id FOR NO KEY UPDATE
"""

_LOCK_NODES = "SELECT id FROM scheduling_node WHERE id = ANY(%(ids)b::bigint[]) ORDER BY id FOR KEY SHARE"

_LOCK_FREE_USERS = """
SELECT id, user_id FROM scheduling_customer WHERE user_id = ANY(%(user_ids)b) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
"""

_LOCKED_USERS = """
WITH free AS MATERIALIZED (
    SELECT id FROM scheduling_customer WHERE user_id = ANY(%(user_ids)b) FOR NO KEY UPDATE SKIP LOCKED
)
SELECT user_id FROM scheduling_customer WHERE user_id = ANY(%(user_ids)b) AND id NOT IN (SELECT id FROM free)
"""

_LOCK_INACTIVE = """
WITH inactive AS MATERIALIZED (
    SELECT id FROM scheduling_customer
    WHERE last_active_at IS NOT NULL AND (inactive_since IS NULL OR NOT inactive_since = last_active_at)
      AND last_active_at < statement_timestamp() - %(after)s
    ORDER BY last_active_at LIMIT %(limit)s
)
SELECT id, user_id, last_active_at FROM scheduling_customer
WHERE id IN (SELECT id FROM inactive) AND last_active_at < statement_timestamp() - %(after)s
ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
"""

_INSERT_COMMUNITIES = """
INSERT INTO scheduling_community (chat_id, name, targets)
SELECT DISTINCT t.chat_id, '', '' FROM scheduling_touch_live AS t
WHERE t.task_id = ANY(%(ids)b) AND t.chat_id <> ''
  AND NOT EXISTS (SELECT 1 FROM scheduling_community AS c WHERE c.chat_id = t.chat_id)
ORDER BY t.chat_id
ON CONFLICT (chat_id) DO NOTHING
"""

_LOCK_COMMUNITIES = """
WITH wanted AS MATERIALIZED (
    SELECT DISTINCT chat_id FROM scheduling_touch_live WHERE task_id = ANY(%(ids)b) AND chat_id <> ''
), locked AS MATERIALIZED (
    SELECT id FROM scheduling_community WHERE chat_id IN (SELECT chat_id FROM wanted)
    ORDER BY chat_id FOR NO KEY UPDATE
)
SELECT (SELECT count(*) FROM wanted) = (SELECT count(*) FROM locked)
"""

_LOCK_PERSONAL_CHATS = """
SELECT c.id FROM scheduling_community AS c
WHERE c.chat_id IN (SELECT chat_id FROM scheduling_touch WHERE event_id = ANY(%(events)b))
  AND c.name = '' AND c.targets = '' AND NOT EXISTS (
      SELECT FROM scheduling_alertreceiver AS receiver WHERE receiver.community_id = c.id)
ORDER BY c.chat_id FOR UPDATE OF c
"""
