"""Lock rows in one global order: customers, communities, touches.

Each table is locked in the order of its key, so that two writers cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from scheduling import sql
from scheduling.policy.specs import CustomerSpec


def insert_customers(user_ids: Sequence[str]) -> None:
    """Insert the users that are not yet stored. Call it before any lock is taken. Idempotent."""
    sql.count(_INSERT_CUSTOMERS, {"user_ids": user_ids})


def lock_customers(task_ids: Sequence[UUID]) -> dict[int, CustomerSpec]:
    """Lock the customers of these touches in the order of their ids and return them by id."""
    rows = sql.rows(_LOCK_CUSTOMERS, {"ids": list(task_ids)})
    return {row[0]: CustomerSpec(*row) for row in rows}


def lock_communities(task_ids: Sequence[UUID]) -> None:
    """Lock the communities of these touches, after the customers. Create missing rows first.

    Needed only while a community cap is active.
    """
    sql.count(_INSERT_COMMUNITIES, {"ids": list(task_ids)})
    sql.rows(_LOCK_COMMUNITIES, {"ids": list(task_ids)})


_INSERT_CUSTOMERS = """
INSERT INTO scheduling_customer (user_id, name, level, locale, timezone, addresses, opted_out, created_at)
SELECT u.user_id, '', '', '', '', '{}', false, statement_timestamp()
FROM unnest(%(user_ids)b::text[]) AS u(user_id)
WHERE NOT EXISTS (SELECT 1 FROM scheduling_customer AS c WHERE c.user_id = u.user_id)
ORDER BY u.user_id
ON CONFLICT (user_id) DO NOTHING
"""

# A touch that runs now may be waiting again before the claim. Its customer is therefore locked too, and Presence is
# asked about it. No touch is claimed without its customer's lock.
_LOCK_CUSTOMERS = """
SELECT id, user_id, name, level, locale, timezone, opted_out, last_active_at, conversation_at, addresses
FROM scheduling_customer WHERE id = ANY(ARRAY(
    SELECT customer_id FROM scheduling_touch
    WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued', 'running')
))
ORDER BY id FOR NO KEY UPDATE
"""

_INSERT_COMMUNITIES = """
INSERT INTO scheduling_community (chat_id, name, targets)
SELECT DISTINCT t.chat_id, '', '' FROM scheduling_touch AS t
WHERE t.task_id = ANY(%(ids)b) AND t.chat_id <> ''
  AND NOT EXISTS (SELECT 1 FROM scheduling_community AS c WHERE c.chat_id = t.chat_id)
ORDER BY t.chat_id
ON CONFLICT (chat_id) DO NOTHING
"""

_LOCK_COMMUNITIES = """
SELECT id FROM scheduling_community
WHERE chat_id IN (SELECT chat_id FROM scheduling_touch WHERE task_id = ANY(%(ids)b) AND chat_id <> '')
ORDER BY chat_id FOR NO KEY UPDATE
"""
