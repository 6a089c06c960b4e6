"""Circuit breaker of a platform: closed, open until an instant, half open for one trial run, closed.

A platform that rejects robots (captcha, risk check) rejects those of all its shops. The breaker stops all shops before
each uses up its retries. It is open for 5 minutes first, at most for 1 hour.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django.db.models import Q

from rpa_tasks.models import Breaker
from scheduling import sql

FIRST_OPEN_TIME = timedelta(minutes=5)
LONGEST_OPEN_TIME = timedelta(hours=1)
#: Outcomes which show that the platform answers normally.
HEALTHY = ("succeeded", "business", "session")


def record_outcome(platform_id: int, outcome: str, task_id: UUID) -> bool:
    """Record the outcome of a run. Returns True if the breaker is open: the job then keeps its retries."""
    if outcome in HEALTHY:
        # A run that started before the breaker opened does not show the present state. Only the trial run closes it.
        close(platform_id, unless_open_for=task_id)
        return False
    if outcome == "platform":
        return _count_error(platform_id, task_id)
    release_trial(task_id)
    return False


def close(platform_id: int, *, unless_open_for: UUID | None = None) -> bool:
    """Close the breaker of a platform. Idempotent; returns False if it was closed and had no errors.

    With `unless_open_for` an open breaker closes only if that job is its trial.
    """
    troubled = Breaker.objects.filter(platform_id=platform_id).exclude(errors=0, open_until=None)
    if unless_open_for is not None:
        troubled = troubled.filter(Q(open_until=None) | Q(probe=unless_open_for))
    return bool(troubled.update(errors=0, open_until=None, opened_at=None, openings=0, probe=None))


def release_trial(task_id: UUID) -> None:
    """Let another run become the trial. Use it where the trial ended without a verdict on the platform."""
    Breaker.objects.filter(probe=task_id).update(probe=None)


def _count_error(platform_id: int, task_id: UUID) -> bool:
    """Count an error of the platform and return whether the breaker is open.

    Each opening doubles the open time. An error of a run that started before the opening does not extend it.
    """
    ((rests,),) = sql.rows(
        """
        WITH judged AS (
            SELECT b.platform_id,
                   CASE WHEN b.open_until IS NULL THEN b.errors + 1 >= p.breaker_threshold
                        ELSE COALESCE(b.probe = %(task)s, false) END AS opens
            FROM rpa_tasks_breaker AS b JOIN rpa_tasks_platform AS p ON p.id = b.platform_id
            WHERE b.platform_id = %(platform)s FOR NO KEY UPDATE OF b
        )
        UPDATE rpa_tasks_breaker AS b
        SET errors = b.errors + 1,
            open_until = CASE WHEN judged.opens
                THEN statement_timestamp() + LEAST(%(first)s * power(2, LEAST(b.openings, 10)), %(longest)s)
                ELSE b.open_until END,
            opened_at = CASE WHEN judged.opens THEN COALESCE(b.opened_at, statement_timestamp()) ELSE b.opened_at END,
            openings = b.openings + judged.opens::int,
            probe = CASE WHEN b.probe = %(task)s THEN NULL ELSE b.probe END
        FROM judged WHERE b.platform_id = judged.platform_id
        RETURNING b.open_until IS NOT NULL
        """,
        {"platform": platform_id, "task": task_id, "first": FIRST_OPEN_TIME, "longest": LONGEST_OPEN_TIME},
    )
    return bool(rests)
