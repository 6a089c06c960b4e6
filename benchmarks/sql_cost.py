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
from scheduling import sql
from scheduling.configuration import snapshot
from scheduling.delivery import due_batch, settlement
from scheduling.ledger import locks
from scheduling.ledger.touches import touches
from scheduling.ledger.transitions import Settlement
from scheduling.models import Touch

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
    began_at = time.process_time()
    for start in range(0, count, BATCH):
        batch = task_ids[start : start + BATCH]
        with transaction.atomic():
            locks.lock_customers(batch)
            due, _, at = touches.lock_due(batch)
            assert at is not None
            due_batch.load_history(due, config)
            touches.settle_batch({Settlement("delivered"): [row.claim.task_id for row in due]}, at=at, lease=LEASE)
            rows = [(row.claim.task_id, at.isoformat(), "send", "", 0, "", "", None) for row in due]
            sql.copy_rows(settlement._COPY_VERDICTS, rows)
            ends = [(row.claim.task_id, 1, 1, at, at, "delivered", "", "", None, "", workload.BODY) for row in due]
            sql.copy_rows(settlement._COPY_ATTEMPTS, ends)
    return (time.process_time() - began_at) / count * 1e6


def _plan(count: int) -> None:
    (cell,) = workload.create_matrix()
    workload.delete_all()
    workload.create_customers(count)
    now = datetime.now(UTC)
    workload.plan_touches([workload.Plan(number + 1, cell, now) for number in range(count)])


_WRITE = """
WITH due AS (
    SELECT task_id FROM scheduling_touch WHERE state = 'scheduled' ORDER BY due_at LIMIT %(batch)s
    FOR NO KEY UPDATE SKIP LOCKED
), touch AS (
    UPDATE scheduling_touch AS row
    SET state = 'delivered', lease_no = 1, attempt = 1, sending_at = now(), settled_at = now(), reserved_at = now(),
        content_type = 'guide-0', template_version = 1
    FROM due WHERE row.task_id = due.task_id RETURNING row.task_id
), verdict AS (
    INSERT INTO scheduling_verdict (touch_id, at, decision, rule, rule_version, observed, "limit")
    SELECT task_id, now(), 'send', '', 0, '', '' FROM touch
)
INSERT INTO scheduling_attempt
    (touch_id, number, lease_no, started_at, ended_at, outcome, reason, detail, subject, body)
SELECT task_id, 1, 1, now(), now(), 'delivered', '', '', '', %(body)s FROM touch
"""
