"""Publish a batch of requests with a few statements for all of them.

The result of each request is that of `publish_job`, called for one after the other. Requests that these cannot serve
go through `publish_job` itself, after the others: those of touches, invalid ones, and those that lost a race.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction

from rpa_tasks.jobs import payloads
from rpa_tasks.jobs.payloads import TASK_KEY
from rpa_tasks.jobs.publish import (
    INSERT_MIXED_JOBS,
    BacklogFull,
    PublishRequest,
    Receipt,
    check_request,
    choose_dedupe_key,
    publish_job,
)
from rpa_tasks.jobs.wakeups import wakeup_publisher
from rpa_tasks.models import Flow, Shop
from scheduling import sql
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.ledger.transitions import WAKEUP_LEASE, WakeUp
from scheduling.models import WAITING

#: What a request leads to. An error of PostgreSQL means that the database is busy: repeat the request.
PublishResult = Receipt | InvalidInput | BacklogFull | Exception


@dataclass(slots=True)
class BatchEntry:
    """A request that the statements serve, with its place in the batch."""

    place: int
    request: PublishRequest
    shop: Shop
    flow: Flow
    key: str | None  #: None: it merges with nothing
    task_id: UUID  #: of the job that it may become
    result: PublishResult | None = None

    @property
    def order(self) -> tuple[int, int, str]:
        return self.shop.pk, self.flow.pk, self.key or ""


def publish_many(requests: Sequence[PublishRequest]) -> list[PublishResult]:
    """Publish requests and return a result for each, in their order. Each stands alone: an error stops no other.

    Duplicates within the batch resolve in order. Waits for each lock at most 1 s.
    """
    results: dict[int, PublishResult] = {}
    left = _prepare(requests)
    while left:
        chosen, left = _split_first_of_each_key(left)
        waiting = _refuse_in_window(chosen)
        # Merging locks jobs, and claims lock windows. In one transaction two batches could deadlock.
        _attempt(_merge, [each for each in chosen if each.place in waiting])
        _attempt(_insert, [each for each in chosen if each.result is None and each.place not in waiting])
        for entry in chosen:
            results[entry.place] = entry.result or _publish_alone(entry.request)
        left = _copy_refusals(chosen, left, results)
    for place, request in enumerate(requests):
        if place not in results:
            results[place] = _publish_alone(request)
    return [results[place] for place in range(len(requests))]


def _publish_alone(request: PublishRequest) -> PublishResult:
    try:
        with sql.brief_lock_waits():
            return publish_job(request)
    except (InvalidInput, BacklogFull, *sql.UNAVAILABLE_ERRORS) as error:
        return error


# --- look up --------------------------------------------------------------------------------------------------------


def _prepare(requests: Sequence[PublishRequest]) -> list[BatchEntry]:
    """Return the valid requests with their shops and flows, without those of touches."""
    platforms, shop_ids = {each.platform for each in requests}, {each.shop_id for each in requests}
    found_shops = (
        Shop.objects.filter(platform__key__in=platforms, shop_id__in=shop_ids, retired_at=None)
        .filter(platform__retired_at=None)
        .select_related("platform")
        .only(
            "platform_id", "shop_id", "name", "backlog_limit",
            "platform__key", "platform__name", "platform__backlog_limit",
        )
    )  # fmt: skip
    shops = {(each.platform.key, each.shop_id): each for each in found_shops}
    task_types = {each.task_type for each in requests}
    found_flows = Flow.objects.filter(platform__key__in=platforms, task_type__in=task_types, retired_at=None)
    flows = {(each.platform_id, each.task_type): each for each in found_flows}
    needs_clock = any(each.dedupe_period for each in flows.values())
    at = sql.now() if needs_clock or any(each.not_before or each.deadline for each in requests) else None
    entries = []
    for place, request in enumerate(requests):
        shop = shops.get((request.platform, request.shop_id))
        flow = flows.get((shop.platform_id, request.task_type)) if shop else None
        is_plain = request.merges and not (request.touch_key or request.keeps_payload or request.merges_into_any)
        if shop is None or flow is None or not is_plain:
            continue
        try:
            stored, unfit = check_request(request, flow, at)
        except InvalidInput:
            continue
        if not unfit:
            entries.append(BatchEntry(place, stored, shop, flow, choose_dedupe_key(stored, flow), new_id()))
    return entries


def _split_first_of_each_key(entries: Iterable[BatchEntry]) -> tuple[list[BatchEntry], list[BatchEntry]]:
    """Split into the first of each shop, flow and key, in the order of locks, and the others."""
    seen: set[tuple[int, int, str]] = set()
    first, others = [], []
    for entry in entries:
        if entry.key is not None and entry.order in seen:
            others.append(entry)
        else:
            first.append(entry)
            seen.add(entry.order)
    return sorted(first, key=lambda entry: entry.order), others


def _copy_refusals(
    done: Iterable[BatchEntry], left: Iterable[BatchEntry], results: dict[int, PublishResult]
) -> list[BatchEntry]:
    """Give later requests of a key the answer of the first one, if that wrote nothing. Return the other requests."""
    refused = {
        entry.order: entry.result
        for entry in done
        if isinstance(entry.result, Receipt) and entry.result.because in ("running", "window")
    }
    results.update({entry.place: answer for entry in left if (answer := refused.get(entry.order))})
    return [entry for entry in left if entry.order not in refused]


# --- publish --------------------------------------------------------------------------------------------------------


def _attempt(write: Callable[[Sequence[BatchEntry]], list[WakeUp]], entries: Sequence[BatchEntry]) -> None:
    """Write in a transaction. After an error of PostgreSQL nothing is stored, and no entry has a new result.

    After a lost connection the batch may be stored: its entries get the error, and the client decides.
    """
    if not entries:
        return
    try:
        with sql.brief_lock_waits():
            wakeups = write(entries)
            transaction.on_commit(lambda: wakeup_publisher.submit(wakeups))
    except sql.UNAVAILABLE_ERRORS as error:
        is_lost = getattr(error.__cause__, "sqlstate", None) is None
        for entry in entries:
            entry.result = error if is_lost else None


def _refuse_in_window(entries: Sequence[BatchEntry]) -> set[int]:
    """Refuse requests whose window another job holds. Return the places of those with a waiting job. Writes nothing."""
    keyed = {entry.place: entry for entry in entries if entry.key is not None}
    waiting = set()
    for place, waits, task_id, state, ends_at in sql.rows(_STANDING, _columns(list(keyed.values()))):
        if waits:
            waiting.add(place)
        elif task_id and state not in WAITING:
            because = "running" if state == "running" else "window"
            keyed[place].result = Receipt(task_id, True, state, because, ends_at)
    return waiting


_STANDING = f"""
SELECT v.place, waiting.task_id IS NOT NULL, held.task_id, COALESCE(job.state, ''), held.ends_at
FROM unnest(%(places)b::int[], %(shops)b::bigint[], %(flows)b::bigint[], %(keys)b::text[], %(windows)b::interval[])
    AS v(place, shop, flow, key, lasts)
LEFT JOIN LATERAL (
    SELECT task_id FROM rpa_tasks_job AS row
    WHERE row.shop_id = v.shop AND row.flow_id = v.flow AND row.dedupe_key = v.key
      AND row.state IN ('scheduled', 'queued') AND row.paused_by = ''
    LIMIT 1
) AS waiting ON true
LEFT JOIN LATERAL (
    SELECT held.* FROM rpa_tasks_dedupewindow AS held
    WHERE v.lasts IS NOT NULL AND held.shop_id = v.shop AND held.flow_id = v.flow AND held.key = v.key
      AND NOT ({payloads.IS_FREE_MIXED})
) AS held ON true
LEFT JOIN LATERAL (SELECT state FROM rpa_tasks_job WHERE task_id = held.task_id) AS job ON true
"""  # noqa: S608  (only our own words)


def _merge(entries: Sequence[BatchEntry]) -> list[WakeUp]:
    """Merge requests into the waiting jobs of their keys, as `publish_job` does."""
    by_place, wakeups = {entry.place: entry for entry in entries}, []
    ids = {"new_ids": [new_id() for _ in entries]}
    for place, task_id, state, due_at, priority, better in sql.rows(_MERGE_MANY, _columns(entries) | ids):
        entry = by_place[place]
        entry.result = Receipt(task_id, True, state, "waiting")
        if better:
            wakeups.append(WakeUp(task_id, due_at, priority, entry.shop.pk))
    return wakeups


_MERGE_MANY = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(
        %(places)b::int[], %(shops)b::bigint[], %(flows)b::bigint[], %(keys)b::text[], %(priorities)b::int[],
        %(delays)b::interval[], %(payloads)b::text[], %(deadlines)b::timestamptz[], %(new_ids)b::uuid[]
    ) AS v(place, shop, flow, key, priority, delay, payload, deadline, new_id)
), standing AS MATERIALIZED (
    SELECT given.*, job.task_id, job.priority AS old_priority, job.due_at AS old_due_at
    FROM given CROSS JOIN LATERAL (
        SELECT task_id, priority, due_at FROM rpa_tasks_job
        WHERE shop_id = given.shop AND flow_id = given.flow AND dedupe_key = given.key
          AND state IN ('scheduled', 'queued') AND paused_by = ''
        ORDER BY fresh DESC, due_at LIMIT 1
        FOR NO KEY UPDATE
    ) AS job
)
UPDATE rpa_tasks_job AS row
SET requests = row.requests + 1,
    root_id = CASE WHEN row.attempt > 0 AND row.payload <> standing.payload::jsonb THEN standing.new_id
                   ELSE row.root_id END,
    payload = standing.payload::jsonb,
    priority = LEAST(row.priority, standing.priority),
    due_at = LEAST(row.due_at, statement_timestamp() + standing.delay),
    deadline = LEAST(row.deadline, standing.deadline)
FROM standing WHERE row.task_id = standing.task_id AND row.state IN ('scheduled', 'queued')
RETURNING standing.place, row.task_id, row.state, row.due_at, row.priority,
          row.due_at <= statement_timestamp() + %(horizon)s
          AND (row.due_at < standing.old_due_at OR row.priority < standing.old_priority)
"""


def _insert(entries: Sequence[BatchEntry]) -> list[WakeUp]:
    """Claim the windows and insert the jobs for which the backlogs have room."""
    fitting = _refuse_over_backlog(entries)
    if not fitting:
        return []
    by_id, wakeups = {entry.task_id: entry for entry in fitting}, []
    for task_id, shop, state, due_at in sql.rows(_INSERT_MANY, _columns(fitting) | {"lease": WAKEUP_LEASE}):
        entry = by_id[task_id]
        entry.result = Receipt(task_id, False, state)
        if state == "queued":
            wakeups.append(WakeUp(task_id, due_at, entry.request.priority, shop))
    payloads.release_unused([entry.task_id for entry in fitting if entry.result is None])
    return wakeups


_INSERT_MANY = f"""
WITH wanted AS MATERIALIZED (
    SELECT v.*, v.delay <= %(horizon)s AS soon, NULL::uuid AS touch
    FROM unnest(
        %(ids)b::uuid[], %(shops)b::bigint[], %(flows)b::bigint[], %(keys)b::text[], %(priorities)b::int[],
        %(delays)b::interval[], %(payloads)b::text[], %(deadlines)b::timestamptz[], %(sources)b::text[],
        %(windows)b::interval[]
    ) AS v(task_id, shop_id, flow, key, priority, delay, payload, deadline, source, lasts)
), claimed AS (
    INSERT INTO rpa_tasks_dedupewindow AS held (task_id, shop_id, flow_id, key, ends_at)
    SELECT task_id, shop_id, flow, key, statement_timestamp() + lasts
    FROM wanted WHERE lasts IS NOT NULL ORDER BY shop_id, flow, key
    {payloads.TAKE_OVER_MIXED}
    RETURNING held.task_id
), tried AS MATERIALIZED (
    SELECT wanted.* FROM wanted LEFT JOIN claimed USING (task_id)
    WHERE wanted.lasts IS NULL OR claimed.task_id IS NOT NULL
)
{INSERT_MIXED_JOBS}
"""  # noqa: S608  (only our own words)


def _refuse_over_backlog(entries: Sequence[BatchEntry]) -> list[BatchEntry]:
    """Refuse requests beyond the backlog limits, in the order of the batch. Return the others in the order of locks."""
    shops = {entry.shop.pk: entry.shop for entry in entries}
    platforms = {shop.platform_id for shop in shops.values()}
    waiting = dict(sql.rows(_COUNT_OF_SHOPS, {"shops": list(shops)}))
    backlogs = dict(sql.rows(_COUNT_OF_PLATFORMS, {"platforms": list(platforms)}))
    fitting = []
    for entry in sorted(entries, key=lambda entry: entry.place):
        shop, platform = entry.shop, entry.shop.platform
        if waiting[shop.pk] >= shop.backlog_limit:
            entry.result = BacklogFull(str(shop), shop.backlog_limit)
        elif backlogs[platform.pk] >= platform.backlog_limit:
            entry.result = BacklogFull(str(platform), platform.backlog_limit)
        else:
            fitting.append(entry)
            waiting[shop.pk] += 1
            backlogs[platform.pk] += 1
    return sorted(fitting, key=lambda entry: entry.order)


_COUNT_OF_SHOPS = """
SELECT shop.id, (
    SELECT count(*) FROM (
        SELECT FROM rpa_tasks_job AS job
        WHERE job.shop_id = shop.id AND job.state IN ('scheduled', 'queued') AND job.paused_by = ''
        LIMIT shop.backlog_limit
    ) AS counted
)
FROM rpa_tasks_shop AS shop WHERE shop.id = ANY(%(shops)b::bigint[])
"""
_COUNT_OF_PLATFORMS = """
SELECT platform.id, (
    SELECT count(*) FROM (
        SELECT FROM rpa_tasks_job AS job JOIN rpa_tasks_shop AS shop ON shop.id = job.shop_id
        WHERE job.state IN ('scheduled', 'queued') AND job.paused_by = '' AND shop.platform_id = platform.id
        LIMIT platform.backlog_limit
    ) AS counted
)
FROM rpa_tasks_platform AS platform WHERE platform.id = ANY(%(platforms)b::bigint[])
"""


def _columns(entries: Sequence[BatchEntry]) -> dict[str, Any]:
    """Return the arrays of the statements. A request that merges with nothing has the key of its own job."""
    requests = [entry.request for entry in entries]
    deadlines: list[datetime | None] = [each.deadline for each in requests]
    return {
        "places": [entry.place for entry in entries],
        "ids": sql.UuidArray([entry.task_id for entry in entries]),
        "shops": [entry.shop.pk for entry in entries],
        "flows": [entry.flow.pk for entry in entries],
        "keys": [f"{TASK_KEY}{entry.task_id}" if entry.key is None else entry.key for entry in entries],
        "windows": [None if entry.key is None else entry.request.window for entry in entries],
        "priorities": [each.priority for each in requests],
        "delays": [each.delay for each in requests],
        "payloads": [json.dumps(each.payload) for each in requests],
        "deadlines": deadlines,
        "sources": [each.source[:100] for each in requests],
        "horizon": settings.AFTERTOUCH_HORIZON,
    }
