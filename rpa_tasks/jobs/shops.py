"""Operate shops and platforms: actions of operators, login checks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from django.db import transaction
from django.db.models import BooleanField, Count, Exists, ExpressionWrapper, F, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce, Now

from rpa_tasks.jobs import breaker
from rpa_tasks.jobs.ledger import NODE_SILENT
from rpa_tasks.jobs.payloads import CHECK_KEY
from rpa_tasks.jobs.publish import INSERT_JOBS
from rpa_tasks.jobs.wakeups import wake_for_shops, wakeup_publisher
from rpa_tasks.models import ExecutionNode, Flow, Job, Lane, LoginState, Platform, Shop
from scheduling import sql
from scheduling.audit import record_action, record_actions
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, InvalidInput, NotFound
from scheduling.ids import new_id
from scheduling.ledger.transitions import Settlement, WakeUp
from scheduling.models import WAITING, Priority

log = structlog.get_logger(__name__)


# Actions of operators on shops and platforms: log in, pause, resume, unpin, move, close a breaker.
#
# Each is one supervised update: of two concurrent requests only one changes the row. An action that opens a gate
# wakes a node for each shop behind it that has due work. An unknown primary key raises `NotFound`.


AUDITED = {"paused": "paused", "resumed": "resumed", "logged in": "acted"}


def record_login(shop_pk: int, *, by: str) -> bool:
    """Record that an operator has logged the shop in, and resume its jobs. Returns False if no login was needed."""
    changes = {"login_state": LoginState.OK, "login_lost_at": None}
    return _change_row(Shop, shop_pk, Q(login_state=LoginState.NEEDED), changes, "logged in", by, wakes=True)


def pause_shop(shop_pk: int, *, by: str) -> bool:
    """Start no further job of this shop; running jobs continue. Returns False if it is already paused."""
    return _change_row(Shop, shop_pk, Q(paused=False), {"paused": True}, "paused", by)


def resume_shop(shop_pk: int, *, by: str) -> bool:
    return _change_row(Shop, shop_pk, Q(paused=True), {"paused": False}, "resumed", by, wakes=True)


@dataclass(frozen=True, slots=True)
class UnpinCounts:
    released: int  #: shops that any node may serve now
    running: int  #: running shops, which keep their preferred node


def unpin_matching_shops(*, by: str, platform: str = "", shop_ids: Sequence[str] = (), node: str = "") -> UnpinCounts:
    """Unpin many shops, so that nodes with free slots take them. Idempotent.

    Platform, its shop ids and preferred node narrow the selection together.

    Raises: `InvalidInput` without platform and node; `NotFound` for an unknown platform, shop id or node.
    """
    if not (platform or node):
        raise InvalidInput.of("shop_ids" if shop_ids else "platform", _("name a platform or a node"))
    shops = Shop.objects.filter(retired_at=None)
    if platform:
        if not Platform.objects.filter(key=platform).exists():
            raise NotFound(_("There is no platform %(platform)s.", platform=platform))
        shops = shops.filter(platform__key=platform)
    if shop_ids:
        known = set(shops.filter(shop_id__in=shop_ids).values_list("shop_id", flat=True))
        if unknown := sorted(set(shop_ids) - known):
            raise NotFound(_("There is no shop %(platform)s/%(shop)s.", platform=platform, shop=unknown[0]))
        shops = shops.filter(shop_id__in=shop_ids)
    if node:
        if not (ExecutionNode.objects.filter(name=node).exists() or Lane.objects.filter(home=node).exists()):
            raise NotFound(_("There is no node %(node)s.", node=node))
        shops = shops.filter(lane__home=node)
    return unpin_shops(list(shops.values_list("pk", flat=True)), by=by)


def unpin_shops(shop_pks: Sequence[int], *, by: str) -> UnpinCounts:
    """Unpin these shops, so that any node may serve them with new profiles. Those that are running or held by an
    operator stay.
    """
    with transaction.atomic():
        lanes = Lane.objects.filter(shop__in=shop_pks).exclude(home="").order_by("shop_id")
        locked = list(lanes.select_for_update(no_key=True).annotate(busy=_IS_BUSY).values_list("shop_id", "busy"))
        free = [shop for shop, is_busy in locked if not is_busy]
        Lane.objects.filter(shop__in=free).update(home="")
        if free:
            log.info("shops_released", count=len(free), by=by)
            released = Shop.objects.select_related("platform").filter(pk__in=free)
            record_actions("acted", released, actor=by, reason="released from its node")
            _wake_after_commit(released)
    return UnpinCounts(len(free), len(locked) - len(free))


#: Whether a lane has a running job, or an operator holds it.
_IS_BUSY = ExpressionWrapper(
    Q(task_id__isnull=False) | Q(held_until__isnull=False, held_until__gt=Now()), BooleanField()
)


def move_shop(shop: Shop, node: str, *, queue: str, by: str) -> None:
    """Pin the shop to a node that serves `queue`. Its login stays on the old node. Idempotent; waits for no lock.

    Raises: `Conflict` if the shop is running, held by an operator or locked, or the node does not report or serve.
    """
    found = ExecutionNode.objects.filter(name=node, seen_at__gt=Now() - NODE_SILENT, draining_at=None).first()
    if found is None or queue not in found.serves:
        raise Conflict(_("The node %(node)s does not serve the queue %(queue)s now.", node=node, queue=queue))
    with transaction.atomic():
        free = Lane.objects.select_for_update(no_key=True, skip_locked=True).filter(shop=shop)
        lane = free.annotate(busy=_IS_BUSY).first()
        if lane is None or lane.busy:
            raise Conflict(_("The shop %(shop)s is running.", shop=shop))
        if lane.home == node:
            return
        log.info("shop_moved", id=shop.pk, old=lane.home, node=node, by=by)
        record_action("acted", shop, label=str(shop), actor=by, reason=f"moved to node {node}")
        Lane.objects.filter(pk=lane.pk).update(home=node)
        _wake_after_commit(Shop.objects.filter(pk=shop.pk))


def pause_platform(platform_pk: int, *, by: str) -> bool:
    return _change_row(Platform, platform_pk, Q(paused=False), {"paused": True}, "paused", by)


def resume_platform(platform_pk: int, *, by: str) -> bool:
    return _change_row(Platform, platform_pk, Q(paused=True), {"paused": False}, "resumed", by, wakes=True)


def close_breaker(platform_pk: int, *, by: str) -> bool:
    """Close the breaker of a platform on the word of an operator. Returns False if it was closed and had no errors."""
    with transaction.atomic():
        if not Platform.objects.filter(pk=platform_pk).exists():
            raise NotFound(_("There is no platform %(platform)s.", platform=platform_pk))
        closed = breaker.close(platform_pk)
        if closed:
            log.info("breaker_closed_manually", id=platform_pk, by=by)
            record_action("acted", (Platform._meta.label_lower, platform_pk), actor=by, reason="breaker closed")
            _wake_after_commit(Shop.objects.filter(platform_id=platform_pk))
    return closed


def _change_row(
    model: type[Shop] | type[Platform],
    pk: int,
    guard: Q,
    changes: dict[str, Any],
    what: str,
    by: str,
    *,
    wakes: bool = False,
) -> bool:
    noun = model._meta.model_name
    with transaction.atomic():
        rows: Any = model._default_manager.filter(pk=pk, retired_at=None)
        if not rows.filter(guard).update(**changes, version=F("version") + 1):
            if not rows.exists():
                raise NotFound(_("There is no %(noun)s %(pk)s.", noun=noun, pk=pk))
            return False
        # A queryset update writes no history, and operators ask who made the change.
        row = rows.get()
        model.history.bulk_history_create([row], update=True, default_change_reason=f"{what} by {by}"[:100])
        record_action(AUDITED[what], row, label=str(row), actor=by, reason=what)
        log.info(f"{noun}_{what.replace(' ', '_')}", id=pk, by=by)
        if wakes:
            _wake_after_commit(Shop.objects.filter(pk=pk) if model is Shop else Shop.objects.filter(platform_id=pk))
    return True


def _wake_after_commit(shops: Any) -> None:
    """Wake nodes for these shops after the commit. A lost wake-up message costs seconds, so its error is ignored."""
    pks = list(shops.filter(retired_at=None).values_list("pk", flat=True))
    transaction.on_commit(lambda: wake_for_shops(pks), robust=True)


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
            return record_login(shop_pk, by=by)
        # Read after the lock: the check of another call may have ended while this one waited.
        if not Shop.objects.filter(needs_login(), pk=shop_pk).exists():
            return False
        _insert_check(lane, flow, by)
    return True


def _insert_check(lane: Lane, flow: Flow, by: str) -> None:
    task_id = new_id()
    given = {
        "id": task_id, "shop": lane.shop_id, "flow": flow.pk, "payload": "{}", "priority": Priority.HIGH,
        "key": f"{CHECK_KEY}{task_id}", "touch": None, "deadline": None, "source": f"login check by {by}"[:100],
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


def count_waiting_jobs(**only: Any) -> Coalesce:
    """Return the number of a shop's waiting jobs, those that meet `only`, for an annotation."""
    jobs = Job.objects.filter(shop=OuterRef("pk"), state__in=WAITING, **only).order_by().values("shop")
    # The index of waiting jobs has no primary key: `Count("pk")` would read each job from the table.
    return Coalesce(Subquery(jobs.annotate(count=Count("*")).values("count")), 0)


def is_being_checked() -> Exists:
    """Return the condition on a shop that a check of its login waits or runs."""
    return Exists(Job.objects.filter(pk=OuterRef("lane__check_id"), state__in=(*WAITING, "running")))


def needs_login() -> Q:
    """Return the condition that an active shop needs a login by an operator: no check of one is open."""
    return Q(~is_being_checked(), login_state=LoginState.NEEDED, retired_at=None)


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
            record_login(job.shop_id, by=job.source)


def clear_ended_checks() -> int:
    """Forget checks that ended without a run, for example cancelled ones. The login stays needed."""
    return sql.execute(_CLEAR_ENDED, {})


# A lane that another transaction has locked waits for the next pass. The second comparison protects a check that one
# starts between look and update.
_CLEAR_ENDED = """
WITH ended AS MATERIALIZED (
    SELECT lane.shop_id, lane.check_id FROM rpa_tasks_lane AS lane
    WHERE lane.check_id IS NOT NULL AND NOT EXISTS (
        SELECT FROM rpa_tasks_job AS job
        WHERE job.task_id = lane.check_id AND job.state IN ('scheduled', 'queued', 'running')
    )
    FOR NO KEY UPDATE OF lane SKIP LOCKED
)
UPDATE rpa_tasks_lane AS lane SET check_id = NULL, check_reason = 'cancelled'
FROM ended WHERE lane.shop_id = ended.shop_id AND lane.check_id = ended.check_id
"""
