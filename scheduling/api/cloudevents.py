"""Read CloudEvents over HTTP: structured (in the body), binary (headers and body), or a batch."""

from __future__ import annotations

import re
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from django.http import HttpRequest
from django.utils.http import parse_header_parameters

from scheduling.api.errors import Problem
from scheduling.api.schemas import check_past, parse_instant
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput
from scheduling.ids import find_user_id_problem
from scheduling.planning.ingest import NewEvent
from scheduling.strict_text import ERRORS_SHOWN, decode_json, decode_json_items
from scheduling.tracing import read_traceparent

CHAT_ID_LENGTH = 200
LENGTHS = {"id": 255, "source": 255, "type": 120, "subject": 200}

#: Control characters, surrogates and noncharacters, which the specification forbids in attributes.
FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
ATTRIBUTE_NAME = re.compile(r"[a-z0-9]{1,64}\Z")
JSON_MEDIA_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;.*)?\Z", re.ASCII | re.IGNORECASE)


def parse_event(raw: Any, now: datetime, *, prefix: str = "") -> NewEvent:
    """Parse one event in the JSON format.

    Raises:
        InvalidInput: all errors of the event, each field prefixed with `prefix`.
    """
    if not isinstance(raw, Mapping):
        raise InvalidInput.of(prefix, "must be an object")
    errors: list[FieldError] = []
    values = {name: _read_required_text(raw, name, length, errors) for name, length in LENGTHS.items()}
    if raw.get("specversion") != "1.0":
        errors.append(FieldError("specversion", "must be “1.0”"))
    occurred_at = _parse_event_time(raw.get("time"), now, errors)
    data = _extract_data(raw, errors)
    chat_id = _extract_chat_id(data, errors)
    _check_other_attributes(raw, errors)
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


def _read_required_text(raw: Mapping[str, Any], name: str, length: int, errors: list[FieldError]) -> str:
    value = raw.get(name)
    if value is None:
        errors.append(FieldError(name, "the id of the customer is required" if name == "subject" else "is required"))
    elif message := _find_text_error(value, length) or (find_user_id_problem(value) if name == "subject" else ""):
        errors.append(FieldError(name, message))
    else:
        return str(value)
    return ""


def _find_text_error(value: Any, length: int) -> str:
    if not isinstance(value, str):
        return "must be a string"
    if not value.strip():
        return _("must not be empty")
    if len(value) > length:
        return f"is longer than {length} characters"
    if found := FORBIDDEN.search(value):
        return _("contains %(character)s", character=f"U+{ord(found[0]):04X}")
    return ""


def _parse_event_time(value: Any, now: datetime, errors: list[FieldError]) -> datetime | None:
    """Parse the time of an event; None if it has none, and the database sets the time of receipt."""
    if value is None:
        return None
    try:
        return check_past(parse_instant(value), now)
    except ValueError as error:
        errors.append(FieldError("time", str(error)))
        return None


def _extract_data(raw: Mapping[str, Any], errors: list[FieldError]) -> dict[str, Any]:
    name, data = "data", raw.get("data")
    if raw.get("data_base64") is not None:
        if data is not None:
            errors.append(FieldError("data_base64", "must not stand beside “data”"))
            return {}
        name = "data_base64"
        try:
            data = decode_json(b64decode(raw["data_base64"], validate=True), array=name)
        except (TypeError, ValueError):
            errors.append(FieldError(name, "must hold a JSON object in Base64"))
            return {}
        except InvalidInput as error:
            errors.extend(FieldError(name, f"{each.field}: {each.message}") for each in error.errors)
            return {}
    if data is None:
        return {}
    if not isinstance(data, dict):
        errors.append(FieldError(name, "must be an object"))
        return {}
    return data


def _extract_chat_id(data: Mapping[str, Any], errors: list[FieldError]) -> str:
    value = data.get("chat_id")
    if value is None or value == "":
        return ""
    if message := _find_text_error(value, CHAT_ID_LENGTH):
        errors.append(FieldError("data.chat_id", message))
        return ""
    return str(value)


def _check_other_attributes(raw: Mapping[str, Any], errors: list[FieldError]) -> None:
    """Check attributes that are not stored: names, types and the content type."""
    for name, value in raw.items():
        if name in LENGTHS or name in ("specversion", "time", "data", "data_base64"):
            continue
        if not ATTRIBUTE_NAME.match(name):
            errors.append(FieldError(name[:80], "attributes are named with lower-case letters and digits only"))
        elif isinstance(value, dict | list | float):
            errors.append(FieldError(name, "must be a string, an integer or a boolean"))
        elif name == "datacontenttype" and value is not None and not _is_json_media_type(value):
            errors.append(FieldError(name, "must be application/json"))


def _is_json_media_type(value: Any) -> bool:
    return isinstance(value, str) and JSON_MEDIA_TYPE.match(value) is not None


STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
PLAIN = "application/json"
BATCH_LIMIT = 500

QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\Z', re.DOTALL)


def read_events(request: HttpRequest, now: datetime) -> list[NewEvent]:
    """Return the events of a request.

    A batch is accepted only if all its events are valid. An event without its own trace gets that of the request.

    Raises:
        Problem: the request is unreadable, of another media type or too large.
        InvalidInput: an event is invalid.
    """
    return [_add_trace(request, event) for event in _parse_by_media_type(request, now)]


def read_each_event(request: HttpRequest, now: datetime) -> list[NewEvent | InvalidInput]:
    """Return the valid events of a request, and the errors in place of the others.

    Raises:
        Problem: the request is unreadable, of another media type or too large.
        InvalidInput: the request holds no events.
    """
    if _read_media_type(request) != BATCH:
        try:
            return list(read_events(request, now))
        except InvalidInput as error:
            return [error]
    raw = decode_json_items(request.body, array="events")
    _check_batch_size(raw)
    return [_parse_or_refuse(request, each, now, place) for place, each in enumerate(raw)]


def _parse_or_refuse(request: HttpRequest, raw: Any, now: datetime, place: int) -> NewEvent | InvalidInput:
    if isinstance(raw, InvalidInput):
        return raw
    try:
        return _add_trace(request, parse_event(raw, now, prefix=f"events.{place}"))
    except InvalidInput as error:
        return error


def _add_trace(request: HttpRequest, event: NewEvent) -> NewEvent:
    trace_id = read_traceparent(request.META.get("HTTP_TRACEPARENT"))
    return event if event.trace_id or not trace_id else replace(event, trace_id=trace_id)


def _parse_by_media_type(request: HttpRequest, now: datetime) -> list[NewEvent]:
    media_type = _read_media_type(request)
    if media_type == BATCH:
        return _parse_batch(decode_json(request.body, array="events"), now)
    if media_type == STRUCTURED:
        return [parse_event(decode_json(request.body, array="events"), now)]
    if "HTTP_CE_SPECVERSION" in request.META or "HTTP_CE_ID" in request.META:
        return [parse_event(_combine_binary_event(request, media_type), now)]
    if media_type != PLAIN:
        raise _build_media_type_problem()
    return [parse_event(decode_json(request.body, array="events"), now)]


def _read_media_type(request: HttpRequest) -> str:
    if request.META.get("HTTP_CONTENT_ENCODING", "identity").strip().lower() not in ("", "identity"):
        raise Problem(415, "A compressed body is not accepted.", headers={"Accept-Encoding": "identity"})
    media_type, parameters = parse_header_parameters(request.META.get("CONTENT_TYPE", ""))
    if parameters.get("charset", "utf-8").lower() not in ("utf-8", "utf8"):
        raise Problem(415, "The charset must be UTF-8.")
    return str(media_type)


def _build_media_type_problem() -> Problem:
    return Problem(415, f"Send {STRUCTURED}, {BATCH}, or {PLAIN} with or without ce- headers.")


def _check_batch_size(raw: Any) -> None:
    if not isinstance(raw, list):
        raise InvalidInput.of("", "a batch must be an array of events")
    if not raw:
        raise InvalidInput.of("", "the batch is empty")
    if len(raw) > BATCH_LIMIT:
        raise Problem(413, f"A batch may have {BATCH_LIMIT} events; this one has {len(raw)}.")


def _parse_batch(raw: Any, now: datetime) -> list[NewEvent]:
    _check_batch_size(raw)
    events: list[NewEvent] = []
    errors: list[FieldError] = []
    for place, each in enumerate(raw):
        try:
            events.append(parse_event(each, now, prefix=f"events.{place}"))
        except InvalidInput as error:
            errors.extend(error.errors)
            if len(errors) >= ERRORS_SHOWN:
                break
    if errors:
        raise InvalidInput(*errors)
    return events


def _combine_binary_event(request: HttpRequest, media_type: str) -> dict[str, Any]:
    """Combine the attributes of the headers and the data of the body to one event.

    Without a `Content-Type` the data is JSON: the official SDKs send none by default.
    """
    if media_type and media_type != PLAIN and not media_type.endswith("+json"):
        raise Problem(415, "The data must be application/json.")
    raw: dict[str, Any] = {}
    errors: list[FieldError] = _find_repeated_headers(request)
    for name, value in request.META.items():
        if name.startswith("HTTP_CE_"):
            attribute = name.removeprefix("HTTP_CE_").lower()
            try:
                raw[attribute] = _decode_header_value(value)
            except UnicodeDecodeError:
                errors.append(FieldError(attribute, "is not percent-encoded UTF-8"))
    if errors:
        raise InvalidInput(*errors)
    for misplaced in {"data", "data_base64"} & raw.keys():
        raise InvalidInput.of(misplaced, "belongs in the body")
    if request.body.strip():
        raw["data"] = _decode_binary_data(request.body)
    return raw


def _decode_binary_data(body: bytes) -> Any:
    try:
        return decode_json(body, array="events")
    except InvalidInput as error:
        raise InvalidInput(
            *(FieldError(f"data.{each.field}" if each.field else "data", each.message) for each in error.errors)
        ) from error


def _find_repeated_headers(request: HttpRequest) -> list[FieldError]:
    """Return an error for each header that was sent twice.

    Joined by a comma they would form an event that the client did not mean.
    """
    sent = Counter(name for name, _value in getattr(request, "scope", {}).get("headers", ()))
    return [
        FieldError(name.decode("latin-1").removeprefix("ce-"), _("is given twice"))
        for name, count in sent.items()
        if count > 1 and name.startswith(b"ce-")
    ]


def _decode_header_value(value: str) -> str:
    """Decode a header by the binding: unquote, then percent-decode.

    Django decodes headers as Latin-1; the bytes may be UTF-8.
    """
    text = value.encode("latin-1").decode("utf-8")
    if quoted := QUOTED.match(text):
        text = re.sub(r"\\(.)", r"\1", quoted[1], flags=re.DOTALL)
    return unquote(text, errors="strict")
