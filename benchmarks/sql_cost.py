"""Measure the cost of the current SQL statements alone, for the rows of a delivered touch.

*PostgreSQL*: the server writes the rows itself, without worker, message, guard or history. *Worker*: Python reads and
writes the same rows with the product's statements, without judgement, rendering, logging or Celery. The result is not
a lower bound: other statements or tables can cost less.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from django.db import connection, transaction

from benchmarks import workload
from benchmarks.environment import Bench, processor_seconds
from scheduling.configuration import snapshot
from scheduling.delivery import due_batch
from scheduling.delivery.announced import MOST_BYTES, Announcement, load_announced
from scheduling.ledger.touches import TouchDecision, touches
from scheduling.ledger.transitions import Settlement
from scheduling.models import Touch
from scheduling.policy.guards import GuardVerdict

BATCH = 500
LEASE = timedelta(seconds=60)


def measure_postgres(bench: Bench, count: int) -> float:
    """Return microseconds of the server's processor time per touch."""
    _plan(count)
    server = [bench.servers["PostgreSQL"]]
    before = processor_seconds(server)
    with connection.cursor() as cursor:
        for _ in range(-(-count // BATCH)):
            with transaction.atomic():
                cursor.execute(_WRITE, {"batch": BATCH, "body": workload.BODY})
    return (processor_seconds(server) - before) / count * 1e6


def measure_worker(count: int) -> float:
    """Return microseconds of this process's processor time per touch."""
    _plan(count)
    task_ids = list(Touch.objects.values_list("task_id", flat=True))
    config = snapshot.current()
    decision = TouchDecision(Settlement("delivered"), GuardVerdict("send"))
    began_at = time.process_time()
    for start in range(0, count, BATCH):
        batch = task_ids[start : start + BATCH]
        with transaction.atomic():
            announced = Announcement(load_announced(batch, most_bytes=MOST_BYTES), {}, {})
            locked = due_batch.lock(announced, config)
            assert locked is not None
            due, at = locked.due, locked.locked_at
            texts = [("", workload.BODY)] * len(due)
            touches.settle_batch({decision: [row.task_id for row in due]}, at=at, lease=LEASE, texts=texts)
    return (time.process_time() - began_at) / count * 1e6


def _plan(count: int) -> None:
    (cell,) = workload.create_matrix()
    workload.delete_all()
    workload.create_customers(count)
    now = datetime.now(UTC)
    workload.plan_touches([workload.Plan(number + 1, cell, now) for number in range(count)])


_WRITE = """
WITH due AS (
    SELECT task_id FROM scheduling_touch_live WHERE state = 'scheduled' ORDER BY due_at LIMIT %(batch)s
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE scheduling_touch AS row
SET state = 'delivered', lease_no = 1, attempt = 1, sending_at = now(), settled_at = now(), reserved_at = now(),
    content_type = 'guide-0', template_version = 1, verdicts = '[[1, "send"]]',
    attempts = jsonb_build_array(jsonb_build_array(1, 1, 1, 1, 'delivered', '', '', NULL, '', %(body)s::text))
FROM due WHERE row.task_id = due.task_id
"""
