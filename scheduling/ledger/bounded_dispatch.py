"""Dispatch due touches by priority, and bound what is dispatched and not claimed.

Workers fetch messages ahead and hold delayed ones in memory. Without a bound, a hundred thousand touches that are due
at one moment delay every touch of a higher priority until they are delivered.
"""

from __future__ import annotations

from datetime import timedelta

from scheduling import sql
from scheduling.ledger.transitions import WAKEUP_LEASE, Ledger, WakeUp, fetch_wakeups
from scheduling.models.ledger import Priority

SLOT = timedelta(milliseconds=250)


class BoundedDispatch(Ledger):
    """The dispatch of touches. Jobs need no bound, because a shop runs one at a time."""

    def dispatch_due(
        self, *, horizon: timedelta = timedelta(0), limit: int = 1000, window: int = 5_000
    ) -> list[WakeUp]:
        """Mark up to `limit` touches due within `horizon` as dispatched, by priority and due time. Return them.

        What is dispatched and not claimed is bounded for each priority: `window` touches that are due, and half as many
        in each `SLOT` of the future, which workers hold in memory. Other touches wait in the table, where a backlog of
        one priority delays no other. Not counted are touches that intake dispatched at once, and wake-ups that may be
        lost: those that fell due more than `WAKEUP_LEASE` ago, and the third and later ones of a touch.

        Safe to run concurrently on any node: only one caller gets a row. Callers at the same moment may exceed a bound
        by one window each.
        """
        return fetch_wakeups(
            _DISPATCH_DUE,
            {
                "slots": -(-horizon // SLOT),
                "slot": SLOT,
                "limit": limit,
                "priorities": Priority.values,
                "window": window,
                "slot_window": window // 2,
                "lease": WAKEUP_LEASE,
            },
        )

    def seconds_until_due(self, horizon: timedelta) -> float | None:
        """Return the seconds until a touch that is not dispatched falls due; None if no touch does within `horizon`."""
        return sql.rows(_NEXT_DUE, {"priorities": Priority.values, "horizon": horizon})[0][0]  # type: ignore[no-any-return]


# Slot 0 holds what is due. A first wake-up that is due has a lease of at most twice WAKEUP_LEASE from now: the count
# needs no other leases in a pass that looks at slot 0 only. The order makes the index by lease the cheapest one, also
# where the statistics were made of an empty table.
_DISPATCH_DUE = """
WITH dispatched AS MATERIALIZED (
    SELECT priority, count(*) AS size,
           GREATEST(ceil(extract(epoch FROM due_at - statement_timestamp()) / extract(epoch FROM %(slot)s)), 0)
               AS number
    FROM (
        SELECT priority, due_at FROM scheduling_touch_live
        WHERE state IN ('queued', 'running') AND COALESCE(state, '') = 'queued'
          AND GREATEST(due_at, queued_at) > statement_timestamp() - %(lease)s AND queued_at > created_at
          AND lease_until > statement_timestamp()
          AND lease_until < statement_timestamp() + 2 * %(lease)s + %(slots)s * %(slot)s
        ORDER BY lease_until LIMIT 10000000
    ) AS queued
    GROUP BY priority, number
), slot AS (
    SELECT priority, number, (CASE number WHEN 0 THEN %(window)s ELSE %(slot_window)s END) - COALESCE(size, 0) AS room,
           CASE number WHEN 0 THEN '-infinity' ELSE statement_timestamp() + (number - 1) * %(slot)s END AS after
    FROM generate_series(0, %(slots)s::int) AS number CROSS JOIN unnest(%(priorities)b::int[]) AS priority
    LEFT JOIN dispatched USING (priority, number)
    ORDER BY number, priority
), due AS MATERIALIZED (
    SELECT touch.task_id FROM slot CROSS JOIN LATERAL (
        SELECT task_id FROM scheduling_touch_live
        WHERE state = 'scheduled' AND paused_by = '' AND priority = slot.priority
          AND due_at > slot.after AND due_at <= statement_timestamp() + slot.number * %(slot)s
        ORDER BY due_at LIMIT GREATEST(slot.room, 0)
        FOR UPDATE SKIP LOCKED
    ) AS touch
    LIMIT %(limit)s
)
UPDATE scheduling_touch_live AS row
SET state = 'queued', queued_at = statement_timestamp(), wakeups = LEAST(row.wakeups + 1, 30),
    lease_until = GREATEST(row.due_at, statement_timestamp()) + %(lease)s * power(2, LEAST(row.wakeups, 6))
WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM due))
RETURNING row.task_id, row.due_at, row.priority, row.node_id
"""

_NEXT_DUE = """
SELECT extract(epoch FROM min(touch.due_at) - statement_timestamp())::float8
FROM unnest(%(priorities)b::int[]) AS p(priority) CROSS JOIN LATERAL (
    SELECT due_at FROM scheduling_touch_live
    WHERE state = 'scheduled' AND paused_by = '' AND priority = p.priority
      AND due_at <= statement_timestamp() + %(horizon)s
    ORDER BY due_at LIMIT 1
) AS touch
"""
