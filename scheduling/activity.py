"""Signs of life that are no events: customers who write in a chat."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from django.db import transaction

from scheduling import sql


def raise_last_active(seen: Mapping[str, datetime]) -> int:
    """Note when customers were last active, by user id; whoever was not known is known from now on. It never goes
    back. Returns how many it changed."""
    if not seen:
        return 0
    with transaction.atomic():
        # In the order of every writer: insert before anything is locked, then lock by id.
        sql.count(_INSERT, {"user_ids": sorted(seen)})
        rows = sql.rows(_LOCK, {"user_ids": sorted(seen)})
        return sql.count(_RAISE, {"ids": [row[0] for row in rows], "at": [seen[row[1]] for row in rows]})


_INSERT = """
INSERT INTO scheduling_customer (user_id, name, level, locale, timezone, addresses, opted_out, created_at)
SELECT u.user_id, '', '', '', '', '{}', false, statement_timestamp()
FROM unnest(%(user_ids)b::text[]) AS u(user_id)
WHERE NOT EXISTS (SELECT 1 FROM scheduling_customer AS c WHERE c.user_id = u.user_id)
ORDER BY u.user_id
ON CONFLICT (user_id) DO NOTHING
"""

_LOCK = "SELECT id, user_id FROM scheduling_customer WHERE user_id = ANY(%(user_ids)b) ORDER BY id FOR NO KEY UPDATE"

_RAISE = """
UPDATE scheduling_customer AS c SET last_active_at = v.at
FROM unnest(%(ids)b::bigint[], %(at)b::timestamptz[]) AS v(id, at)
WHERE c.id = v.id AND (c.last_active_at IS NULL OR c.last_active_at < v.at)
"""
