"""Signs of life that are no events: customers who write in a chat."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from scheduling import sql


def raise_last_active(seen: Mapping[str, datetime]) -> set[str]:
    """Note when customers were last active, by user id, and insert those who are not known. The time never goes back.

    Returns the user ids that are noted. The others are held by another transaction: note them later.
    """
    if not seen:
        return set()
    # Insert before anything is locked, as every writer does.
    with sql.brief_lock_waits():
        sql.count(_INSERT, {"user_ids": sorted(seen)})
        rows = sql.rows(_LOCK, {"user_ids": sorted(seen)})
        sql.count(_RAISE, {"ids": [row[0] for row in rows], "at": [seen[row[1]] for row in rows]})
    return {row[1] for row in rows}


_INSERT = """
INSERT INTO scheduling_customer (user_id, name, level, locale, timezone, addresses, opted_out, created_at)
SELECT u.user_id, '', '', '', '', '{}', false, statement_timestamp()
FROM unnest(%(user_ids)b::text[]) AS u(user_id)
WHERE NOT EXISTS (SELECT 1 FROM scheduling_customer AS c WHERE c.user_id = u.user_id)
ORDER BY u.user_id
ON CONFLICT (user_id) DO NOTHING
"""

# A watcher does this between two looks at its deadlines, so it waits for no lock.
_LOCK = """
SELECT id, user_id FROM scheduling_customer WHERE user_id = ANY(%(user_ids)b) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
"""

_RAISE = """
UPDATE scheduling_customer AS c SET last_active_at = v.at
FROM unnest(%(ids)b::bigint[], %(at)b::timestamptz[]) AS v(id, at)
WHERE c.id = v.id AND (c.last_active_at IS NULL OR c.last_active_at < v.at)
"""
