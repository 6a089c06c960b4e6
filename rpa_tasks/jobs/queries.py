"""Queries about jobs and shops that several pages or programs use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db.models import Count, QuerySet

from rpa_tasks.jobs.gates import is_being_checked
from rpa_tasks.models import Flow, Job, LoginState, Shop
from scheduling.models import WAITING

# --- jobs ---------------------------------------------------------------------------------------------------------


def jobs_page(
    *,
    platform: str = "",
    shop: str = "",
    task_type: str = "",
    state: str = "",
    before: UUID | None = None,
    limit: int = 50,
) -> list[Job]:
    """Return at most `limit` jobs created before the job `before`, newest first.

    Payloads and results are not loaded, because each may be as long as a page.
    """
    found = Job.objects.select_related("shop__platform", "flow").defer("payload", "result")
    if platform or shop:
        found = found.filter(shop_id__in=list(_select_shops(platform, shop).values_list("pk", flat=True)))
    if task_type:
        found = found.filter(flow_id__in=list(Flow.objects.filter(task_type=task_type).values_list("pk", flat=True)))
    if state:
        found = found.filter(state=state)
    if before:
        found = found.filter(pk__lt=before)
    return list(found.order_by("-pk")[:limit])


def find_job(task_id: UUID) -> Job | None:
    """Return a job with its shop, platform, flow and runs."""
    found = Job.objects.select_related("shop__platform", "flow").prefetch_related("runs")
    return found.filter(pk=task_id).first()


def map_to_retries(task_ids: Iterable[UUID]) -> dict[UUID, UUID]:
    """Map each task id to the task that was published as its retry."""
    again = Job.objects.filter(retry_of__in=list(task_ids)).values_list("retry_of", "task_id")
    return {old: new for old, new in again if old}


def _select_shops(platform: str, shop: str) -> QuerySet[Shop]:
    found = Shop.objects.all()
    if platform:
        found = found.filter(platform__key=platform)
    return found.filter(shop_id=shop) if shop else found


# --- shops --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShopState:
    """State of a shop for lists."""

    shop: Shop
    waiting: int
    running: UUID | None
    last_served_at: datetime | None
    last_success_at: datetime | None
    breaker_open_until: datetime | None
    checking: bool  #: its login is needed, and a check of it waits or runs


def shops_page(*, platform: str = "", login: str = "", after: int = 0, limit: int = 50) -> list[ShopState]:
    """Return active shops by primary key, starting behind the primary key `after`."""
    found = _select_shops(platform, "").filter(retired_at=None, platform__retired_at=None, pk__gt=after)
    if login:
        found = found.filter(login_state=login)
    return shop_states(found.order_by("pk")[:limit])


def shop_states(shops: QuerySet[Shop]) -> list[ShopState]:
    """Return the state of each shop. Uses two queries for any number of shops."""
    rows = list(shops.select_related("platform__breaker", "lane").annotate(checked=is_being_checked()))
    waiting = _count_waiting(rows)
    return [_shop_state(row, waiting[row.pk]) for row in rows]


def _count_waiting(rows: Sequence[Shop]) -> Counter[int]:
    counted = Job.objects.filter(shop__in=[row.pk for row in rows], state__in=WAITING, paused_by="")
    return Counter(dict(counted.values_list("shop_id").annotate(Count("pk")).order_by()))


def _shop_state(shop: Shop, waiting: int) -> ShopState:
    lane, breaker = getattr(shop, "lane", None), getattr(shop.platform, "breaker", None)
    return ShopState(
        shop=shop,
        waiting=waiting,
        running=lane.task_id if lane else None,
        last_served_at=lane.last_served_at if lane else None,
        last_success_at=lane.last_success_at if lane else None,
        breaker_open_until=breaker.open_until if breaker else None,
        checking=shop.login_state == LoginState.NEEDED and shop.checked,  # type: ignore[attr-defined]
    )


def count_platform_backlog(platform_pk: int) -> int:
    """Count the waiting jobs that count against the platform's backlog limit."""
    return Job.objects.filter(shop__platform=platform_pk, state__in=WAITING, paused_by="").count()
