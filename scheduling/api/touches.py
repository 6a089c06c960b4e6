"""List, read and cancel touches; preview an event; pause and resume everything, a channel, or a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Field, Query, Router
from pydantic import AfterValidator

from scheduling import sql
from scheduling.api.auth import ApiKeyAuth, build_api_key_actor
from scheduling.api.events import EVENT_BODY, read_each_event, require_valid
from scheduling.api.schemas import (
    Page,
    PauseIn,
    PauseOut,
    PreviewOut,
    ProblemOut,
    Request,
    ResumeIn,
    ResumeOut,
    Text,
    TouchesOut,
    TouchOut,
    build_page,
    check_storable,
    limit_list_time,
)
from scheduling.customers.inputs import Tags
from scheduling.errors import InvalidInput, NotFound
from scheduling.models import Pause, Touch, TouchState
from scheduling.operations import commands, queries
from scheduling.operations.preview import imagine_customer, preview_event
from scheduling.receipts import load_receipts
from scheduling.strict_text import InvalidText, read_json

router = Router(tags=["touches"], auth=ApiKeyAuth("touches"))
PROBLEMS = (400, 401, 403, 404, 409, 413, 415, 422, 429, 503)
PAUSE_PROBLEMS = (400, 401, 403, 404, 413, 422, 429, 503)


class TouchFilters(Page):
    user: Text = ""
    event: Text = ""
    source: Text = ""
    node: Text = ""
    state: TouchState | None = None


@router.get("/touches", response={200: TouchesOut, PROBLEMS: ProblemOut})
def list_touches(request: HttpRequest, filters: Query[TouchFilters]) -> dict[str, Any]:
    """List touches, newest first. `event` is the id of an event; `source` makes it unique.

    A search by `node` or by `source` alone reads 100,000 touches per page. Such a page may have fewer items than
    `limit`, or none, and still a `next`. The list ends where `next` is null. A page that takes too long returns 503:
    filter by a user or an event then."""
    with limit_list_time():
        chosen = filters.model_dump(exclude={"limit", "cursor"}, exclude_none=True)
        rows, last = queries.query_touches(**chosen, before=filters.before(), limit=filters.limit + 1)
        return build_page(_add_references(rows), [row.task_id for row in rows], filters.limit, last)


@router.get("/touches/{task_id}", response={200: TouchOut, PROBLEMS: ProblemOut})
def get_touch(request: HttpRequest, task_id: UUID) -> Touch:
    """Return one touch with its verdicts, at most 50 (the first and the latest), and all attempts."""
    return _read_touch(task_id)


@router.post("/touches/{task_id}/cancel", response={200: TouchOut, PROBLEMS: ProblemOut})
def cancel_touch(request: HttpRequest, task_id: UUID) -> Touch:
    """Cancel a touch. 409 if it is marked as sending or has ended."""
    with sql.brief_lock_waits():
        commands.cancel_one_touch(task_id, actor=build_api_key_actor(request).name)
    return _read_touch(task_id)


@router.post("/pause", tags=["pauses"], response={200: PauseOut, PAUSE_PROBLEMS: ProblemOut})
def pause(request: HttpRequest, wish: PauseIn) -> Pause:
    """Pause touches of a scope: “all”, “channel:<key>” or “node:<key>”. Idempotent."""
    actor = build_api_key_actor(request).name
    reason = f"{actor}: {wish.reason}" if wish.reason else actor
    with sql.brief_lock_waits():
        return commands.pause_scope(wish.scope, reason=reason, actor=actor)


@router.post("/resume", tags=["pauses"], response={200: ResumeOut, PAUSE_PROBLEMS: ProblemOut})
def resume(request: HttpRequest, wish: ResumeIn) -> dict[str, Any]:
    """End a pause. The paused touches are spread over the next minutes."""
    with sql.brief_lock_waits():
        commands.resume_scope(wish.scope, actor=build_api_key_actor(request).name)
    return {"scope": wish.scope, "resumed": True}


class ImaginedCustomer(Request):
    """Values that the customer of a preview has instead of the stored ones."""

    level: Text = ""
    tag: Tags = []
    attributes: Annotated[str, Field(max_length=8_000), AfterValidator(check_storable)] = ""  #: a JSON object


@router.post("/preview", response={200: PreviewOut, PROBLEMS: ProblemOut}, openapi_extra=EVENT_BODY)
def preview(request: HttpRequest, imagined: Query[ImaginedCustomer]) -> dict[str, Any]:
    """Preview what this event would send, when, or why it would not. Stores nothing.

    `level`, `tag` (repeatable) and `attributes` (a JSON object, merged by name) replace what is stored about the
    customer, who may be unknown.
    """
    events = require_valid(read_each_event(request))
    if len(events) != 1:
        raise InvalidInput.of("", "one event at a time")
    try:
        found = read_json(imagined.attributes) if imagined.attributes else {}
    except InvalidText as error:
        raise InvalidInput.of("attributes", f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInput.of("attributes", "must be a JSON object")
    who = imagine_customer(events[0].user_id, level=imagined.level, tags=imagined.tag, attributes=found)
    return {"items": preview_event(events[0], customer=who)}


def _read_touch(task_id: UUID) -> Touch:
    row = queries.prefetch_trace(Touch.objects.filter(pk=task_id)).first()
    if row is None:
        raise NotFound(f"There is no touch {task_id}.")
    touch: Touch = _add_references([row])[0]
    return touch


def _add_references(rows: Sequence[Any]) -> Sequence[Any]:
    """Return touches with the columns of other tables: `retried_as` and `receipts`."""
    again = queries.find_republished([row.task_id for row in rows])
    receipts = load_receipts(row.root_id for row in rows)
    for row in rows:
        row.retried_as, row.receipts = again.get(row.task_id), receipts.get(row.root_id, [])
    return rows
