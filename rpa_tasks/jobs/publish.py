"""The one way in for jobs: from the API, the admin, schedules and touches.

One key for every producer: shop + flow + business key. While a job of a key waits, be it for its retry, another request
merges into it; while one runs, at most one waits behind it. A request without a key gets the one that its flow chooses.
Two partial unique indexes hold that against any race.
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
from rpa_tasks.jobs.wakeups import doorbell
from rpa_tasks.models import DedupeBy, Flow, Job, Platform, Shop
from rpa_tasks.supervisor import command
from scheduling import sql
from scheduling.errors import AftertouchError, Conflict, FieldError, InvalidInput, NotFound
from scheduling.ids import new_id
from scheduling.ledger.transitions import HINT_LEASE, Hint
from scheduling.models import Priority

#: U+0000 as it is written in JSON, and not the six characters of its name behind a backslash of their own.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def as_stored(value: Any) -> Any:
    """The value as it is read back from `jsonb`, which writes numbers without an exponent: 1e300 has 301 digits."""
    return json.loads(json.dumps(value, ensure_ascii=False), parse_float=_plain)


def _plain(text: str) -> int | float:
    number = Decimal(text)
    return int(number) if "e" in text and number == number.to_integral_value() else float(text)


def unstorable(value: Any) -> str:
    """Why it cannot be kept, or ""."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:  # NaN, half a surrogate pair, no JSON at all
        return str(error)
    return "contains U+0000" if _NUL.search(text) else ""


MAX_DELAY = timedelta(days=90)
MAX_PAYLOAD = 65_536  #: bytes of JSON; a command line's word holds 128 KiB
#: How stored keys begin that no request names: of a payload's digest, and of a job that merges with nothing.
OWN_KEYS = "@"
PAYLOAD_KEY, TASK_KEY = f"{OWN_KEYS}payload:", f"{OWN_KEYS}task:"
ERRORS_SHOWN, MESSAGE_SHOWN = 20, 300


#: New jobs for the rows of `tried` (task_id, shop_id, delay, soon), one a shop and all of one flow, payload and key. In
#: the order of the shops, so that two statements at once wait for each other in one direction only.
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
class Request:
    """What somebody wants done."""

    platform: str
    shop_id: str
    task_type: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    priority: int = Priority.NORMAL
    delay: timedelta = timedelta(0)
    dedupe_key: str | None = None  #: None: the flow chooses (`Flow.dedupe_by`); "": merges with nothing
    source: str = ""
    touch_key: UUID | None = None  #: the touch that it delivers: at most one job, ever
    keeps_payload: bool = False  #: a job that waits keeps its own, because whoever asks may not edit payloads
    merges: bool = True  #: whether a job that waits takes over payload, priority and time (a schedule only looks)


@dataclass(frozen=True, slots=True)
class Receipt:
    task_id: UUID
    duplicate: bool  #: nothing new was made; `task_id` is the one that stands for this request as well
    state: str


class Refused(AftertouchError):
    """Too much waits already."""

    def __init__(self, scope: str, limit: int) -> None:
        super().__init__(f"{limit} jobs of {scope} wait already.")
        self.scope = scope
        self.limit = limit
        self.retry_after = 60  #: seconds


def publish(request: Request) -> Receipt:
    """Store the job, then wake a node. Raises `InvalidInput` naming the field, or `Refused` where too much waits."""
    shop, flow = _find(request)
    _check(request, flow)
    if not unstorable(request.payload):
        request = replace(request, payload=as_stored(request.payload))
    unfit = payload_errors(request.payload, flow)
    with transaction.atomic():
        # Who keeps the payload of the one that waits brings none that would have to fit.
        merged = _merge(request, shop, flow) if unfit and request.keeps_payload else None
        if unfit and merged is None:
            raise InvalidInput(*unfit)
        receipt, hint = merged or _store(request, shop, flow)
    if hint:
        transaction.on_commit(lambda: doorbell.ring([hint]))
    return receipt


def cancel(task_id: UUID, *, by: str) -> str:
    """Call a job off: at once while it waits ("cancelled"), else its node is told within seconds
    ("cancel_requested"). Raises `NotFound`, or `Conflict` where it has ended."""
    with transaction.atomic():
        # Locked, so that a retry that is settled in this moment is seen as what it is.
        row = Job.objects.select_for_update(no_key=True).filter(pk=task_id).first()
        if row is None:
            raise NotFound(f"There is no job {task_id}.")
        if jobs.cancel([task_id], reason=f"by:{by}"):
            return "cancelled"
        if Job.objects.filter(pk=task_id, state="running").update(cancel_requested_at=Now()):
            return "cancel_requested"
    raise Conflict(f"The job is {row.state} already.")


def _find(request: Request) -> tuple[Shop, Flow]:
    shop = (
        Shop.objects.select_related("platform").filter(platform__key=request.platform, shop_id=request.shop_id).first()
    )
    if shop is None or shop.retired_at or shop.platform.retired_at:
        field = "platform" if shop is None and not _platform_lives(request.platform) else "shop_id"
        raise InvalidInput.of(field, f"there is no {field.removesuffix('_id')} “{getattr(request, field)}”")
    flow = Flow.objects.filter(platform=shop.platform, task_type=request.task_type, retired_at=None).first()
    if flow is None:
        raise InvalidInput.of("task_type", f"{request.platform} has no task type “{request.task_type}”")
    return shop, flow


def _platform_lives(key: str) -> bool:
    return Platform.objects.filter(key=key, retired_at=None).exists()


def _check(request: Request, flow: Flow) -> None:
    errors = []
    if request.priority not in Priority.values:
        errors.append(FieldError("priority", "high, normal or low"))
    if not timedelta(0) <= request.delay <= MAX_DELAY:
        errors.append(FieldError("delay_seconds", f"between 0 and {int(MAX_DELAY.total_seconds())}"))
    key = request.dedupe_key or ""
    if len(key) > 200:
        errors.append(FieldError("dedupe_key", "at most 200 characters"))
    if key.startswith(OWN_KEYS):
        errors.append(FieldError("dedupe_key", f"must not begin with “{OWN_KEYS}”"))
    if unstorable(key):
        errors.append(FieldError("dedupe_key", "has a character that cannot be stored"))
    if errors:
        raise InvalidInput(*errors)


def payload_errors(payload: Mapping[str, Any], flow: Flow) -> list[FieldError]:
    """What is wrong with a payload of this flow, by field path: `payload.x.y`. Messages quote the payload, so they are
    cut."""
    if problem := unstorable(payload) or _too_long(as_stored(payload), flow):
        return [FieldError("payload", problem)]
    if not flow.payload_schema:
        return []
    found = _validator(json.dumps(flow.payload_schema)).iter_errors(dict(payload))
    return [
        FieldError(".".join(["payload", *map(str, error.instance_path)]), error.message[:MESSAGE_SHOWN])
        for error in islice(found, ERRORS_SHOWN)
    ]


def _too_long(payload: Mapping[str, Any], flow: Flow) -> str:
    """Why no command line holds it; measured in the form that is executed, for the longest ids that a shop can have."""
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


def key_of(flow: Flow, payload: Mapping[str, Any]) -> str | None:
    """The key under which the flow merges jobs without a key of their own. None: it merges none. `payload` is in the
    form in which it is stored."""
    if flow.dedupe_by == DedupeBy.TASK_TYPE:
        return ""
    if flow.dedupe_by == DedupeBy.NONE:
        return None
    return key_of_payload(payload)


def key_of_payload(payload: Mapping[str, Any]) -> str:
    """Return the key of a payload in the form in which it is stored."""
    text = json.dumps(payload, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return f"{PAYLOAD_KEY}{hashlib.sha256(text.encode()).hexdigest()[:32]}"


@cache
def _validator(schema: str) -> Any:
    """Never one that fetches a part of itself from elsewhere."""
    return jsonschema_rs.validator_for(schema, offline=True)


def _store(request: Request, shop: Shop, flow: Flow) -> tuple[Receipt, Hint | None]:
    while True:
        if request.touch_key:
            known = Job.objects.filter(touch_key=request.touch_key).values_list("task_id", "state").first()
            if known:
                return Receipt(known[0], True, known[1]), None
        if waiting := _merge(request, shop, flow):
            return waiting
        _refuse_excess(shop)
        if inserted := _insert(request, shop, flow):
            return inserted
        # Somebody else published the same in this moment, and perhaps a node already runs it: look again.


def _merge(request: Request, shop: Shop, flow: Flow) -> tuple[Receipt, Hint | None] | None:
    """Let the job that waits stand for this request as well: the latest payload, the highest priority, the earliest
    time. A job that waits for its retry is brought forward. Where an earlier try may have had its effect with another
    payload, the job gets a new delivery key, or a receiver would take the new payload for a repetition.
    """
    parameters = _parameters(request, shop, flow)
    if parameters["key"] is None:
        return None
    found = sql.rows(
        """
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
        """,
        parameters
        | {
            "merges": request.merges,
            "renews": request.merges and not request.keeps_payload,
            "new_id": new_id(),
            # Who may not see payloads means whatever waits.
            "any": request.keeps_payload and request.dedupe_key is None,
            "payload_key": PAYLOAD_KEY,
        },
    )
    if not found:
        return None
    # What is no sooner and no more urgent than before needs no second token.
    task_id, state, due_at, priority, better = found[0]
    hint = Hint(task_id, due_at, priority, shop.pk) if better else None
    return Receipt(task_id, True, state), hint


def _insert(request: Request, shop: Shop, flow: Flow) -> tuple[Receipt, Hint | None] | None:
    """None: one of this key waits since this moment."""
    task_id = new_id()
    parameters = _parameters(request, shop, flow)
    if parameters["key"] is None:
        parameters["key"] = f"{TASK_KEY}{task_id}"
    found = sql.rows(
        f"""
        WITH tried AS (
            SELECT %(id)s::uuid AS task_id, %(shop)s::bigint AS shop_id, %(delay)s::interval AS delay,
                   %(delay)s::interval <= %(horizon)s AS soon
        ) {INSERT_JOBS}
        """,
        parameters | {"id": task_id, "lease": HINT_LEASE},
    )
    if not found:
        return None
    _, _, state, due_at = found[0]
    hint = Hint(task_id, due_at, request.priority, shop.pk) if state == "queued" else None
    return Receipt(task_id, False, state), hint


def _key(request: Request, flow: Flow) -> str | None:
    if request.touch_key:
        return f"touch:{request.touch_key}"
    return key_of(flow, request.payload) if request.dedupe_key is None else request.dedupe_key or None


def _parameters(request: Request, shop: Shop, flow: Flow) -> dict[str, Any]:
    return {
        "shop": shop.pk,
        "flow": flow.pk,
        "key": _key(request, flow),
        "payload": json.dumps(request.payload),
        "priority": request.priority,
        "delay": request.delay,
        "horizon": settings.AFTERTOUCH_HORIZON,
        "touch": request.touch_key,
        "source": request.source[:100],
    }


def _refuse_excess(shop: Shop) -> None:
    """Two who publish at once may both pass at the limit: it bounds a pile, it does not count a quota."""
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
            raise Refused(scope, limit)
