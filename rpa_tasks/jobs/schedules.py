"""Check and run the periodic task `rpa_tasks.publish_for_shops`.

Operators create such tasks in the admin, with arguments like

    {"platform": "pdd", "task_type": "sync_order", "shops": "all", "priority": "normal", "spread_seconds": 600}

Beat publishes a round when it falls due, by one statement. A shop with a waiting job is skipped and keeps that job
unchanged. Each shop has a constant place within the spread. So 500 shops do not start together and keep their distances
each time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import structlog
from django.conf import settings
from django.db import transaction

from rpa_tasks.jobs import payloads
from rpa_tasks.jobs.payloads import (
    add_period,
    as_stored,
    flow_key_of,
    key_of_payload,
    payload_errors,
)
from rpa_tasks.jobs.publish import INSERT_JOBS
from rpa_tasks.jobs.wakeups import wakeup_publisher
from rpa_tasks.models import Flow, Platform, Shop
from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, InvalidInput, check_number, check_texts
from scheduling.ids import derive_id, reveal_odd_characters
from scheduling.ledger.transitions import WakeUp
from scheduling.models import Priority
from scheduling.policy.specs import hash_to_percent
from scheduling.strict_text import find_unstorable_text

log = structlog.get_logger(__name__)

ALL_SHOPS = "all"
MOST_SHOPS = 5_000  #: that a schedule lists, and of one statement
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


@dataclass(slots=True)
class RoundCounts:
    """Counts of shops: job published, job already waiting, refused because of a backlog limit."""

    published: int = 0
    waiting: int = 0
    refused: int = 0


def publish_round(schedule_id: int, due_at: datetime, args: Any, kwargs: Any) -> RoundCounts:
    """Publish the round that fell due at `due_at`: a job for each shop of the schedule. Idempotent.

    The id of a job is derived from `schedule:<id>:<due instant>:<shop>`, so a repeated round publishes no job twice.
    A shop whose job waits, or whose window has not ended, keeps its job unchanged. Shops above a backlog limit are left
    to the next round. With a period of the clock all jobs belong to that of `due_at`, also those that start later.

    Raises: `InvalidInput` with the argument, before the first job is published; `OperationalError`.
    """
    arguments = check_arguments(args, kwargs)
    flow = Flow.objects.get(platform__key=arguments.platform, task_type=arguments.task_type, retired_at=None)
    payload = as_stored(arguments.payload or {})
    key = flow_key_of(flow, payload)
    if key is None:  # the flow merges nothing, but a schedule skips a shop where a job with its payload is waiting
        key = key_of_payload(payload)
    at = sql.now()
    period, lasts = payloads.find_window(flow, at, due_at - at)
    common = {
        "flow": flow.pk, "platform": flow.platform_id, "payload": json.dumps(payload),
        "priority": PRIORITIES[arguments.priority], "key": add_period(key, period), "window": lasts,
        "by_clock": bool(period), "horizon": settings.AFTERTOUCH_HORIZON, "source": "schedule",
        "deadline": due_at + timedelta(seconds=arguments.due_seconds) if arguments.due_seconds else None, "touch": None,
    }  # fmt: skip
    shops = _active_shops(arguments.platform)
    if arguments.shops is not None:
        shops = shops.filter(shop_id__in=arguments.shops)
    counts, left = RoundCounts(), iter(shops.values_list("pk", "shop_id"))
    while batch := list(islice(left, MOST_SHOPS)):
        _publish_batch(
            common | {
                "shops": [pk for pk, _ in batch],
                "ids": [derive_id(f"schedule:{schedule_id}:{due_at.isoformat()}:{pk}", due_at) for pk, _ in batch],
                "delays": [
                    spread_delay(arguments.platform, shop_id, arguments.task_type, arguments.spread_seconds)
                    for _, shop_id in batch
                ],
            },
            counts,
        )  # fmt: skip
    write = log.warning if counts.refused else log.info
    write(
        "round_published", schedule_id=schedule_id, due_at=due_at.isoformat(), platform=arguments.platform,
        task_type=arguments.task_type, **asdict(counts),
    )  # fmt: skip
    return counts


def _publish_batch(given: Mapping[str, Any], counts: RoundCounts) -> None:
    with transaction.atomic():
        sql.limit_lock_waits(1.0)
        free = sql.rows(_INSERT, given)
        if given["window"]:
            payloads.release_unused(given["ids"])
        made = [row for row in free if row[2] is not None]
        # After the insert, and without waiting: whoever waits for one of these jobs may be waited for by the insert.
        skipped = set(given["shops"]) - {row[0] for row in made}
        sql.execute(_COUNT_REQUESTS, {**given, "shops": list(skipped)})
        due = [WakeUp(pk, due_at, given["priority"], shop) for shop, _, pk, state, due_at in made if state == "queued"]
        transaction.on_commit(lambda: wakeup_publisher.submit(due))
    refused = sum(row[1] for row in free)
    counts.published += len(made)
    counts.refused += refused
    counts.waiting += len(skipped) - refused


def check_arguments(args: Any, kwargs: Any) -> ScheduleArguments:
    """Parse and check the arguments of a periodic task as its row has them.

    Raises: `InvalidInput` with all errors, including an unknown platform, task type or shop.
    """
    if args:
        raise InvalidInput.of("args", _("must be empty; name every argument"))
    if not isinstance(kwargs, Mapping):
        raise InvalidInput.of("kwargs", _("must be a mapping"))
    _check_shape(kwargs)
    shops = kwargs.get("shops", ALL_SHOPS)
    arguments = ScheduleArguments(**{**kwargs, "shops": None if shops == ALL_SHOPS else tuple(shops)})
    _check_references(arguments)
    return arguments


def _check_shape(given: Mapping[str, Any]) -> None:
    found = ErrorCollector()
    known = [each.name for each in fields(ScheduleArguments)]
    for name in given.keys() - set(known):
        found.add(reveal_odd_characters(str(name)), _("is not known here; known are %(known)s", known=", ".join(known)))
    for name in ("platform", "task_type"):
        if not isinstance(given.get(name), str) or not given[name]:
            found.add(name, _("is missing") if given.get(name) in (None, "") else _("must be text"))
        elif problem := find_unstorable_text(given[name]):
            found.add(name, problem)
    priority, shops = given.get("priority", "normal"), given.get("shops", ALL_SHOPS)
    if not isinstance(priority, str) or priority not in PRIORITIES:
        found.add("priority", _("must be one of %(known)s", known=", ".join(PRIORITIES)))
    if not isinstance(given.get("payload", {}), dict):
        found.add("payload", _("must be a mapping"))
    with found.within("spread_seconds"):
        check_number(given.get("spread_seconds", 0), 0, MAX_SPREAD)
    if given.get("due_seconds") is not None:
        with found.within("due_seconds"):
            check_number(given["due_seconds"], 60, MAX_SPREAD)
    if shops != ALL_SHOPS:
        with found.within("shops"):
            check_texts(shops, 64)
            if problem := find_unstorable_text("".join(shops)):
                raise ValueError(problem)
        if isinstance(shops, list) and not 0 < len(shops) <= MOST_SHOPS:
            found.add("shops", _("“all”, or 1 to %(most)s shop ids", most=MOST_SHOPS))
    found.raise_if_any()


def _check_references(arguments: ScheduleArguments) -> None:
    found = ErrorCollector()
    platform = Platform.objects.filter(key=arguments.platform, retired_at=None).first()
    if platform is None:
        raise InvalidInput.of("platform", _("there is no platform “%(name)s”", name=arguments.platform))
    flow = Flow.objects.filter(platform=platform, task_type=arguments.task_type, retired_at=None).first()
    if flow is None:
        problem = _("%(platform)s has no task type “%(name)s”", platform=arguments.platform, name=arguments.task_type)
        found.add("task_type", problem)
    else:
        found.errors += payload_errors(arguments.payload or {}, flow)
    if arguments.shops is not None:
        living = set(
            _active_shops(arguments.platform).filter(shop_id__in=arguments.shops).values_list("shop_id", flat=True)
        )
        for shop_id in arguments.shops:
            if shop_id not in living:
                found.add("shops", _("there is no shop “%(name)s”", name=shop_id))
    found.raise_if_any()


def _active_shops(platform: str) -> Any:
    return Shop.objects.filter(platform__key=platform, retired_at=None).order_by("pk")


def spread_delay(platform: str, shop_id: str, task_type: str, spread_seconds: float) -> timedelta:
    """Return the delay of this shop within the spread, in whole milliseconds. Constant across processes and time."""
    share = hash_to_percent(f"schedule:{platform}:{task_type}", shop_id) / 100
    return timedelta(milliseconds=int(share * spread_seconds * 1000))


# A row that another transaction has locked is skipped: its count of requests is only informative.
_COUNT_REQUESTS = """
WITH mine AS MATERIALIZED (
    SELECT task_id FROM rpa_tasks_job
    WHERE shop_id = ANY(%(shops)b::bigint[]) AND flow_id = %(flow)s AND dedupe_key = %(key)s
      AND state IN ('scheduled', 'queued')
    FOR UPDATE SKIP LOCKED
)
UPDATE rpa_tasks_job AS job SET requests = job.requests + 1 FROM mine WHERE job.task_id = mine.task_id
"""
_INSERT = f"""
WITH wanted AS MATERIALIZED (
    SELECT w.shop_id, w.task_id, w.delay, w.delay <= %(horizon)s AS soon
    FROM unnest(%(shops)b::bigint[], %(ids)b::uuid[], %(delays)b::interval[]) AS w(shop_id, task_id, delay)
), free AS MATERIALIZED (
    SELECT wanted.* FROM wanted
    WHERE NOT EXISTS (SELECT FROM rpa_tasks_job AS job WHERE job.task_id = wanted.task_id) AND NOT EXISTS (
        SELECT FROM rpa_tasks_job AS job
        WHERE job.shop_id = wanted.shop_id AND job.flow_id = %(flow)s AND job.dedupe_key = %(key)s
          AND job.state IN ('scheduled', 'queued')
    )
), room AS MATERIALIZED (
    SELECT platform.backlog_limit - count(job.task_id) AS left
    FROM rpa_tasks_platform AS platform
        JOIN rpa_tasks_shop AS shop ON shop.platform_id = platform.id
        LEFT JOIN rpa_tasks_job AS job
            ON job.shop_id = shop.id AND job.state IN ('scheduled', 'queued')
    WHERE platform.id = %(platform)s GROUP BY platform.backlog_limit
), fitting AS MATERIALIZED (
    SELECT free.*, row_number() OVER (ORDER BY free.delay, free.shop_id) AS place
    FROM free JOIN rpa_tasks_shop AS shop ON shop.id = free.shop_id
    WHERE shop.backlog_limit > (
        SELECT count(*) FROM rpa_tasks_job AS job
        WHERE job.shop_id = free.shop_id AND job.state IN ('scheduled', 'queued')
    )
), candidates AS MATERIALIZED (
    SELECT * FROM fitting WHERE place <= (SELECT room.left FROM room)
), claimed AS (
    INSERT INTO rpa_tasks_dedupewindow AS held (task_id, shop_id, flow_id, key, ends_at)
    SELECT task_id, shop_id, %(flow)s, %(key)s, statement_timestamp() + %(window)s
           + CASE WHEN %(by_clock)s THEN interval '0' ELSE delay END
    FROM candidates WHERE %(window)s::interval IS NOT NULL ORDER BY shop_id
    {payloads.TAKE_OVER}
    RETURNING held.task_id
), tried AS MATERIALIZED (
    SELECT candidates.* FROM candidates LEFT JOIN claimed USING (task_id)
    WHERE %(window)s::interval IS NULL OR claimed.task_id IS NOT NULL
), made AS ({INSERT_JOBS})
SELECT shop_id, candidates.task_id IS NULL, made.task_id, made.state, made.due_at
FROM free LEFT JOIN candidates USING (shop_id) LEFT JOIN made USING (shop_id)
"""  # noqa: S608  (only our own words)
