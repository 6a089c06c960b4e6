"""Start bulk actions on failed tasks; read and stop bulk actions on any list."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from django.http import HttpRequest
from ninja import Field, Router, Schema

from scheduling.api.auth import ApiKeyAuth, build_api_key_actor, require_scope
from scheduling.api.schemas import ActionIn, ProblemOut, Request, Text, Words, limit_list_time
from scheduling.errors import InvalidInput, NotFound
from scheduling.models import BulkAction, Scope
from scheduling.operations import bulk_actions, queries
from scheduling.operations.bulk_actions import FAILED_TASK_ACTIONS, row_actions

router = Router(tags=["failed tasks"], auth=ApiKeyAuth("failed-tasks"))
PROBLEMS = (400, 401, 403, 404, 409, 413, 422, 429, 503)
#: The scope of the action counts: `RowAction.scope`.
OF_ANY_LIST = ApiKeyAuth(Scope.FAILED_TASKS.value, Scope.RPA_OPERATE.value)


class ChosenIn(Request):
    """A missing filter matches any value. `state` defaults to `open`."""

    state: Literal["open", "ignored", "all"] = "open"
    reason: Text = ""
    fingerprint: Text = ""
    origin: Literal["touch", "rpa_job", "message", ""] = ""
    channel: Text = ""
    q: Words = ""


class BulkIn(ActionIn):
    action: Literal["retry", "again", "delivered", "not_delivered", "ignore", "archive"]
    filter: ChosenIn
    per_second: Annotated[float, Field(ge=bulk_actions.SLOWEST, le=bulk_actions.FASTEST)] | None = None
    confirm: bool = False


class BulkActionOut(Schema):
    id: UUID
    action: str
    filter: dict[str, str]
    given: dict[str, Any]
    state: str
    total: int
    done: int
    skipped: int
    failed: int
    per_second: float
    actor: str = Field(alias="actor_name")
    reason: str
    begun_at: datetime
    ended_at: datetime | None
    note: str

    @staticmethod
    def resolve_action(row: BulkAction) -> str:
        """Return its name within the list: `cancel`, not `job.cancel`."""
        return row.action.rpartition(".")[2]


@router.post("/failed-tasks/bulk", response={202: BulkActionOut, PROBLEMS: ProblemOut})
def begin(request: HttpRequest, wish: BulkIn) -> tuple[int, BulkAction]:
    """Apply an action to all failed tasks that match now, at `per_second`. `again` may deliver a message twice, so it
    needs `confirm: true`."""
    if FAILED_TASK_ACTIONS[wish.action].as_new and not wish.confirm:
        raise InvalidInput.of("confirm", "sending again as new may deliver it twice; confirm with true")
    chosen = {name: value for name, value in wish.filter.model_dump().items() if value}
    equal = {name: value for name, value in chosen.items() if name != "q"}
    if wish.filter.state == "all":
        del equal["state"]
    with limit_list_time():
        rows = queries.filter_failed_tasks(wish.filter.q, **equal)
    actor = build_api_key_actor(request, wish.reason)
    return 202, bulk_actions.start_bulk_action(wish.action, rows, actor, chosen=chosen, per_second=wish.per_second)


@router.get("/bulk-actions/{action_id}", auth=OF_ANY_LIST, response={200: BulkActionOut, PROBLEMS: ProblemOut})
def read(request: HttpRequest, action_id: UUID) -> BulkAction:
    """Return the progress of a bulk action. A bulk action on jobs needs the scope `rpa.operate`."""
    return _read_bulk_action(request, action_id)


@router.post("/bulk-actions/{action_id}/cancel", auth=OF_ANY_LIST, response={200: BulkActionOut, PROBLEMS: ProblemOut})
def cancel(request: HttpRequest, action_id: UUID, wish: ActionIn) -> BulkAction:
    """Stop a bulk action before its next batch. Completed work is not undone."""
    _read_bulk_action(request, action_id)
    bulk_actions.cancel_bulk_action(action_id, build_api_key_actor(request, wish.reason))
    return _read_bulk_action(request, action_id)


def _read_bulk_action(request: HttpRequest, action_id: UUID) -> BulkAction:
    row = BulkAction.objects.filter(pk=action_id).first()
    action = row_actions().get(row.action) if row else None
    if row is None or action is None or not action.scope:
        raise NotFound(f"There is no bulk action {action_id}.")
    require_scope(request, action.scope)
    return row
