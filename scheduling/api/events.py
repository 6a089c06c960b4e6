"""`POST /events`: record events over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from ninja import Router

from scheduling.api.auth import ApiKeyAuth, charge, get_principal
from scheduling.api.cloudevents import BATCH, BATCH_LIMIT, PLAIN, STRUCTURED, CloudEvent, read_each_event, read_events
from scheduling.api.errors import RETRY_AFTER, Problem, build_unavailable_problem
from scheduling.api.schemas import EventsOut, PartialOut, ProblemOut
from scheduling.errors import InvalidInput
from scheduling.planning import request_metrics
from scheduling.planning.group_commit import DatabaseUnavailable, IngestOverloaded, submit
from scheduling.planning.ingest import NewEvent, Receipt

RESPONSE_TIMEOUT = 10  #: seconds

router = Router(tags=["events"])

_EVENT = CloudEvent.model_json_schema()
_ONE: dict[str, Any] = {STRUCTURED: {"schema": _EVENT}, PLAIN: {"schema": _EVENT}}
_MANY = {BATCH: {"schema": {"type": "array", "items": _EVENT, "minItems": 1, "maxItems": BATCH_LIMIT}}}
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
    if partial:
        return await _store_valid_events(request)
    events = read_events(request)
    await charge(get_principal(request), "events", len(events))
    receipts = await _submit_events(events)
    return HttpResponse(_format_receipts(events, receipts), content_type=PLAIN, status=202)


@router.api_operation(["OPTIONS"], "/events", auth=None, include_in_schema=False)
def allow_delivery(request: HttpRequest) -> HttpResponse:
    """Answer the validation handshake of CloudEvents webhooks. Any sender may deliver, with an API key."""
    answer = HttpResponse(status=200, headers={"Allow": "POST"})
    if origin := request.headers.get("WebHook-Request-Origin"):
        answer["WebHook-Allowed-Origin"] = origin
        answer["WebHook-Allowed-Rate"] = str(settings.AFTERTOUCH_API_RATE_PER_MINUTE)
    return answer


async def _store_valid_events(request: HttpRequest) -> HttpResponse:
    found = read_each_event(request)
    await charge(get_principal(request), "events", len(found))
    valid = [each for each in found if isinstance(each, NewEvent)]
    receipts = iter(await _submit_events(valid) if valid else ())
    results: list[dict[str, Any]] = []
    for index, each in enumerate(found):
        if isinstance(each, InvalidInput):
            errors = [{"field": error.field, "message": error.message} for error in each.errors]
            results.append({"index": index, "status": "refused", "touches": [], "errors": errors})
            continue
        receipt = next(receipts)
        status = "duplicate" if receipt.duplicate else "accepted"
        touches = [str(task_id) for task_id in receipt.task_ids]
        results.append({"index": index, "status": status, "touches": touches, "errors": []})
    statuses = Counter(each["status"] for each in results)
    request_metrics.count_ingested(statuses["accepted"], statuses["duplicate"])
    return HttpResponse(json.dumps({"results": results}, ensure_ascii=False), content_type=PLAIN, status=202)


async def _submit_events(events: Sequence[NewEvent]) -> list[Receipt]:
    try:
        return await asyncio.wait_for(submit(events), RESPONSE_TIMEOUT)
    except (DatabaseUnavailable, IngestOverloaded) as error:
        raise Problem(503, str(error), retry_after=RETRY_AFTER) from error
    except TimeoutError as error:
        raise build_unavailable_problem(
            "The database is slow, the events may or may not be stored. Send them again."
        ) from error


def _format_receipts(events: Sequence[NewEvent], receipts: Sequence[Receipt]) -> str:
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
    request_metrics.count_ingested(len(rows) - duplicates, duplicates)
    return json.dumps(
        {
            "accepted": len(rows) - duplicates,
            "duplicates": duplicates,
            "touches": [task_id for row in rows for task_id in row["touches"]],
            "events": rows,
        },
        ensure_ascii=False,
    )
