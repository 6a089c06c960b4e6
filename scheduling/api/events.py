"""`POST /events`: record CloudEvents over HTTP: structured (in the body), binary (headers and body), or a batch."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64decode
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal, cast
from urllib.parse import unquote
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.utils.http import parse_header_parameters
from ninja import Router
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from typing_extensions import TypedDict  # pydantic wants it before Python 3.12

from scheduling.api.auth import ApiKeyAuth, charge, get_principal
from scheduling.api.schemas import (
    RETRY_AFTER,
    EventsOut,
    PartialOut,
    PastInstant,
    Problem,
    ProblemOut,
    build_unavailable_problem,
)
from scheduling.customers.inputs import UserId
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput, describe_model_error
from scheduling.planning import request_metrics
from scheduling.planning.ingest import DatabaseUnavailable, IngestOverloaded, NewEvent, Receipt, submit
from scheduling.policy.profile import check_characters
from scheduling.strict_text import ERRORS_SHOWN, PATH_SHOWN, decode_json
from scheduling.tracing import read_traceparent

STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
PLAIN = "application/json"
BATCH_LIMIT = 500
#: As OpenAPI takes them within another schema, without references.
DATA_SCHEMA = {"type": "object", "properties": {"chat_id": {"type": "string", "maxLength": 200}}}
BASE64_SCHEMA = {"type": "string", "format": "byte"}

JSON_MEDIA_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;.*)?\Z", re.ASCII | re.IGNORECASE)


def _check_text(text: str) -> str:
    if not text or text.isspace():
        raise ValueError("must not be empty")
    return check_characters(text)


def _check_chat_id(text: str) -> str:
    return _check_text(text) if text else text


def _check_media_type(text: str) -> str:
    if not JSON_MEDIA_TYPE.match(text):
        raise ValueError("must be application/json")
    return text


def _check_extension(value: Any) -> Any:
    if isinstance(value, dict | list | float):
        raise ValueError("must be a string, an integer or a boolean")
    return value


def _decode_base64(text: Any) -> Any:
    if text is None:
        return None
    try:
        return decode_json(b64decode(text, validate=True))
    except (TypeError, ValueError):
        raise ValueError("must hold a JSON object in Base64") from None
    except InvalidInput as error:
        raise ValueError(str(error)) from None


class EventData(TypedDict, total=False):
    """The data of an event, of any members."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    chat_id: Annotated[str, Field(max_length=200), AfterValidator(_check_chat_id)] | None


class CloudEvent(BaseModel):
    """CloudEvents 1.0. `subject` is the user id. Of extension attributes only the trace of `traceparent` is stored."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[
        Annotated[str, Field(pattern="^[a-z0-9]{1,64}$")], Annotated[Any, AfterValidator(_check_extension)]
    ]

    specversion: Literal["1.0"]
    id: Annotated[str, Field(max_length=255), AfterValidator(_check_text)]
    source: Annotated[str, Field(max_length=255), AfterValidator(_check_text)]
    type: Annotated[str, Field(max_length=120), AfterValidator(_check_text)]
    subject: UserId
    time: PastInstant | None = None
    datacontenttype: Annotated[str, AfterValidator(_check_media_type)] | None = None
    data: Annotated[EventData, WithJsonSchema(DATA_SCHEMA)] | None = None
    data_base64: Annotated[EventData | None, BeforeValidator(_decode_base64), WithJsonSchema(BASE64_SCHEMA)] = None

    @field_validator("data_base64")
    @classmethod
    def _stands_alone(cls, value: EventData | None, info: ValidationInfo) -> EventData | None:
        if value is not None and info.data.get("data") is not None:
            raise ValueError("must not stand beside “data”")
        return value

    def to_event(self, trace_id: UUID | None) -> NewEvent:
        """Return the event to store. `trace_id` is that of the request, for an event without its own."""
        data = cast("dict[str, Any]", self.data or self.data_base64 or {})
        return NewEvent(
            source=self.source, event_id=self.id, type=self.type, user_id=self.subject,
            chat_id=data.get("chat_id") or "", occurred_at=self.time, data=data,
            trace_id=read_traceparent((self.__pydantic_extra__ or {}).get("traceparent")) or trace_id,
        )  # fmt: skip


def parse_event(raw: Any, *, prefix: str = "", trace_id: UUID | None = None) -> NewEvent:
    """Parse one event in the JSON format.

    Raises:
        InvalidInput: all errors of the event, each field prefixed with `prefix`.
    """
    try:
        event = CloudEvent.model_validate(raw)
    except ValidationError as error:
        found = []
        for each in islice(error.errors(include_url=False, include_input=False), ERRORS_SHOWN):
            path = ".".join(filter(None, (prefix, *map(str, each["loc"]))))[:PATH_SHOWN]
            found.append(FieldError(path, describe_model_error(each)))
        raise InvalidInput(*found) from None
    return event.to_event(trace_id)


QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\Z', re.DOTALL)


def require_valid(entries: Sequence[NewEvent | InvalidInput]) -> list[NewEvent]:
    """Return the events of a request, which is accepted only as a whole.

    Raises:
        InvalidInput: some are invalid.
    """
    if errors := [error for each in entries if isinstance(each, InvalidInput) for error in each.errors]:
        raise InvalidInput(*errors[:ERRORS_SHOWN])
    return [each for each in entries if isinstance(each, NewEvent)]


def read_each_event(request: HttpRequest) -> list[NewEvent | InvalidInput]:
    """Return the valid events of a request, and the errors in place of the others.

    An event without its own trace gets that of the request.

    Raises:
        Problem: the request is of another media type or too large.
        InvalidText: the body is not JSON.
        InvalidInput: a batch that holds no events.
    """
    media_type = _read_media_type(request)
    has_headers = "HTTP_CE_SPECVERSION" in request.META or "HTTP_CE_ID" in request.META
    is_binary = has_headers and media_type not in (BATCH, STRUCTURED)
    if not is_binary and media_type not in (BATCH, STRUCTURED, PLAIN):
        raise Problem(415, f"Send {STRUCTURED}, {BATCH}, or {PLAIN} with or without ce- headers.")
    trace_id = read_traceparent(request.META.get("HTTP_TRACEPARENT"))
    if media_type != BATCH:
        try:
            raw = _combine_binary_event(request, media_type) if is_binary else decode_json(request.body)
            return [parse_event(raw, trace_id=trace_id)]
        except InvalidInput as error:
            return [error]
    batch = decode_json(request.body, array="events", errors_in_place=True)
    _check_batch_size(batch)
    results: list[NewEvent | InvalidInput] = []
    for place, each in enumerate(batch):
        if isinstance(each, InvalidInput):
            results.append(each)
            continue
        try:
            results.append(parse_event(each, prefix=f"events.{place}", trace_id=trace_id))
        except InvalidInput as error:
            results.append(error)
    return results


def _read_media_type(request: HttpRequest) -> str:
    if request.META.get("HTTP_CONTENT_ENCODING", "identity").strip().lower() not in ("", "identity"):
        raise Problem(415, "A compressed body is not accepted.", headers={"Accept-Encoding": "identity"})
    media_type, parameters = parse_header_parameters(request.META.get("CONTENT_TYPE", ""))
    if parameters.get("charset", "utf-8").lower() not in ("utf-8", "utf8"):
        raise Problem(415, "The charset must be UTF-8.")
    return str(media_type)


def _check_batch_size(raw: Any) -> None:
    if not isinstance(raw, list):
        raise InvalidInput.of("", "a batch must be an array of events")
    if not raw:
        raise InvalidInput.of("", "the batch is empty")
    if len(raw) > BATCH_LIMIT:
        raise Problem(413, f"A batch may have {BATCH_LIMIT} events; this one has {len(raw)}.")


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
                # Decode a header by the binding: unquote, then percent-decode. Django decodes headers as Latin-1;
                # the bytes may be UTF-8.
                text = value.encode("latin-1").decode("utf-8")
                if quoted := QUOTED.match(text):
                    text = re.sub(r"\\(.)", r"\1", quoted[1], flags=re.DOTALL)
                raw[attribute] = unquote(text, errors="strict")
            except UnicodeDecodeError:
                errors.append(FieldError(attribute, "is not percent-encoded UTF-8"))
    if errors:
        raise InvalidInput(*errors)
    for misplaced in {"data", "data_base64"} & raw.keys():
        raise InvalidInput.of(misplaced, "belongs in the body")
    if request.body.strip():
        try:
            raw["data"] = decode_json(request.body)
        except InvalidInput as error:
            raise InvalidInput(
                *(FieldError(f"data.{each.field}".rstrip("."), each.message) for each in error.errors)
            ) from error
    return raw


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


# --- views ------------------------------------------------------------------------------------------------------------


RESPONSE_TIMEOUT = 10  #: seconds

router = Router(tags=["events"])

_EVENT_SCHEMA = CloudEvent.model_json_schema()
_ONE: dict[str, Any] = {STRUCTURED: {"schema": _EVENT_SCHEMA}, PLAIN: {"schema": _EVENT_SCHEMA}}
_MANY = {BATCH: {"schema": {"type": "array", "items": _EVENT_SCHEMA, "minItems": 1, "maxItems": BATCH_LIMIT}}}
EVENT_BODY = {"requestBody": {"required": True, "content": _ONE}}
EVENTS_BODY = {"requestBody": {"required": True, "content": _ONE | _MANY}}


@router.post(
    "/events",
    auth=ApiKeyAuth("events"),
    response={202: EventsOut | PartialOut, (400, 401, 403, 408, 413, 415, 422, 429, 503): ProblemOut},
    openapi_extra=EVENTS_BODY,
)
async def post_events(request: HttpRequest, partial: bool = False) -> HttpResponse:
    """Record one CloudEvent (structured or binary) or a batch of up to 500, and plan their touches.

    The response follows the commit. Idempotent by source and id: a known event counts as a duplicate and returns its
    touches. A batch is stored completely or not at all. With `partial=true` the valid events of a batch are stored, and
    `results` has an entry for each: accepted, duplicate or refused.
    """
    entries = read_each_event(request)
    events = [each for each in entries if isinstance(each, NewEvent)] if partial else require_valid(entries)
    await charge(get_principal(request), "events", len(entries))
    receipts = await _submit_events(events) if events else []
    duplicates = sum(receipt.duplicate for receipt in receipts)
    request_metrics.count_ingested(len(receipts) - duplicates, duplicates)
    answer = _list_results(entries, receipts) if partial else _list_receipts(events, receipts)
    return HttpResponse(json.dumps(answer, ensure_ascii=False), content_type=PLAIN, status=202)


@router.api_operation(["OPTIONS"], "/events", auth=None, include_in_schema=False)
def allow_delivery(request: HttpRequest) -> HttpResponse:
    """Answer the validation handshake of CloudEvents webhooks. Any sender may deliver, with an API key."""
    answer = HttpResponse(status=200, headers={"Allow": "POST"})
    if origin := request.headers.get("WebHook-Request-Origin"):
        answer["WebHook-Allowed-Origin"] = origin
        answer["WebHook-Allowed-Rate"] = str(settings.AFTERTOUCH_API_RATE_PER_MINUTE)
    return answer


async def _submit_events(events: Sequence[NewEvent]) -> list[Receipt]:
    try:
        return await asyncio.wait_for(submit(events), RESPONSE_TIMEOUT)
    except (DatabaseUnavailable, IngestOverloaded) as error:
        raise Problem(503, str(error), retry_after=RETRY_AFTER) from error
    except TimeoutError as error:
        raise build_unavailable_problem(
            "The database is slow, the events may or may not be stored. Send them again."
        ) from error


def _list_receipts(events: Sequence[NewEvent], receipts: Sequence[Receipt]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {
            "source": event.source,
            "id": event.event_id,
            "duplicate": receipt.duplicate,
            "touches": [str(task_id) for task_id in receipt.task_ids],
        }
        for event, receipt in zip(events, receipts, strict=True)
    ]
    duplicates = sum(receipt.duplicate for receipt in receipts)
    return {
        "accepted": len(rows) - duplicates,
        "duplicates": duplicates,
        "touches": [task_id for row in rows for task_id in row["touches"]],
        "events": rows,
    }


def _list_results(entries: Sequence[NewEvent | InvalidInput], receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Return a result for each entry of a request. The receipts are those of its valid events."""
    stored = iter(receipts)
    results: list[dict[str, Any]] = []
    for index, each in enumerate(entries):
        if isinstance(each, InvalidInput):
            errors = [{"field": error.field, "message": error.message} for error in each.errors]
            results.append({"index": index, "status": "refused", "touches": [], "errors": errors})
            continue
        receipt = next(stored)
        status = "duplicate" if receipt.duplicate else "accepted"
        touches = [str(task_id) for task_id in receipt.task_ids]
        results.append({"index": index, "status": status, "touches": touches, "errors": []})
    return {"results": results}
