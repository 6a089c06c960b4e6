"""Define the columns that all rows of work share: touches and RPA jobs.

Only `scheduling.ledger` and `rpa_tasks.jobs` write them. A claim increments `lease_no`, and no row leaves an end.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id


class Priority(models.IntegerChoices):
    HIGH = 0, _("High")
    NORMAL = 1, _("Normal")
    LOW = 2, _("Low")


WAITING = ("scheduled", "queued")  #: not started: a cancellation or an edit may still change it
LEASED = ("queued", "running")  #: dispatched or claimed until `lease_until`
RARE = ("failed", "unknown", "cancelled")  #: ends that may be few among millions of rows


class LedgerRow(models.Model):
    """One piece of work. The row is authoritative; a message about it is only a wake-up."""

    task_id = models.UUIDField(_("task id"), primary_key=True, default=new_id, editable=False)
    #: The first task of a chain of retries. Receivers see it as the idempotency key.
    root_id = models.UUIDField(_("delivery key"), default=new_id, editable=False)
    #: The task that this one publishes again.
    retry_of = models.UUIDField(_("retry of"), null=True, editable=False)
    state = models.CharField(_("state"), max_length=10, default="scheduled")
    priority = models.SmallIntegerField(_("priority"), choices=Priority, default=Priority.NORMAL)
    #: The earliest start, by the database's clock.
    due_at = models.DateTimeField(_("due at"))
    #: The first `due_at`, from which lateness is measured.
    planned_at = models.DateTimeField(_("planned at"))
    #: The pause that keeps this row from dispatch ("" for none): "all", "channel:hook", "node:x", "shop:pdd/s1".
    paused_by = models.CharField(_("paused by"), max_length=120, default="", blank=True)
    #: How many times the receiver was called or the flow was run.
    attempt = models.SmallIntegerField(_("attempts"), default=0)
    #: The fence: every claim increments it, every later write of the claimant names it.
    lease_no = models.IntegerField(_("lease number"), default=0)
    lease_until = models.DateTimeField(_("lease until"), null=True)
    #: Wake-ups published for the current `due_at`; each doubles the wait for the next.
    wakeups = models.SmallIntegerField(_("wake-ups"), default=0)
    queued_at = models.DateTimeField(_("dispatched at"), null=True)
    #: From now on the receiver may have seen it. An end without a response is `unknown`.
    sending_at = models.DateTimeField(_("sending at"), null=True)
    settled_at = models.DateTimeField(_("settled at"), null=True)
    #: A short code: why it waits, or why it ended.
    reason = models.CharField(_("reason"), max_length=64, default="", blank=True)
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)

    class Meta:
        abstract = True

    @staticmethod
    def indexes_for(table: str, due: Sequence[str] = ("due_at",)) -> list[models.Index]:
        """Return the partial indexes that the ledger needs. Its statements repeat the state as a literal.

        `due` names the columns by which the dispatch finds rows.
        """
        return [
            models.Index(fields=due, name=f"{table}_due", condition=Q(state="scheduled", paused_by="")),
            # Read by both rescues.
            models.Index(fields=["lease_until"], name=f"{table}_leased", condition=Q(state__in=LEASED)),
            # Read by the end of a pause.
            models.Index(fields=["paused_by"], name=f"{table}_paused_by", condition=~Q(paused_by="")),
            # Read by lists of these states, newest first. A row with a usual end has no entry.
            models.Index(fields=["task_id", "state"], name=f"{table}_rare", condition=Q(state__in=RARE)),
        ]

    @staticmethod
    def constraints_for(table: str) -> list[models.BaseConstraint]:
        """Return the constraint that a row has a lease exactly while it is queued or running."""
        leased = Q(state__in=LEASED)
        return [
            models.CheckConstraint(
                name=f"{table}_leased_iff_lease",
                condition=(leased & Q(lease_until__isnull=False)) | (~leased & Q(lease_until__isnull=True)),
            )
        ]
