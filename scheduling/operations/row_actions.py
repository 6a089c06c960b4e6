"""Define the actions of bulk operations, and the states of rows that allow them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.db.models import QuerySet

from scheduling.models import WAITING, FailedTask
from scheduling.operations import commands, failed_tasks
from scheduling.operations.failed_tasks import Actor

FAILED_TASKS, TOUCHES = "failed_task", "touch"


@dataclass(frozen=True, slots=True)
class RowAction:
    """An action on one row.

    Raises:
        Conflict: another process changed the row first, or its state does not allow the action.
        NotFound: the row does not exist.
    """

    over: str
    function: Callable[..., Any]
    states: tuple[str, ...]
    unknown_only: bool = False
    publishes: bool = False
    as_new: bool = False  #: the customer may receive a message twice
    per_second: float = 200  #: default rate in rows per second

    def act(self, key: UUID, actor: Actor, due_at: datetime | None = None) -> None:
        if self.publishes:
            self.function(key, actor, due_at=due_at)
        else:
            self.function(key, actor)

    def allowed_rows(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        rows = rows.filter(state__in=self.states)
        return rows.filter(failure="unknown") if self.unknown_only else rows


def _cancel_row(task_id: UUID, actor: Actor) -> None:
    # A batch locks up to a hundred touches, and settling locks many in any order, so waiting could deadlock.
    commands.cancel_one_touch(task_id, actor=actor.name, wait=False)


OPEN, IGNORED = FailedTask.State.OPEN.value, FailedTask.State.IGNORED.value
#: Rows per second: low enough not to flood a receiver that has just recovered.
RETRY_RATE = 50
_REPUBLISHES: dict[str, Any] = {"publishes": True, "per_second": RETRY_RATE}
_retry_as_new = partial(failed_tasks.retry_failed_task, as_new=True)
_resolve_delivered = partial(failed_tasks.resolve_failed_task, delivered=True)
_resolve_not_delivered = partial(failed_tasks.resolve_failed_task, delivered=False)
ROW_ACTIONS: dict[str, RowAction] = {
    "retry": RowAction(FAILED_TASKS, failed_tasks.retry_failed_task, (OPEN, IGNORED), **_REPUBLISHES),
    "again": RowAction(FAILED_TASKS, _retry_as_new, (OPEN, IGNORED), as_new=True, **_REPUBLISHES),
    "delivered": RowAction(FAILED_TASKS, _resolve_delivered, (OPEN,), unknown_only=True),
    "not_delivered": RowAction(FAILED_TASKS, _resolve_not_delivered, (OPEN,), unknown_only=True),
    "ignore": RowAction(FAILED_TASKS, failed_tasks.ignore_failed_task, (OPEN,)),
    "archive": RowAction(FAILED_TASKS, failed_tasks.archive_failed_task, (OPEN, IGNORED)),
    "cancel": RowAction(TOUCHES, _cancel_row, WAITING),
}
