"""Create failed tasks from jobs and publish them again. Take back such a retry, and the cancellation of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction

from rpa_tasks.jobs.payloads import (
    CHECK_KEY,
    PAYLOAD_KEY,
    TASK_KEY,
    as_stored,
    claim_window,
    find_window,
    key_of_payload,
    move_window,
    move_window_back,
    name_touch_key,
    payload_errors,
    refuse_erased_job,
    split_period,
)
from rpa_tasks.jobs.shops import is_login_check
from rpa_tasks.models import CANCEL_JOBS, EDIT_PAYLOADS, DedupeWindow, Job, Run
from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.error_text import find_error_line
from scheduling.errors import Conflict, InvalidInput
from scheduling.ids import new_id
from scheduling.ledger.failures import failure_fingerprint
from scheduling.models import WAITING, FailedTask
from scheduling.operations.failed_tasks import Actor, Republisher, Retry
from scheduling.operations.undo import Reversal


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
                fingerprint=failure_fingerprint("rpa_job", platform, task_type, job.reason, find_error_line(detail)),
            )
        ],
        ignore_conflicts=True,
    )


def republish_job(row: FailedTask, retry: Retry) -> Mapping[str, Any] | None:
    """Create a new job for the same shop and flow. Return its payload if that was edited.

    The window of the old job moves to it. If that has none, or an edited payload is its own key, it claims the window.

    Raises:
        Conflict: a job with the same key is waiting, which also covers this request, or has the window; or an erasure
            emptied the job.
        InvalidInput: the edited payload does not fit the flow.
    """
    return _republish(Job.objects.select_related("flow").get(pk=str(row.task_id)), retry)


def _republish(old: Job, retry: Retry) -> Mapping[str, Any] | None:
    refuse_erased_job(old)
    edited = None if retry.payload is None else _check_payload(retry.payload, old)
    payload = old.payload if edited is None else edited
    # A key that is the digest of the payload follows the payload.
    period, key = split_period(old.dedupe_key)
    follows = edited is not None and key.startswith(PAYLOAD_KEY)
    key = period + (key_of_payload(payload) if follows else key)
    same = Job.objects.filter(
        shop_id=old.shop_id, flow_id=old.flow_id, dedupe_key=key, state__in=("scheduled", "queued")
    )
    try:
        with transaction.atomic():
            if same.exists():  # also a job that waits for its retry
                raise IntegrityError
            if key != old.dedupe_key or not move_window(old.pk, retry.task_id):
                _claim_retried_window(old, key, retry)
            _insert_retried_job(old, retry, payload, key)
    except IntegrityError:
        waiting = same.order_by("-fresh").first()
        job = waiting.pk if waiting else _("see the list of jobs")
        raise Conflict(_("A job of the same shop and task type waits already: %(job)s.", job=job)) from None
    return edited


def _check_payload(given: Mapping[str, Any], old: Job) -> Mapping[str, Any]:
    if errors := payload_errors(given, old.flow):
        raise InvalidInput(*errors)
    stored: Mapping[str, Any] = as_stored(given)
    return stored


def _insert_retried_job(old: Job, retry: Retry, payload: Mapping[str, Any], key: str) -> None:
    if old.touch_key:  # the key is unique; the newest job of a touch has it
        Job.objects.filter(pk=old.pk).update(touch_key=None)
    Job.objects.create(
        touch_key=old.touch_key,
        task_id=retry.task_id,
        root_id=retry.task_id if retry.renews_key else old.root_id,
        retry_of=old.pk,
        priority=old.priority if retry.priority is None else retry.priority,
        due_at=retry.due_at,
        planned_at=retry.due_at,
        shop_id=old.shop_id,
        flow_id=old.flow_id,
        payload=payload,
        dedupe_key=key,
        source=f"retry of {old.pk}",
    )


def _claim_retried_window(old: Job, key: str, retry: Retry) -> None:
    """Claim the window of the key, because the old job holds none or another key's.

    With an edited payload the old job keeps its own, because its payload may have been at work.
    """
    is_unique = split_period(key)[1].startswith((TASK_KEY, CHECK_KEY)) or (
        old.touch_key is not None and key == name_touch_key(old.touch_key)
    )
    if is_unique or not old.flow.has_window:
        return
    at = sql.now()
    _window, lasts = find_window(old.flow, at, max(retry.due_at - at, timedelta(0)))
    assert lasts is not None
    claim_window(retry.task_id, old.shop_id, old.flow, key, lasts)


def read_job_payload(row: FailedTask) -> Mapping[str, Any] | None:
    found = Job.objects.filter(pk=str(row.task_id)).values_list("payload", flat=True)
    payload: Mapping[str, Any] | None = found.first()
    return payload


def sort_in_lock_order(task_ids: Sequence[UUID | str]) -> list[UUID]:
    """Sort jobs by shop, as bulk publishes do.

    An insert waits for a concurrent insert of the same key. One common order prevents a deadlock of two transactions.
    """
    keys = ("shop_id", "flow_id", "dedupe_key", "pk")
    return list(Job.objects.filter(pk__in=task_ids).order_by(*keys).values_list("pk", flat=True))


def withdraw_job(row: FailedTask, task_id: UUID, as_new: bool) -> bool:
    """Delete a job that was published again, and give its window back. Return False if it ran or covers a request."""
    list(DedupeWindow.objects.select_for_update().filter(pk=task_id))  # before its job, as all writers
    mine = Job.objects.select_for_update(skip_locked=True).filter(pk=task_id, state__in=WAITING, lease_no=0, requests=1)
    job = mine.first()
    if job is None or job.retry_of is None:
        return False
    job.delete()
    if job.touch_key:
        Job.objects.filter(pk=job.retry_of).update(touch_key=job.touch_key)
    move_window_back(task_id, job.retry_of)
    return True


REPUBLISHER = Republisher(
    republish_job, read_job_payload, EDIT_PAYLOADS, withdraw_job, sort_in_lock_order
)  # fmt: skip


def digest_jobs(task_ids: Sequence[UUID]) -> dict[str, str]:
    """Return a digest of what `publish_cancelled_again` publishes, by job. Call it before the cancellation.

    A login check is left out. Only the lane of its shop can start one.
    """
    return {str(job.pk): _digest_job(job) for job in Job.objects.filter(pk__in=task_ids) if not is_login_check(job)}


def _digest_job(job: Job) -> str:
    return sha256(json.dumps([job.payload, job.dedupe_key], sort_keys=True).encode()).hexdigest()


def publish_cancelled_again(task_id: str, actor: Actor, *, digests: Mapping[str, str]) -> None:
    """Publish a cancelled job again under a new task id, with its delivery key, touch, payload, due time and deadline.

    `digests` are those of `digest_jobs`.

    Raises:
        Conflict: the job was not cancelled, an erasure emptied it, or another job of its key was published since.
        InvalidInput: the flow changed and no longer accepts the payload.
    """
    old = Job.objects.select_for_update(of=("self",)).select_related("flow").filter(pk=task_id).first()
    if old is None or old.state != "cancelled" or old.cancel_requested_at or digests.get(task_id) != _digest_job(old):
        raise Conflict(_("There is no job %(job)s that was cancelled before it ran.", job=task_id))
    _check_payload(old.payload, old)
    same = Job.objects.filter(shop_id=old.shop_id, flow_id=old.flow_id, dedupe_key=old.dedupe_key, pk__gt=old.pk)
    if Job.objects.filter(retry_of=old.pk).exists() or same.exists():
        raise Conflict(_("another job of the same key was published since"))
    retry = Retry(new_id(), max(old.due_at, sql.now()))
    _republish(old, retry)
    kept = {name: getattr(old, name) for name in ("deadline", "source", "requests", "failures")}
    Job.objects.filter(pk=retry.task_id).update(**kept)


REVERSAL = Reversal(Job._meta.label_lower, CANCEL_JOBS, publish_cancelled_again, sort_in_lock_order)


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
