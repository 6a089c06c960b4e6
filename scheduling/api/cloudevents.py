"""CloudEvents 1.0, read strictly: what is missing or cannot be meant is refused with the name of the attribute.

An event is known by `source` and `id`, so an id that were made up here would make every repetition a new event.
Extension attributes are allowed, as the specification asks, and not kept; of `traceparent` (its distributed tracing
extension) the trace is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from scheduling.errors import FieldError, InvalidInput
from scheduling.planning.ingest import NewEvent
from scheduling.tracing import read_traceparent

LATEST = timedelta(minutes=5)  #: how far ahead of this clock an event's time may be
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
CHAT_ID_LENGTH = 200
LENGTHS = {"id": 255, "source": 255, "type": 120, "subject": 200}

#: Control characters, surrogates and noncharacters: the specification keeps them out of attributes.
FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
ATTRIBUTE_NAME = re.compile(r"[a-z0-9]{1,64}\Z")
RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}(\.\d{1,18})?([Zz]|[+-]\d{2}:\d{2})\Z", re.ASCII)
JSON_MEDIA_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;.*)?\Z", re.ASCII | re.IGNORECASE)


def parse_event(raw: Any, now: datetime, *, prefix: str = "") -> NewEvent:
    """One event in the JSON format. Raises `InvalidInput` with everything that is wrong; fields begin with `prefix`."""
    if not isinstance(raw, Mapping):
        raise InvalidInput.of(prefix, "must be an object")
    errors: list[FieldError] = []
    values = {name: _required(raw, name, length, errors) for name, length in LENGTHS.items()}
    if raw.get("specversion") != "1.0":
        errors.append(FieldError("specversion", "must be “1.0”"))
    occurred_at = _time(raw.get("time"), now, errors)
    data = _data(raw, errors)
    chat_id = _chat_id(data, errors)
    _check_others(raw, errors)
    if errors:
        start = f"{prefix}." if prefix else ""
        raise InvalidInput(*(FieldError(f"{start}{each.field}", each.message) for each in errors))
    return NewEvent(
        source=values["source"],
        event_id=values["id"],
        type=values["type"],
        user_id=values["subject"],
        chat_id=chat_id,
        occurred_at=occurred_at,
        data=data,
        trace_id=read_traceparent(raw.get("traceparent")),
    )


def _required(raw: Mapping[str, Any], name: str, length: int, errors: list[FieldError]) -> str:
    value = raw.get(name)
    if value is None:
        errors.append(FieldError(name, "the id of the customer is required" if name == "subject" else "is required"))
    elif message := _objection(value, length):
        errors.append(FieldError(name, message))
    else:
        return str(value)
    return ""


def _objection(value: Any, length: int) -> str:
    if not isinstance(value, str):
        return "must be a string"
    if not value.strip():
        return "must not be empty"
    if len(value) > length:
        return f"is longer than {length} characters"
    if found := FORBIDDEN.search(value):
        return f"contains U+{ord(found[0]):04X}"
    return ""


def _time(value: Any, now: datetime, errors: list[FieldError]) -> datetime | None:
    """None where there is none: the database says when it was received."""
    if value is None:
        return None
    try:
        if not isinstance(value, str) or not RFC3339.match(value):
            raise ValueError
        at = datetime.fromisoformat(value.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        errors.append(FieldError("time", "must be an RFC 3339 time with its offset, such as 2026-01-31T08:00:00+08:00"))
        return None
    if at > now + LATEST:
        errors.append(FieldError("time", "is more than 5 minutes ahead"))
    elif at < EARLIEST:
        errors.append(FieldError("time", "is before 1970"))
    return at


def _data(raw: Mapping[str, Any], errors: list[FieldError]) -> dict[str, Any]:
    data = raw.get("data")
    if raw.get("data_base64") is not None:
        errors.append(FieldError("data_base64", "is not supported; send “data” as a JSON object"))
    if data is None:
        return {}
    if not isinstance(data, dict):
        errors.append(FieldError("data", "must be an object"))
        return {}
    return data


def _chat_id(data: Mapping[str, Any], errors: list[FieldError]) -> str:
    value = data.get("chat_id")
    if value is None or value == "":
        return ""
    if message := _objection(value, CHAT_ID_LENGTH):
        errors.append(FieldError("data.chat_id", message))
        return ""
    return str(value)


def _check_others(raw: Mapping[str, Any], errors: list[FieldError]) -> None:
    """Attributes that are not kept must still be ones."""
    for name, value in raw.items():
        if name in LENGTHS or name in ("specversion", "time", "data", "data_base64"):
            continue
        if not ATTRIBUTE_NAME.match(name):
            errors.append(FieldError(name[:80], "attributes are named with lower-case letters and digits only"))
        elif isinstance(value, dict | list | float):
            errors.append(FieldError(name, "must be a string, an integer or a boolean"))
        elif name == "datacontenttype" and value is not None and not _is_json(value):
            errors.append(FieldError(name, "must be application/json"))


def _is_json(value: Any) -> bool:
    return isinstance(value, str) and JSON_MEDIA_TYPE.match(value) is not None
