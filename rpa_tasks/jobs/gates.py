"""Gates before jobs: the login check of a shop and the drain of a node."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Count, Exists, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce, Now

from rpa_tasks.jobs import shops
from rpa_tasks.jobs.payloads import CHECK_KEY
from rpa_tasks.jobs.publish import INSERT_JOBS
from rpa_tasks.jobs.wakeups import wake_for_shops, wakeup_publisher
from rpa_tasks.models import ExecutionNode, Flow, Job, Lane, LoginState, Platform, Shop, TakeOver
from scheduling import sql
from scheduling.audit.audit_log import record_action
from scheduling.error_text import ErrorText as _
from scheduling.errors import NotFound
from scheduling.ids import new_id
from scheduling.ledger.transitions import WAKEUP_LEASE, Settlement, WakeUp
from scheduling.models import WAITING, Priority

log = structlog.get_logger(__name__)


# Check the login of a shop that needs one by a run of its platform's check flow.
#
# The check is a job with high priority. `Lane.check_id` names it and lets it alone start although the shop is logged
# out. The name counts only until that job has ended. So a check that was cancelled or deleted blocks nothing.
#
# A check ends as succeeded, or as cancelled with a reason. It has no failed task: the login that is still needed is the
# open work.


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


# Drain execution nodes: a draining node ends what runs and starts nothing new.
#
# The gate is in `rpa_tasks.jobs.pick`. A pick takes no lock of the node. So a job that was picked before the drain was
# committed runs to its end.


def drain_node(name: str, *, by: str) -> bool:
    """Let the node start nothing new. What runs there continues. Returns False if it drains already.

    The drain lasts until `resume_node`, also over restarts of the node. Raises: `NotFound`.
    """
    return _change_drain(name, {"draining_at": Now(), "drained_by": by[:150]}, drains=False, what="node_drained", by=by)


def resume_node(name: str, *, by: str) -> bool:
    """End the drain and wake the node for its shops. Returns False if it does not drain. Raises: `NotFound`."""
    return _change_drain(name, {"draining_at": None, "drained_by": ""}, drains=True, what="node_resumed", by=by)


def _change_drain(name: str, changes: dict[str, Any], *, drains: bool, what: str, by: str) -> bool:
    with transaction.atomic():
        rows = ExecutionNode.objects.filter(name=name)
        if not rows.filter(draining_at__isnull=not drains).update(**changes):
            if not rows.exists():
                raise NotFound(_("There is no execution node %(name)s.", name=name))
            return False
        log.info(what, node=name, by=by)
        kind = ExecutionNode._meta.label_lower
        record_action("resumed" if drains else "paused", (kind, name), label=name, actor=by, reason=what)
        if drains:
            pinned = list(Lane.objects.filter(home=name, shop__retired_at=None).values_list("shop_id", flat=True))
            transaction.on_commit(lambda: wake_for_shops(pinned), robust=True)
    return True


def is_draining(name: str) -> bool:
    return ExecutionNode.objects.filter(name=name).exclude(draining_at=None).exists()


def waits_for_drained_node(job: Job) -> bool:
    """Return whether a waiting job needs the browser profile of a draining node, and its platform waits for that.

    It ends when the node has not reported for `AFTERTOUCH_RPA_HOME_LEASE`: then any node takes the shop.
    """
    if not (job.shop.lane.home and job.flow.needs_browser and job.shop.platform.waits_for_home):
        return False
    reporting = ExecutionNode.objects.filter(seen_at__gt=Now() - settings.AFTERTOUCH_RPA_HOME_LEASE)
    return reporting.filter(name=job.shop.lane.home).exclude(draining_at=None).exists()


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What a node does, and what depends on it."""

    running: int = 0
    take_overs: int = 0  #: open ones that it hosts
    pinned: int = 0  #: active shops whose browser profile it has
    waiting: int = 0  #: of these, shops with a due job

    @property
    def is_empty(self) -> bool:
        """Return whether a stop of the node ends no run and no take-over."""
        return not (self.running or self.take_overs)


def measure_loads(names: Sequence[str]) -> dict[str, NodeLoad]:
    """Return the load of each of these nodes. Uses four queries for any number of nodes."""

    def count(rows: QuerySet[Any], column: str) -> dict[str, int]:
        found = rows.filter(**{f"{column}__in": names}).order_by().values_list(column)
        return dict(found.annotate(Count("pk")))

    pinned = Shop.objects.filter(retired_at=None)
    counts = (
        count(Job.objects.filter(state="running"), "node"),
        count(open_take_overs(), "node"),
        count(pinned, "lane__home"),
        count(pinned.filter(Exists(_due_jobs())), "lane__home"),
    )
    return {name: NodeLoad(*(each.get(name, 0) for each in counts)) for name in names}


def count_free_slots(node: ExecutionNode, load: NodeLoad, *, reports: bool) -> int:
    """Return how many further jobs the node could start now: none while it drains or does not report."""
    return max(0, node.slots - load.running) if reports and node.draining_at is None else 0


def open_take_overs() -> QuerySet[TakeOver]:
    return TakeOver.objects.filter(ended_at=None, lease_until__gt=Now())


def pinned_shops(name: str) -> QuerySet[Shop]:
    """Return the active shops that are pinned to the node, each with `waiting`, its number of due jobs: most first."""
    waiting = _due_jobs().order_by().values("shop").annotate(count=Count("pk")).values("count")
    shops = Shop.objects.filter(lane__home=name, retired_at=None).select_related("platform", "lane")
    return shops.annotate(waiting=Coalesce(Subquery(waiting), 0)).order_by("-waiting", "platform__key", "shop_id")


def _due_jobs() -> QuerySet[Job]:
    return Job.objects.filter(shop=OuterRef("pk"), state__in=WAITING, paused_by="", due_at__lte=Now())
