"""Delete old jobs with their runs and remaining evidence, and old rounds (see `scheduling.operations.retention`)."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from django.conf import settings

from rpa_tasks.models import Job, ScheduledRound
from scheduling import sql
from scheduling.operations.retention import RetentionTable


def _retention_time() -> timedelta:
    return timedelta(days=settings.AFTERTOUCH_RPA_RETENTION_DAYS)


def _delete_jobs(batch: list[UUID], before: datetime) -> int:
    over = [row[0] for row in sql.rows(_LOCK, {"ids": batch, "before": before})]
    if not over:
        return 0
    for statement in (_DELETE_EVIDENCE, _DELETE_RUNS):
        sql.execute(statement, {"ids": over})
    return sql.execute(_DELETE_JOBS, {"ids": over})


JOBS = RetentionTable(Job._meta.db_table, "task_id", _retention_time, _delete_jobs)


def _delete_rounds(batch: list[UUID], before: datetime) -> int:
    return sql.execute(_DELETE_ROUNDS, {"ids": batch, "before": before})


ROUNDS = RetentionTable(ScheduledRound._meta.db_table, "id", _retention_time, _delete_rounds)

_DELETE_ROUNDS = """
DELETE FROM rpa_tasks_scheduledround WHERE id = ANY(%(ids)b) AND state <> 'waiting' AND ended_at < %(before)s
"""

# A job that delivers a touch stays as long as that touch. It prevents a second job for the same touch.
_LOCK = """
SELECT j.task_id FROM rpa_tasks_job AS j
WHERE j.task_id = ANY(%(ids)b) AND j.state IN ('succeeded', 'cancelled', 'failed', 'unknown')
  AND j.settled_at < %(before)s
  AND NOT EXISTS (SELECT FROM scheduling_failedtask AS f WHERE f.task_id = j.task_id)
  AND NOT EXISTS (SELECT FROM rpa_tasks_job AS again WHERE again.retry_of = j.task_id)
  AND NOT EXISTS (SELECT FROM scheduling_touch AS t WHERE t.task_id = j.touch_key)
FOR UPDATE OF j SKIP LOCKED
"""
_DELETE_EVIDENCE = """
DELETE FROM rpa_tasks_evidence AS e USING rpa_tasks_run AS r WHERE e.run_id = r.id AND r.job_id = ANY(%(ids)b)
"""
_DELETE_RUNS = "DELETE FROM rpa_tasks_run WHERE job_id = ANY(%(ids)b)"
_DELETE_JOBS = "DELETE FROM rpa_tasks_job WHERE task_id = ANY(%(ids)b)"
