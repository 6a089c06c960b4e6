"""Insert new touches: those of an event, and the one that publishes an ended touch again, until an undo."""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import datetime
from uuid import UUID

from django.db.models.functions import Now

from scheduling import sql
from scheduling.ledger.touches import WAKEUP_LEASE, touch_ledger
from scheduling.models import Touch
from scheduling.policy.matrix import PlannedTouch


def insert_planned(planned: Sequence[PlannedTouch], dispatched: Set[UUID], *, at: datetime) -> None:
    """Insert touches that are planned at `at`, in one statement. Call it in the transaction of their events.

    Those whose ids are `dispatched` start as `queued`: their wake-ups are published after the commit.
    """
    rows = []
    for touch in planned:
        node, due_at, is_dispatched = touch.node, touch.due_at, touch.task_id in dispatched
        rows.append((
            touch.task_id,
            touch.task_id,
            "cancelled" if touch.cancelled_as else "queued" if is_dispatched else "scheduled",
            node.priority,
            due_at,
            due_at,
            "",
            0,
            0,
            max(due_at, at) + WAKEUP_LEASE if is_dispatched else None,
            int(is_dispatched),
            at if is_dispatched else None,
            at if touch.cancelled_as else None,
            touch.cancelled_as[:64],
            at,
            touch.event.id,
            node.id,
            node.version,
            touch.customer_id,
            touch.event.chat_id,
            touch.expires_at,
            "",
            node.guard_cap != "ignore",
        ))  # fmt: skip
    sql.copy_rows(_COPY_TOUCHES, rows, list(_PLANNED_COLUMNS.values()))


def insert_retry(
    old_id: UUID, task_id: UUID, due_at: datetime, *, as_new: bool, edited: bool = False, priority: int | None = None,
    expires_at: datetime | None = None,
) -> None:  # fmt: skip
    """Insert a touch for the event and node of an ended touch.

    With the same delivery key the cap slot moves to the new touch. A touch sent as new reserves its own slot at once.
    No dedupe or cap then suppresses what the operator confirmed. An edited touch has a new delivery key, and the guards
    check it as any retry. `expires_at` is that of the node, counted from `due_at`, unless given.
    """
    old = Touch.objects.select_related("node").get(pk=str(old_id))
    reserved_at = Now() if as_new else old.reserved_at
    if reserved_at and not as_new:
        touch_ledger.release_cap_slot(old.task_id)
    Touch.objects.create(
        task_id=task_id,
        root_id=task_id if as_new or edited else old.root_id,
        retry_of=old.task_id,
        created_at=Now(),
        priority=old.priority if priority is None else priority,
        due_at=due_at,
        planned_at=due_at,
        event_id=old.event_id,
        node_id=old.node_id,
        node_version=old.node.version,
        customer_id=old.customer_id,
        chat_id=old.chat_id,
        expires_at=expires_at or due_at + old.node.expires_after,
        reserved_at=reserved_at,
        content_type=old.content_type,
        template_id=old.template_id if reserved_at else None,
        counts_toward_cap=old.counts_toward_cap,
    )


def delete_unclaimed_retry(task_id: UUID, *, keeps_slot: bool) -> bool:
    """Delete a republished touch that no worker has claimed. Return whether there was one.

    A row that another transaction has locked stays. With `keeps_slot` the cap slot goes back to the original.
    """
    rows = sql.rows(_WITHDRAW_RETRY, {"id": task_id})
    for old_id, reserved_at in rows if keeps_slot else ():
        sql.execute(_RETURN_SLOT, {"id": old_id, "at": reserved_at})
    return bool(rows)


_PLANNED_COLUMNS = {
    "task_id": "uuid", "root_id": "uuid", "state": "varchar", "priority": "int2", "due_at": "timestamptz",
    "planned_at": "timestamptz", "paused_by": "varchar", "attempt": "int2", "lease_no": "int4",
    "lease_until": "timestamptz", "wakeups": "int2", "queued_at": "timestamptz", "settled_at": "timestamptz",
    "reason": "varchar", "created_at": "timestamptz", "event_id": "uuid", "node_id": "int8", "node_version": "int4",
    "customer_id": "int8", "chat_id": "varchar", "expires_at": "timestamptz", "content_type": "varchar",
    "counts_toward_cap": "bool",
}  # fmt: skip

_COPY_TOUCHES = f"COPY scheduling_touch ({', '.join(_PLANNED_COLUMNS)}) FROM STDIN (FORMAT BINARY)"

_WITHDRAW_RETRY = """
DELETE FROM scheduling_touch_live WHERE task_id = ANY(ARRAY(
    SELECT task_id FROM scheduling_touch_live
    WHERE task_id = %(id)s AND COALESCE(state, '') IN ('scheduled', 'queued') AND lease_no = 0
    FOR UPDATE SKIP LOCKED
))
RETURNING retry_of, reserved_at
"""
_RETURN_SLOT = "UPDATE scheduling_touch_ended SET reserved_at = %(at)s WHERE task_id = %(id)s"
