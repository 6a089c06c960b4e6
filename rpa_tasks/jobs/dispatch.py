"""The passes that keep jobs moving. Any number may run at once, anywhere; each is safe to run twice."""

from __future__ import annotations

from datetime import datetime

import structlog
from django.conf import settings
from django.db import DatabaseError, close_old_connections, transaction
from django.db.models import Max, Q
from kombu.exceptions import OperationalError

from rpa_tasks.jobs import circuit_breaker, dead_letters, wakeups
from rpa_tasks.jobs.pick import jobs
from rpa_tasks.models import Job, Run
from rpa_tasks.outcomes import retry_delay
from scheduling import sql
from scheduling.dispatch.publisher import oldest_message_at
from scheduling.ledger.transitions import Claim, Settlement

log = structlog.get_logger(__name__)

LIMIT = 500


def keep_moving() -> None:
    """All that brings things back into motion; one that fails does not keep the others from it."""
    for step in (rescue, call_off_retired, wake):
        try:
            step()
        except Exception:
            log.exception("pass_failed", step=step.__name__)
            close_old_connections()


def hand_over_due() -> int:
    """Publish a token for each job that falls due within the horizon."""
    hints = jobs.hand_over(horizon=settings.AFTERTOUCH_HORIZON, limit=LIMIT)
    if hints:
        wakeups.announce(hints)
    return len(hints)


def wake() -> dict[str, int]:
    """Where something could start and no token is on its way, publish some: a token was lost, a gate opened, a node
    came back. A queue that holds tokens is left alone. Returns how many were published, by queue."""
    woken: dict[str, int] = {}
    for queue, lanes in jobs.startable(ageing=settings.AFTERTOUCH_RPA_AGEING).items():
        try:
            if oldest_message_at(queue) is not None:
                continue
        except (OperationalError, OSError) as error:
            log.warning("broker_unreachable", error=str(error))
            return woken
        woken[queue] = wakeups.publish_tokens_to(queue, lanes)
    return woken


def rescue() -> int:
    """Bring back runs whose node let the lease run out. One that had not begun waits again. One that had: an
    idempotent flow is tried again with the same key, anything else waits for a person."""
    with transaction.atomic():
        lapsed = jobs.lapsed_runs(limit=LIMIT)
        at = sql.now()  # this node's clock may be ahead, and all others go by the database's
        rescued = sum(_rescue(claim, began, at) for claim, began in lapsed)
    if lapsed:
        log.warning("rpa_runs_rescued", count=rescued)
    return rescued


def _rescue(claim: Claim, began: bool, at: datetime) -> bool:
    """One that cannot be rescued does not take the others along."""
    try:
        with transaction.atomic():
            row = Job.objects.select_related("flow", "shop").get(pk=str(claim.task_id))
            settlement = _rescued(row, claim, began, at)
            jobs.settle([settlement])
            if began:
                _note_lost(row, at)
            circuit_breaker.release_probe(claim.task_id)
            if settlement.state in ("failed", "unknown"):
                dead_letters.bury(claim.task_id)
    except DatabaseError:
        log.exception("run_not_rescued", task_id=str(claim.task_id))
        return False
    return True


def _rescued(row: Job, claim: Claim, began: bool, at: datetime) -> Settlement:
    if row.cancel_requested_at and (not began or row.flow.idempotent):
        return Settlement(claim.task_id, claim.lease_no, "cancelled", "cancelled")
    if not began:
        return Settlement(claim.task_id, claim.lease_no, "scheduled", "worker_lost", due_at=at)
    delay = retry_delay(row.failures + 1, row.flow.retry_delays, lambda: 0.0)
    if not row.flow.idempotent or delay is None:
        return Settlement(claim.task_id, claim.lease_no, "unknown", "worker_lost")
    return Settlement(claim.task_id, claim.lease_no, "scheduled", "worker_lost", due_at=at + delay)


def _note_lost(row: Job, at: datetime) -> None:
    assert row.sending_at is not None
    last = row.runs.aggregate(last=Max("number"))["last"] or 0
    Run.objects.create(
        job=row, number=last + 1, lease_no=row.lease_no, node=row.node, started_at=row.sending_at,
        ended_at=at, outcome=Run.Outcome.UNKNOWN, reason="worker_lost",
    )  # fmt: skip
    Job.objects.filter(pk=row.pk).update(failures=row.failures + 1)


def call_off_retired() -> int:
    """What waits for a shop, flow or platform that is retired will never start: it ends, and says why."""
    retired = Q(shop__retired_at__isnull=False) | Q(flow__retired_at__isnull=False)
    waiting = Job.objects.filter(retired | Q(shop__platform__retired_at__isnull=False)).filter(
        Q(state="scheduled") | Q(state="queued")
    )
    return len(jobs.cancel(list(waiting.values_list("pk", flat=True)[:LIMIT]), reason="retired"))
