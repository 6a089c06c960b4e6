"""Check payloads, derive the keys by which jobs merge, and claim the windows of keys."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import cache
from itertools import islice
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import jsonschema_rs
from django.conf import settings

from rpa_tasks.models import DedupeBy, DedupePeriod, Flow, Job, ParamStyle
from rpa_tasks.supervisor import command
from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, FieldError

#: Bytes of JSON in the form that is executed. Linux limits one argument, which has the ids of the run too, to 128 KiB.
MAX_PAYLOAD = 65_536
MAX_FILE_PAYLOAD = 524_288  #: bytes of JSON for a command that reads `{param_file}` only; a request has 1 MiB at most
#: Prefixes of stored keys that no request may use: the digest of a payload, and the key of a job that never merges.
RESERVED_KEY_PREFIX = "@"
PAYLOAD_KEY, TASK_KEY = f"{RESERVED_KEY_PREFIX}payload:", f"{RESERVED_KEY_PREFIX}task:"
PERIOD_KEY = f"{RESERVED_KEY_PREFIX}period:"  #: followed by the name of a period, ":", and the key within it
CHECK_KEY = f"{RESERVED_KEY_PREFIX}check:"  #: of a job that checks a login
ERASED_KEY = f"{RESERVED_KEY_PREFIX}erased:"  #: of a job that an erasure emptied, followed by a digest
ERRORS_SHOWN, MESSAGE_SHOWN = 20, 300
RESERVED_MEMBER = _("is a member that the run itself sets; rename it, or set param_style of the flow to nested")
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
    return _("contains %(character)s", character="U+0000") if _NUL.search(text) else ""


def payload_errors(payload: Mapping[str, Any], flow: Flow) -> list[FieldError]:
    """Return the errors of a payload by field path, such as `payload.x.y`.

    At most 20 errors. A message quotes the payload, so it is cut to 300 characters.
    """
    if problem := unstorable_reason(payload):
        return [FieldError("payload", problem)]
    if flow.param_style == ParamStyle.FLAT and (taken := command.reserved_members(payload)):
        return [FieldError(f"payload.{name}", RESERVED_MEMBER) for name in taken]
    size = len(json.dumps(as_stored(payload), ensure_ascii=False).encode())
    most = MAX_PAYLOAD if command.uses_placeholder(flow.command, "param") else MAX_FILE_PAYLOAD
    if size > most:
        return [FieldError("payload", _("is %(size)s bytes of JSON; at most %(most)s", size=size, most=most))]
    if not flow.payload_schema:
        return []
    found = _payload_validator(json.dumps(flow.payload_schema)).iter_errors(dict(payload))
    return [
        FieldError(".".join(["payload", *map(str, error.instance_path)]), error.message[:MESSAGE_SHOWN])
        for error in islice(found, ERRORS_SHOWN)
    ]


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


def add_period(key: str, period: str) -> str:
    return f"{PERIOD_KEY}{period}:{key}" if period else key


def split_period(stored: str) -> tuple[str, str]:
    """Return what precedes the key within its period, and that key."""
    if not stored.startswith(PERIOD_KEY):
        return "", stored
    key = stored.removeprefix(PERIOD_KEY).partition(":")[2]
    return stored[: len(stored) - len(key)], key


def requested_key_of(stored: str) -> str | None:
    """Return the key that the request of a job gave. None: the flow chose it."""
    _period, key = split_period(stored)
    return None if not key or key.startswith(RESERVED_KEY_PREFIX) else key


def name_touch_key(touch_key: UUID) -> str:
    """Return the key of a job that delivers a touch outside the window of its flow. No other job has it."""
    return f"touch:{touch_key}"


def refuse_erased_job(job: Job) -> None:
    """Refuse to publish a job again without the payload that an erasure removed.

    Raises:
        Conflict: an erasure emptied the job.
    """
    if job.dedupe_key.startswith(ERASED_KEY):
        raise Conflict(_("The payload of this job was erased. It cannot run again."))


@cache
def _payload_validator(schema: str) -> Any:
    """Compile a JSON schema, cached. It never fetches a remote reference."""
    return jsonschema_rs.validator_for(schema, offline=True)


# Windows in which a shop runs the same work once: a unique row per shop, flow and key, held by a job.
#
# A window is a time span from the start of its job on, or a period of the clock. The key of a period names it, so a job
# for tomorrow neither merges with one for today nor takes its window.
#
# Concurrent claims of one key wait for each other in the unique index. A claim is stored with its job in one
# transaction. Lock order: windows before jobs, both by shop.


#: How long a job holds the window of a period that has ended. A second late schedule of that period then runs no job.
LATE_WINDOW = timedelta(days=1)
#: Ends of the holder after which a request may run again; always a cancellation before the first run. An end is final,
#: so an older snapshot of it is no risk. A holder that the snapshot lacks counts.
REPEATABLE = {
    "refuse": "job.state = 'cancelled' AND job.attempt = 0",
    "after_failure": "job.state IN ('failed', 'cancelled')",
    "always": "job.state IN ('succeeded', 'failed', 'unknown', 'cancelled')",
}
_BY_FLOW = " ".join(f"WHEN '{rerun}' THEN {condition}" for rerun, condition in REPEATABLE.items())
#: Whether another job may take the window `held`.
IS_FREE = f"""
held.ends_at <= statement_timestamp()
OR EXISTS (
    SELECT FROM rpa_tasks_job AS job WHERE job.task_id = held.task_id
        AND CASE (SELECT dedupe_rerun FROM rpa_tasks_flow AS flow WHERE flow.id = held.flow_id) {_BY_FLOW} END
)
"""  # noqa: S608  (only our own words)
#: Follows an INSERT INTO rpa_tasks_dedupewindow AS held.
TAKE_OVER = f"""
ON CONFLICT (shop_id, flow_id, key) DO UPDATE SET task_id = EXCLUDED.task_id, ends_at = EXCLUDED.ends_at
WHERE {IS_FREE}
"""


def find_period(flow: Flow, at: datetime) -> tuple[str, datetime]:
    """Return the name of the flow's period that contains this instant, and its end."""
    local = at.astimezone(ZoneInfo(flow.dedupe_timezone or settings.TIME_ZONE))
    if flow.dedupe_period == DedupePeriod.HOUR:
        # By the world's clock: an hour that is repeated in autumn is two hours, and some zones have half hours.
        offset = local.utcoffset() or timedelta(0)
        begins = local.replace(minute=0, second=0, microsecond=0, tzinfo=timezone(offset))
        return begins.strftime("%Y-%m-%dT%H%z"), begins + timedelta(hours=1)
    day = local.date()
    if flow.dedupe_period == DedupePeriod.DAY:
        name, after = day.isoformat(), day + timedelta(days=1)
    elif flow.dedupe_period == DedupePeriod.WEEK:
        name, after = day.strftime("%G-W%V"), day + timedelta(days=7 - day.weekday())
    else:
        name, after = day.strftime("%Y-%m"), (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    return name, datetime.combine(after, time.min, local.tzinfo)


def find_window(flow: Flow, at: datetime | None, delay: timedelta) -> tuple[str, timedelta | None]:
    """Return the period of a job that starts `delay` after `at`, empty without one, and how long its window lasts.

    A late job has a negative delay. Only a period needs PostgreSQL's time `at`.
    """
    if flow.dedupe_period:
        assert at is not None
        period, ends_at = find_period(flow, at + delay)
        lasts = ends_at.astimezone(UTC) - at
        return period, lasts if lasts > timedelta(0) else LATE_WINDOW
    return "", None if flow.dedupe_window is None else max(delay, timedelta(0)) + flow.dedupe_window


def claim_window(task_id: UUID, shop: int, flow: Flow, key: str, lasts: timedelta) -> None:
    """Claim the window for a job that is stored in the same transaction. It lasts from now on.

    Raises:
        Conflict: another job holds it.
    """
    given = {"id": task_id, "shop": shop, "flow": flow.pk, "key": key, "lasts": lasts}
    while not sql.execute(_CLAIM, given):
        for job, until in sql.rows(_HOLDER, given):  # none: its holder was deleted since
            words = _("Job %(job)s of the same kind has the window until %(until)s.", job=job, until=until.isoformat())
            raise Conflict(words)


def release_unused(task_ids: Sequence[UUID]) -> None:
    """Release the windows of jobs that were not stored after all."""
    sql.execute(_RELEASE, {"ids": list(task_ids)})


def move_window(old: UUID, new: UUID) -> bool:
    """Let the job that is published in place of another one hold its window. Call it before that job is stored.

    Return False if the other one has no window, because it has ended or another job has taken it.
    """
    return sql.execute(_MOVE, {"old": old, "new": new}) == 1


def move_window_back(new: UUID, old: UUID) -> None:
    """Undo `move_window` after the job `new` was deleted. A window of another key, which `new` claimed, is released."""
    sql.execute(_MOVE_BACK, {"old": old, "new": new})
    release_unused([new])


_MOVE = """
UPDATE rpa_tasks_dedupewindow SET task_id = %(new)s WHERE task_id = %(old)s AND ends_at > statement_timestamp()
"""
_MOVE_BACK = """
UPDATE rpa_tasks_dedupewindow AS held SET task_id = job.task_id FROM rpa_tasks_job AS job
WHERE held.task_id = %(new)s AND job.task_id = %(old)s AND held.shop_id = job.shop_id AND held.flow_id = job.flow_id
  AND held.key = job.dedupe_key
"""
_CLAIM = f"""
INSERT INTO rpa_tasks_dedupewindow AS held (task_id, shop_id, flow_id, key, ends_at)
VALUES (%(id)s, %(shop)s, %(flow)s, %(key)s, statement_timestamp() + %(lasts)s)
{TAKE_OVER}
"""  # noqa: S608  (only our own words)
_HOLDER = """
SELECT task_id, ends_at FROM rpa_tasks_dedupewindow
WHERE shop_id = %(shop)s AND flow_id = %(flow)s AND key = %(key)s
"""
_RELEASE = """
DELETE FROM rpa_tasks_dedupewindow AS held
WHERE held.task_id = ANY(%(ids)b) AND NOT EXISTS (SELECT FROM rpa_tasks_job AS job WHERE job.task_id = held.task_id)
"""
