"""Delete ended touches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from scheduling import sql


def delete_ended(task_ids: Sequence[UUID], before: datetime) -> int:
    """Delete the touches among `task_ids` that ended before `before` and that nothing refers to. Return their number.

    Their attempts and verdicts are deleted too, for which PostgreSQL has no cascade (see `Verdict`). Touches that
    another transaction has locked are skipped.
    """
    over = [row[0] for row in sql.rows(_LOCK_TOUCHES, {"ids": task_ids, "before": before})]
    if not over:
        return 0
    for statement in (_DELETE_ATTEMPTS, _DELETE_VERDICTS, _LEAVE_COMPLAINTS):
        sql.execute(statement, {"ids": over})
    return sql.execute(_DELETE_TOUCHES, {"ids": over})


# A touch stays as long as its failed task, from which it may be published again. It also stays as long as its
# republished touch: that one checks whether its predecessor has an unknown outcome, and shares its delivery key.
_LOCK_TOUCHES = """
SELECT t.task_id FROM scheduling_touch AS t
WHERE t.task_id = ANY(%(ids)b) AND t.state IN ('delivered', 'suppressed', 'cancelled', 'failed', 'unknown')
  AND t.settled_at < %(before)s AND (t.reserved_at IS NULL OR t.reserved_at < %(before)s)
  AND NOT EXISTS (SELECT FROM scheduling_failedtask AS f WHERE f.task_id = t.task_id)
  AND NOT EXISTS (SELECT FROM scheduling_touch AS again WHERE again.retry_of = t.task_id)
FOR UPDATE OF t SKIP LOCKED
"""
_DELETE_ATTEMPTS = "DELETE FROM scheduling_attempt WHERE touch_id = ANY(%(ids)b)"
_DELETE_VERDICTS = "DELETE FROM scheduling_verdict WHERE touch_id = ANY(%(ids)b)"
_LEAVE_COMPLAINTS = "UPDATE scheduling_complaint SET touch_id = NULL WHERE touch_id = ANY(%(ids)b)"
_DELETE_TOUCHES = "DELETE FROM scheduling_touch WHERE task_id = ANY(%(ids)b)"
