"""Write operations of users and clients: customers, cancellation and its undo, pauses, API keys.

Events are in `planning.ingest`, failed tasks in `failed_tasks`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.contrib.auth.models import User
from django.db import transaction

from scheduling import sql
from scheduling.audit import record_action
from scheduling.configuration.file.section import check_row
from scheduling.customers.changes import change_customer
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, InvalidInput, NotFound
from scheduling.ids import new_id
from scheduling.ledger import locks
from scheduling.ledger.new_touches import insert_retry
from scheduling.ledger.touches import touch_ledger
from scheduling.models import (
    WAITING,
    ApiKey,
    AttemptOutcome,
    ChannelConfig,
    Customer,
    Event,
    Node,
    Pause,
    Scope,
    Touch,
    TouchState,
    UndoableAct,
)
from scheduling.models.access import digest_api_key
from scheduling.models.touch import name_in_error
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.undo import MOST_ROWS

MOST_PLANNED_AGAIN = 1000  #: touches of a node that was off for seconds
DELIVERY_WAIT = timedelta(seconds=5)  #: for workers that judge with the node switched off; a batch takes about 3 s


def update_customer(user_id: str, changes: Mapping[str, Any], *, actor: str = "") -> Customer:
    """Create the customer or change the named fields (see `change_customers`)."""
    return Customer.objects.get(pk=change_customer(user_id, changes, actor=actor).id)


def cancel_one_touch(task_id: UUID, *, actor: str, wait: bool = True) -> None:
    """Cancel a touch that is not marked as sending, also while a worker holds it.

    A caller that holds locks of other touches passes `wait=False`. A running touch that another transaction has locked
    then does not change.

    Raises:
        NotFound: there is no such touch.
        Conflict: the touch is being sent, has ended or is locked.
    """
    state = None
    for _try in range(2):  # between the two statements a worker may return the touch for a retry
        with transaction.atomic():
            if touch_ledger.cancel([task_id], reason=f"by:{actor}", wait=wait):
                if wait:  # a bulk action has one entry for all its rows
                    record_action("cancelled", (Touch._meta.label_lower, task_id), actor=actor)
                return
        state = Touch.objects.filter(pk=task_id).values_list("state", flat=True).first()
        if state not in WAITING:
            break
    if state is None:
        raise NotFound(_("There is no touch %(task_id)s.", task_id=task_id))
    if state == TouchState.RUNNING:
        raise Conflict(_("A worker is running the touch."))
    raise Conflict(_("The touch is %(state)s already.", state=name_in_error(TouchState(state).label)))


STILL_HELD = _("touches that a worker holds may stay suppressed")
FOLLOWED = _("an event of the customer has arrived since")
IN_DOUBT = _("an earlier attempt of the touch may have had its effect")
#: An event names its insert as its arrival. Its transaction may wait for locks after it (`TIMEOUTS.event_lock`).
EVENT_WAIT = timedelta(seconds=2)


def plan_touch_again(task_id: str, actor: Actor) -> None:
    """Plan an ended touch again under a new task id, with its delivery key, due time and expiry.

    It ended without being sent: cancelled, or suppressed because its node was off. Call it after `lock_customers_of`.

    Raises:
        Conflict: an event of the customer has arrived since, or an earlier attempt may have had its effect.
    """
    old = Touch.objects.filter(pk=task_id, state__in=UNSENT).first()
    if old is None or not old.settled_at or not locks.lock_remaining([old.customer_id]):
        raise Conflict(_("There is no touch %(touch)s that ended without being sent.", touch=task_id))
    later = Event.objects.filter(customer_id=old.customer_id, received_at__gte=old.settled_at - EVENT_WAIT)
    if later.exclude(pk=old.event_id).exists():
        raise Conflict(FOLLOWED)
    unknown = Touch.objects.filter(root_id=old.root_id, state=TouchState.UNKNOWN)
    repeats_unknown = old.retry_of is not None and unknown.filter(pk=old.retry_of).exists()
    if repeats_unknown or any(each.outcome == AttemptOutcome.UNKNOWN for each in old.attempts or ()):
        raise Conflict(IN_DOUBT)
    insert_retry(old.task_id, new_id(), max(old.due_at, sql.now()), as_new=False, expires_at=old.expires_at)


UNSENT = (TouchState.CANCELLED, TouchState.SUPPRESSED)


def lock_customers_of(task_ids: Sequence[str]) -> Sequence[str]:
    """Lock the customers of ended touches, so that no event of them arrives until the transaction ends.

    Return the ids as given.
    """
    locks.lock_remaining(Touch.objects.filter(pk__in=task_ids).values_list("customer_id", flat=True))
    return task_ids


def plan_suppressed_again(node_id: str, actor: Actor, *, version: int, since: str) -> list[str]:
    """Plan the touches again that a node suppressed since it was switched off. Return why others stay suppressed.

    Call it after the commit of the switch: every other transaction locks customers before it reads the configuration.
    """
    refusals: set[str] = set() if locks.await_customer_locks(DELIVERY_WAIT) else {STILL_HELD}
    stopped = Touch.objects.filter(
        node_id=node_id, settled_at__gte=since, state="suppressed", reason="node_disabled"
    ).order_by("pk")  # fmt: skip
    task_ids = [str(pk) for pk in stopped.values_list("pk", flat=True)]
    planned = 0
    for start in range(0, min(len(task_ids), MOST_PLANNED_AGAIN), MOST_ROWS):
        batch = task_ids[start : start + MOST_ROWS]
        with transaction.atomic():
            lock_customers_of(batch)
            for task_id in batch:
                try:
                    plan_touch_again(task_id, actor)
                    planned += 1
                except Conflict as error:
                    refusals.add(str(error))
    if left := len(task_ids) - planned:
        refusals.add(_("touches that stay suppressed: %(count)s", count=left))
    return sorted(refusals)


def end_own_pause(scope: str, actor: Actor, *, pause: int) -> None:
    """Resume a scope if this pause is still the one that holds it.

    Raises:
        Conflict: the pause has ended.
    """
    if not Pause.objects.select_for_update().filter(pk=pause, scope=scope).exists():
        raise Conflict(_("The pause had already ended."))
    resume_scope(scope, actor=actor.name)


def pause_scope(scope: str, *, reason: str = "", user: User | None = None, actor: str = "") -> Pause:
    """Pause all touches of a scope as they fall due: "all", "channel:<key>" or "node:<key>". Idempotent.

    A repetition ends the offer to undo the pause: this caller relies on it too.
    """
    _check_scope(scope)
    while True:
        with transaction.atomic():
            row, is_new = Pause.objects.get_or_create(scope=scope, defaults={"reason": reason[:200], "paused_by": user})
            if is_new:
                record_action("paused", (Pause._meta.label_lower, scope), label=scope, actor=actor, reason=reason)
                return row
            # In the order of an undo: the offer, then the pause. If an undo came first, the pause is stored again.
            offers = UndoableAct.objects.filter(act="pause", keys=[scope])
            list(offers.select_for_update().order_by("pk"))
            if Pause.objects.select_for_update().filter(pk=row.pk).exists():
                offers.delete()
                return row


def resume_scope(scope: str, *, actor: str = "") -> None:
    """End a pause. The next pass spreads its paused touches over the next minutes.

    Raises:
        NotFound: the scope is not paused.
    """
    _check_scope(scope)
    with transaction.atomic():
        deleted, _by_model = Pause.objects.filter(scope=scope).delete()
        if not deleted:
            raise NotFound(_("%(scope)s is not paused.", scope=scope))
        record_action("resumed", (Pause._meta.label_lower, scope), label=scope, actor=actor)


def _check_scope(scope: str) -> None:
    kind, _colon, key = scope.partition(":")
    known: dict[str, type[ChannelConfig] | type[Node]] = {"channel": ChannelConfig, "node": Node}
    if scope == "all":
        return
    if kind not in known:
        raise InvalidInput.of("scope", _("“all”, “channel:<key>” or “node:<key>”"))
    if not known[kind]._default_manager.filter(key=key).exists():
        raise InvalidInput.of("scope", _("there is no %(noun)s “%(name)s”", noun=kind, name=key))


def create_api_key(
    name: str, scopes: Sequence[str], *, rate_per_minute: int | None = None, expires_at: datetime | None = None,
    actor: str = "",
) -> str:  # fmt: skip
    """Create a key and return it. It cannot be read again.

    Raises:
        InvalidInput: `scope` or a column is invalid.
    """
    unknown = sorted(set(scopes) - set(Scope.values))
    if unknown or not scopes:
        raise InvalidInput.of(
            "scope",
            _(
                "%(given)s; available: %(known)s",
                given=", ".join(unknown) or "none given",
                known=", ".join(Scope.values),
            ),
        )
    if not name or ApiKey.objects.filter(name=name).exists():
        raise InvalidInput.of(
            "name", _("a key named “%(name)s” already exists", name=name) if name else _("must be given")
        )
    key = f"at_{secrets.token_urlsafe(32)}"
    row = ApiKey(
        name=name, digest=digest_api_key(key), prefix=key[:8], scopes=sorted(set(scopes)),
        rate_per_minute=rate_per_minute, expires_at=expires_at,
    )  # fmt: skip
    check_row(row)
    with transaction.atomic():
        row.save()
        record_action("added", row, label=name, actor=actor, changes=[("scopes", None, row.scopes)])
    return key
