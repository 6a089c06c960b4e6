"""Define the actions of bulk operations, and the states of rows that allow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any
from uuid import UUID

from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy

from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput
from scheduling.ledger import locks
from scheduling.models import WAITING, FailedTask
from scheduling.operations import commands, failed_tasks
from scheduling.operations.failed_tasks import Actor

FAILED_TASKS, TOUCHES = "failed_task", "touch"
Given = Mapping[str, Any]


def refuse_parameters(given: Given) -> None:
    """Check the parameters of an action that takes none.

    Raises:
        InvalidInput: there is one; the error names it.
    """
    if given:
        raise InvalidInput(*(FieldError(f"given.{name}", _("is no parameter of this action")) for name in given))


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
    permission: str  #: of a user who may start and stop it
    title: str | Promise = ""
    unknown_only: bool = False
    publishes: bool = False
    as_new: bool = False  #: the customer may receive a message twice
    per_second: float = 200  #: default rate in rows per second
    #: Check the parameters that a user gives. Raises `InvalidInput`.
    check: Callable[[Given], None] = refuse_parameters
    #: Return the parameters that restrict the action to the rights of the user who starts it. Workers check no rights.
    restrict: Callable[[User], Given] = lambda user: {}
    #: Lock what a batch needs, and return the order in which one transaction may change the rows. None: any order
    #: works, because the action waits for no other transaction.
    lock: Callable[[Sequence[UUID]], Sequence[UUID]] | None = None

    def act(self, key: UUID, actor: Actor, due_at: datetime | None = None, given: Given = MappingProxyType({})) -> Any:
        timing = {"due_at": due_at} if self.publishes else {}
        return self.function(key, actor, **timing, **given)

    def allowed_rows(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        rows = rows.filter(state__in=self.states)
        return rows.filter(failure="unknown") if self.unknown_only else rows


def _cancel_row(task_id: UUID, actor: Actor) -> None:
    # A batch locks up to a hundred touches, and settling locks many in any order, so waiting could deadlock.
    commands.cancel_one_touch(task_id, actor=actor.name, wait=False)


def _lock_customers_first(task_ids: Sequence[UUID]) -> Sequence[UUID]:
    """Lock the customers of these touches before the touches, as every writer does."""
    locks.lock_customers(task_ids)
    return task_ids


OPEN, IGNORED = FailedTask.State.OPEN.value, FailedTask.State.IGNORED.value
#: Rows per second: low enough not to flood a receiver that has just recovered.
RETRY_RATE = 50
_HANDLES: dict[str, Any] = {"permission": "scheduling.act_on_failedtask"}
_REPUBLISHES: dict[str, Any] = {
    **_HANDLES, "publishes": True, "per_second": RETRY_RATE, "lock": failed_tasks.lock_in_publish_order,
}  # fmt: skip
_retry_as_new = partial(failed_tasks.retry_failed_task, as_new=True)
_resolve_delivered = partial(failed_tasks.resolve_failed_task, delivered=True)
_resolve_not_delivered = partial(failed_tasks.resolve_failed_task, delivered=False)
ROW_ACTIONS: dict[str, RowAction] = {
    "retry": RowAction(FAILED_TASKS, failed_tasks.retry_failed_task, (OPEN, IGNORED), **_REPUBLISHES),
    "again": RowAction(FAILED_TASKS, _retry_as_new, (OPEN, IGNORED), as_new=True, **_REPUBLISHES),
    "delivered": RowAction(FAILED_TASKS, _resolve_delivered, (OPEN,), unknown_only=True, **_HANDLES),
    "not_delivered": RowAction(FAILED_TASKS, _resolve_not_delivered, (OPEN,), unknown_only=True, **_HANDLES),
    "ignore": RowAction(FAILED_TASKS, failed_tasks.ignore_failed_task, (OPEN,), **_HANDLES),
    "archive": RowAction(FAILED_TASKS, failed_tasks.archive_failed_task, (OPEN, IGNORED), **_HANDLES),
    "cancel": RowAction(
        TOUCHES,
        _cancel_row,
        WAITING,
        "scheduling.change_touch",
        gettext_lazy("Cancel the touch"),
        lock=_lock_customers_first,
    ),
}
