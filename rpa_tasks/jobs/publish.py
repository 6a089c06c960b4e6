"""Publish and cancel jobs for all producers: API, admin, schedules and touches.

The key of a job is shop + flow + business key. A request merges into the waiting job of its key. Behind a running job
at most one waits. A request without a key gets the one that its flow chooses. Two partial unique indexes enforce this.
A flow with a window runs a key once in that time: see `payloads`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
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
    unstorable_reason,
)
from rpa_tasks.jobs.wakeups import wakeup_publisher
from rpa_tasks.models import DedupeBy, Flow, Job, Platform, Shop
from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import AftertouchError, Conflict, FieldError, InvalidInput, NotFound
from scheduling.ids import new_id
from scheduling.ledger.transitions import WAKEUP_LEASE, WakeUp
from scheduling.models import WAITING, Priority
from scheduling.strict_text import find_unstorable_text

LONGEST_KEY = 200  #: characters
MAX_DELAY = timedelta(days=90)
MAX_TIME_TO_DUE = timedelta(days=366)


# Rows are ordered by shop, flow and key, so that two concurrent statements cannot deadlock.
_INSERT_JOBS = """
INSERT INTO rpa_tasks_job (
    task_id, root_id, state, priority, due_at, planned_at, queued_at, lease_until, wakeups, paused_by, attempt,
    lease_no, reason, created_at, shop_id, flow_id, payload, dedupe_key, fresh, requests, failures, touch_key, deadline,
    source, node, progress_message
)
SELECT tried.task_id, tried.task_id, CASE WHEN tried.soon THEN 'queued' ELSE 'scheduled' END, {priority},
       statement_timestamp() + tried.delay, statement_timestamp() + tried.delay,
       CASE WHEN tried.soon THEN statement_timestamp() END,
       CASE WHEN tried.soon THEN statement_timestamp() + tried.delay + %(lease)s END, tried.soon::int, '', 0, 0, '',
       statement_timestamp(), tried.shop_id, {flow}, {payload}::jsonb, {key}, true, 1, 0, {touch}::uuid,
       {deadline}::timestamptz, {source}, '', ''
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
    period: str = ""  #: of the flow's clock, set by `check_request`; requests of different ones never merge
    window: timedelta | None = None  #: how long the job holds its key, set by `check_request`
    merges: bool = True  #: whether the waiting job takes over payload, priority and time; a schedule leaves them


@dataclass(frozen=True, slots=True)
class Receipt:
    task_id: UUID
    duplicate: bool  #: no job was created; `task_id` is the job that covers this request
    state: str
    because: str = ""  #: of a duplicate: the job is "waiting", "running", or its "window" has not ended
    window_ends_at: datetime | None = None  #: of a duplicate that a window refused


class BacklogFull(AftertouchError):
    """Too many jobs of a shop or platform are waiting."""

    def __init__(self, scope: str, limit: int) -> None:
        super().__init__(f"{limit} jobs of {scope} wait already.")
        self.scope = scope
        self.limit = limit
        self.retry_after = 60  #: seconds


def publish_job(request: PublishRequest) -> Receipt:
    """Store the job and wake a node after the commit. Idempotent for a `touch_key`.

    Raises: `InvalidInput` with the field; `BacklogFull` if too many jobs are waiting.
    """
    shop, flow = _find_shop_and_flow(request)
    request, unfit = check_request(request, flow)
    with transaction.atomic():
        # A request that keeps the waiting job's payload need not bring a valid one.
        merged = _merge_into_waiting(request, shop, flow) if unfit and request.keeps_payload else None
        if unfit and merged is None:
            raise InvalidInput(*unfit)
        receipt, wakeup = merged or _store_job(request, shop, flow)
    if wakeup:
        transaction.on_commit(lambda: wakeup_publisher.submit([wakeup]))
    return receipt


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
    raise Conflict(_("The job is %(state)s already.", state=row.state))


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


def check_request(
    request: PublishRequest, flow: Flow, at: datetime | None = None
) -> tuple[PublishRequest, list[FieldError]]:
    """Return the request as it is stored, and the errors of its payload. `at` is PostgreSQL's time, if known.

    Raises: `InvalidInput` for every other error.
    """
    if at is None and (request.not_before or request.deadline or flow.dedupe_period):
        at = sql.now()
    if request.not_before is not None and at is not None:
        # It becomes the delay, by PostgreSQL's clock. The past means at once.
        delay = max(request.delay, request.not_before - at)
        if delay > MAX_DELAY:
            raise InvalidInput.of("not_before", _("within %(days)s days", days=MAX_DELAY.days))
        request = replace(request, delay=delay, not_before=None)
    _check_members(request, at)
    if flow.has_window:
        period, lasts = payloads.find_window(flow, at, request.delay)
        longest = LONGEST_KEY - len(add_period("", period))
        if len(request.dedupe_key or "") > longest:
            raise InvalidInput.of("dedupe_key", _("at most %(most)s characters in a flow with a period", most=longest))
        request = replace(request, period=period, window=lasts)
    if not unstorable_reason(request.payload):
        request = replace(request, payload=as_stored(request.payload))
    if request.touch_key:
        # The data of a customer stays in jobs of their own touches, where an erasure finds it.
        request = replace(request, keeps_payload=True)
    return request, payload_errors(request.payload, flow)


def _check_members(request: PublishRequest, at: datetime | None) -> None:
    errors = []
    if request.priority not in Priority.values:
        errors.append(FieldError("priority", _("high, normal or low")))
    if not timedelta(0) <= request.delay <= MAX_DELAY:
        errors.append(FieldError("delay_seconds", _("between 0 and %(most)s", most=int(MAX_DELAY.total_seconds()))))
    key = request.dedupe_key or ""
    if request.deadline and at and not timedelta(0) < request.deadline - at - request.delay <= MAX_TIME_TO_DUE:
        errors.append(
            FieldError("due_at", _("within %(days)s days after the earliest start", days=MAX_TIME_TO_DUE.days))
        )
    if len(key) > LONGEST_KEY:
        errors.append(FieldError("dedupe_key", _("at most %(most)s characters", most=LONGEST_KEY)))
    if key.startswith(RESERVED_KEY_PREFIX):
        errors.append(
            FieldError(
                "dedupe_key",
                _("must not start with “%(prefix)s”", prefix=RESERVED_KEY_PREFIX),
            )
        )
    if problem := find_unstorable_text(key):
        errors.append(FieldError("dedupe_key", problem))
    if errors:
        raise InvalidInput(*errors)


def _store_job(request: PublishRequest, shop: Shop, flow: Flow) -> tuple[Receipt, WakeUp | None]:
    while True:
        if request.touch_key:
            known = Job.objects.filter(touch_key=request.touch_key).values_list("task_id", "state").first()
            if known:
                return Receipt(known[0], True, known[1], "waiting"), None
        if waiting := _merge_into_waiting(request, shop, flow):
            return waiting
        task_id = new_id()
        if holder := _claim_window(task_id, request, shop, flow):
            if holder.state not in WAITING:
                because = "running" if holder.state == "running" else "window"
                return Receipt(holder.task_id, True, holder.state, because, holder.ends_at), None
            continue  # its job was stored after the attempt to merge into it
        _check_backlog(shop)
        if inserted := _insert_job(task_id, request, shop, flow):
            return inserted
        # A concurrent request published the same key, and a node may run that job already: repeat.
        payloads.release_unused([task_id])


def _claim_window(task_id: UUID, request: PublishRequest, shop: Shop, flow: Flow) -> payloads.Holder | None:
    """Return the job that holds the window of the request's key. None: no job does, now `task_id` does."""
    key = choose_dedupe_key(request, flow)
    if request.window is None or key is None or not _shares_window(request, flow):
        return None
    return payloads.claim_window(task_id, shop.pk, flow, key, request.window)


def _merge_into_waiting(request: PublishRequest, shop: Shop, flow: Flow) -> tuple[Receipt, WakeUp | None] | None:
    """Merge the request into the waiting job of its key. Returns None if no job is waiting.

    The job takes the latest payload, the highest priority and the earliest time. This also advances a pending retry.
    An earlier attempt may have had its effect with another payload. The job then gets a new delivery key. With the old
    key a receiver would reject the new payload as a repetition.
    """
    parameters = _insert_parameters(request, shop, flow)
    if parameters["key"] is None:
        return None
    found = sql.rows(
        _MERGE_INTO_WAITING,
        parameters
        | {
            "merges": request.merges,
            "renews": request.merges and not request.keeps_payload,
            "new_id": new_id(),
            "any": request.merges_into_any,
            "plain_key": add_period("", request.period),
            "payload_key": add_period(PAYLOAD_KEY, request.period),
        },
    )
    if not found:
        return None
    # A job that is neither earlier nor more urgent than before needs no second message.
    task_id, state, due_at, priority, better = found[0]
    wakeup = WakeUp(task_id, due_at, priority, shop.pk) if better else None
    return Receipt(task_id, True, state, "waiting"), wakeup


# No job has a `paused_by`. Statements name it, because the partial indexes of waiting rows do.
_MERGE_INTO_WAITING = """
WITH standing AS MATERIALIZED (
    SELECT task_id, priority, due_at FROM rpa_tasks_job
    WHERE shop_id = %(shop)s AND flow_id = %(flow)s
      AND (dedupe_key = %(key)s OR %(any)s AND (dedupe_key = %(plain_key)s OR starts_with(dedupe_key, %(payload_key)s)))
      AND state IN ('scheduled', 'queued') AND paused_by = ''
    ORDER BY fresh DESC, due_at LIMIT 1
    FOR NO KEY UPDATE
)
UPDATE rpa_tasks_job AS row
SET requests = row.requests + 1,
    root_id = CASE WHEN %(renews)s AND row.attempt > 0 AND row.payload <> %(payload)s::jsonb
                   THEN %(new_id)s ELSE row.root_id END,
    payload = CASE WHEN %(renews)s THEN %(payload)s::jsonb ELSE row.payload END,
    priority = CASE WHEN %(merges)s THEN LEAST(row.priority, %(priority)s) ELSE row.priority END,
    due_at = CASE WHEN %(merges)s THEN LEAST(row.due_at, statement_timestamp() + %(delay)s)
                  ELSE row.due_at END,
    deadline = CASE WHEN %(merges)s THEN LEAST(row.deadline, %(deadline)s::timestamptz) ELSE row.deadline END
FROM standing WHERE row.task_id = standing.task_id
RETURNING row.task_id, row.state, row.due_at, row.priority,
          row.due_at <= statement_timestamp() + %(horizon)s
          AND (row.due_at < standing.due_at OR row.priority < standing.priority)
"""


def _insert_job(task_id: UUID, request: PublishRequest, shop: Shop, flow: Flow) -> tuple[Receipt, WakeUp | None] | None:
    """Insert the job. Returns None if a concurrent request stored one of this key."""
    parameters = _insert_parameters(request, shop, flow)
    if parameters["key"] is None:
        parameters["key"] = f"{TASK_KEY}{task_id}"
    found = sql.rows(
        f"""
        WITH tried AS (
            SELECT %(id)s::uuid AS task_id, %(shop)s::bigint AS shop_id, %(delay)s::interval AS delay,
                   %(delay)s::interval <= %(horizon)s AS soon
        ) {INSERT_JOBS}
        """,
        parameters | {"id": task_id, "lease": WAKEUP_LEASE},
    )
    if not found:
        return None
    *_others, state, due_at = found[0]
    wakeup = WakeUp(task_id, due_at, request.priority, shop.pk) if state == "queued" else None
    return Receipt(task_id, False, state), wakeup


def choose_dedupe_key(request: PublishRequest, flow: Flow) -> str | None:
    """Return the key under which the request merges. None: it merges with nothing."""
    if request.touch_key and not _shares_window(request, flow):
        return name_touch_key(request.touch_key)
    key = flow_key_of(flow, request.payload) if request.dedupe_key is None else request.dedupe_key or None
    return None if key is None else add_period(key, request.period)


def _shares_window(request: PublishRequest, flow: Flow) -> bool:
    """Return whether the window of the flow covers the request. A flow that merges nothing gives a touch no key."""
    has_key = not request.touch_key or flow.dedupe_by != DedupeBy.NONE or bool(request.dedupe_key)
    return flow.has_window and has_key


def _insert_parameters(request: PublishRequest, shop: Shop, flow: Flow) -> dict[str, Any]:
    return {
        "shop": shop.pk,
        "flow": flow.pk,
        "key": choose_dedupe_key(request, flow),
        "payload": json.dumps(request.payload),
        "priority": request.priority,
        "delay": request.delay,
        "horizon": settings.AFTERTOUCH_HORIZON,
        "touch": request.touch_key,
        "deadline": request.deadline,
        "source": request.source[:100],
    }


def _check_backlog(shop: Shop) -> None:
    """Raise `BacklogFull` if a backlog limit is reached. Concurrent requests may exceed it slightly."""
    waiting = """
        SELECT count(*) FROM (
            SELECT FROM rpa_tasks_job AS job {join}
            WHERE job.state IN ('scheduled', 'queued') AND job.paused_by = '' AND {scope} LIMIT %(limit)s
        ) AS counted
    """
    scopes = [
        (str(shop), shop.backlog_limit, waiting.format(join="", scope="job.shop_id = %(id)s"), shop.pk),
        (
            str(shop.platform),
            shop.platform.backlog_limit,
            waiting.format(
                join="JOIN rpa_tasks_shop AS shop ON shop.id = job.shop_id", scope="shop.platform_id = %(id)s"
            ),
            shop.platform_id,
        ),
    ]
    for scope, limit, statement, pk in scopes:
        ((count,),) = sql.rows(statement, {"id": pk, "limit": limit})
        if count >= limit:
            raise BacklogFull(scope, limit)
