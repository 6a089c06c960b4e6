"""Find the shops whose browsers this node will need next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from django.conf import settings
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from rpa_tasks.browsers.browser_errors import NoBrowser
from rpa_tasks.browsers.upkeep import WarmShop
from rpa_tasks.configuration.browser_settings import resolve_launch_settings
from rpa_tasks.jobs.wakeups import queue_of
from rpa_tasks.models import ExecutionNode, Job, LoginState, Shop

HORIZON = timedelta(hours=1)  #: a browser that is needed later would be idle for too long
LOOKED_AT = 200  #: waiting jobs of each state


def find_next_shops(queues: Sequence[str]) -> list[WarmShop]:
    """Return shops whose next job this node may run, the earliest first, then those that it served last.

    At most `AFTERTOUCH_RPA_WARM_BROWSERS`. A shop with a running job has its browser.
    """
    found: dict[int, WarmShop] = {}
    for shop in _shops_by_need(queues):
        if len(found) >= settings.AFTERTOUCH_RPA_WARM_BROWSERS:
            break
        if shop.pk not in found:
            try:
                launch = resolve_launch_settings(shop)
            except NoBrowser:  # its run names the reason
                continue
            if launch.cdp_url:  # to attach it closes its pages, and a run on another node may have begun
                continue
            found[shop.pk] = WarmShop(shop.profile, f"{shop.platform.key}/{shop.shop_id}", launch)
    return list(found.values())


def _shops_by_need(queues: Sequence[str]) -> Iterator[Shop]:
    jobs = [job for state, order in (("queued", "lease_until"), ("scheduled", "due_at"))
            for job in _waiting_jobs(state).order_by(order)[:LOOKED_AT]]  # fmt: skip
    for job in sorted(jobs, key=lambda job: job.due_at):
        if queue_of(job.shop, job.priority) in queues:
            yield job.shop
    served = Shop.objects.filter(_is_servable(""), lane__home=settings.AFTERTOUCH_NODE)
    yield from served.select_related("platform").order_by("-lane__last_served_at")[: settings.AFTERTOUCH_RPA_BROWSERS]


def _waiting_jobs(state: str) -> QuerySet[Job]:
    others = ExecutionNode.objects.filter(seen_at__gt=Now() - settings.AFTERTOUCH_RPA_HOME_LEASE)
    elsewhere = others.exclude(name=settings.AFTERTOUCH_NODE).values("name")
    waiting = (
        Job.objects.filter(
            _is_servable("shop__"), state=state, paused_by="", due_at__lt=Now() + HORIZON, flow__needs_browser=True
        )
        .exclude(shop__lane__held_until__gt=Now())
        .exclude(shop__platform__waits_for_home=True, shop__lane__home__in=elsewhere)
    )
    return waiting.select_related("shop__platform", "shop__lane").defer("payload", "result")


def _is_servable(shop: str) -> Q:
    """Return the condition that jobs of a shop may start and none runs."""
    wanted = {
        "paused": False,
        "retired_at": None,
        "login_state": LoginState.OK,
        "lane__task_id": None,
        "platform__paused": False,
        "platform__retired_at": None,
        "platform__breaker__open_until": None,
    }
    return Q(**{f"{shop}{name}": value for name, value in wanted.items()})
