"""Bulk publish one request for many shops without merging: two statements for 500 shops.

One transaction per shop would occupy a core worker's process for seconds each time. The same processes deliver touches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from django.conf import settings
from django.db import transaction

from rpa_tasks.jobs import dedupe_windows
from rpa_tasks.jobs.payloads import add_period, as_stored, flow_key_of, key_of_payload
from rpa_tasks.jobs.publish import INSERT_JOBS
from rpa_tasks.jobs.wakeups import wakeup_publisher
from rpa_tasks.models import Flow
from scheduling import sql
from scheduling.ids import new_id
from scheduling.ledger.transitions import WAKEUP_LEASE, WakeUp

BATCH = 500
SOURCE = "schedule"


@dataclass(frozen=True, slots=True)
class BulkPublishCounts:
    """Counts of shops: job published, job already waiting, refused because of a backlog limit."""

    published: int = 0
    waiting: int = 0
    refused: int = 0

    def __add__(self, other: BulkPublishCounts) -> BulkPublishCounts:
        return BulkPublishCounts(
            self.published + other.published, self.waiting + other.waiting, self.refused + other.refused
        )


#: Called in the transaction of each batch with the batch's last shop and counts. An exception from it rolls the batch
#: back and ends the bulk publish.
ProgressCallback = Callable[[int, BulkPublishCounts], None]


def publish_bulk(
    flow: Flow,
    delays: Mapping[int, timedelta],
    *,
    payload: Mapping[str, Any],
    priority: int,
    due_at: datetime | None = None,
    due_seconds: float | None = None,
    note: ProgressCallback | None = None,
) -> BulkPublishCounts:
    """Publish a job of `flow` for each shop (primary key) after its delay. Safe to repeat and to run concurrently.

    A shop with a waiting job, or whose window has not ended, keeps its job unchanged. Shops that were refused are left
    to the next call. With a period of the clock all jobs belong to that of `due_at`, when the schedule fell due (None:
    now), also those that start later. Their deadline is `due_seconds` after it.
    Counting and inserting are separate transactions. Otherwise two calls could deadlock: one holds waiting jobs while
    it waits for the insert of the other.
    """
    counts, left = BulkPublishCounts(), iter(sorted(delays.items()))
    payload = as_stored(payload)
    key = flow_key_of(flow, payload)
    if key is None:  # the flow merges nothing, but a schedule skips a shop where a job with its payload is waiting
        key = key_of_payload(payload)
    at = sql.now()
    fell_due = due_at or at
    period, lasts = dedupe_windows.find_window(flow, at, fell_due - at)
    common = {
        "flow": flow.pk, "platform": flow.platform_id, "payload": json.dumps(payload), "priority": priority,
        "key": add_period(key, period), "window": lasts, "by_clock": bool(period),
        "deadline": fell_due + timedelta(seconds=due_seconds) if due_seconds else None,
    }  # fmt: skip
    while batch := dict(islice(left, BATCH)):
        counts += _publish_batch(flow, batch, common, note)
    return counts


def _publish_batch(
    flow: Flow, delays: Mapping[int, timedelta], common: Mapping[str, Any], note: ProgressCallback | None
) -> BulkPublishCounts:
    with transaction.atomic(durable=True):
        waiting = {
            row[0]
            for row in sql.rows(_COUNT_REQUESTS, {"shops": list(delays), "flow": common["flow"], "key": common["key"]})
        }
    free = {shop: delay for shop, delay in delays.items() if shop not in waiting}
    ids = [new_id() for _ in free]
    given = {
        "shops": list(free),
        "ids": ids,
        "delays": list(free.values()),
        "horizon": settings.AFTERTOUCH_HORIZON,
        "lease": WAKEUP_LEASE,
        "source": SOURCE,
        "touch": None,
    }
    statement = _INSERT.format(tried=_ALL_TRIED)
    if flow.has_window:
        statement = _INSERT.format(tried=_CLAIMED.format(take_over=dedupe_windows.take_over(flow)))
    with transaction.atomic(durable=True):
        tried = sql.rows(statement, {**common, **given}) if free else []
        if flow.has_window:
            dedupe_windows.release_unused(ids)
        made_count = sum(row[1] is not None for row in tried)
        done = BulkPublishCounts(made_count, len(waiting) + len(tried) - made_count, len(free) - len(tried))
        if note:
            note(max(delays), done)
    made = [row for row in tried if row[1] is not None]  # for the others a concurrent request published a job
    created = [
        WakeUp(task_id, due_at, common["priority"], shop) for shop, task_id, state, due_at in made if state == "queued"
    ]
    wakeup_publisher.submit(created)
    return done


# A row that another transaction has locked is skipped: its count of requests is only informative.
_COUNT_REQUESTS = """
WITH standing AS MATERIALIZED (
    SELECT task_id, shop_id FROM rpa_tasks_job
    WHERE shop_id = ANY(%(shops)b::bigint[]) AND flow_id = %(flow)s AND dedupe_key = %(key)s
      AND state IN ('scheduled', 'queued') AND paused_by = ''
), mine AS MATERIALIZED (
    SELECT task_id FROM rpa_tasks_job WHERE task_id IN (SELECT task_id FROM standing)
      AND state IN ('scheduled', 'queued')
    FOR UPDATE SKIP LOCKED
), noted AS (
    UPDATE rpa_tasks_job AS job SET requests = job.requests + 1 FROM mine WHERE job.task_id = mine.task_id
)
SELECT shop_id FROM standing
"""
_INSERT = f"""
WITH wanted AS MATERIALIZED (
    SELECT w.shop_id, w.task_id, w.delay, w.delay <= %(horizon)s AS soon
    FROM unnest(%(shops)b::bigint[], %(ids)b::uuid[], %(delays)b::interval[]) AS w(shop_id, task_id, delay)
), room AS MATERIALIZED (
    SELECT platform.backlog_limit - count(job.task_id) AS left
    FROM rpa_tasks_platform AS platform
        JOIN rpa_tasks_shop AS shop ON shop.platform_id = platform.id
        LEFT JOIN rpa_tasks_job AS job
            ON job.shop_id = shop.id AND job.state IN ('scheduled', 'queued') AND job.paused_by = ''
    WHERE platform.id = %(platform)s GROUP BY platform.backlog_limit
), fitting AS MATERIALIZED (
    SELECT wanted.*, row_number() OVER (ORDER BY wanted.delay, wanted.shop_id) AS place
    FROM wanted JOIN rpa_tasks_shop AS shop ON shop.id = wanted.shop_id
    WHERE shop.backlog_limit > (
        SELECT count(*) FROM rpa_tasks_job AS job
        WHERE job.shop_id = wanted.shop_id AND job.state IN ('scheduled', 'queued') AND job.paused_by = ''
    )
), candidates AS MATERIALIZED (
    SELECT * FROM fitting WHERE place <= (SELECT room.left FROM room)
), {{tried}}, made AS ({INSERT_JOBS})
SELECT candidates.shop_id, made.task_id, made.state, made.due_at FROM candidates LEFT JOIN made USING (shop_id)
"""  # noqa: S608  (only our own words)
_ALL_TRIED = "tried AS MATERIALIZED (SELECT * FROM candidates)"
_CLAIMED = """
claimed AS (
    INSERT INTO rpa_tasks_dedupewindow AS held (task_id, shop_id, flow_id, key, ends_at)
    SELECT task_id, shop_id, %(flow)s, %(key)s, statement_timestamp() + %(window)s
           + CASE WHEN %(by_clock)s THEN interval '0' ELSE delay END
    FROM candidates ORDER BY shop_id
    {take_over}
    RETURNING held.task_id
), tried AS MATERIALIZED (SELECT candidates.* FROM candidates JOIN claimed USING (task_id))
"""
