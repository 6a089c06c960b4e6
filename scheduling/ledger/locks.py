"""Lock rows in the one order that every writer keeps: customers, then communities, then touches. Each in the order of
its key, so that two writers cannot wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from scheduling import sql
from scheduling.policy.specs import CustomerSpec


def lock_customers(task_ids: Sequence[UUID]) -> dict[int, CustomerSpec]:
    """Lock the customers of these touches in the order of their ids, as every writer does."""
    rows = sql.rows(_LOCK_CUSTOMERS, {"ids": list(task_ids)})
    return {row[0]: CustomerSpec(*row) for row in rows}


def lock_communities(task_ids: Sequence[UUID]) -> None:
    """Where a community cap is on: the communities too, after the customers. Unknown ones get a row to lock."""
    sql.count(_INSERT_COMMUNITIES, {"ids": list(task_ids)})
    sql.rows(_LOCK_COMMUNITIES, {"ids": list(task_ids)})


# A touch that is running now may be back in the table before the claim, so its customer is locked as well (and
# Presence asked about it): nothing is claimed whose customer is not.
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
