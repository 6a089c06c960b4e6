"""Check the login of a shop that needs one by a run of its platform's check flow.

The check is a job with high priority. `Lane.check_id` names it and lets it alone start although the shop is logged out.
The name counts only until that job has ended. So a check that was cancelled or deleted blocks nothing.

A check ends as succeeded, or as cancelled with a reason. It has no failed task: the login that is still needed is the
open work.
"""

from __future__ import annotations

from contextlib import suppress

import structlog
from django.db import transaction
from django.db.models import Exists, OuterRef

from rpa_tasks.jobs import shops
from rpa_tasks.jobs.payloads import CHECK_KEY
from rpa_tasks.jobs.publish import INSERT_JOBS
from rpa_tasks.jobs.wakeups import wakeup_publisher
from rpa_tasks.models import Flow, Job, Lane, LoginState, Platform, Shop
from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import NotFound
from scheduling.ids import new_id
from scheduling.ledger.transitions import WAKEUP_LEASE, Settlement, WakeUp
from scheduling.models import WAITING, Priority

log = structlog.get_logger(__name__)


def find_check_flow(platform: Platform) -> Flow | None:
    """Return the flow that checks logins of the platform, or None."""
    if not platform.check_task_type:
        return None
    return Flow.objects.filter(platform=platform, task_type=platform.check_task_type, retired_at=None).first()


def check_login(shop_pk: int, *, by: str) -> bool:
    """Start a check of the login that an operator reports. Without a check flow the report counts, and the jobs
    continue.

    Of concurrent calls one starts a check. Returns False if no login is needed or a check of it is open.

    Raises: `NotFound`.
    """
    with transaction.atomic():
        rows = Lane.objects.select_for_update(no_key=True, of=("self",)).select_related("shop__platform")
        lane = rows.filter(shop=shop_pk, shop__retired_at=None).first()
        if lane is None:
            raise NotFound(_("There is no shop %(shop)s.", shop=shop_pk))
        flow = find_check_flow(lane.shop.platform)
        if flow is None:
            return shops.record_login(shop_pk, by=by)
        # Read after the lock: the check of another call may have ended while this one waited.
        if not Shop.objects.filter(~is_being_checked(), pk=shop_pk, login_state=LoginState.NEEDED).exists():
            return False
        _insert_check(lane, flow, by)
    return True


def _insert_check(lane: Lane, flow: Flow, by: str) -> None:
    task_id = new_id()
    given = {
        "id": task_id, "shop": lane.shop_id, "flow": flow.pk, "payload": "{}", "priority": Priority.HIGH,
        "key": f"{CHECK_KEY}{task_id}", "touch": None, "deadline": None, "source": f"login check by {by}"[:100],
        "lease": WAKEUP_LEASE,
    }  # fmt: skip
    ((_, _, _, due_at),) = sql.rows(_TRY_CHECK + INSERT_JOBS, given)
    Lane.objects.filter(pk=lane.pk).update(check_id=task_id, check_reason="")
    log.info("login_check_started", shop=lane.shop_id, task_id=str(task_id), by=by)
    wakeup = WakeUp(task_id, due_at, Priority.HIGH, lane.shop_id)
    transaction.on_commit(lambda: wakeup_publisher.submit([wakeup]), robust=True)


_TRY_CHECK = """
WITH tried AS (SELECT %(id)s::uuid AS task_id, %(shop)s::bigint AS shop_id, interval '0' AS delay, true AS soon)
"""


def is_login_check(job: Job) -> bool:
    return job.dedupe_key.startswith(CHECK_KEY)


def is_being_checked() -> Exists:
    """Return the condition on a shop that a check of its login waits or runs."""
    return Exists(Job.objects.filter(pk=OuterRef("lane__check_id"), state__in=(*WAITING, "running")))


def settle_check(job: Job, settlement: Settlement) -> Settlement:
    """Return the end of a run, changed if it was a check: one that found no login, or failed, is cancelled.

    A check that is to be tried again stays open.
    """
    if not is_login_check(job) or settlement.state == "succeeded":
        return settlement
    if settlement.state == "scheduled" and settlement.reason != "login_needed":
        return settlement
    return Settlement("cancelled", settlement.reason)


def record_checked_login(job: Job, settlement: Settlement) -> None:
    """Let the jobs of the shop continue if this was the end of a check that found the login."""
    if is_login_check(job) and settlement.state == "succeeded":
        with suppress(NotFound):  # the shop was retired during the check
            shops.record_login(job.shop_id, by=job.source)


def clear_ended_checks() -> int:
    """Forget checks that ended without a run, for example cancelled ones. The login stays needed."""
    return sql.execute(_CLEAR_ENDED, {})


# The second comparison protects a check that another transaction starts between look and update.
_CLEAR_ENDED = """
WITH ended AS MATERIALIZED (
    SELECT lane.shop_id, lane.check_id FROM rpa_tasks_lane AS lane
    WHERE lane.check_id IS NOT NULL AND NOT EXISTS (
        SELECT FROM rpa_tasks_job AS job
        WHERE job.task_id = lane.check_id AND job.state IN ('scheduled', 'queued', 'running')
    )
)
UPDATE rpa_tasks_lane AS lane SET check_id = NULL, check_reason = 'cancelled'
FROM ended WHERE lane.shop_id = ended.shop_id AND lane.check_id = ended.check_id
"""
