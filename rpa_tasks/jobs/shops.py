"""Operate shops, platforms and nodes: actions of operators, circuit breaker, login checks, drains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import BooleanField, Count, Exists, ExpressionWrapper, F, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce, Now

from rpa_tasks.jobs.payloads import CHECK_KEY
from rpa_tasks.jobs.pick import NODE_SILENT
from rpa_tasks.jobs.publish import INSERT_JOBS
from rpa_tasks.jobs.wakeups import wake_for_shops, wakeup_publisher
from rpa_tasks.models import Breaker, ExecutionNode, Flow, Job, Lane, LoginState, Platform, Shop, TakeOver
from scheduling import sql
from scheduling.audit import record_action
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, InvalidInput, NotFound
from scheduling.ids import new_id
from scheduling.ledger.transitions import WAKEUP_LEASE, Settlement, WakeUp
from scheduling.models import WAITING, Priority

log = structlog.get_logger(__name__)


# Circuit breaker of a platform: closed, open until an instant, half open for one trial run, closed.
#
# A platform that rejects robots (captcha, risk check) rejects those of all its shops. The breaker stops all shops
# before each uses up its retries. It is open for 5 minutes first, at most for 1 hour.


FIRST_OPEN_TIME = timedelta(minutes=5)
LONGEST_OPEN_TIME = timedelta(hours=1)
#: Outcomes which show that the platform answers normally.
HEALTHY = ("succeeded", "business", "session")


def record_outcome(platform_id: int, outcome: str, task_id: UUID) -> bool:
    """Record the outcome of a run. Returns True if the breaker is open: the job then keeps its retries."""
    if outcome in HEALTHY:
        # A run that started before the breaker opened does not show the present state. Only the trial run closes it.
        close(platform_id, unless_open_for=task_id)
        return False
    if outcome == "platform":
        return _count_error(platform_id, task_id)
    release_trial(task_id)
    return False


def close(platform_id: int, *, unless_open_for: UUID | None = None) -> bool:
    """Close the breaker of a platform. Idempotent; returns False if it was closed and had no errors.

    With `unless_open_for` an open breaker closes only if that job is its trial.
    """
    troubled = Breaker.objects.filter(platform_id=platform_id).exclude(errors=0, open_until=None)
    if unless_open_for is not None:
        troubled = troubled.filter(Q(open_until=None) | Q(probe=unless_open_for))
    return bool(troubled.update(errors=0, open_until=None, opened_at=None, openings=0, probe=None))


def release_trial(task_id: UUID) -> None:
    """Let another run become the trial. Use it where the trial ended without a verdict on the platform."""
    Breaker.objects.filter(probe=task_id).update(probe=None)


def _count_error(platform_id: int, task_id: UUID) -> bool:
    """Count an error of the platform and return whether the breaker is open.

    Each opening doubles the open time. An error of a run that started before the opening does not extend it.
    """
    ((rests,),) = sql.rows(
        """
        WITH judged AS (
            SELECT b.platform_id,
                   CASE WHEN b.open_until IS NULL THEN b.errors + 1 >= p.breaker_threshold
                        ELSE COALESCE(b.probe = %(task)s, false) END AS opens
            FROM rpa_tasks_breaker AS b JOIN rpa_tasks_platform AS p ON p.id = b.platform_id
            WHERE b.platform_id = %(platform)s FOR NO KEY UPDATE OF b
        )
        UPDATE rpa_tasks_breaker AS b
        SET errors = b.errors + 1,
            open_until = CASE WHEN judged.opens
                THEN statement_timestamp() + LEAST(%(first)s * power(2, LEAST(b.openings, 10)), %(longest)s)
                ELSE b.open_until END,
            opened_at = CASE WHEN judged.opens THEN COALESCE(b.opened_at, statement_timestamp()) ELSE b.opened_at END,
            openings = b.openings + judged.opens::int,
            probe = CASE WHEN b.probe = %(task)s THEN NULL ELSE b.probe END
        FROM judged WHERE b.platform_id = judged.platform_id
        RETURNING b.open_until IS NOT NULL
        """,
        {"platform": platform_id, "task": task_id, "first": FIRST_OPEN_TIME, "longest": LONGEST_OPEN_TIME},
    )
    return bool(rests)


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


def unpin_shop(shop_pk: int, *, by: str) -> bool:
    """Unpin the shop, so that any node may serve it with a new profile. Returns False if it is not pinned or is
    running.
    """
    if not Shop.objects.filter(pk=shop_pk).exists():
        raise NotFound(_("There is no shop %(shop)s.", shop=shop_pk))
    return bool(unpin_shops([shop_pk], by=by).released)


@dataclass(frozen=True, slots=True)
class UnpinCounts:
    released: int  #: shops that any node may serve now
    running: int  #: running shops, which keep their preferred node


def unpin_matching_shops(*, by: str, platform: str = "", shop_ids: Sequence[str] = (), node: str = "") -> UnpinCounts:
    """Unpin many shops, so that nodes with free slots take them. Idempotent.

    Platform, its shop ids and preferred node narrow the selection together.

    Raises: `InvalidInput` without platform and node; `NotFound` for an unknown shop id.
    """
    if not (platform or node):
        raise InvalidInput.of("shop_ids" if shop_ids else "platform", _("name a platform or a node"))
    shops = Shop.objects.filter(retired_at=None)
    if platform:
        shops = shops.filter(platform__key=platform)
    if shop_ids:
        known = set(shops.filter(shop_id__in=shop_ids).values_list("shop_id", flat=True))
        if unknown := sorted(set(shop_ids) - known):
            raise NotFound(_("There is no shop %(platform)s/%(shop)s.", platform=platform, shop=unknown[0]))
        shops = shops.filter(shop_id__in=shop_ids)
    if node:
        shops = shops.filter(lane__home=node)
    return unpin_shops(list(shops.values_list("pk", flat=True)), by=by)


def unpin_shops(shop_pks: Sequence[int], *, by: str) -> UnpinCounts:
    """Unpin these shops, except those that are running or held by an operator."""
    with transaction.atomic():
        lanes = Lane.objects.filter(shop__in=shop_pks).exclude(home="").order_by("shop_id")
        locked = list(lanes.select_for_update(no_key=True).annotate(busy=_IS_BUSY).values_list("shop_id", "busy"))
        free = [shop for shop, is_busy in locked if not is_busy]
        Lane.objects.filter(shop__in=free).update(home="")
        if free:
            log.info("shops_released", count=len(free), by=by)
            record_action(
                "acted", (Shop._meta.label_lower, ",".join(map(str, free))), actor=by, reason="released from their node"
            )
            _wake_after_commit(Shop.objects.filter(pk__in=free))
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
        closed = close(platform_pk)
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
            record_login(job.shop_id, by=job.source)


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
