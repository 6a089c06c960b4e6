"""What a person does to shops and platforms: log in again, pause, resume, close a breaker.

Each is one guarded update, so that of two people who click at once one changes something. What opens a gate wakes a
node for every shop behind it that has work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from django.db import transaction
from django.db.models import F, Q

from rpa_tasks.jobs import circuit_breaker
from rpa_tasks.jobs.wakeups import ring_for_shops
from rpa_tasks.models import Lane, LoginState, Platform, Shop
from scheduling.errors import InvalidInput, NotFound

log = structlog.get_logger(__name__)


def logged_in(shop_pk: int, *, by: str) -> bool:
    """A person has logged this shop in: what was parked for it may run. False: nobody was waiting for that. Raises
    `NotFound`, as all of these do."""
    changes = {"login_state": LoginState.OK, "login_lost_at": None}
    return _change(Shop, shop_pk, Q(login_state=LoginState.NEEDED), changes, "logged in", by, wakes=True)


def pause(shop_pk: int, *, by: str) -> bool:
    """Nothing of this shop starts any more; what runs goes on. False: it is paused already."""
    return _change(Shop, shop_pk, Q(paused=False), {"paused": True}, "paused", by)


def resume(shop_pk: int, *, by: str) -> bool:
    return _change(Shop, shop_pk, Q(paused=True), {"paused": False}, "resumed", by, wakes=True)


def leave_home(shop_pk: int, *, by: str) -> bool:
    """Let any node serve the shop from now on, with a profile of its own. False: it has no home, or runs there now."""
    if not Shop.objects.filter(pk=shop_pk).exists():
        raise NotFound(f"There is no shop {shop_pk}.")
    return bool(release([shop_pk], by=by).released)


@dataclass(frozen=True, slots=True)
class Rebalanced:
    released: int  #: shops that any node may serve from now on
    running: int  #: shops that run on their preferred node at this moment and keep it


def rebalance(*, by: str, platform: str = "", shop_ids: Sequence[str] = (), node: str = "") -> Rebalanced:
    """Release the preferred node of many shops, so that nodes with room take them. Narrowed by platform, shop ids of
    that platform and preferred node; all that are given must fit. Idempotent.

    Raises: `InvalidInput` without any of them, or with shop ids and no platform; `NotFound` for an unknown shop id.
    """
    if not (platform or node):
        raise InvalidInput.of("shop_ids" if shop_ids else "platform", "name a platform or a node")
    shops = Shop.objects.filter(retired_at=None)
    if platform:
        shops = shops.filter(platform__key=platform)
    if shop_ids:
        known = set(shops.filter(shop_id__in=shop_ids).values_list("shop_id", flat=True))
        if unknown := sorted(set(shop_ids) - known):
            raise NotFound(f"There is no shop {platform}/{unknown[0]}.")
        shops = shops.filter(shop_id__in=shop_ids)
    if node:
        shops = shops.filter(lane__home=node)
    return release(list(shops.values_list("pk", flat=True)), by=by)


def release(shop_pks: Sequence[int], *, by: str) -> Rebalanced:
    """Release the preferred node of these shops, except of those that run at this moment."""
    with transaction.atomic():
        lanes = Lane.objects.filter(shop__in=shop_pks).exclude(home="").order_by("shop_id")
        locked = list(lanes.select_for_update(no_key=True).values_list("shop_id", "task_id"))
        free = [shop for shop, task_id in locked if task_id is None]
        Lane.objects.filter(shop__in=free).update(home="")
        if free:
            log.info("shops_released", count=len(free), by=by)
            _wake(Shop.objects.filter(pk__in=free))
    return Rebalanced(len(free), len(locked) - len(free))


def pause_platform(platform_pk: int, *, by: str) -> bool:
    return _change(Platform, platform_pk, Q(paused=False), {"paused": True}, "paused", by)


def resume_platform(platform_pk: int, *, by: str) -> bool:
    return _change(Platform, platform_pk, Q(paused=True), {"paused": False}, "resumed", by, wakes=True)


def close_breaker(platform_pk: int, *, by: str) -> bool:
    """A person knows that the platform lets us in again. False: nothing was counted against it."""
    with transaction.atomic():
        if not Platform.objects.filter(pk=platform_pk).exists():
            raise NotFound(f"There is no platform {platform_pk}.")
        closed = circuit_breaker.close(platform_pk)
        if closed:
            log.info("breaker_closed_by_hand", id=platform_pk, by=by)
            _wake(Shop.objects.filter(platform_id=platform_pk))
    return closed


def _change(
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
                raise NotFound(f"There is no {noun} {pk}.")
            return False
        # An update leaves no history by itself, and people ask who it was.
        model.history.bulk_history_create([rows.get()], update=True, default_change_reason=f"{what} by {by}"[:100])
        log.info(f"{noun}_{what.replace(' ', '_')}", id=pk, by=by)
        if wakes:
            _wake(Shop.objects.filter(pk=pk) if model is Shop else Shop.objects.filter(platform_id=pk))
    return True


def _wake(shops: Any) -> None:
    """Once it is committed. A token that is lost costs seconds, so nobody is told."""
    pks = list(shops.filter(retired_at=None).values_list("pk", flat=True))
    transaction.on_commit(lambda: ring_for_shops(pks), robust=True)
