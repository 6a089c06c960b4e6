"""What a person can do about a failed task: publish it again, resolve it, ignore it, archive it.

Each action moves the row with one guarded update, so that of two people who click at once one gets `Conflict`.
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
from scheduling.ledger.touches import touches
from scheduling.models import FailedTask, Touch

State = FailedTask.State
RETRYABLE = (State.OPEN, State.IGNORED)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, and why: stored with what was done."""

    name: str
    user: User | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Republisher:
    """Publishes failed tasks of one origin again."""

    #: One, as a new id, due at an instant; with the same delivery key or its own.
    publish: Callable[[FailedTask, UUID, datetime, bool], None]
    #: Several tasks, by their ids, in the order in which one transaction may publish them; None where it is all the
    #: same, because none ever waits for what somebody else publishes at the moment.
    order: Callable[[Sequence[UUID]], Sequence[UUID]] | None = None


def retry(failed_id: UUID, actor: Actor, *, as_new: bool = False, due_at: datetime | None = None) -> UUID:
    """Publish it again under a new task id, with the same delivery key: a receiver that honours the key sees no second
    effect. `as_new` gives it a key of its own: the receiver will get it even if it had it before.

    The next pass hands it over. Returns the new task id. Raises `Conflict` where it was acted on already or can't be
    published again, `NotFound` where there is none.
    """
    task_id = new_id()
    with transaction.atomic():
        row = _move(failed_id, State.RETRIED, actor, RETRYABLE, retried_as=task_id)
        republisher = _republishers().get(row.origin)
        if republisher is None:
            raise Conflict("A broker message cannot be published again; ignore or archive it.")
        republisher.publish(row, task_id, due_at or sql.now(), as_new)
    return task_id


def locked_in_order(failed_ids: Sequence[UUID]) -> list[UUID]:
    """The order in which one transaction publishes these again. They are locked first, by their ids as by everybody
    else, so that nobody who holds one of them waits for what was published."""
    rows = FailedTask.objects.select_for_update().filter(pk__in=failed_ids).order_by("pk")
    found = list(rows.values_list("pk", "origin", "task_id"))
    ordered: list[UUID] = []
    for origin, republisher in sorted(_republishers().items()):
        if republisher.order is not None:
            by_task = {task_id: pk for pk, theirs, task_id in found if theirs == origin and task_id}
            ordered += [by_task[each] for each in republisher.order(list(by_task))]
    return [*ordered, *(pk for pk in failed_ids if pk not in ordered)]


def resolve(failed_id: UUID, actor: Actor, *, delivered: bool) -> None:
    """Settle an unknown outcome by what a person found out. Not delivered gives the customer's slot back."""
    with transaction.atomic():
        row = _find(failed_id)
        if row.failure != "unknown":
            raise Conflict("Only an unknown outcome can be resolved.")
        _move(failed_id, State.RESOLVED_DELIVERED if delivered else State.RESOLVED_NOT_DELIVERED, actor, (State.OPEN,))
        if not delivered and row.origin == FailedTask.Origin.TOUCH and row.task_id:
            touches.free_slot(row.task_id)


def ignore(failed_id: UUID, actor: Actor) -> None:
    with transaction.atomic():
        _move(failed_id, State.IGNORED, actor, (State.OPEN,))


def archive(failed_id: UUID, actor: Actor) -> None:
    with transaction.atomic():
        _move(failed_id, State.ARCHIVED, actor, (State.OPEN, State.IGNORED))


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of many. A conflict is one that somebody else acted on meanwhile, or that can't be acted on so."""

    done: int
    conflicts: int


def retry_all(failed_ids: Sequence[UUID], actor: Actor, *, as_new: bool = False, per_second: float = 20) -> Tally:
    """Publish many again at a pace, so that the receiver is not flooded; conflicts take no place in it."""
    started_at = sql.now()

    def again(failed_id: UUID, done: int) -> None:
        retry(failed_id, actor, as_new=as_new, due_at=started_at + timedelta(seconds=done / per_second))

    return do_all(failed_ids, again)


def retry_first(failed_ids: Sequence[UUID], actor: Actor, *, count: int) -> Tally:
    """Publish the first `count` again that can be, at once: to see how they fare before the rest follows."""
    tally = Tally(0, 0)
    for failed_id in failed_ids:
        if tally.done == count:
            break
        one = do_all([failed_id], lambda failed_id, done: retry(failed_id, actor))
        tally = Tally(tally.done + one.done, tally.conflicts + one.conflicts)
    return tally


def do_all(failed_ids: Sequence[UUID], act: Callable[[UUID, int], object]) -> Tally:
    """Each in a transaction of its own. `act` is also told how many were done before."""
    done = conflicts = 0
    for failed_id in failed_ids:
        try:
            act(failed_id, done)
        except (Conflict, NotFound):
            conflicts += 1
        else:
            done += 1
    return Tally(done, conflicts)


def _find(failed_id: UUID) -> FailedTask:
    row = FailedTask.objects.select_for_update().filter(pk=failed_id).first()
    if row is None:
        raise NotFound(f"There is no failed task {failed_id}.")
    return row


def _move(failed_id: UUID, state: str, actor: Actor, allowed: Sequence[str], **changes: Any) -> FailedTask:
    row = _find(failed_id)
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
    """A new touch for the same event and node. An unknown one's slot moves along, as it is the same delivery. What a
    person sends as new takes a slot of its own at once, so that no dedupe or cap undoes what was confirmed."""
    old = Touch.objects.select_related("node").get(pk=str(row.task_id))
    reserved_at = Now() if as_new else old.reserved_at
    if reserved_at and not as_new:
        touches.free_slot(old.task_id)
    Touch.objects.create(
        task_id=task_id,
        root_id=task_id if as_new else old.root_id,
        retry_of=old.task_id,
        priority=old.priority,
        due_at=due_at,
        planned_at=due_at,
        event_id=old.event_id,
        node_id=old.node_id,
        node_version=old.node.version,
        customer_id=old.customer_id,
        chat_id=old.chat_id,
        expires_at=due_at + old.node.expires_after,
        reserved_at=reserved_at,
        content_type=old.content_type,
        template_id=old.template_id if reserved_at else None,
        counts_toward_cap=old.counts_toward_cap,
    )


REPUBLISHER = Republisher(republish_touch)


@cache
def _republishers() -> dict[str, Republisher]:
    return {origin: import_string(path) for origin, path in settings.REPUBLISHERS.items()}
