"""Check and run the periodic task `rpa_tasks.publish_for_shops`.

Operators create such tasks in the admin, with arguments like

    {"platform": "pdd", "task_type": "sync_order", "shops": "all", "priority": "normal", "spread_seconds": 600}

Each shop has a constant place within the spread. So 500 shops do not start together and keep their distances each time.
A shop with a waiting job is skipped and keeps that job unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any

import structlog

from rpa_tasks.jobs.bulk_publish import BulkPublishCounts, ProgressCallback, publish_bulk
from rpa_tasks.jobs.payloads import payload_errors
from rpa_tasks.models import Flow, Platform, Shop
from scheduling.errors import ErrorCollector, InvalidInput
from scheduling.models import Priority
from scheduling.policy.specs import hash_to_percent

log = structlog.get_logger(__name__)

ALL_SHOPS = "all"
MOST_SHOPS = 5_000
MAX_SPREAD = 86_400  #: seconds
PRIORITIES = {each.name.lower(): each.value for each in Priority}


@dataclass(frozen=True, slots=True)
class ScheduleArguments:
    """The arguments of one periodic task."""

    platform: str
    task_type: str
    shops: tuple[str, ...] | None = None  #: None: all active shops
    priority: str = "normal"
    payload: Mapping[str, Any] | None = None
    spread_seconds: float = 0
    due_seconds: float | None = None  #: after the schedule fell due; jobs that are not done by then are late


def publish_schedule(
    given: Mapping[str, Any], *, due_at: datetime | None = None, after: int = 0, note: ProgressCallback | None = None
) -> BulkPublishCounts:
    """Publish for each shop whose primary key is greater than `after`; `due_at` and `note` as in `publish_bulk`.

    Raises: `InvalidInput` with the argument, before the first job is published.
    """
    order = parse_arguments(given)
    flow = Flow.objects.get(platform__key=order.platform, task_type=order.task_type)
    shops = _active_shops(order.platform)
    if order.shops is not None:
        shops = shops.filter(shop_id__in=order.shops)
    delays = {
        pk: spread_delay(order.platform, shop_id, order.task_type, order.spread_seconds)
        for pk, shop_id in shops.filter(pk__gt=after).values_list("pk", "shop_id")
    }
    counts = publish_bulk(
        flow, delays, payload=order.payload or {}, priority=PRIORITIES[order.priority], due_at=due_at,
        due_seconds=order.due_seconds, note=note,
    )  # fmt: skip
    write = log.warning if counts.refused else log.info
    write("schedule_published", platform=order.platform, task_type=order.task_type, **asdict(counts))
    return counts


def parse_arguments(given: Mapping[str, Any]) -> ScheduleArguments:
    """Parse and check the arguments of a periodic task.

    Raises: `InvalidInput` with all errors, including an unknown platform, task type or shop.
    """
    _check_shape(given)
    shops = given.get("shops", ALL_SHOPS)
    order = ScheduleArguments(**{**given, "shops": None if shops == ALL_SHOPS else tuple(shops)})
    _check_references(order)
    return order


def _check_shape(given: Mapping[str, Any]) -> None:
    found = ErrorCollector()
    known = [each.name for each in fields(ScheduleArguments)]
    for name in given.keys() - set(known):
        found.add(str(name), f"is not known here; known are {', '.join(known)}")
    for name in ("platform", "task_type"):
        if not isinstance(given.get(name), str) or not given[name]:
            found.add(name, "is missing" if given.get(name) in (None, "") else "must be text")
    priority, shops = given.get("priority", "normal"), given.get("shops", ALL_SHOPS)
    if not isinstance(priority, str) or priority not in PRIORITIES:
        found.add("priority", f"must be one of {', '.join(PRIORITIES)}")
    if not isinstance(given.get("payload", {}), dict):
        found.add("payload", "must be a mapping")
    found.number(given, "spread_seconds", 0, MAX_SPREAD)
    if given.get("due_seconds") is not None:
        found.number(given, "due_seconds", 60, MAX_SPREAD)
    if shops != ALL_SHOPS:
        found.texts({"shops": shops}, "shops", longest=64)
        if isinstance(shops, list) and not 0 < len(shops) <= MOST_SHOPS:
            found.add("shops", f"“all”, or 1 to {MOST_SHOPS} shop ids")
    found.raise_if_any()


def _check_references(order: ScheduleArguments) -> None:
    found = ErrorCollector()
    platform = Platform.objects.filter(key=order.platform, retired_at=None).first()
    if platform is None:
        raise InvalidInput.of("platform", f"there is no platform “{order.platform}”")
    flow = Flow.objects.filter(platform=platform, task_type=order.task_type, retired_at=None).first()
    if flow is None:
        found.add("task_type", f"{order.platform} has no task type “{order.task_type}”")
    else:
        found.errors += payload_errors(order.payload or {}, flow)
    if order.shops is not None:
        living = set(_active_shops(order.platform).filter(shop_id__in=order.shops).values_list("shop_id", flat=True))
        for shop_id in order.shops:
            if shop_id not in living:
                found.add("shops", f"there is no shop “{shop_id}”")
    found.raise_if_any()


def _active_shops(platform: str) -> Any:
    return Shop.objects.filter(platform__key=platform, retired_at=None).order_by("pk")


def spread_delay(platform: str, shop_id: str, task_type: str, spread_seconds: float) -> timedelta:
    """Return the delay of this shop within the spread, in whole milliseconds. Constant across processes and time."""
    share = hash_to_percent(f"schedule:{platform}:{task_type}", shop_id) / 100
    return timedelta(milliseconds=int(share * spread_seconds * 1000))


def keyword_arguments(given: Any, order: Any) -> Mapping[str, Any]:
    """Return the keyword arguments. Raises `InvalidInput` if there are positional ones."""
    if given:
        raise InvalidInput.of("args", "must be empty; name every argument")
    if not isinstance(order, Mapping):
        raise InvalidInput.of("kwargs", "must be a mapping")
    return order


def check_arguments(args: Any, kwargs: Any) -> None:
    """Check the arguments before the admin form stores a periodic task. Raises `InvalidInput`."""
    parse_arguments(keyword_arguments(args, kwargs))
