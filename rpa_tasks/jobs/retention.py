"""Delete old jobs with their runs and remaining evidence, and ended windows.

See `scheduling.operations.retention`.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings

from scheduling import sql
from scheduling.operations.retention import RetentionTable, delete_locked

# An ended window that a request takes over at this moment is locked: that request keeps it.
_DELETE_WINDOWS = """
DELETE FROM rpa_tasks_dedupewindow WHERE task_id IN (
    SELECT task_id FROM rpa_tasks_dedupewindow
    WHERE task_id = ANY(%(ids)b) AND ends_at <= statement_timestamp() FOR UPDATE SKIP LOCKED
)
"""

# A job that delivers a touch stays as long as that touch. It prevents a second job for the same touch.
_LOCK = """
SELECT j.task_id FROM rpa_tasks_job AS j
WHERE j.task_id = ANY(%(ids)b) AND j.state IN ('succeeded', 'cancelled', 'failed', 'unknown')
  AND j.settled_at < %(before)s
  AND NOT EXISTS (SELECT FROM scheduling_failedtask AS f WHERE f.task_id = j.task_id)
  AND NOT EXISTS (SELECT FROM rpa_tasks_job AS again WHERE again.retry_of = j.task_id)
  AND (SELECT t.task_id FROM scheduling_touch AS t WHERE t.task_id = j.touch_key LIMIT 1) IS NULL
FOR UPDATE OF j SKIP LOCKED
"""
_DELETE_EVIDENCE = """
DELETE FROM rpa_tasks_evidence AS e USING rpa_tasks_run AS r WHERE e.run_id = r.id AND r.job_id = ANY(%(ids)b)
"""
_DELETE_RUNS = "DELETE FROM rpa_tasks_run WHERE job_id = ANY(%(ids)b)"
_DELETE_JOBS = "DELETE FROM rpa_tasks_job WHERE task_id = ANY(%(ids)b)"

JOBS = RetentionTable(
    "rpa_tasks_job",
    lambda: timedelta(days=settings.AFTERTOUCH_RPA_RETENTION_DAYS),
    delete_locked(_LOCK, _DELETE_EVIDENCE, _DELETE_RUNS, _DELETE_JOBS),
    key="task_id",
)
WINDOWS = RetentionTable(
    "rpa_tasks_dedupewindow",
    lambda: timedelta(days=1),
    lambda batch, before: sql.execute(_DELETE_WINDOWS, {"ids": batch}),
    key="task_id",
)
