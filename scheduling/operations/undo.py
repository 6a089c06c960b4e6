"""Take back an act within ten seconds.

What a user may take back is a row of `UndoableAct`. The undo deletes that row in the transaction of its effect. So of
two concurrent undos one has an effect. `Integration.reversals` names how each kind of act is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

import structlog
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models.functions import Now

from scheduling.app_integrations import integrations
from scheduling.audit import record_action
from scheduling.error_text import ErrorText as _
from scheduling.errors import AftertouchError, Conflict
from scheduling.models import UndoableAct
from scheduling.operations.failed_tasks import Actor

log = structlog.get_logger(__name__)

UNDO_WINDOW = timedelta(seconds=10)
MOST_ROWS = 100  #: of an act with an undo: one transaction locks the customers of all of them
KEPT_FOR = timedelta(minutes=1)  #: longer than any undo takes
EXPIRED = _("The time to undo is over, or it was undone already.")


@dataclass(frozen=True, slots=True)
class Reversal:
    """How one kind of act is taken back.

    Raises:
        Conflict: something followed the act, so taking it back could send twice or lose an edit.
    """

    kind: str  #: of the rows, for the audit log
    permission: str  #: of users who may take it back
    #: Take back the act on one row: `take_back(key, actor, **given)`.
    take_back: Callable[..., None]
    #: Lock what all the rows need, in the order of every writer. Return the keys in the order to take them back.
    lock: Callable[[Sequence[str]], Sequence[object]] | None = None
    #: Continue after the commit, in transactions of its own: `follow_up(key, actor, **given)`. Return what stays as it
    #: is, and why. A process that dies before it leaves that part in effect.
    follow_up: Callable[..., Sequence[str]] | None = None


class Undone(NamedTuple):
    label: str
    rows: int
    refusals: Sequence[str]  #: why the act stays in effect on other rows


def offer_undo(
    user: User, act: str, keys: Sequence[object], *, label: str = "", given: Mapping[str, Any] | None = None
) -> UUID:
    """Store the act so that its user can take it back. Call it in the transaction of the act, or after it."""
    row = UndoableAct.objects.create(
        owner=user, act=act, keys=[str(key) for key in keys], label=label[:200], given=dict(given or {})
    )
    return row.pk


def find_reversal(act: str) -> Reversal:
    return {name: each for app in integrations() for name, each in app.reversals.items()}[act]


def undo_act(act_id: UUID, actor: Actor) -> Undone:
    """Take the act back on each of its rows, where nothing followed.

    Raises:
        Conflict: the act is older than `UNDO_WINDOW` by PostgreSQL's clock, was undone, or belongs to another user;
            or something followed it on every row.
        PermissionDenied: the user has lost the permission.
    """
    with transaction.atomic():
        mine = UndoableAct.objects.select_for_update().filter(owner=actor.user, made_at__gt=Now() - UNDO_WINDOW)
        row = mine.filter(pk=act_id).first()
        if row is None:
            raise Conflict(EXPIRED)
        reversal = find_reversal(row.act)
        if actor.user is None or not actor.user.has_perm(reversal.permission):
            raise PermissionDenied
        ordered = [str(key) for key in reversal.lock(row.keys)] if reversal.lock else []
        refusals: list[AftertouchError] = []
        for key in dict.fromkeys([*ordered, *row.keys]):  # rows that are deleted since come last, and are refused
            try:
                with transaction.atomic():
                    reversal.take_back(key, actor, **row.given)
            except AftertouchError as error:
                refusals.append(error)
        if len(refusals) == len(row.keys):
            raise refusals[0]
        row.delete()
        done = len(row.keys) - len(refusals)
        target = row.keys[0] if len(row.keys) == 1 else ""
        facts = [("act", None, row.act), ("rows", None, done)]
        record_action("undone", (reversal.kind, target), label=row.label, actor=actor.name, changes=facts)
    log.info("act_undone", act=row.act, rows=done, refused=len(refusals), actor=actor.name)
    left = {str(each) for each in refusals}
    if reversal.follow_up:  # only of acts on one row
        left.update(reversal.follow_up(row.keys[0], actor, **row.given))
    return Undone(row.label, done, sorted(left))
