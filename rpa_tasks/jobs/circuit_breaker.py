"""The circuit breaker of a platform: closed → open until an instant → half open, where one run tries → closed.

A platform that turns robots away (a captcha, a risk check) does so for all shops at once. The breaker stops them
before each burns its retries, and lets one run look whether it is over.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django.db.models import Q

from rpa_tasks.models import Breaker
from scheduling import sql

FIRST_REST = timedelta(minutes=5)
LONGEST_REST = timedelta(hours=1)
#: Ends that show that the platform answers as it should.
HEALTHY = ("succeeded", "business", "session")


def note(platform_id: int, outcome: str, task_id: UUID) -> bool:
    """Take in how a run ended. True: the platform rests now, so this end is not the job's own fault."""
    if outcome in HEALTHY:
        # A run that began before the breaker opened says nothing about the platform of now: only the trial closes it.
        close(platform_id, unless_open_for=task_id)
        return False
    if outcome == "platform":
        return _count(platform_id, task_id)
    release_probe(task_id)
    return False


def close(platform_id: int, *, unless_open_for: UUID | None = None) -> bool:
    """Let its shops run again. True: it was not closed before. With `unless_open_for` an open breaker closes only
    where that job is its trial."""
    troubled = Breaker.objects.filter(platform_id=platform_id).exclude(errors=0, open_until=None)
    if unless_open_for is not None:
        troubled = troubled.filter(Q(open_until=None) | Q(probe=unless_open_for))
    return bool(troubled.update(errors=0, open_until=None, opened_at=None, openings=0, probe=None))


def release_probe(task_id: UUID) -> None:
    """A probe ended without telling: the next run may try."""
    Breaker.objects.filter(probe=task_id).update(probe=None)


def _count(platform_id: int, task_id: UUID) -> bool:
    """Each opening doubles the rest. Errors of runs that began before it opened change nothing."""
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
        {"platform": platform_id, "task": task_id, "first": FIRST_REST, "longest": LONGEST_REST},
    )
    return bool(rests)
