"""Drain execution nodes and measure their load.

A draining node ends what runs and starts nothing new. The gate is in `rpa_tasks.jobs.ledger`. A pick takes no lock of
the node. So a job that was picked before the drain was committed runs to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Count, Exists, OuterRef, QuerySet
from django.db.models.functions import Now

from rpa_tasks.jobs.shops import count_waiting_jobs
from rpa_tasks.jobs.wakeups import wake_for_shops
from rpa_tasks.models import ExecutionNode, Job, Lane, Shop, TakeOver
from scheduling.audit import record_action
from scheduling.error_text import ErrorText as _
from scheduling.errors import NotFound
from scheduling.models import WAITING

log = structlog.get_logger(__name__)


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
    due = Job.objects.filter(shop=OuterRef("pk"), state__in=WAITING, due_at__lte=Now())
    counts = (
        count(Job.objects.filter(state="running"), "node"),
        count(open_take_overs(), "node"),
        count(pinned, "lane__home"),
        count(pinned.filter(Exists(due)), "lane__home"),
    )
    return {name: NodeLoad(*(each.get(name, 0) for each in counts)) for name in names}


def count_free_slots(node: ExecutionNode, load: NodeLoad, *, reports: bool) -> int:
    """Return how many further jobs the node could start now: none while it drains or does not report."""
    return max(0, node.slots - load.running) if reports and node.draining_at is None else 0


def open_take_overs() -> QuerySet[TakeOver]:
    return TakeOver.objects.filter(ended_at=None, lease_until__gt=Now())


def pinned_shops(name: str) -> QuerySet[Shop]:
    """Return the active shops that are pinned to the node, each with `waiting`, its number of due jobs: most first."""
    waiting = count_waiting_jobs(due_at__lte=Now())
    shops = Shop.objects.filter(lane__home=name, retired_at=None).select_related("platform", "lane")
    return shops.annotate(waiting=waiting).order_by("-waiting", "platform__key", "shop_id")
