"""Periodic passes that dispatch, wake, rescue and cancel jobs.

Each pass is idempotent and may run concurrently in any number of processes. It handles at most `LIMIT` rows.
"""

from __future__ import annotations

import random
from datetime import datetime

import structlog
from django.conf import settings
from django.db import DatabaseError, close_old_connections, transaction
from django.db.models import Max
from kombu.exceptions import OperationalError

from rpa_tasks.jobs import circuit_breaker, dead_letters, wakeups
from rpa_tasks.jobs.gates import login_checks
from rpa_tasks.jobs.pick import jobs
from rpa_tasks.models import Job, Run
from rpa_tasks.outcomes import retry_delay
from scheduling import sql
from scheduling.dispatch import oldest_message_at
from scheduling.ledger.transitions import Claim, Settlement

log = structlog.get_logger(__name__)

LIMIT = 500


def run_repair_passes() -> None:
    """Run the repair passes. An error in one pass does not prevent the next."""
    for step in (rescue_expired_runs, cancel_retired_jobs, login_checks.clear_ended_checks, wake_queues):
        try:
            step()
        except Exception:
            log.exception("pass_failed", step=step.__name__)
            close_old_connections()


def dispatch_due_jobs() -> int:
    """Publish a wake-up message for each job that is due within the horizon, and return their number."""
    found = jobs.dispatch_due(horizon=settings.AFTERTOUCH_HORIZON, limit=LIMIT)
    if found:
        wakeups.publish_wakeups(found)
    return len(found)


def wake_queues() -> dict[str, int]:
    """Publish wake-up messages to queues that have startable work and no message.

    This repairs a lost message, an opened gate or a node that came back. Returns the number of messages by queue.
    """
    woken: dict[str, int] = {}
    for queue, lanes in jobs.startable(ageing=settings.AFTERTOUCH_RPA_AGEING).items():
        try:
            if oldest_message_at(queue) is not None:
                continue
        except (OperationalError, OSError) as error:
            log.warning("broker_unreachable", error=str(error))
            return woken
        woken[queue] = wakeups.publish_wakeups_to(queue, lanes)
    return woken


def rescue_expired_runs() -> int:
    """Settle runs whose lease has expired, and return their number.

    A run whose command had not started waits again. A started run of an idempotent flow is retried with the same key,
    and fails after the last retry. Any other started run ends as `unknown` and needs a decision by an operator.
    """
    with transaction.atomic():
        expired = jobs.expired_runs(limit=LIMIT)
        at = sql.now()  # the clock of this node may be ahead; due times use PostgreSQL's clock
        rescued = sum(_rescue_run(claim, began, at) for claim, began in expired)
    if expired:
        log.warning("rpa_runs_rescued", count=rescued)
    return rescued


def _rescue_run(claim: Claim, began: bool, at: datetime) -> bool:
    """Rescue one run in its own savepoint, so that its error does not affect the others."""
    try:
        with transaction.atomic():
            row = Job.objects.select_related("flow", "shop").get(pk=str(claim.task_id))
            settlement = login_checks.settle_check(row, _rescue_settlement(row, began, at))
            jobs.settle({claim: settlement})
            if began:
                record_lost_run(row, at)
            circuit_breaker.release_trial(claim.task_id)
            if settlement.state in ("failed", "unknown"):
                dead_letters.record_failed_job(claim.task_id)
    except DatabaseError:
        log.exception("run_rescue_failed", task_id=str(claim.task_id))
        return False
    return True


def _rescue_settlement(row: Job, began: bool, at: datetime) -> Settlement:
    if row.cancel_requested_at and (not began or row.flow.idempotent):
        return Settlement("cancelled", "cancelled")
    if not began:
        return Settlement("scheduled", "worker_lost", due_at=at)
    if not row.flow.idempotent:
        return Settlement("unknown", "worker_lost")
    delay = retry_delay(row.failures + 1, row.flow.retry_delays, random.random)
    if delay is None:
        return Settlement("failed", "worker_lost")
    return Settlement("scheduled", "worker_lost", due_at=at + delay)


def record_lost_run(row: Job, at: datetime) -> None:
    """Store a run whose worker was lost."""
    assert row.sending_at is not None
    last = row.runs.aggregate(last=Max("number"))["last"] or 0
    Run.objects.create(
        job=row, number=last + 1, lease_no=row.lease_no, node=row.node, started_at=row.sending_at,
        ended_at=at, outcome=Run.Outcome.UNKNOWN, reason="worker_lost",
    )  # fmt: skip
    Job.objects.filter(pk=row.pk).update(failures=row.failures + 1)


def cancel_retired_jobs() -> int:
    """Cancel waiting jobs whose shop, flow or platform is retired, with the reason `retired`."""
    found = sql.rows(_RETIRED, {"limit": LIMIT})
    return len(jobs.cancel([task_id for (task_id,) in found], reason="retired")) if found else 0


# Two branches: with one OR over the three tables PostgreSQL reads the whole history of jobs every few seconds.
_RETIRED = """
SELECT job.task_id
FROM rpa_tasks_platform AS platform
    JOIN rpa_tasks_shop AS shop ON shop.platform_id = platform.id
    JOIN rpa_tasks_job AS job ON job.shop_id = shop.id
WHERE (platform.retired_at IS NOT NULL OR shop.retired_at IS NOT NULL)
  AND job.state IN ('scheduled', 'queued') AND job.paused_by = ''
UNION ALL
SELECT job.task_id
FROM rpa_tasks_flow AS flow JOIN rpa_tasks_job AS job ON job.flow_id = flow.id
WHERE flow.retired_at IS NOT NULL AND job.state IN ('scheduled', 'queued') AND job.paused_by = ''
LIMIT %(limit)s
"""
