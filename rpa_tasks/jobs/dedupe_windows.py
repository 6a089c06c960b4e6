"""Windows in which a shop runs the same work once: a unique row per shop, flow and key, held by a job.

A window is a time span from the start of its job on, or a period of the clock. The key of a period names it, so a job
for tomorrow neither merges with one for today nor takes its window.

Concurrent claims of one key wait for each other in the unique index. A claim is stored with its job in one transaction.
Lock order: windows before jobs, both by shop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, timezone
from uuid import UUID
from zoneinfo import ZoneInfo

from django.conf import settings

from rpa_tasks.models import DedupePeriod, Flow
from scheduling import sql

#: How long a job holds the window of a period that has ended. A second late schedule of that period then runs no job.
LATE_WINDOW = timedelta(days=1)
#: Ends of the holder after which a request may run again; always a cancellation before the first run. An end is final,
#: so an older snapshot of it is no risk. A holder that the snapshot lacks counts.
REPEATABLE = {
    "refuse": "job.state = 'cancelled' AND job.attempt = 0",
    "after_failure": "job.state IN ('failed', 'cancelled')",
    "always": "job.state IN ('succeeded', 'failed', 'unknown', 'cancelled')",
}
#: Whether another job may take the window `held`.
_IS_FREE = """
held.ends_at <= statement_timestamp()
OR EXISTS (SELECT FROM rpa_tasks_job AS job WHERE job.task_id = held.task_id AND {repeatable})
"""
#: Follows an INSERT INTO rpa_tasks_dedupewindow AS held.
TAKE_OVER = f"""
ON CONFLICT (shop_id, flow_id, key) DO UPDATE SET task_id = EXCLUDED.task_id, ends_at = EXCLUDED.ends_at
WHERE {_IS_FREE}
"""


#: The same for rows of several flows.
_BY_FLOW = " ".join(f"WHEN '{rerun}' THEN {condition}" for rerun, condition in REPEATABLE.items())
_RERUN = f"CASE (SELECT dedupe_rerun FROM rpa_tasks_flow AS flow WHERE flow.id = held.flow_id) {_BY_FLOW} END"  # noqa: S608
IS_FREE_MIXED, TAKE_OVER_MIXED = _IS_FREE.format(repeatable=_RERUN), TAKE_OVER.format(repeatable=_RERUN)


@dataclass(frozen=True, slots=True)
class Holder:
    """The job that holds a window. Its state is empty if the job has been deleted."""

    task_id: UUID
    state: str
    ends_at: datetime


def find_period(flow: Flow, at: datetime) -> tuple[str, datetime]:
    """Return the name of the flow's period that contains this instant, and its end."""
    local = at.astimezone(ZoneInfo(flow.dedupe_timezone or settings.TIME_ZONE))
    if flow.dedupe_period == DedupePeriod.HOUR:
        # By the world's clock: an hour that is repeated in autumn is two hours, and some zones have half hours.
        offset = local.utcoffset() or timedelta(0)
        begins = local.replace(minute=0, second=0, microsecond=0, tzinfo=timezone(offset))
        return begins.strftime("%Y-%m-%dT%H%z"), begins + timedelta(hours=1)
    day = local.date()
    if flow.dedupe_period == DedupePeriod.DAY:
        name, after = day.isoformat(), day + timedelta(days=1)
    elif flow.dedupe_period == DedupePeriod.WEEK:
        name, after = day.strftime("%G-W%V"), day + timedelta(days=7 - day.weekday())
    else:
        name, after = day.strftime("%Y-%m"), (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    return name, datetime.combine(after, time.min, local.tzinfo)


def find_window(flow: Flow, at: datetime | None, delay: timedelta) -> tuple[str, timedelta | None]:
    """Return the period of a job that starts `delay` after `at`, empty without one, and how long its window lasts.

    A late job has a negative delay. Only a period needs PostgreSQL's time `at`.
    """
    if flow.dedupe_period:
        assert at is not None
        period, ends_at = find_period(flow, at + delay)
        lasts = ends_at.astimezone(UTC) - at
        return period, lasts if lasts > timedelta(0) else LATE_WINDOW
    return "", None if flow.dedupe_window is None else max(delay, timedelta(0)) + flow.dedupe_window


def claim_window(task_id: UUID, shop: int, flow: Flow, key: str, lasts: timedelta) -> Holder | None:
    """Claim the window for a job. It lasts from now on. Returns its holder if that is another job.

    The job must be stored in the same transaction, else `release_unused`.
    """
    given = {"id": task_id, "shop": shop, "flow": flow.pk, "key": key, "lasts": lasts}
    while not sql.execute(_CLAIM.format(take_over=take_over(flow)), given):
        for found in sql.rows(_HOLDER, given):
            return Holder(*found)
    return None


def take_over(flow: Flow) -> str:
    return TAKE_OVER.format(repeatable=REPEATABLE[flow.dedupe_rerun])


def release_unused(task_ids: Sequence[UUID]) -> None:
    """Release the windows of jobs that were not stored after all."""
    sql.execute(_RELEASE, {"ids": sql.UuidArray(task_ids)})


def move_window(old: UUID, new: UUID) -> bool:
    """Let the job that is published in place of another one hold its window. Call it before that job is stored.

    Return False if the other one has no window, because it has ended or another job has taken it.
    """
    return sql.execute(_MOVE, {"old": old, "new": new}) == 1


def move_window_back(new: UUID, old: UUID) -> None:
    """Undo `move_window` after the job `new` was deleted. A window of another key, which `new` claimed, is released."""
    sql.execute(_MOVE_BACK, {"old": old, "new": new})
    release_unused([new])


_MOVE = """
UPDATE rpa_tasks_dedupewindow SET task_id = %(new)s WHERE task_id = %(old)s AND ends_at > statement_timestamp()
"""
_MOVE_BACK = """
UPDATE rpa_tasks_dedupewindow AS held SET task_id = job.task_id FROM rpa_tasks_job AS job
WHERE held.task_id = %(new)s AND job.task_id = %(old)s AND held.shop_id = job.shop_id AND held.flow_id = job.flow_id
  AND held.key = job.dedupe_key
"""
_CLAIM = """
INSERT INTO rpa_tasks_dedupewindow AS held (task_id, shop_id, flow_id, key, ends_at)
VALUES (%(id)s, %(shop)s, %(flow)s, %(key)s, statement_timestamp() + %(lasts)s)
{take_over}
"""
_HOLDER = """
SELECT held.task_id, COALESCE(job.state, ''), held.ends_at
FROM rpa_tasks_dedupewindow AS held LEFT JOIN rpa_tasks_job AS job ON job.task_id = held.task_id
WHERE held.shop_id = %(shop)s AND held.flow_id = %(flow)s AND held.key = %(key)s
"""
_RELEASE = """
DELETE FROM rpa_tasks_dedupewindow AS held
WHERE held.task_id = ANY(%(ids)b) AND NOT EXISTS (SELECT FROM rpa_tasks_job AS job WHERE job.task_id = held.task_id)
"""
