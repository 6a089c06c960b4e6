"""The HTTP binding of CloudEvents: one event in the body (structured), in headers and body (binary), or a batch."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from django.http import HttpRequest
from django.utils.http import parse_header_parameters

from scheduling.api.cloudevents import parse_event
from scheduling.api.errors import Problem
from scheduling.api.strict_json import ERRORS_SHOWN, NotJson, decode
from scheduling.errors import FieldError, InvalidInput
from scheduling.planning.ingest import NewEvent
from scheduling.tracing import read_traceparent

STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
PLAIN = "application/json"
BATCH_LIMIT = 500

QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\Z', re.DOTALL)


def read_events(request: HttpRequest, now: datetime) -> list[NewEvent]:
    """The events of a request. Raises `Problem` where it cannot be read, `InvalidInput` where it can but does not
    fit; of a batch none counts unless all of them fit. An event without a trace of its own is part of the request's."""
    events = _read(request, now)
    trace_id = read_traceparent(request.META.get("HTTP_TRACEPARENT"))
    return [each if each.trace_id or not trace_id else replace(each, trace_id=trace_id) for each in events]


def _read(request: HttpRequest, now: datetime) -> list[NewEvent]:
    media_type = _media_type(request)
    if media_type == BATCH:
        return _batch(_decode(request.body), now)
    if media_type == STRUCTURED:
        return [parse_event(_decode(request.body), now)]
    if "HTTP_CE_SPECVERSION" in request.META or "HTTP_CE_ID" in request.META:
        return [parse_event(_binary(request, media_type), now)]
    if media_type != PLAIN:
        raise _unsupported()
    return [parse_event(_decode(request.body), now)]


def _media_type(request: HttpRequest) -> str:
    if request.META.get("HTTP_CONTENT_ENCODING", "identity").strip().lower() not in ("", "identity"):
        raise Problem(415, "A compressed body is not accepted.", headers={"Accept-Encoding": "identity"})
    media_type, parameters = parse_header_parameters(request.META.get("CONTENT_TYPE", ""))
    if parameters.get("charset", "utf-8").lower() not in ("utf-8", "utf8"):
        raise Problem(415, "The charset must be UTF-8.")
    return str(media_type)


def _unsupported() -> Problem:
    return Problem(415, f"Send {STRUCTURED}, {BATCH}, or {PLAIN} with or without ce- headers.")


def _decode(body: bytes) -> Any:
    try:
        return decode(body)
    except NotJson as error:
        raise Problem(400, str(error)) from error


def _batch(raw: Any, now: datetime) -> list[NewEvent]:
    if not isinstance(raw, list):
        raise InvalidInput.of("", "a batch must be an array of events")
    if not raw:
        raise InvalidInput.of("", "the batch is empty")
    if len(raw) > BATCH_LIMIT:
        raise Problem(413, f"A batch may have {BATCH_LIMIT} events; this one has {len(raw)}.")
    events: list[NewEvent] = []
    errors: list[FieldError] = []
    for place, each in enumerate(raw):
        try:
            events.append(parse_event(each, now, prefix=f"[{place}]"))
        except InvalidInput as error:
            errors.extend(error.errors)
            if len(errors) >= ERRORS_SHOWN:
                break
    if errors:
        raise InvalidInput(*errors)
    return events


def _binary(request: HttpRequest, media_type: str) -> dict[str, Any]:
    """Return the attributes from the headers and the data from the body, as if it had come in one piece.

    Without a `Content-Type` the data is JSON: the official SDKs send none by default.
    """
    if media_type and media_type != PLAIN and not media_type.endswith("+json"):
        raise Problem(415, "The data must be application/json.")
    raw: dict[str, Any] = {}
    errors: list[FieldError] = _repeated(request)
    for name, value in request.META.items():
        if name.startswith("HTTP_CE_"):
            attribute = name.removeprefix("HTTP_CE_").lower()
            try:
                raw[attribute] = _header_value(value)
            except UnicodeDecodeError:
                errors.append(FieldError(attribute, "is not percent-encoded UTF-8"))
    if errors:
        raise InvalidInput(*errors)
    for misplaced in {"data", "data_base64"} & raw.keys():
        raise InvalidInput.of(misplaced, "belongs in the body")
    if request.body.strip():
        raw["data"] = _read_data(request.body)
    return raw


def _read_data(body: bytes) -> Any:
    try:
        return _decode(body)
    except InvalidInput as error:
        raise InvalidInput(
            *(FieldError(f"data.{each.field}" if each.field else "data", each.message) for each in error.errors)
        ) from error


def _repeated(request: HttpRequest) -> list[FieldError]:
    """Headers that were sent twice: joined by a comma they would be an event nobody meant."""
    sent = Counter(name for name, _ in getattr(request, "scope", {}).get("headers", ()))
    return [
        FieldError(name.decode("latin-1").removeprefix("ce-"), "is given twice")
        for name, count in sent.items()
        if count > 1 and name.startswith(b"ce-")
    ]


def _header_value(value: str) -> str:
    """As the binding says: unquote, then percent-decode. Django hands out Latin-1; the bytes may be UTF-8."""
    text = value.encode("latin-1").decode("utf-8")
    if quoted := QUOTED.match(text):
        text = re.sub(r"\\(.)", r"\1", quoted[1], flags=re.DOTALL)
    return unquote(text, errors="strict")
