"""Delete ended touches, those of an erasure, and a republished touch that an undo withdraws."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from scheduling import sql


def delete_ended(task_ids: Sequence[UUID], before: datetime) -> int:
    """Delete the touches of the partition `rest` that ended before `before` and that nothing needs. Return the number.

    Touches that another transaction has locked are skipped. Whole partitions are dropped instead (`partitions`).
    """
    over = [row[0] for row in sql.rows(_LOCK_TOUCHES, {"ids": task_ids, "before": before})]
    if not over:
        return 0
    sql.execute(_LEAVE_COMPLAINTS, {"ids": over})
    return sql.execute(_DELETE_TOUCHES, {"ids": over})


# A touch stays as long as its failed task, from which it may be published again. It also stays as long as its
# republished touch: that one checks whether its predecessor has an unknown outcome, and shares its delivery key.
_LOCK_TOUCHES = """
SELECT t.task_id FROM scheduling_touch_ended_rest AS t
WHERE t.task_id = ANY(%(ids)b) AND t.state IN ('delivered', 'suppressed', 'cancelled', 'failed', 'unknown')
  AND t.settled_at < %(before)s AND (t.reserved_at IS NULL OR t.reserved_at < %(before)s)
  AND NOT EXISTS (SELECT FROM scheduling_failedtask AS f WHERE f.task_id = t.task_id)
  AND (SELECT again.task_id FROM scheduling_touch AS again WHERE again.retry_of = t.task_id LIMIT 1) IS NULL
FOR UPDATE OF t SKIP LOCKED
"""
_LEAVE_COMPLAINTS = "UPDATE scheduling_complaint SET touch_id = NULL WHERE touch_id = ANY(%(ids)b)"
_DELETE_TOUCHES = "DELETE FROM scheduling_touch_ended_rest WHERE task_id = ANY(%(ids)b)"


def delete_unclaimed_retry(task_id: UUID, *, keeps_slot: bool) -> bool:
    """Delete a republished touch that no worker has claimed. Return whether there was one.

    A row that another transaction has locked stays. With `keeps_slot` the cap slot goes back to the original.
    """
    rows = sql.rows(_WITHDRAW_RETRY, {"id": task_id})
    for old_id, reserved_at in rows if keeps_slot else ():
        sql.execute(_RETURN_SLOT, {"id": old_id, "at": reserved_at})
    return bool(rows)


_WITHDRAW_RETRY = """
DELETE FROM scheduling_touch_live WHERE task_id = ANY(ARRAY(
    SELECT task_id FROM scheduling_touch_live
    WHERE task_id = %(id)s AND COALESCE(state, '') IN ('scheduled', 'queued') AND lease_no = 0
    FOR UPDATE SKIP LOCKED
))
RETURNING retry_of, reserved_at
"""
_RETURN_SLOT = "UPDATE scheduling_touch_ended SET reserved_at = %(at)s WHERE task_id = %(id)s"


def delete_touches_of(event_ids: Sequence[UUID]) -> tuple[list[UUID], int]:
    """Delete the touches of these events with their failed tasks. Return their ids and how many are being sent.

    Call it while the customers are locked. A touch that a worker holds stays.
    """
    deleted = [row[0] for row in sql.rows(_DELETE_TOUCHES_OF, {"events": sql.UuidArray(event_ids)})]
    ((running,),) = sql.rows(_COUNT_TOUCHES_OF, {"events": sql.UuidArray(event_ids)})
    sql.execute(_DELETE_COMMENTS_OF, {"ids": sql.UuidArray(deleted)})
    sql.execute("DELETE FROM scheduling_failedtask WHERE task_id = ANY(%(ids)b)", {"ids": sql.UuidArray(deleted)})
    return deleted, running


_DELETE_TOUCHES_OF = """
DELETE FROM scheduling_touch WHERE event_id = ANY(%(events)b) AND state <> 'running' RETURNING task_id
"""
_COUNT_TOUCHES_OF = "SELECT count(*) FROM scheduling_touch WHERE event_id = ANY(%(events)b)"
_DELETE_COMMENTS_OF = """
DELETE FROM scheduling_failedtaskcomment AS c USING scheduling_failedtask AS f
WHERE f.id = c.failed_task_id AND f.task_id = ANY(%(ids)b)
"""
