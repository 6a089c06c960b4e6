"""Publish and cancel jobs for all producers: API, admin, schedules and touches.

The key of a job is shop + flow + business key. A request merges into the waiting job of its key. Behind a running job
at most one waits. A request without a key gets the one that its flow chooses. Two partial unique indexes enforce this.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from functools import cache
from itertools import islice
from typing import Any
from uuid import UUID

import jsonschema_rs
from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now

from rpa_tasks.jobs.pick import jobs
from rpa_tasks.jobs.wakeups import wakeup_publisher
from rpa_tasks.models import DedupeBy, Flow, Job, Platform, Shop
from rpa_tasks.supervisor import command
from scheduling import sql
from scheduling.errors import AftertouchError, Conflict, FieldError, InvalidInput, NotFound
from scheduling.ids import new_id
from scheduling.ledger.transitions import WAKEUP_LEASE, WakeUp
from scheduling.models import Priority

#: U+0000 as JSON writes it, but not an escaped backslash followed by `u0000`.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def as_stored(value: Any) -> Any:
    """Return the value as `jsonb` returns it: numbers have no exponent, so 1e300 has 301 digits."""
    return json.loads(json.dumps(value, ensure_ascii=False), parse_float=_parse_number_text)


def _parse_number_text(text: str) -> int | float:
    number = Decimal(text)
    return int(number) if "e" in text and number == number.to_integral_value() else float(text)


def unstorable_reason(value: Any) -> str:
    """Return why PostgreSQL cannot store this value, or ""."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:  # NaN, half a surrogate pair, or no JSON
        return str(error)
    return "contains U+0000" if _NUL.search(text) else ""


MAX_DELAY = timedelta(days=90)
MAX_PAYLOAD = 65_536  #: bytes of JSON; one argument of a command line is limited to 128 KiB
#: Prefixes of stored keys that no request may use: the digest of a payload, and the key of a job that never merges.
RESERVED_KEY_PREFIX = "@"
PAYLOAD_KEY, TASK_KEY = f"{RESERVED_KEY_PREFIX}payload:", f"{RESERVED_KEY_PREFIX}task:"
ERRORS_SHOWN, MESSAGE_SHOWN = 20, 300


#: Insert jobs for the rows of `tried` (task_id, shop_id, delay, soon): one per shop, all of one flow, payload and key.
#: Rows are ordered by shop, so that two concurrent statements cannot deadlock.
INSERT_JOBS = """
INSERT INTO rpa_tasks_job (
    task_id, root_id, state, priority, due_at, planned_at, queued_at, lease_until, hints, parked, attempt, lease_no,
    reason, created_at, shop_id, flow_id, payload, dedupe_key, fresh, requests, failures, touch_key, source, node,
    progress_message
)
SELECT tried.task_id, tried.task_id, CASE WHEN tried.soon THEN 'queued' ELSE 'scheduled' END, %(priority)s,
       statement_timestamp() + tried.delay, statement_timestamp() + tried.delay,
       CASE WHEN tried.soon THEN statement_timestamp() END,
       CASE WHEN tried.soon THEN statement_timestamp() + tried.delay + %(lease)s END, tried.soon::int, '', 0, 0, '',
       statement_timestamp(), tried.shop_id, %(flow)s, %(payload)s::jsonb, %(key)s, true, 1, 0, %(touch)s::uuid,
       %(source)s, '', ''
FROM tried ORDER BY tried.shop_id
ON CONFLICT DO NOTHING
RETURNING task_id, shop_id, state, due_at
"""


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
    touch_key: UUID | None = None  #: the touch that the job delivers; it gets one job at most
    keeps_payload: bool = False  #: the waiting job keeps its payload, because the requester may not edit payloads
    merges: bool = True  #: whether the waiting job takes over payload, priority and time; a schedule leaves them


@dataclass(frozen=True, slots=True)
class Receipt:
    task_id: UUID
    duplicate: bool  #: no job was created; `task_id` is the waiting job that covers this request
    state: str


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
    _check_request(request, flow)
    if not unstorable_reason(request.payload):
        request = replace(request, payload=as_stored(request.payload))
    unfit = payload_errors(request.payload, flow)
    with transaction.atomic():
        # A request that keeps the waiting job's payload need not bring a valid one.
        merged = _merge_into_waiting(request, shop, flow) if unfit and request.keeps_payload else None
        if unfit and merged is None:
            raise InvalidInput(*unfit)
        receipt, wakeup = merged or _store_job(request, shop, flow)
    if wakeup:
        transaction.on_commit(lambda: wakeup_publisher.submit([wakeup]))
    return receipt


def request_cancel(task_id: UUID, *, by: str) -> str:
    """Cancel a job. Returns "cancelled" if it was waiting; "cancel_requested" if it runs, and its node stops it in
    seconds.

    Raises: `NotFound`; `Conflict` if the job has ended.
    """
    with transaction.atomic():
        # The lock makes a retry that is settled concurrently visible in its new state.
        row = Job.objects.select_for_update(no_key=True).filter(pk=task_id).first()
        if row is None:
            raise NotFound(f"There is no job {task_id}.")
        if jobs.cancel([task_id], reason=f"by:{by}"):
            return "cancelled"
        if Job.objects.filter(pk=task_id, state="running").update(cancel_requested_at=Now()):
            return "cancel_requested"
    raise Conflict(f"The job is {row.state} already.")


def _find_shop_and_flow(request: PublishRequest) -> tuple[Shop, Flow]:
    shop = (
        Shop.objects.select_related("platform").filter(platform__key=request.platform, shop_id=request.shop_id).first()
    )
    if shop is None or shop.retired_at or shop.platform.retired_at:
        field = "platform" if shop is None and not _platform_is_active(request.platform) else "shop_id"
        raise InvalidInput.of(field, f"there is no {field.removesuffix('_id')} “{getattr(request, field)}”")
    flow = Flow.objects.filter(platform=shop.platform, task_type=request.task_type, retired_at=None).first()
    if flow is None:
        raise InvalidInput.of("task_type", f"{request.platform} has no task type “{request.task_type}”")
    return shop, flow


def _platform_is_active(key: str) -> bool:
    return Platform.objects.filter(key=key, retired_at=None).exists()


def _check_request(request: PublishRequest, flow: Flow) -> None:
    errors = []
    if request.priority not in Priority.values:
        errors.append(FieldError("priority", "high, normal or low"))
    if not timedelta(0) <= request.delay <= MAX_DELAY:
        errors.append(FieldError("delay_seconds", f"between 0 and {int(MAX_DELAY.total_seconds())}"))
    key = request.dedupe_key or ""
    if len(key) > 200:
        errors.append(FieldError("dedupe_key", "at most 200 characters"))
    if key.startswith(RESERVED_KEY_PREFIX):
        errors.append(FieldError("dedupe_key", f"must not start with “{RESERVED_KEY_PREFIX}”"))
    if unstorable_reason(key):
        errors.append(FieldError("dedupe_key", "has a character that cannot be stored"))
    if errors:
        raise InvalidInput(*errors)


def payload_errors(payload: Mapping[str, Any], flow: Flow) -> list[FieldError]:
    """Return the errors of a payload by field path, such as `payload.x.y`.

    At most 20 errors. A message quotes the payload, so it is cut to 300 characters.
    """
    if problem := unstorable_reason(payload) or _payload_too_long(as_stored(payload), flow):
        return [FieldError("payload", problem)]
    if not flow.payload_schema:
        return []
    found = _payload_validator(json.dumps(flow.payload_schema)).iter_errors(dict(payload))
    return [
        FieldError(".".join(["payload", *map(str, error.instance_path)]), error.message[:MESSAGE_SHOWN])
        for error in islice(found, ERRORS_SHOWN)
    ]


def _payload_too_long(payload: Mapping[str, Any], flow: Flow) -> str:
    """Return why no command line can hold this payload, or "".

    The payload is measured in its executed form, with the longest ids that a shop can have.
    """
    size = len(json.dumps(payload, ensure_ascii=False).encode())
    if size > MAX_PAYLOAD:
        return f"is {size} bytes of JSON; at most {MAX_PAYLOAD}"
    try:
        command.argv_for(
            flow.command,
            flow=f"{'x' * 64}_{flow.task_type}",
            param=command.longest_param(payload),
            timeout=flow.timeout,
            param_file="x" * command.LONGEST_PATH,
        )
    except command.ParamTooLong as error:
        return str(error)
    return ""


def flow_key_of(flow: Flow, payload: Mapping[str, Any]) -> str | None:
    """Return the key under which the flow merges jobs that have none of their own. None: the flow merges nothing.

    `payload` has the stored form (`as_stored`).
    """
    if flow.dedupe_by == DedupeBy.TASK_TYPE:
        return ""
    if flow.dedupe_by == DedupeBy.NONE:
        return None
    return key_of_payload(payload)


def key_of_payload(payload: Mapping[str, Any]) -> str:
    """Return the key of a payload in its stored form."""
    text = json.dumps(payload, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return f"{PAYLOAD_KEY}{hashlib.sha256(text.encode()).hexdigest()[:32]}"


@cache
def _payload_validator(schema: str) -> Any:
    """Compile a JSON schema, cached. It never fetches a remote reference."""
    return jsonschema_rs.validator_for(schema, offline=True)


def _store_job(request: PublishRequest, shop: Shop, flow: Flow) -> tuple[Receipt, WakeUp | None]:
    while True:
        if request.touch_key:
            known = Job.objects.filter(touch_key=request.touch_key).values_list("task_id", "state").first()
            if known:
                return Receipt(known[0], True, known[1]), None
        if waiting := _merge_into_waiting(request, shop, flow):
            return waiting
        _check_backlog(shop)
        if inserted := _insert_job(request, shop, flow):
            return inserted
        # A concurrent request published the same key, and a node may run that job already: repeat.


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
            # A requester who may not see payloads means any waiting job.
            "any": request.keeps_payload and request.dedupe_key is None,
            "payload_key": PAYLOAD_KEY,
        },
    )
    if not found:
        return None
    # A job that is neither earlier nor more urgent than before needs no second message.
    task_id, state, due_at, priority, better = found[0]
    wakeup = WakeUp(task_id, due_at, priority, shop.pk) if better else None
    return Receipt(task_id, True, state), wakeup


_MERGE_INTO_WAITING = """
WITH standing AS MATERIALIZED (
    SELECT task_id, priority, due_at FROM rpa_tasks_job
    WHERE shop_id = %(shop)s AND flow_id = %(flow)s
      AND (dedupe_key = %(key)s OR %(any)s AND (dedupe_key = '' OR starts_with(dedupe_key, %(payload_key)s)))
      AND state IN ('scheduled', 'queued')
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
                  ELSE row.due_at END
FROM standing WHERE row.task_id = standing.task_id
RETURNING row.task_id, row.state, row.due_at, row.priority,
          row.due_at <= statement_timestamp() + %(horizon)s
          AND (row.due_at < standing.due_at OR row.priority < standing.priority)
"""


def _insert_job(request: PublishRequest, shop: Shop, flow: Flow) -> tuple[Receipt, WakeUp | None] | None:
    """Insert the job. Returns None if a concurrent request stored one of this key."""
    task_id = new_id()
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
    _, _, state, due_at = found[0]
    wakeup = WakeUp(task_id, due_at, request.priority, shop.pk) if state == "queued" else None
    return Receipt(task_id, False, state), wakeup


def _dedupe_key(request: PublishRequest, flow: Flow) -> str | None:
    if request.touch_key:
        return f"touch:{request.touch_key}"
    return flow_key_of(flow, request.payload) if request.dedupe_key is None else request.dedupe_key or None


def _insert_parameters(request: PublishRequest, shop: Shop, flow: Flow) -> dict[str, Any]:
    return {
        "shop": shop.pk,
        "flow": flow.pk,
        "key": _dedupe_key(request, flow),
        "payload": json.dumps(request.payload),
        "priority": request.priority,
        "delay": request.delay,
        "horizon": settings.AFTERTOUCH_HORIZON,
        "touch": request.touch_key,
        "source": request.source[:100],
    }


def _check_backlog(shop: Shop) -> None:
    """Raise `BacklogFull` if a backlog limit is reached. Concurrent requests may exceed it slightly."""
    waiting = """
        SELECT count(*) FROM (
            SELECT FROM rpa_tasks_job AS job {join}
            WHERE job.state IN ('scheduled', 'queued') AND job.parked = '' AND {scope} LIMIT %(limit)s
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
