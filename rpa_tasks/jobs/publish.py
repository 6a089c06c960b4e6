"""Publish and cancel jobs for all producers: API, admin, schedules and touches.

The key of a job is shop + flow + business key. A request merges into the waiting job of its key. Behind a running job
at most one waits. A request without a key gets the one that its flow chooses. Two partial unique indexes enforce this.
A flow with a window runs a key once in that time: see `payloads`.

A batch has a few statements for all of its requests. The result of each is that of `publish_job`, called for one after
the other. Requests that these cannot serve go through `publish_job` itself, after the others: those of touches, invalid
ones, and those that lost a race.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from rpa_tasks.jobs import payloads
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.payloads import (
    PAYLOAD_KEY,
    RESERVED_KEY_PREFIX,
    TASK_KEY,
    add_period,
    as_stored,
    flow_key_of,
    name_touch_key,
    payload_errors,
    split_period,
    unstorable_reason,
)
from rpa_tasks.jobs.wakeups import wakeup_publisher
from rpa_tasks.models import DedupeBy, Flow, Job, JobState, Platform, Shop
from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import AftertouchError, Conflict, FieldError, InvalidInput, NotFound
from scheduling.ids import new_id
from scheduling.ledger.transitions import WakeUp
from scheduling.models import WAITING, Priority
from scheduling.models.touch import name_in_error
from scheduling.strict_text import find_unstorable_text

LONGEST_ALONE = 5.0  #: seconds that requests published alone wait in vain, all together
LONGEST_KEY = 200  #: characters
MAX_DELAY = timedelta(days=90)
MAX_TIME_TO_DUE = timedelta(days=366)


# Rows are ordered by shop, flow and key, so that two concurrent statements cannot deadlock.
_INSERT_JOBS = """
INSERT INTO rpa_tasks_job (
    task_id, root_id, state, priority, due_at, planned_at, attempt, lease_no, reason, created_at, shop_id, flow_id,
    payload, dedupe_key, fresh, requests, failures, touch_key, deadline, source, node, progress_message
)
SELECT tried.task_id, tried.task_id, CASE WHEN tried.soon THEN 'queued' ELSE 'scheduled' END, {priority},
       statement_timestamp() + tried.delay, statement_timestamp() + tried.delay, 0, 0, '', statement_timestamp(),
       tried.shop_id, {flow}, {payload}::jsonb, {key}, true, 1, 0, {touch}::uuid, {deadline}::timestamptz, {source},
       '', ''
FROM tried ORDER BY tried.shop_id{order}
ON CONFLICT DO NOTHING
RETURNING task_id, shop_id, state, due_at
"""
_VALUES = ("priority", "flow", "payload", "key", "touch", "deadline", "source")
#: Insert jobs for the rows of `tried` (task_id, shop_id, delay, soon): one per shop, all of one flow, payload and key.
INSERT_JOBS = _INSERT_JOBS.format(order="", **{name: f"%({name})s" for name in _VALUES})
#: Insert jobs for the rows of `tried`, which has a column for each of `_VALUES`, too.
INSERT_MIXED_JOBS = _INSERT_JOBS.format(order=", tried.flow, tried.key", **{name: f"tried.{name}" for name in _VALUES})


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """What a producer asks for."""

    platform: str
    shop_id: str
    task_type: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    priority: int = Priority.NORMAL
    delay: timedelta = timedelta(0)
    dedupe_key: str | None = None  #: None: the flow chooses (`Flow.dedupe_by`); "": the job never merges
    source: str = ""
    #: The touch that the job delivers. It gets one job at most. It merges only in a flow with a window.
    touch_key: UUID | None = None
    keeps_payload: bool = False  #: the waiting job keeps its payload, because the requester may not edit payloads
    merges_into_any: bool = False  #: into the waiting job of any payload; of a requester who cannot choose one
    not_before: datetime | None = None  #: the earliest start, beside `delay`
    deadline: datetime | None = None  #: when the job is to be done; later it counts as late


@dataclass(frozen=True, slots=True)
class Receipt:
    task_id: UUID
    duplicate: bool  #: no job was created; `task_id` is the job that covers this request
    state: str
    because: str = ""  #: of a duplicate: the job is "waiting", "running", or its "window" has not ended
    window_ends_at: datetime | None = None  #: of a duplicate that a window refused


class BacklogFull(AftertouchError):
    """Too many jobs of a shop or platform are waiting."""

    retry_after = 60  #: seconds

    def __init__(self, scope: str, limit: int) -> None:
        super().__init__(_("%(scope)s: %(limit)s jobs wait already, no more are taken.", scope=scope, limit=limit))


#: What a request of a batch leads to. An error of PostgreSQL means that the database is busy: repeat the request.
PublishResult = Receipt | InvalidInput | BacklogFull | Exception


@dataclass(slots=True)
class Publication:
    """A request on its way to a job, as the job stores it, with its place in the batch."""

    request: PublishRequest
    shop: Shop
    flow: Flow
    payload: Mapping[str, Any]
    unfit: list[FieldError]  #: errors of the payload
    delay: timedelta
    key: str | None = None  #: within the period of the flow's clock; None: it merges with nothing
    window: timedelta | None = None  #: how long the job holds its key; None: it holds none
    place: int = 0
    task_id: UUID = field(default_factory=new_id)  #: of the job that it may become
    result: PublishResult | None = None

    @property
    def order(self) -> tuple[int, int, str]:
        return self.shop.pk, self.flow.pk, self.key or ""

    @property
    def keeps_payload(self) -> bool:
        """Return whether the waiting job keeps its payload.

        The data of a customer stays in jobs of their own touches, where an erasure finds it.
        """
        return self.request.keeps_payload or self.request.touch_key is not None


def publish_job(request: PublishRequest) -> Receipt:
    """Store the job and wake a node after the commit. Idempotent for a `touch_key`.

    Raises: `InvalidInput` with the field; `BacklogFull` if too many jobs are waiting.
    """
    entry = _prepare(request, *_find_shop_and_flow(request))
    key = entry.key
    wakeups: list[WakeUp] = []
    if request.merges_into_any and key is not None:
        # A run may take the found job before the merge. Then another one may wait.
        while entry.result is None and (found := _find_waiting_key(entry, key)) is not None:
            entry.key = found
            wakeups = _merge([entry])
        entry.key = key
    if entry.result is None and not entry.unfit:
        wakeups = _store(entry)
    elif entry.result is None and key is not None:
        # A request that keeps the waiting job's payload need not bring a valid one.
        wakeups = _merge([entry])
    if entry.result is None:
        raise InvalidInput(*entry.unfit)
    if not isinstance(entry.result, Receipt):
        raise entry.result
    if wakeups:
        transaction.on_commit(lambda: wakeup_publisher.submit(wakeups))
    return entry.result


def _store(entry: Publication) -> list[WakeUp]:
    """Store the request. A concurrent request of the key, or a run of its job, makes it start again."""
    while True:
        with transaction.atomic():
            if entry.request.touch_key:
                known = Job.objects.filter(touch_key=entry.request.touch_key).values_list("task_id", "state").first()
                if known:
                    entry.result = Receipt(known[0], True, known[1], "waiting")
                    return []
            wakeups: list[WakeUp] = []
            if _refuse_in_window([entry]):
                wakeups = _merge([entry])
            elif entry.result is None:
                wakeups = _insert([entry])
            if entry.result:
                return wakeups
            # This releases the lock on a window that another job holds. A run locks its job first, then its window.
            transaction.set_rollback(True)


def _find_waiting_key(entry: Publication, key: str) -> str | None:
    """Return the key of a waiting job of any payload, in the period of this key."""
    period, _key = split_period(key)
    waiting = Job.objects.filter(shop_id=entry.shop.pk, flow_id=entry.flow.pk, state__in=WAITING).filter(
        Q(dedupe_key__in=[key, period]) | Q(dedupe_key__startswith=period + PAYLOAD_KEY)
    )
    return waiting.order_by("-fresh", "due_at").values_list("dedupe_key", flat=True).first()


def publish_many(requests: Sequence[PublishRequest]) -> list[PublishResult]:
    """Publish requests and return a result for each, in their order. Each stands alone: an error stops no other.

    Duplicates within the batch resolve in order. Waits for each lock at most 1 s. When requests that are published
    alone have waited in vain for `LONGEST_ALONE` seconds, the others hardly wait. After a lost connection the others
    get its error untried.
    """
    results: dict[int, PublishResult] = {}
    wait_left = LONGEST_ALONE
    lost: Exception | None = None

    def publish_alone(request: PublishRequest) -> PublishResult:
        nonlocal wait_left, lost
        if lost is not None:
            return lost
        started_at = time.monotonic()
        try:
            with sql.brief_lock_waits(min(max(wait_left, 0.01), 1.0)):
                return publish_job(request)
        except (InvalidInput, BacklogFull) as error:
            return error
        except sql.UNAVAILABLE_ERRORS as error:
            wait_left -= time.monotonic() - started_at
            lost = error if _is_lost(error) else None
            return error

    left = _prepare_batch(requests)
    while left:
        chosen, left = _split_first_of_each_key(left)
        waiting = _refuse_in_window(chosen)
        # Merging locks jobs, and claims lock windows. In one transaction two batches could deadlock.
        lost = _attempt(_merge, [each for each in chosen if each.place in waiting])
        if not lost:
            new = [each for each in chosen if each.result is None and each.place not in waiting]
            lost = _attempt(_insert, new)
        for entry in chosen:
            results[entry.place] = entry.result or publish_alone(entry.request)
        left = [] if lost else _copy_refusals(chosen, left, results)
    for place, request in enumerate(requests):
        if place not in results:
            results[place] = publish_alone(request)
    return [results[place] for place in range(len(requests))]


def _is_lost(error: Exception) -> bool:
    """Return whether the connection is lost: then the statement may have been stored."""
    return getattr(error.__cause__, "sqlstate", None) is None


# --- check the request ---------------------------------------------------------------------------------------------


def _find_shop_and_flow(request: PublishRequest) -> tuple[Shop, Flow]:
    shop = (
        Shop.objects.select_related("platform").filter(platform__key=request.platform, shop_id=request.shop_id).first()
    )
    if shop is None or shop.retired_at or shop.platform.retired_at:
        has_platform = shop or Platform.objects.filter(key=request.platform, retired_at=None).exists()
        field = "shop_id" if has_platform else "platform"
        raise InvalidInput.of(
            field,
            _("there is no %(noun)s “%(name)s”", noun=field.removesuffix("_id"), name=getattr(request, field)),
        )
    flow = Flow.objects.filter(platform=shop.platform, task_type=request.task_type, retired_at=None).first()
    if flow is None:
        raise InvalidInput.of(
            "task_type",
            _("%(platform)s has no task type “%(name)s”", platform=request.platform, name=request.task_type),
        )
    return shop, flow


def _prepare(request: PublishRequest, shop: Shop, flow: Flow, at: datetime | None = None) -> Publication:
    """Return the request as its job stores it. `at` is PostgreSQL's time, if known.

    Raises: `InvalidInput`. A payload that does not fit the flow is no error while a waiting job may keep its own.
    """
    if at is None and (request.not_before or request.deadline or flow.dedupe_period):
        at = sql.now()
    delay = request.delay
    if request.not_before is not None and at is not None:
        # It becomes the delay, by PostgreSQL's clock. The past means at once.
        delay = max(delay, request.not_before - at)
        if delay > MAX_DELAY:
            raise InvalidInput.of("not_before", _("within %(days)s days", days=MAX_DELAY.days))
    _check_members(request, delay, at)
    period, lasts = payloads.find_window(flow, at, delay)
    longest = LONGEST_KEY - len(add_period("", period))
    if len(request.dedupe_key or "") > longest:
        raise InvalidInput.of("dedupe_key", _("at most %(most)s characters in a flow with a period", most=longest))
    if problem := unstorable_reason(request.payload):
        raise InvalidInput.of("payload", problem)
    payload = as_stored(request.payload)
    entry = Publication(request, shop, flow, payload, payload_errors(payload, flow), delay)
    if entry.unfit and not entry.keeps_payload:
        raise InvalidInput(*entry.unfit)
    # A touch has a key of its own, unless the flow has a window and the flow or the request a key.
    if request.touch_key and not (flow.has_window and (flow.dedupe_by != DedupeBy.NONE or request.dedupe_key)):
        entry.key = name_touch_key(request.touch_key)
        return entry
    key = flow_key_of(flow, payload) if request.dedupe_key is None else request.dedupe_key or None
    if key is not None:
        entry.key, entry.window = add_period(key, period), lasts
    return entry


def _check_members(request: PublishRequest, delay: timedelta, at: datetime | None) -> None:
    errors = []
    if request.priority not in Priority.values:
        errors.append(FieldError("priority", _("high, normal or low")))
    if not timedelta(0) <= delay <= MAX_DELAY:
        errors.append(FieldError("delay_seconds", _("between 0 and %(most)s", most=int(MAX_DELAY.total_seconds()))))
    key = request.dedupe_key or ""
    if request.deadline and at and not timedelta(0) < request.deadline - at - delay <= MAX_TIME_TO_DUE:
        errors.append(
            FieldError("due_at", _("within %(days)s days after the earliest start", days=MAX_TIME_TO_DUE.days))
        )
    if len(key) > LONGEST_KEY:
        errors.append(FieldError("dedupe_key", _("at most %(most)s characters", most=LONGEST_KEY)))
    if key.startswith(RESERVED_KEY_PREFIX):
        errors.append(FieldError("dedupe_key", _("must not start with “%(prefix)s”", prefix=RESERVED_KEY_PREFIX)))
    if problem := find_unstorable_text(key):
        errors.append(FieldError("dedupe_key", problem))
    if errors:
        raise InvalidInput(*errors)


# --- batches ---------------------------------------------------------------------------------------------------------


def _prepare_batch(requests: Sequence[PublishRequest]) -> list[Publication]:
    """Return the valid requests that the statements serve, with their shops and flows."""
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
        if shop is None or flow is None or request.touch_key or request.merges_into_any:
            continue
        try:
            entry = _prepare(request, shop, flow, at)
        except InvalidInput:
            continue
        if not entry.unfit:
            entry.place = place
            entries.append(entry)
    return entries


def _split_first_of_each_key(entries: Iterable[Publication]) -> tuple[list[Publication], list[Publication]]:
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
    done: Iterable[Publication], left: Iterable[Publication], results: dict[int, PublishResult]
) -> list[Publication]:
    """Give later requests of a key the answer of the first one, if that wrote nothing. Return the other requests."""
    refused = {
        entry.order: entry.result
        for entry in done
        if isinstance(entry.result, Receipt) and entry.result.because in ("running", "window")
    }
    results.update({entry.place: answer for entry in left if (answer := refused.get(entry.order))})
    return [entry for entry in left if entry.order not in refused]


def _attempt(
    write: Callable[[Sequence[Publication]], list[WakeUp]], entries: Sequence[Publication]
) -> Exception | None:
    """Write in a transaction. After an error of PostgreSQL nothing is stored, and no entry has a new result.

    After a lost connection the batch may be stored: its entries get the error, which is returned, and the client
    decides.
    """
    if not entries:
        return None
    try:
        with sql.brief_lock_waits():
            wakeups = write(entries)
            transaction.on_commit(lambda: wakeup_publisher.submit(wakeups))
    except sql.UNAVAILABLE_ERRORS as error:
        lost = error if _is_lost(error) else None
        for entry in entries:
            entry.result = lost
        return lost
    return None


# --- store -----------------------------------------------------------------------------------------------------------


def _refuse_in_window(entries: Sequence[Publication]) -> set[int]:
    """Refuse requests whose window another job holds. Return the places of those with a waiting job. Writes nothing."""
    keyed = {entry.place: entry for entry in entries if entry.key is not None}
    waiting: set[int] = set()
    if not keyed:
        return waiting
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
      AND row.state IN ('scheduled', 'queued')
    LIMIT 1
) AS waiting ON true
LEFT JOIN LATERAL (
    SELECT held.* FROM rpa_tasks_dedupewindow AS held
    WHERE v.lasts IS NOT NULL AND held.shop_id = v.shop AND held.flow_id = v.flow AND held.key = v.key
      AND NOT ({payloads.IS_FREE})
) AS held ON true
LEFT JOIN LATERAL (SELECT state FROM rpa_tasks_job WHERE task_id = held.task_id) AS job ON true
"""  # noqa: S608  (only our own words)


def _merge(entries: Sequence[Publication]) -> list[WakeUp]:
    """Merge requests into the waiting jobs of their keys.

    A job takes the latest payload, the highest priority and the earliest time. This also advances a pending retry. An
    earlier attempt may have had its effect with another payload. The job then gets a new delivery key. With the old key
    a receiver would reject the new payload as a repetition.
    """
    by_place, wakeups = {entry.place: entry for entry in entries}, []
    ids = {"new_ids": [new_id() for _ in entries]}
    for place, task_id, state, due_at, priority, better in sql.rows(_MERGE, _columns(entries) | ids):
        entry = by_place[place]
        entry.result = Receipt(task_id, True, state, "waiting")
        if better:
            wakeups.append(WakeUp(task_id, due_at, priority, entry.shop.pk))
    return wakeups


_MERGE = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(
        %(places)b::int[], %(shops)b::bigint[], %(flows)b::bigint[], %(keys)b::text[], %(priorities)b::int[],
        %(delays)b::interval[], %(payloads)b::text[], %(deadlines)b::timestamptz[], %(new_ids)b::uuid[],
        %(renews)b::bool[]
    ) AS v(place, shop, flow, key, priority, delay, payload, deadline, new_id, renews)
), standing AS MATERIALIZED (
    SELECT given.*, job.task_id, job.priority AS old_priority, job.due_at AS old_due_at
    FROM given CROSS JOIN LATERAL (
        SELECT task_id, priority, due_at FROM rpa_tasks_job
        WHERE shop_id = given.shop AND flow_id = given.flow AND dedupe_key = given.key
          AND state IN ('scheduled', 'queued')
        ORDER BY fresh DESC, due_at LIMIT 1
        FOR NO KEY UPDATE
    ) AS job
)
UPDATE rpa_tasks_job AS row
SET requests = row.requests + 1,
    root_id = CASE WHEN renews AND row.attempt > 0 AND row.payload <> standing.payload::jsonb THEN new_id
                   ELSE row.root_id END,
    payload = CASE WHEN renews THEN standing.payload::jsonb ELSE row.payload END,
    priority = LEAST(row.priority, standing.priority),
    due_at = LEAST(row.due_at, statement_timestamp() + delay),
    deadline = LEAST(row.deadline, standing.deadline)
FROM standing WHERE row.task_id = standing.task_id AND row.state IN ('scheduled', 'queued')
RETURNING standing.place, row.task_id, row.state, row.due_at, row.priority,
          row.due_at <= statement_timestamp() + %(horizon)s
          AND (row.due_at < standing.old_due_at OR row.priority < standing.old_priority)
"""


def _insert(entries: Sequence[Publication]) -> list[WakeUp]:
    """Claim the windows and insert the jobs for which the backlogs have room."""
    fitting = _refuse_over_backlog(entries)
    if not fitting:
        return []
    by_id, wakeups = {entry.task_id: entry for entry in fitting}, []
    for task_id, shop, state, due_at in sql.rows(_INSERT, _columns(fitting)):
        entry = by_id[task_id]
        entry.result = Receipt(task_id, False, state)
        if state == "queued":
            wakeups.append(WakeUp(task_id, due_at, entry.request.priority, shop))
    if unused := [entry.task_id for entry in fitting if entry.result is None and entry.window is not None]:
        payloads.release_unused(unused)
    return wakeups


_INSERT = f"""
WITH wanted AS MATERIALIZED (
    SELECT v.*, v.delay <= %(horizon)s AS soon
    FROM unnest(
        %(ids)b::uuid[], %(shops)b::bigint[], %(flows)b::bigint[], %(keys)b::text[], %(priorities)b::int[],
        %(delays)b::interval[], %(payloads)b::text[], %(deadlines)b::timestamptz[], %(sources)b::text[],
        %(windows)b::interval[], %(touches)b::uuid[]
    ) AS v(task_id, shop_id, flow, key, priority, delay, payload, deadline, source, lasts, touch)
), claimed AS (
    INSERT INTO rpa_tasks_dedupewindow AS held (task_id, shop_id, flow_id, key, ends_at)
    SELECT task_id, shop_id, flow, key, statement_timestamp() + lasts
    FROM wanted WHERE lasts IS NOT NULL ORDER BY shop_id, flow, key
    {payloads.TAKE_OVER}
    RETURNING held.task_id
), tried AS MATERIALIZED (
    SELECT wanted.* FROM wanted LEFT JOIN claimed USING (task_id)
    WHERE wanted.lasts IS NULL OR claimed.task_id IS NOT NULL
)
{INSERT_MIXED_JOBS}
"""  # noqa: S608  (only our own words)


def _refuse_over_backlog(entries: Sequence[Publication]) -> list[Publication]:
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
        WHERE job.shop_id = shop.id AND job.state IN ('scheduled', 'queued')
        LIMIT shop.backlog_limit
    ) AS counted
)
FROM rpa_tasks_shop AS shop WHERE shop.id = ANY(%(shops)b::bigint[])
"""
_COUNT_OF_PLATFORMS = """
SELECT platform.id, (
    SELECT count(*) FROM (
        SELECT FROM rpa_tasks_job AS job JOIN rpa_tasks_shop AS shop ON shop.id = job.shop_id
        WHERE job.state IN ('scheduled', 'queued') AND shop.platform_id = platform.id
        LIMIT platform.backlog_limit
    ) AS counted
)
FROM rpa_tasks_platform AS platform WHERE platform.id = ANY(%(platforms)b::bigint[])
"""


def _columns(entries: Sequence[Publication]) -> dict[str, Any]:
    """Return the arrays of the statements. A request that merges with nothing has the key of its own job."""
    requests = [entry.request for entry in entries]
    deadlines: list[datetime | None] = [each.deadline for each in requests]
    return {
        "places": [entry.place for entry in entries],
        "ids": [entry.task_id for entry in entries],
        "shops": [entry.shop.pk for entry in entries],
        "flows": [entry.flow.pk for entry in entries],
        "keys": [f"{TASK_KEY}{entry.task_id}" if entry.key is None else entry.key for entry in entries],
        "windows": [entry.window for entry in entries],
        "touches": [each.touch_key for each in requests],
        "renews": [not entry.keeps_payload for entry in entries],
        "priorities": [each.priority for each in requests],
        "delays": [entry.delay for entry in entries],
        "payloads": [json.dumps(entry.payload) for entry in entries],
        "deadlines": deadlines,
        "sources": [each.source[:100] for each in requests],
        "horizon": settings.AFTERTOUCH_HORIZON,
    }


# --- cancel ----------------------------------------------------------------------------------------------------------


def request_cancel(task_id: UUID, *, by: str, wait: bool = True) -> str:
    """Cancel a job. Returns "cancelled" if it was waiting; "cancel_requested" if it runs, and its node stops it in
    seconds.

    A caller that holds locks of other jobs passes `wait=False`. A job that another transaction has locked then does not
    change.

    Raises: `NotFound`; `Conflict` if the job has ended, or is locked.
    """
    with transaction.atomic():
        # The lock makes a retry that is settled concurrently visible in its new state.
        mine = Job.objects.select_for_update(no_key=wait, skip_locked=not wait).filter(pk=task_id)
        row = mine.defer("payload", "result").first()
        if row is None:
            if not wait and Job.objects.filter(pk=task_id).exists():
                raise Conflict(_("Another transaction changes the job %(task_id)s now.", task_id=task_id))
            raise NotFound(_("There is no job %(task_id)s.", task_id=task_id))
        if job_ledger.cancel([task_id], reason=f"by:{by}"):
            return "cancelled"
        if Job.objects.filter(pk=task_id, state="running").update(cancel_requested_at=Now()):
            return "cancel_requested"
    raise Conflict(_("The job is %(state)s already.", state=name_in_error(JobState(row.state).label)))
