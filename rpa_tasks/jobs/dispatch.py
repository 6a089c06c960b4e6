"""Settle the end of a run, and dispatch, wake, rescue and cancel jobs in periodic passes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import DatabaseError, close_old_connections, transaction
from django.db.models import F
from django.db.models.functions import Now
from kombu.exceptions import OperationalError

from rpa_tasks import metrics
from rpa_tasks.jobs import breaker, dead_letters, shops, wakeups
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.models import Evidence, Flow, Job, LoginState, Run, Shop
from rpa_tasks.outcomes import RunOutcome, Verdict, retry_delay
from scheduling import sql
from scheduling.dispatch import oldest_message_at
from scheduling.ledger.transitions import Claim, Settlement
from scheduling.strict_text import storable_text

log = structlog.get_logger(__name__)


# Settle the end of a run for its job, shop and platform in one transaction.
#
# A stale claim changes nothing: another run has the job.


DEFER_BY_REASON = {
    "browser_wait": timedelta(seconds=5),
    "profile_busy": timedelta(seconds=5),
    "worker_lost": timedelta(0),
}
LONG_DEFER = timedelta(seconds=30)  #: for causes that need longer: a full disk, a process that does not end
PLATFORM_DEFER = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Everything known about a run at its end."""

    verdict: Verdict
    started_at: datetime  #: PostgreSQL's clock
    exit_code: int | None = None
    detail: str = ""
    result: Any = None
    pool_wait: timedelta | None = None
    warm: bool | None = None  #: its browser was already running
    evidence: Mapping[str, bytes] = field(default_factory=dict)  #: by `Evidence.Kind`


def settle_run(job: Job, claim: Claim, ended: RunResult) -> bool:
    """Settle the run. Returns False without any change if the claim is stale."""
    outcome = ended.verdict.outcome
    with transaction.atomic():
        fresh = Job.objects.select_for_update(no_key=True).get(pk=job.pk)
        if fresh.state != "running" or fresh.lease_no != claim.lease_no:
            log.warning("stale_run_dropped", task_id=str(job.pk), lease_no=claim.lease_no, outcome=outcome)
            return False
        rests = breaker.record_outcome(job.shop.platform_id, outcome, job.pk)
        at = sql.now()  # the clock of this node may be ahead; due times use PostgreSQL's clock
        settlement, burns = _settlement_of(fresh, job.flow, ended.verdict, rests, at)
        settlement = shops.settle_check(job, settlement)
        record_run(fresh, settlement, burns, ended, at)
        # A lost login stops the shop until an operator has logged in. Only the first of several runs logs the event.
        if outcome == "session" and Shop.objects.filter(pk=job.shop.pk, login_state=LoginState.OK).update(
            login_state=LoginState.NEEDED, login_lost_at=Now()
        ):
            log.warning("login_needed", shop=str(job.shop), platform=job.shop.platform.key)
        job_ledger.settle(claim, settlement)
        shops.record_checked_login(job, settlement)
        if settlement.state in ("failed", "unknown"):
            dead_letters.record_failed_job(job.pk)
    metrics.record_ended_run(job.shop.platform.key, ended.verdict, at - ended.started_at, ended.pool_wait, ended.warm)
    log.info("run_ended", task_id=str(job.pk), outcome=outcome, reason=ended.verdict.reason, state=settlement.state)
    return True


def _settlement_of(fresh: Job, flow: Flow, verdict: Verdict, rests: bool, at: datetime) -> tuple[Settlement, bool]:
    """Return the settlement of the job and whether this end counts as a failure."""

    def to(state: str, *, due_at: datetime | None = None, reason: str = verdict.reason) -> Settlement:
        return Settlement(state, reason, due_at=due_at)

    outcome = verdict.outcome
    if outcome == "succeeded":
        return to("succeeded"), False
    if outcome == "unknown":
        return to("unknown"), True
    if fresh.cancel_requested_at or outcome == "cancelled":
        return to("cancelled", reason="cancelled"), False
    if outcome == "business":
        return to("failed"), True
    if outcome == "held":
        return to("scheduled", due_at=at + DEFER_BY_REASON.get(verdict.reason, LONG_DEFER)), False
    if outcome == "session":
        return to("scheduled", due_at=at, reason="login_needed"), False
    if outcome == "platform" and rests:
        return to("scheduled", due_at=at + PLATFORM_DEFER), False
    delay = retry_delay(fresh.failures + 1, flow.retry_delays, random.random)
    return (to("failed") if delay is None else to("scheduled", due_at=at + delay)), True


def record_run(fresh: Job, settlement: Settlement, burns: bool, ended: RunResult, at: datetime) -> None:
    runs = fresh.runs.order_by("-id")
    if ended.verdict.outcome == RunOutcome.DEFERRED:
        # A job may be deferred every few seconds for days. One run row per reason records the whole period.
        before = runs.exclude(outcome=RunOutcome.DEFERRED).values_list("pk", flat=True).first()
        same = runs.filter(pk__gt=before or 0, reason=ended.verdict.reason[:64])
        if same.update(ended_at=at, lease_no=fresh.lease_no, node=fresh.node):
            return
    run = Run.objects.create(
        job=fresh,
        number=(runs.values_list("number", flat=True).first() or 0) + 1,
        lease_no=fresh.lease_no,
        node=fresh.node,
        started_at=ended.started_at,
        ended_at=at,
        pool_wait=ended.pool_wait,
        warm=ended.warm,
        outcome=ended.verdict.outcome,
        reason=ended.verdict.reason[:64],
        exit_code=ended.exit_code,
        detail=storable_text(ended.detail)[-10_000:],
    )
    Evidence.objects.bulk_create(
        [Evidence(run=run, kind=kind, content=content) for kind, content in ended.evidence.items()]
    )
    changes: dict[str, Any] = {"failures": F("failures") + int(burns)}
    if settlement.state == "succeeded":
        changes |= {"result": ended.result, "progress": 1.0}
    Job.objects.filter(pk=fresh.pk).update(**changes)


# Periodic passes that dispatch, wake, rescue and cancel jobs.
#
# Each pass is idempotent and may run concurrently in many processes. It handles at most `LIMIT` rows of a kind.


LIMIT = 500
LOCK_WAIT = 0.1  #: seconds, for each lock of a run that is rescued


def run_repair_passes() -> None:
    """Run the repair passes. An error in one pass does not prevent the next."""
    for step in (rescue_expired_runs, cancel_retired_jobs, shops.clear_ended_checks, wake_queues):
        try:
            step()
        except Exception:
            log.exception("pass_failed", step=step.__name__)
            close_old_connections()


def dispatch_due_jobs() -> int:
    """Publish a wake-up message for each job that is due within the horizon, and return their number."""
    found = job_ledger.dispatch_due(horizon=settings.AFTERTOUCH_HORIZON, limit=LIMIT)
    if found:
        wakeups.publish_wakeups(found)
    return len(found)


def wake_queues() -> dict[str, int]:
    """Publish wake-up messages to queues that have startable work and no message: one, or as many as slots are free.

    This repairs a lost message, an opened gate or a node that came back. Returns the number of messages by queue.
    """
    woken: dict[str, int] = {}
    startable = job_ledger.startable()
    nodes = wakeups.node_capacities() if startable else {}
    for queue, lanes in startable.items():
        try:
            if oldest_message_at(queue) is not None:
                continue
        except (OperationalError, OSError) as error:
            log.warning("broker_unreachable", error=str(error))
            return woken
        count = max(1, min(lanes, wakeups.queue_capacity(queue, nodes)))
        messages = [wakeups.WakeUpMessage(queue, "any")] * count
        # Without nodes no capacity is known: one message goes out although no slot is free.
        wakeups.publish_within_capacity(messages, {} if count == 1 else nodes)
        woken[queue] = count
    return woken


def rescue_expired_runs() -> int:
    """Settle runs whose lease has expired, and return their number.

    A run whose command had not started waits again. A started run of an idempotent flow is retried with the same key,
    and fails after the last retry. Any other started run ends as `unknown` and needs a decision by an operator.
    """
    with transaction.atomic():
        expired = job_ledger.expired_runs(limit=LIMIT)
        at = sql.now()  # the clock of this node may be ahead; due times use PostgreSQL's clock
        rescued = sum(_rescue_run(claim, began, at) for claim, began in expired)
    if expired:
        log.warning("rpa_runs_rescued", count=rescued)
    return rescued


def _rescue_run(claim: Claim, began: bool, at: datetime) -> bool:
    """Rescue one run in its own savepoint, so that its error does not affect the others.

    A run whose lane another transaction holds waits for the next pass.
    """
    try:
        with sql.brief_lock_waits(LOCK_WAIT):
            row = Job.objects.select_related("flow", "shop").get(pk=str(claim.task_id))
            outcome = RunOutcome.DEFERRED
            if began:
                outcome = RunOutcome.TRANSIENT if row.flow.idempotent else RunOutcome.UNKNOWN
            settlement, _ = _settlement_of(row, row.flow, Verdict(outcome, "worker_lost"), False, at)
            settlement = shops.settle_check(row, settlement)
            job_ledger.settle(claim, settlement)
            if began:
                assert row.sending_at is not None
                lost = RunResult(verdict=Verdict(RunOutcome.UNKNOWN, "worker_lost"), started_at=row.sending_at)
                record_run(row, settlement, True, lost, at)
            breaker.release_trial(claim.task_id)
            if settlement.state in ("failed", "unknown"):
                dead_letters.record_failed_job(claim.task_id)
    except DatabaseError as error:
        if not sql.is_lock_timeout(error):
            log.exception("run_rescue_failed", task_id=str(claim.task_id))
        return False
    return True


def cancel_retired_jobs() -> int:
    """Cancel waiting jobs whose shop, flow or platform is retired, with the reason `retired`.

    A job that another transaction has locked waits for the next pass.
    """
    with transaction.atomic():
        free = [task_id for (task_id,) in sql.rows(_RETIRED, {"limit": LIMIT})]
        return len(job_ledger.cancel(free, reason="retired")) if free else 0


# Two branches: with one OR over the three tables PostgreSQL reads the whole history of jobs every few seconds.
_RETIRED = """
WITH of_shops AS MATERIALIZED (
SELECT job.task_id
FROM rpa_tasks_platform AS platform
    JOIN rpa_tasks_shop AS shop ON shop.platform_id = platform.id
    JOIN rpa_tasks_job AS job ON job.shop_id = shop.id
WHERE (platform.retired_at IS NOT NULL OR shop.retired_at IS NOT NULL)
  AND job.state IN ('scheduled', 'queued')
LIMIT %(limit)s FOR UPDATE OF job SKIP LOCKED
), of_flows AS MATERIALIZED (
SELECT job.task_id
FROM rpa_tasks_flow AS flow JOIN rpa_tasks_job AS job ON job.flow_id = flow.id
WHERE flow.retired_at IS NOT NULL AND job.state IN ('scheduled', 'queued')
LIMIT %(limit)s FOR UPDATE OF job SKIP LOCKED
)
SELECT task_id FROM of_shops UNION SELECT task_id FROM of_flows
"""
