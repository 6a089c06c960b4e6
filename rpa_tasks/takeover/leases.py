"""Start, renew and end take-overs in PostgreSQL.

A take-over is a row with a lease, which its node renews. Each shop has at most one open row. Without a run it holds the
lane of the shop until the same instant, so no job starts. A transaction that changes both locks the lane first.
"""

from __future__ import annotations

import secrets
from datetime import timedelta

import structlog
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Now

from rpa_tasks.browser_settings import uses_browser_elsewhere
from rpa_tasks.jobs.ledger import NODE_SILENT, TIERS
from rpa_tasks.jobs.wakeups import queue_of
from rpa_tasks.models import ExecutionNode, Job, Lane, TakeOver, TakeOverEnd
from scheduling.audit import record_action

log = structlog.get_logger(__name__)

LEASE = timedelta(seconds=60)
KEY_BYTES = 32


class CannotTakeOver(Exception):
    """The shop cannot be taken over now. `reason` is a code."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def start_take_over(shop_pk: int, *, user: User, address: str) -> TakeOver:
    """Open a take-over, which the shop's node hosts within seconds. Of concurrent requests only one opens it.

    Raises: `CannotTakeOver`: another one is open, the shop is retired, or its node drains or does not report.
    """
    with transaction.atomic():
        rows = Lane.objects.select_for_update(no_key=True, of=("self",)).select_related("shop__platform")
        lane = rows.get(shop_id=shop_pk)
        if lane.shop.retired_at:
            raise CannotTakeOver("retired")
        _end_expired(TakeOver.objects.filter(shop=shop_pk))
        if TakeOver.objects.filter(shop=shop_pk, ended_at=None).exists():
            raise CannotTakeOver("taken")
        node = _choose_node(lane)
        if lane.task_id is None:
            Lane.objects.filter(pk=lane.pk).update(held_until=Now() + LEASE, lease_no=F("lease_no") + 1)
        row = TakeOver.objects.create(
            shop_id=shop_pk,
            task_id=lane.task_id,
            lease_no=lane.lease_no + (lane.task_id is None),
            user=user,
            username=user.get_username(),
            address=address or None,
            node=node,
            key=secrets.token_bytes(KEY_BYTES),
            started_at=Now(),
            lease_until=Now() + LEASE,
        )
        record_action("started", row, label=str(lane.shop), actor=row.username)
    log.info("take_over_started", take_over=row.pk, shop=shop_pk, by=row.username, node=node)
    return row


def _choose_node(lane: Lane) -> str:
    """Return the node of the run or of the profile, otherwise one that serves the queues of the shop, with most slots.

    The login stays on that node, so the jobs of the shop must run there. A draining node hosts only what runs there
    already.

    Raises: `CannotTakeOver`.
    """
    if lane.task_id is not None:
        return Job.objects.values_list("node", flat=True).get(pk=lane.task_id)
    reporting = ExecutionNode.objects.filter(seen_at__gt=Now() - NODE_SILENT)
    nodes, home = reporting.filter(draining_at=None), lane.home
    if uses_browser_elsewhere(lane.shop) and not nodes.filter(name=home).exists():
        home = ""  # its login is not on a node
    if home and reporting.filter(name=home).exclude(draining_at=None).exists():
        if lane.shop.platform.waits_for_home:
            raise CannotTakeOver("node_drained")
        home = ""
    if home:
        nodes = nodes.filter(name=home)
    queues = {queue_of(lane.shop, tier) for tier in TIERS}
    found = sorted(
        nodes.only("queues", "slots"), key=lambda node: (-len(queues & {*node.serves}), -node.slots, node.name)
    )
    if not found:
        raise CannotTakeOver("node_lost" if home else "no_node")
    return found[0].name


def open_take_over(shop_pk: int) -> TakeOver | None:
    """Return the take-over of the shop whose lease is valid, or None."""
    return TakeOver.objects.filter(shop=shop_pk, ended_at=None, lease_until__gt=Now()).first()


def request_end(row: TakeOver, end: TakeOverEnd) -> bool:
    """Ask the node to end the take-over. Returns False if it has ended already."""
    return bool(TakeOver.objects.filter(pk=row.pk, ended_at=None).update(wanted_end=end))


def renew_take_over(row: TakeOver) -> bool:
    """Renew row and lane. Returns False if the lease has expired or the take-over has ended."""
    with transaction.atomic():
        if row.task_id is None and not _held_lane(row).filter(held_until__gt=Now()).update(held_until=Now() + LEASE):
            return False
        open_rows = TakeOver.objects.filter(pk=row.pk, ended_at=None, lease_until__gt=Now())
        if not open_rows.update(lease_until=Now() + LEASE):
            transaction.set_rollback(True)
            return False
    return True


def pin_profile(row: TakeOver) -> None:
    """Pin the held shop to the node, whose disk has its profile now."""
    _held_lane(row).filter(held_until__gt=Now()).update(home=row.node)


def end_take_over(row: TakeOver, end: TakeOverEnd) -> bool:
    """End the take-over and free the lane. The caller has released the browser. Returns False if it had ended.

    The next dispatch wakes a node for waiting jobs: a maintainer publishes no messages.
    """
    with transaction.atomic():
        Lane.objects.select_for_update(no_key=True).get(shop_id=row.shop_id)
        if not _close(row, TakeOver.objects.all(), end):
            return False
        if row.task_id is None:
            _held_lane(row).update(held_until=None)
    log.info("take_over_ended", take_over=row.pk, end=end)
    return True


def end_lost_take_overs() -> int:
    """End take-overs whose node no longer renews them. Their lanes are free already."""
    return _end_expired(TakeOver.objects.all())


def _held_lane(row: TakeOver) -> QuerySet[Lane]:
    return Lane.objects.filter(shop_id=row.shop_id, task_id=None, lease_no=row.lease_no)


def _end_expired(rows: QuerySet[TakeOver]) -> int:
    count = 0
    for row in rows.filter(lease_until__lte=Now(), ended_at=None).select_related("shop__platform"):
        with transaction.atomic():
            count += _close(row, rows.filter(lease_until__lte=Now()), TakeOverEnd.NODE_LOST)
    return count


def _close(row: TakeOver, rows: QuerySet[TakeOver], end: TakeOverEnd) -> bool:
    """Close and record a take-over. Returns False if it has ended or is none of the rows."""
    if not rows.filter(pk=row.pk, ended_at=None).update(ended_at=Now(), end=end, key=None):
        return False
    record_action("ended", row, label=str(row.shop), actor=row.username, reason=str(end))
    return True
