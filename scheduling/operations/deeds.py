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
class Deed:
    """An action on one row.

    Raises:
        Conflict: another process changed the row first, or its state does not allow the action.
        NotFound: the row does not exist.
    """

    over: str
    do: Callable[..., Any]
    states: tuple[str, ...]
    unknown_only: bool = False
    publishes: bool = False
    as_new: bool = False  #: the customer may receive a message twice
    per_second: float = 200  #: default rate in rows per second

    def act(self, key: UUID, actor: Actor, due_at: datetime | None = None) -> None:
        if self.publishes:
            self.do(key, actor, due_at=due_at)
        else:
            self.do(key, actor)

    def fitting(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        rows = rows.filter(state__in=self.states)
        return rows.filter(failure="unknown") if self.unknown_only else rows


def _call_off(task_id: UUID, actor: Actor) -> None:
    # A batch locks up to a hundred touches, and settling locks many in any order, so waiting could deadlock.
    commands.cancel_touch(task_id, actor=actor.name, wait=False)


OPEN, IGNORED = FailedTask.State.OPEN.value, FailedTask.State.IGNORED.value
#: Rows per second: low enough not to flood a receiver that has just recovered.
REPLAYS = 50
DEEDS: dict[str, Deed] = {
    "retry": Deed(FAILED_TASKS, failed_tasks.retry, (OPEN, IGNORED), publishes=True, per_second=REPLAYS),
    "again": Deed(
        FAILED_TASKS, partial(failed_tasks.retry, as_new=True), (OPEN, IGNORED), publishes=True, as_new=True,
        per_second=REPLAYS,
    ),
    "delivered": Deed(FAILED_TASKS, partial(failed_tasks.resolve, delivered=True), (OPEN,), unknown_only=True),
    "not_delivered": Deed(FAILED_TASKS, partial(failed_tasks.resolve, delivered=False), (OPEN,), unknown_only=True),
    "ignore": Deed(FAILED_TASKS, failed_tasks.ignore, (OPEN,)),
    "archive": Deed(FAILED_TASKS, failed_tasks.archive, (OPEN, IGNORED)),
    "call_off": Deed(TOUCHES, _call_off, WAITING),
}  # fmt: skip
