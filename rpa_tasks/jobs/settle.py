"""Settle the end of a run for its job, shop and platform in one transaction.

A stale claim changes nothing: another run has the job.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from rpa_tasks import metrics
from rpa_tasks.jobs import circuit_breaker, dead_letters
from rpa_tasks.jobs.gates import login_checks
from rpa_tasks.jobs.pick import jobs
from rpa_tasks.models import Evidence, Job, LoginState, Run, Shop
from rpa_tasks.outcomes import Verdict, retry_delay
from scheduling import sql
from scheduling.ledger.transitions import Claim, Settlement
from scheduling.strict_text import storable_text

log = structlog.get_logger(__name__)

DEFER_BY_REASON = {"browser_wait": timedelta(seconds=5), "profile_busy": timedelta(seconds=5)}
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
        rests = circuit_breaker.record_outcome(job.shop.platform_id, outcome, job.pk)
        at = sql.now()  # the clock of this node may be ahead; due times use PostgreSQL's clock
        settlement, burns = _settlement_of(fresh, job, ended.verdict, rests, at)
        settlement = login_checks.settle_check(job, settlement)
        _record_run(fresh, settlement, burns, ended, at)
        if outcome == "session":
            _require_login(job.shop)
        jobs.settle({claim: settlement})
        login_checks.record_checked_login(job, settlement)
        if settlement.state in ("failed", "unknown"):
            dead_letters.record_failed_job(job.pk)
    metrics.record_ended_run(job.shop.platform.key, ended.verdict, at - ended.started_at, ended.pool_wait, ended.warm)
    log.info("run_ended", task_id=str(job.pk), outcome=outcome, reason=ended.verdict.reason, state=settlement.state)
    return True


def _settlement_of(fresh: Job, job: Job, verdict: Verdict, rests: bool, at: datetime) -> tuple[Settlement, bool]:
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
    delay = retry_delay(fresh.failures + 1, job.flow.retry_delays, random.random)
    return (to("failed") if delay is None else to("scheduled", due_at=at + delay)), True


def _record_run(fresh: Job, settlement: Settlement, burns: bool, ended: RunResult, at: datetime) -> None:
    last = fresh.runs.order_by("-id").first()
    if last and ended.verdict.outcome == last.outcome == Run.Outcome.DEFERRED and last.reason == ended.verdict.reason:
        # A job may be deferred every few seconds for days. One run row records the whole period.
        Run.objects.filter(pk=last.pk).update(ended_at=at, lease_no=fresh.lease_no, node=fresh.node)
        return
    run = Run.objects.create(
        job=fresh,
        number=last.number + 1 if last else 1,
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


def _require_login(shop: Shop) -> None:
    """Stop the shop until an operator has logged in. Only the first of several runs logs the event."""
    if Shop.objects.filter(pk=shop.pk, login_state=LoginState.OK).update(
        login_state=LoginState.NEEDED, login_lost_at=Now()
    ):
        log.warning("login_needed", shop=str(shop), platform=shop.platform.key)
