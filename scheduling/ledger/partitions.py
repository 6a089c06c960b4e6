"""Create the partitions of ended touches and drop them when their retention time is over.

Partitions exist for two spans ahead. If they are missing, rows go to the partition `rest` and nothing is lost. Any
number of passes may run at once. Workers settle no touch while a pass moves rows between partitions, because no row
may be missing or doubled for a reader. A pass therefore moves at most `MOST_MOVED` rows. More of them stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction

from scheduling import sql
from scheduling.ids import first_id_at

log = structlog.get_logger(__name__)

ENDED, REST = "scheduling_touch_ended", "scheduling_touch_ended_rest"
#: Seconds. A worker that settles touches waits behind this pass for at most that long.
LOCK_WAIT = 2.0
#: Rows in one transaction: about half a second under its locks.
MOST_MOVED = 10_000
#: A complaint's transaction is shorter, and its event's id comes from the clock of a node.
COMPLAINT_LAG = timedelta(minutes=10)


class Partition(NamedTuple):
    """A partition with the ends of its touches: from `since`, before `until`."""

    name: str
    since: datetime
    until: datetime


def create_partitions() -> int:
    """Create the missing partitions up to two spans ahead. Return their number. Idempotent.

    If `rest` holds more than `MOST_MOVED` rows of them, these stay there until they expire. Partitions then start with
    the next day.
    """
    span = timedelta(days=settings.AFTERTOUCH_PARTITION_DAYS)
    with transaction.atomic():
        sql.limit_lock_waits(LOCK_WAIT)
        sql.execute("SELECT pg_advisory_xact_lock(hashtext(%(name)s))", {"name": ENDED})
        ((today,),) = sql.rows("SELECT date_trunc('day', statement_timestamp(), 'UTC')", {})
        since = max([today, *(each.until for each in list_partitions())])
        if since > today + 2 * span:
            return 0
        sql.execute(f"LOCK TABLE {REST} IN ACCESS EXCLUSIVE MODE", {})
        ((waiting,),) = sql.rows(_COUNT_REST, {"since": since, "most": MOST_MOVED + 1})
        if waiting > MOST_MOVED:
            log.warning("partition_rest_kept", since=since.isoformat())
            since = max(since, today + timedelta(days=1))
        missing = []
        while since <= today + 2 * span:
            missing.append(Partition(f"{ENDED}_{since:%Y%m%d}", since, since + span))
            since += span
        for each in missing:
            _create_partition(each)
    return len(missing)


def list_partitions() -> list[Partition]:
    """Return the partitions in order of time, without `rest`."""
    return [Partition(*row) for row in sql.rows(_PARTITIONS, {"ended": ENDED})]


def drop_expired_partitions(before: datetime) -> int:
    """Drop the partitions whose touches all ended before `before`. Return the number of dropped rows, estimated.

    A touch stays as long as its failed task, from which it may be published again. It also stays as long as a touch
    that repeats it: that one asks whether its predecessor has an unknown outcome, and shares its delivery key.
    """
    dropped = 0
    for each in list_partitions():
        if each.until <= before:
            dropped += _drop_partition(each)
    return dropped


def delete_ended(task_ids: Sequence[UUID], before: datetime) -> int:
    """Delete the touches of the partition `rest` that ended before `before` and that nothing needs. Return the number.

    Touches that another transaction has locked are skipped.
    """
    over = [row[0] for row in sql.rows(_LOCK_TOUCHES, {"ids": task_ids, "before": before})]
    if not over:
        return 0
    sql.execute(_LEAVE_COMPLAINTS, {"ids": over})
    return sql.execute(_DELETE_TOUCHES, {"ids": over})


def _create_partition(partition: Partition) -> None:
    """Create a partition as a table and attach it, which blocks no reader and no writer of other partitions."""
    name, since, until = partition.name, partition.since.isoformat(), partition.until.isoformat()
    columns = ", ".join(row[0] for row in sql.rows(_COLUMNS, {"ended": ENDED}))
    for statement in (
        f"CREATE TABLE {name} (LIKE {ENDED} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)",
        # Statistics of a few rows of one customer would make each probe of a customer read the whole partition.
        f"ALTER TABLE {name} ALTER COLUMN customer_id SET (n_distinct = -0.2)",
        f"""WITH moved AS (DELETE FROM {REST} WHERE settled_at >= '{since}' AND settled_at < '{until}' RETURNING *)
            INSERT INTO {name} ({columns}) SELECT {columns} FROM moved""",
        f"ALTER TABLE {ENDED} ATTACH PARTITION {name} FOR VALUES FROM ('{since}') TO ('{until}')",
    ):
        sql.execute(statement, {})
    log.info("partition_created", table=name, since=since, until=until)


def _drop_partition(partition: Partition) -> int:
    name, began = partition.name, sql.now()
    survivors: list[UUID] = [row[0] for row in sql.rows(_SURVIVORS.format(table=name), {"most": MOST_MOVED + 1})]
    if len(survivors) > MOST_MOVED:
        log.warning("partition_kept", table=name)
        return 0
    columns = ", ".join(row[0] for row in sql.rows(_COLUMNS, {"ended": ENDED}))
    _forget_complaints(name, survivors, after=UUID(int=0))
    with transaction.atomic():
        sql.limit_lock_waits(LOCK_WAIT)
        sql.execute("SELECT pg_advisory_xact_lock(hashtext(%(name)s))", {"name": ENDED})
        if partition not in list_partitions():
            return 0
        ((rows,),) = sql.rows("SELECT GREATEST(reltuples, 0)::bigint FROM pg_class WHERE relname = %(name)s",
                              {"name": name})  # fmt: skip
        sql.execute(f"ALTER TABLE {ENDED} DETACH PARTITION {name}", {})
        sql.execute(
            f"INSERT INTO {ENDED} ({columns}) SELECT {columns} FROM {name} WHERE task_id = ANY(%(kept)b)",
            {"kept": survivors},
        )
        _forget_complaints(name, survivors, after=first_id_at(began - COMPLAINT_LAG))  # those that came since
        sql.execute(f"DROP TABLE {name}", {})
    log.info("partition_dropped", table=name, kept=len(survivors))
    return int(rows)


def _forget_complaints(table: str, kept: list[UUID], *, after: UUID) -> None:
    """Let complaints of later events than `after` forget the touches of a partition, except `kept`. In batches."""
    last: UUID | None = after
    while last:
        statement = _FORGET_COMPLAINTS.format(table=table)
        ((last,),) = sql.rows(statement, {"kept": kept, "after": last, "limit": MOST_MOVED})


_COUNT_REST = f"""
SELECT count(*) FROM (SELECT FROM {REST} WHERE settled_at >= %(since)s ORDER BY settled_at LIMIT %(most)s) AS batch
"""

_PARTITIONS = """
SELECT name, bounds[1]::timestamptz, bounds[2]::timestamptz
FROM (
    SELECT c.relname AS name,
           regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \\(''(.+)''\\) TO \\(''(.+)''\\)') AS bounds
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = %(ended)s::regclass
) AS part
WHERE bounds IS NOT NULL
ORDER BY 2
"""

_COLUMNS = """
SELECT quote_ident(attname) FROM pg_attribute
WHERE attrelid = %(ended)s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""

# Each query starts at the small table and probes the partition by its key.
_SURVIVORS = """
SELECT needed.task_id FROM (
    SELECT task_id FROM scheduling_failedtask
    UNION SELECT retry_of FROM scheduling_touch WHERE retry_of IS NOT NULL
) AS needed
WHERE (SELECT t.task_id FROM {table} AS t WHERE t.task_id = needed.task_id LIMIT 1) IS NOT NULL
LIMIT %(most)s
"""

_FORGET_COMPLAINTS = """
WITH batch AS MATERIALIZED (
    SELECT event_id, touch_id FROM scheduling_complaint WHERE event_id > %(after)s ORDER BY event_id LIMIT %(limit)s
), forgotten AS (
    UPDATE scheduling_complaint AS c SET touch_id = NULL FROM batch
    WHERE c.event_id = batch.event_id AND NOT batch.touch_id = ANY(%(kept)b)
      AND (SELECT t.task_id FROM {table} AS t WHERE t.task_id = batch.touch_id LIMIT 1) IS NOT NULL
)
SELECT (SELECT event_id FROM batch ORDER BY event_id DESC LIMIT 1)
"""

# The same touches stay as in `drop_expired_partitions`.
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
