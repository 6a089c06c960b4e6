"""Check payloads and derive the keys by which jobs merge."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from itertools import islice
from typing import Any
from uuid import UUID

import jsonschema_rs

from rpa_tasks.models import DedupeBy, Flow, Job, ParamStyle
from rpa_tasks.supervisor import command
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
