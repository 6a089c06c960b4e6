"""Create failed tasks from jobs and publish them again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction

from rpa_tasks.models import Job, Run
from scheduling.errors import Conflict
from scheduling.ledger.dead_letters import failure_fingerprint
from scheduling.models import FailedTask
from scheduling.operations.failed_tasks import Republisher


def record_failed_job(task_id: UUID) -> None:
    """Create the failed task of a job that has ended as `failed` or `unknown`, with all its runs. Idempotent."""
    job = Job.objects.select_related("shop__platform", "flow").get(pk=str(task_id))
    runs = list(job.runs.all())
    detail = runs[-1].detail if runs else ""
    platform, task_type = job.shop.platform.key, job.flow.task_type
    FailedTask.objects.bulk_create(
        [
            FailedTask(
                origin=FailedTask.Origin.RPA_JOB,
                task_id=job.pk,
                root_id=job.root_id,
                failure="unknown" if job.state == "unknown" else "failed",
                reason=job.reason,
                detail=detail[-2_000:],
                payload={
                    "platform": platform,
                    "shop_id": job.shop.shop_id,
                    "task_type": task_type,
                    "payload": job.payload,
                    "priority": job.priority,
                    "dedupe_key": job.dedupe_key,
                    "source": job.source,
                    "touch": str(job.touch_key) if job.touch_key else None,
                    "planned_at": job.planned_at.isoformat(),
                },
                attempts=[_serialize_attempt(run) for run in runs],
                channel=f"{platform}/{task_type}"[:64],
                fingerprint=failure_fingerprint("rpa_job", platform, task_type, job.reason, _last_line(detail)),
            )
        ],
        ignore_conflicts=True,
    )


def republish_job(row: FailedTask, task_id: UUID, due_at: datetime, as_new: bool) -> None:
    """Create a new job for the same shop and flow with the unchanged payload.

    Raises: `Conflict` if a job with the same key is waiting; that job also covers this request.
    """
    old = Job.objects.get(pk=str(row.task_id))
    same = Job.objects.filter(
        shop_id=old.shop_id, flow_id=old.flow_id, dedupe_key=old.dedupe_key, state__in=("scheduled", "queued")
    )
    try:
        with transaction.atomic():
            if same.exists():  # also a job that waits for its retry
                raise IntegrityError
            Job.objects.create(
                task_id=task_id,
                root_id=task_id if as_new else old.root_id,
                retry_of=old.pk,
                priority=old.priority,
                due_at=due_at,
                planned_at=due_at,
                shop_id=old.shop_id,
                flow_id=old.flow_id,
                payload=old.payload,
                dedupe_key=old.dedupe_key,
                source=f"retry of {old.pk}",
            )
    except IntegrityError:
        waiting = same.order_by("-fresh").first()
        raise Conflict(f"A job of the same shop and task type waits already: {waiting or 'see the list'}.") from None


def sort_in_lock_order(task_ids: Sequence[UUID]) -> list[UUID]:
    """Sort jobs by shop, as bulk publishes do.

    An insert waits for a concurrent insert of the same key. One common order prevents a deadlock of two transactions.
    """
    keys = ("shop_id", "flow_id", "dedupe_key", "pk")
    return list(Job.objects.filter(pk__in=task_ids).order_by(*keys).values_list("pk", flat=True))


REPUBLISHER = Republisher(republish_job, sort_in_lock_order)


def _serialize_attempt(run: Run) -> dict[str, Any]:
    return {
        "number": run.number,
        "started_at": run.started_at.isoformat(),
        "outcome": run.outcome,
        "reason": run.reason,
        "detail": run.detail[-1_000:],
        "status": run.exit_code,
        "node": run.node,
    }


def _last_line(detail: str) -> str:
    lines = [line for line in detail.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
