"""Start, read and stop bulk actions on failed tasks."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from django.http import HttpRequest
from ninja import Field, Router, Schema

from scheduling.api.auth import ApiKeyAuth, build_api_key_actor
from scheduling.api.schemas import ActionIn, ProblemOut, Request, Text
from scheduling.errors import InvalidInput, NotFound
from scheduling.models import BulkAction
from scheduling.operations import bulk_actions
from scheduling.operations.row_actions import FAILED_TASKS, ROW_ACTIONS

router = Router(tags=["failed tasks"], auth=ApiKeyAuth("failed-tasks"))
PROBLEMS = (400, 401, 403, 404, 409, 413, 422, 429, 503)
OF_FAILED_TASKS = [name for name, row_action in ROW_ACTIONS.items() if row_action.over == FAILED_TASKS]
#: Names of the filters as parameters of the back office's list.
PARAMETERS = {"origin": "origin__exact"}


class ChosenIn(Request):
    """A missing filter matches any value. `state` defaults to `open`."""

    state: Literal["open", "ignored", "all"] = "open"
    reason: Text = ""
    fingerprint: Text = ""
    origin: Literal["touch", "rpa_job", "message", ""] = ""
    channel: Text = ""
    q: Text = ""


class BulkIn(ActionIn):
    action: Literal["retry", "again", "delivered", "not_delivered", "ignore", "archive"]
    filter: ChosenIn
    per_second: Annotated[float, Field(ge=bulk_actions.SLOWEST, le=bulk_actions.FASTEST)] | None = None
    confirm: bool = False


class BulkActionOut(Schema):
    id: UUID
    action: str
    filter: dict[str, str]
    state: str
    total: int | None
    done: int
    skipped: int
    failed: int
    per_second: float
    actor: str
    reason: str
    begun_at: datetime
    ended_at: datetime | None
    note: str


@router.post("/failed-tasks/bulk", response={202: BulkActionOut, PROBLEMS: ProblemOut})
def begin(request: HttpRequest, wish: BulkIn) -> tuple[int, dict[str, Any]]:
    """Apply an action to all failed tasks that match now, at `per_second`. `again` may deliver a message twice, so it
    needs `confirm: true`."""
    if ROW_ACTIONS[wish.action].as_new and not wish.confirm:
        raise InvalidInput.of("confirm", "sending again as new may deliver it twice; confirm with true")
    given = wish.filter.model_dump()
    chosen = {PARAMETERS.get(name, name): value for name, value in given.items() if value}
    return 202, _serialize_bulk_action(
        bulk_actions.start_bulk_action(
            wish.action, chosen, build_api_key_actor(request, wish.reason), per_second=wish.per_second
        )
    )


@router.get("/bulk-actions/{action_id}", response={200: BulkActionOut, PROBLEMS: ProblemOut})
def read(request: HttpRequest, action_id: UUID) -> dict[str, Any]:
    """Return the progress of a bulk action."""
    return _read_bulk_action(action_id)


@router.post("/bulk-actions/{action_id}/cancel", response={200: BulkActionOut, PROBLEMS: ProblemOut})
def cancel(request: HttpRequest, action_id: UUID, wish: ActionIn) -> dict[str, Any]:
    """Stop a bulk action before its next batch. Completed work is not undone."""
    _read_bulk_action(action_id)
    bulk_actions.cancel_bulk_action(action_id, build_api_key_actor(request, wish.reason))
    return _read_bulk_action(action_id)


def _read_bulk_action(action_id: UUID) -> dict[str, Any]:
    row = BulkAction.objects.filter(pk=action_id, action__in=OF_FAILED_TASKS).first()
    if row is None:
        raise NotFound(f"There is no bulk action {action_id}.")
    return _serialize_bulk_action(row)


def _serialize_bulk_action(row: BulkAction) -> dict[str, Any]:
    names = {"actor": "actor_name"}
    return {name: getattr(row, names.get(name, name)) for name in BulkActionOut.model_fields}
