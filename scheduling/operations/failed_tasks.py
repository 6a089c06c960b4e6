"""Handle failed tasks: publish again, resolve, ignore, archive.

Each action changes the row with one guarded update. Of two concurrent actions one raises `Conflict`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models.functions import Now
from django.utils.module_loading import import_string

from scheduling import sql
from scheduling.errors import Conflict, NotFound
from scheduling.ids import new_id
from scheduling.ledger import insertion
from scheduling.ledger.touches import touches
from scheduling.models import FailedTask

State = FailedTask.State
RETRYABLE = (State.OPEN, State.IGNORED)


@dataclass(frozen=True, slots=True)
class Actor:
    """The acting user and the reason, stored with the action."""

    name: str
    user: User | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Republisher:
    """Publishes failed tasks of one origin again."""

    #: Publish one task under a new id, due at an instant. The flag gives it a new delivery key.
    publish: Callable[[FailedTask, UUID, datetime, bool], None]
    #: Sort task ids into the order in which one transaction may publish them. None: any order works, because publishing
    #: waits for no other transaction.
    order: Callable[[Sequence[UUID]], Sequence[UUID]] | None = None


def retry_failed_task(failed_id: UUID, actor: Actor, *, as_new: bool = False, due_at: datetime | None = None) -> UUID:
    """Publish a failed task again under a new task id. Return the id.

    The delivery key stays, so a receiver that honours it sees no second effect. With `as_new` the task gets a new key.
    The receiver then gets the message even if it has the first one. The next pass dispatches the task.

    Raises:
        Conflict: the task was handled already or cannot be published again.
        NotFound: there is no such failed task.
    """
    task_id = new_id()
    with transaction.atomic():
        row = _change_state(failed_id, State.RETRIED, actor, RETRYABLE, retried_as=task_id)
        republisher = _republishers().get(row.origin)
        if republisher is None:
            raise Conflict("A broker message cannot be published again; ignore or archive it.")
        republisher.publish(row, task_id, due_at or sql.now(), as_new)
    return task_id


def lock_in_publish_order(failed_ids: Sequence[UUID]) -> list[UUID]:
    """Lock failed tasks and return the order in which one transaction publishes them again.

    All writers lock failed tasks by id before they publish. No holder of such a lock then waits for a published row.
    """
    rows = FailedTask.objects.select_for_update().filter(pk__in=failed_ids).order_by("pk")
    found = list(rows.values_list("pk", "origin", "task_id"))
    ordered: list[UUID] = []
    for origin, republisher in sorted(_republishers().items()):
        if republisher.order is not None:
            by_task = {task_id: pk for pk, theirs, task_id in found if theirs == origin and task_id}
            ordered += [by_task[each] for each in republisher.order(list(by_task))]
    return [*ordered, *(pk for pk in failed_ids if pk not in ordered)]


def resolve_failed_task(failed_id: UUID, actor: Actor, *, delivered: bool) -> None:
    """Settle an unknown outcome with the operator's finding. "Not delivered" releases the customer's cap slot.

    Raises:
        Conflict: the outcome is not unknown, or the task was handled already.
        NotFound: there is no such failed task.
    """
    with transaction.atomic():
        row = _lock_failed_task(failed_id)
        if row.failure != "unknown":
            raise Conflict("Only an unknown outcome can be resolved.")
        _change_state(
            failed_id, State.RESOLVED_DELIVERED if delivered else State.RESOLVED_NOT_DELIVERED, actor, (State.OPEN,)
        )
        if not delivered and row.origin == FailedTask.Origin.TOUCH and row.task_id:
            touches.release_cap_slot(row.task_id)


def ignore_failed_task(failed_id: UUID, actor: Actor) -> None:
    with transaction.atomic():
        _change_state(failed_id, State.IGNORED, actor, (State.OPEN,))


def archive_failed_task(failed_id: UUID, actor: Actor) -> None:
    with transaction.atomic():
        _change_state(failed_id, State.ARCHIVED, actor, (State.OPEN, State.IGNORED))


@dataclass(frozen=True, slots=True)
class BulkResult:
    """The result of an action on many tasks.

    A conflict is a task handled by another process, or one that cannot be handled so.
    """

    done: int
    conflicts: int


def retry_all(failed_ids: Sequence[UUID], actor: Actor, *, as_new: bool = False, per_second: float = 20) -> BulkResult:
    """Publish many tasks again at a limited rate, so that the receiver is not flooded.

    Conflicts use no share of the rate.
    """
    started_at = sql.now()

    def again(failed_id: UUID, done: int) -> None:
        retry_failed_task(failed_id, actor, as_new=as_new, due_at=started_at + timedelta(seconds=done / per_second))

    return apply_to_each(failed_ids, again)


def retry_sample(failed_ids: Sequence[UUID], actor: Actor, *, count: int) -> BulkResult:
    """Publish a sample at once: the first `count` tasks that can be published again.

    The operator then judges the result.
    """
    tally = BulkResult(0, 0)
    for failed_id in failed_ids:
        if tally.done == count:
            break
        one = apply_to_each([failed_id], lambda failed_id, done: retry_failed_task(failed_id, actor))
        tally = BulkResult(tally.done + one.done, tally.conflicts + one.conflicts)
    return tally


def apply_to_each(failed_ids: Sequence[UUID], act: Callable[[UUID, int], object]) -> BulkResult:
    """Apply `act` to each task in a separate transaction. Its second argument is the number done before."""
    done = conflicts = 0
    for failed_id in failed_ids:
        try:
            act(failed_id, done)
        except (Conflict, NotFound):
            conflicts += 1
        else:
            done += 1
    return BulkResult(done, conflicts)


def _lock_failed_task(failed_id: UUID) -> FailedTask:
    row = FailedTask.objects.select_for_update().filter(pk=failed_id).first()
    if row is None:
        raise NotFound(f"There is no failed task {failed_id}.")
    return row


def _change_state(failed_id: UUID, state: str, actor: Actor, allowed: Sequence[str], **changes: Any) -> FailedTask:
    row = _lock_failed_task(failed_id)
    changed = FailedTask.objects.filter(pk=failed_id, state__in=allowed).update(
        state=state,
        actor=actor.user,
        actor_name=actor.name[:150],
        action_reason=actor.reason[:500],
        acted_at=Now(),
        **changes,
    )
    if changed != 1:
        raise Conflict(f"It is {row.get_state_display()} already.")
    return row


def republish_touch(row: FailedTask, task_id: UUID, due_at: datetime, as_new: bool) -> None:
    assert row.task_id is not None
    insertion.insert_retry(row.task_id, task_id, due_at, as_new=as_new)


REPUBLISHER = Republisher(republish_touch)


@cache
def _republishers() -> dict[str, Republisher]:
    return {origin: import_string(path) for origin, path in settings.REPUBLISHERS.items()}
