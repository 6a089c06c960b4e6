"""Delete rows older than their retention time.

These are handled failed tasks, ended touches, events, bulk actions, customer imports, receipts, ids of vendors,
disabled targets, audit entries, acts that can no longer be undone, and tables of other apps. Tables are read
in key order, which is the order of creation (`scheduling.ids`). Writers thus pay for no index by age. A batch is one
short transaction that skips locked rows. Any number of passes may run at once. A killed pass loses only its current
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import structlog
from django.conf import settings
from django.db import close_old_connections, transaction
from django.db.models import Max

from scheduling import sql
from scheduling.app_integrations import integrations
from scheduling.configuration import snapshot
from scheduling.delivery import routing
from scheduling.ids import first_id_at
from scheduling.ledger import ends, partitions
from scheduling.models import CustomerImport, Node, RefusedLines
from scheduling.operations.undo import KEPT_FOR

log = structlog.get_logger(__name__)

BATCH = 1_000  #: rows checked per transaction
LONGEST_TABLE_PASS = timedelta(seconds=1)  #: per kind and pass: its worker has other long work, too
#: A sender may repeat an event for that long. The stored row identifies the duplicate.
EVENTS_KNOWN_FOR = timedelta(days=90)
START = UUID(int=0)
#: By table: where the last pass of this process ran out of time. Old rows that stay must not block those after them.
reached: dict[str, UUID] = {}


@dataclass(frozen=True, slots=True)
class RetentionTable:
    """A table with retention. Its key is a time-ordered UUID."""

    table: str
    kept: Callable[[], timedelta]  #: retention time after the end of a row
    #: Delete those of the given rows that ended before the instant, with their dependent rows. Return the number.
    delete: Callable[[list[UUID], datetime], int]
    key: str = "id"


def delete_expired_rows() -> dict[str, int]:
    """Run one pass. Return the number of deleted rows by table. The failure of one kind does not stop the others."""
    deletions: dict[str, Callable[..., int]] = {
        kind.table: partial(delete_expired_in_table, kind)
        for kind in (*TABLES, *(table for app in integrations() for table in app.retention))
    }
    deletions["scheduling_disabledtarget"] = _delete_expired_targets
    deletions["scheduling_touch_ended"] = _drop_expired_partitions
    deleted: dict[str, int] = {}
    for table, delete in deletions.items():
        try:
            deleted[table] = delete(ends_at=datetime.now(UTC) + LONGEST_TABLE_PASS)
        except Exception:
            log.exception("retention_failed", table=table)
            close_old_connections()
    if any(deleted.values()):
        log.info("expired_rows_deleted", **deleted)
    return deleted


def delete_expired_in_table(kind: RetentionTable, *, ends_at: datetime) -> int:
    """Delete old rows in batches, once around the table from where the last pass stopped.

    After `ends_at` no further batch starts.
    """
    before = _cutoff_time(kind.kept())
    newest = first_id_at(before)
    began = reached.pop(kind.table, START)
    deleted = 0
    for start, end in ((began, newest), (START, min(began, newest))):
        after: UUID | None = start
        while after is not None:
            with transaction.atomic():
                batch = _created_between(kind, after, end)
                deleted += kind.delete(batch, before) if batch else 0
            after = batch[-1] if batch else None
            if after is not None and datetime.now(UTC) >= ends_at:
                reached[kind.table] = after
                return deleted
    return deleted


def _cutoff_time(kept: timedelta) -> datetime:
    ((instant,),) = sql.rows("SELECT statement_timestamp() - %(kept)s::interval", {"kept": kept})
    assert isinstance(instant, datetime)
    return instant


def _created_between(kind: RetentionTable, after: UUID, end: UUID) -> list[UUID]:
    statement = f"""
        SELECT {kind.key} FROM {kind.table} WHERE {kind.key} > %(after)s AND {kind.key} < %(end)s
        ORDER BY {kind.key} LIMIT %(limit)s
    """  # noqa: S608 (names of a constant)
    return [row[0] for row in sql.rows(statement, {"after": after, "end": end, "limit": BATCH})]


# --- the kinds ----------------------------------------------------------------------------------------------------


def _delete_expired_targets(*, ends_at: datetime) -> int:
    deleted = 0
    while True:
        gone = routing.delete_expired_targets(BATCH)
        deleted += gone
        if gone < BATCH or datetime.now(UTC) >= ends_at:
            return deleted


def _drop_expired_partitions(*, ends_at: datetime) -> int:
    partitions.create_partitions()
    before, read = _cutoff_time(_retention_time()), ends.find_oldest_mark()
    # What a reader has not read stays.
    return partitions.drop_expired_partitions(min(before, read) if read else before)


def _retention_time() -> timedelta:
    """Return the retention time. It covers the longest window of a rule and the longest goal of a node."""
    goal = Node.objects.aggregate(longest=Max("goal_within"))["longest"] or timedelta(0)
    return max(timedelta(days=settings.AFTERTOUCH_RETENTION_DAYS), snapshot.current().window, goal)


def _event_time() -> timedelta:
    """Return the retention time of events.

    A touch counts earlier events when it is planned and again when it is judged. So events stay for the longest wait of
    such a touch too.
    """
    config = snapshot.current()
    waits = [timedelta(0)]
    for node in map(config.nodes.__getitem__, config.counting_earlier):
        rules = node.delay_rules or config.delay_rules
        delays = [*rules.by_level.values(), rules.default] if node.dynamic else [node.delay]
        waits.append(max(delays) + node.expires_after)
    return max(_retention_time(), EVENTS_KNOWN_FOR + max(waits))


def delete_locked(lock: str, *deletions: str) -> Callable[[list[UUID], datetime], int]:
    """Return the deletion of rows that `lock` finds. The first `deletions` are those of rows that depend on them."""

    def delete(batch: list[UUID], before: datetime) -> int:
        over = [row[0] for row in sql.rows(lock, {"ids": batch, "before": before})]
        return [sql.execute(each, {"ids": over}) for each in deletions][-1] if over else 0

    return delete


def _delete_ended_imports(batch: list[UUID], before: datetime) -> int:
    over = CustomerImport.objects.filter(pk__in=batch, ended_at__lt=before)
    RefusedLines.objects.filter(upload__in=over).delete()
    return over.delete()[0]


def _delete_where(table: str, kept: Callable[[], timedelta], condition: str) -> RetentionTable:
    """Return a table whose rows no other rows depend on. It loses the old rows that meet the condition."""
    statement = f"DELETE FROM {table} WHERE id = ANY(%(ids)b) AND {condition}"  # noqa: S608 (made of constants)
    return RetentionTable(table, kept, lambda batch, before: sql.execute(statement, {"ids": batch, "before": before}))


# An open failed task waits for an operator without limit. An ignored one may still be published again until it is
# deleted; that action holds its lock, and so does a comment.
_LOCK_FAILED_TASKS = """
SELECT id FROM scheduling_failedtask
WHERE id = ANY(%(ids)b) AND state <> 'open' AND acted_at < %(before)s
FOR UPDATE SKIP LOCKED
"""
_DELETE_COMMENTS = "DELETE FROM scheduling_failedtaskcomment WHERE failed_task_id = ANY(%(ids)b)"
_DELETE_FAILED_TASKS = "DELETE FROM scheduling_failedtask WHERE id = ANY(%(ids)b)"

# Written with NOT EXISTS, PostgreSQL may read all touches into a hash table.
_LOCK_EVENTS = """
SELECT e.id FROM scheduling_event AS e
WHERE e.id = ANY(%(ids)b) AND e.received_at < %(before)s
  AND (SELECT t.task_id FROM scheduling_touch AS t WHERE t.event_id = e.id LIMIT 1) IS NULL
FOR UPDATE OF e SKIP LOCKED
"""
_DELETE_COMPLAINTS = "DELETE FROM scheduling_complaint WHERE event_id = ANY(%(ids)b)"
_DELETE_EVENTS = "DELETE FROM scheduling_event WHERE id = ANY(%(ids)b)"

TOUCHES = RetentionTable(partitions.REST, _retention_time, partitions.delete_ended, key="task_id")
EVENTS = RetentionTable(
    "scheduling_event", _event_time, delete_locked(_LOCK_EVENTS, _DELETE_COMPLAINTS, _DELETE_EVENTS)
)
TABLES = (
    RetentionTable(
        "scheduling_failedtask",
        _retention_time,
        delete_locked(_LOCK_FAILED_TASKS, _DELETE_COMMENTS, _DELETE_FAILED_TASKS),
    ),
    TOUCHES,  # that a dropped partition left: their failed task kept them, or the touch that repeats them
    EVENTS,
    _delete_where("scheduling_bulkaction", _retention_time, "state <> 'running' AND ended_at < %(before)s"),
    RetentionTable("scheduling_customerimport", _retention_time, _delete_ended_imports),
    _delete_where("scheduling_deliveryreceipt", _retention_time, "TRUE"),
    RetentionTable(
        "scheduling_vendormessage",
        lambda: timedelta(days=settings.AFTERTOUCH_VENDOR_IDS_DAYS),
        routing.delete_vendor_ids,
    ),
    _delete_where("scheduling_auditentry", lambda: timedelta(days=settings.AFTERTOUCH_AUDIT_DAYS), "at < %(before)s"),
    _delete_where("scheduling_undoableact", lambda: KEPT_FOR, "made_at < %(before)s"),
)
