"""Store touches."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from scheduling.models.ledger import WAITING, LedgerRow
from scheduling.models.touch_log import Attempt, LogField, Verdict


class TouchState(models.TextChoices):
    SCHEDULED = "scheduled", _("Scheduled")  #: waits for its due time
    QUEUED = "queued", _("Dispatched")  #: a wake-up was dispatched to a worker
    RUNNING = "running", pgettext_lazy("touch", "Running")  #: claimed by a worker until `lease_until`
    DELIVERED = "delivered", _("Delivered")  #: the receiver confirmed it
    SUPPRESSED = "suppressed", _("Suppressed")  #: a guard stopped it; the verdict has the reason
    CANCELLED = "cancelled", _("Cancelled")  #: an event or a person cancelled it before it was sent
    FAILED = "failed", _("Failed")  #: certainly not delivered; a failed task waits for a person
    UNKNOWN = "unknown", _("Unknown")  #: it may have been delivered; a failed task waits for a person


class Touch(LedgerRow):
    """One message to one customer, for one event at one node.

    Triggers hold the references to event and node instead of foreign key constraints, whose check for each inserted row
    cost a third of PostgreSQL's work. A trigger refuses to delete a row that others refer to. A writer locks what its
    rows will refer to: the customer, and the nodes with `locks.lock_nodes`. The customer is the event's.

    The table has two parts (migration 0001): `scheduling_touch_live` holds the rows that have not ended, and
    `scheduling_touch_ended` holds the ended ones, partitioned by `settled_at`. The ledger writes the live part. A row
    moves when it ends. Readers query the whole table and need not know.
    """

    state = models.CharField(
        _("state"), max_length=10, choices=TouchState, default=TouchState.SCHEDULED, editable=False
    )
    # The keys below have no index if no frequent query needs one: each index costs every update a write. Queries for
    # all touches of a customer go through its events.
    event = models.ForeignKey(
        "scheduling.Event",
        on_delete=models.PROTECT,
        related_name="touches",
        verbose_name=_("event"),
        db_index=False,
        db_constraint=False,
    )
    node = models.ForeignKey(
        "scheduling.Node",
        on_delete=models.PROTECT,
        related_name="touches",
        verbose_name=_("node"),
        db_index=False,
        db_constraint=False,
    )
    node_version = models.PositiveIntegerField(_("node version when planned"))
    customer = models.ForeignKey(
        "scheduling.Customer",
        on_delete=models.PROTECT,
        related_name="touches",
        verbose_name=_("customer"),
        db_index=False,
        db_constraint=False,
    )
    chat_id = models.CharField(_("chat id"), max_length=200, blank=True)
    expires_at = models.DateTimeField(_("expires at"))
    # Decided at fire time; kept over retries. A trigger protects the template (see migration 0001). The check of a
    # foreign key constraint cost a seventh of PostgreSQL's work for a delivery.
    template = models.ForeignKey(
        "scheduling.Template",
        null=True,
        on_delete=models.PROTECT,
        related_name="touches",
        verbose_name=_("template"),
        db_index=False,
        db_constraint=False,
    )
    template_version = models.PositiveIntegerField(_("template version"), null=True)
    content_type = models.CharField(_("content type"), max_length=64, default="", blank=True)
    #: When a guard reserved a cap slot; empty again if it certainly was not delivered.
    reserved_at = models.DateTimeField(_("cap slot reserved at"), null=True)
    counts_toward_cap = models.BooleanField(_("counts toward the cap"), default=True)
    #: The first and the latest ones, at most `MOST_VERDICTS`, in order of time.
    verdicts: Any = LogField(_("verdicts"), entry=Verdict)
    attempts: Any = LogField(_("attempts"), entry=Attempt)  #: all, in order of time

    class Meta:
        verbose_name = _("touch")
        verbose_name_plural = _("touches")
        indexes = [
            *LedgerRow.indexes_for("touch", due=("priority", "due_at")),
            # Read by the guard (a customer's history) and by the page of a customer.
            models.Index(
                fields=["customer", "reserved_at"], name="touch_history", condition=Q(reserved_at__isnull=False)
            ),
            models.Index(
                fields=["chat_id", "reserved_at"],
                name="touch_chat_history",
                condition=Q(reserved_at__isnull=False) & ~Q(chat_id=""),
            ),
            # Read by cancel_on, on_repeat and slot_hold. Only the live part has it.
            models.Index(fields=["customer", "node"], name="touch_waiting"),
            # Read by the overview and by lists of a time span. Written once per touch, at its end.
            models.Index(fields=["settled_at"], name="touch_ended", condition=Q(settled_at__isnull=False)),
            # Read by the list of paused touches, newest first.
            models.Index(fields=["task_id"], name="touch_paused", condition=~Q(paused_by="")),
            # Read by the page of receivers: the touches that their receivers have no room for.
            models.Index(
                fields=["node", "chat_id", "due_at"],
                name="touch_deferred",
                condition=Q(state__in=WAITING, reason__in=["quota", "target_busy", "target_down"]),
            ),
        ]
        constraints = [
            *LedgerRow.constraints_for("touch"),
            # Read by queries for the touches of an event.
            models.UniqueConstraint(
                fields=["event", "node", "retry_of"], name="touch_once_an_event", nulls_distinct=False
            ),
            # A double click publishes once.
            models.UniqueConstraint(
                fields=["retry_of"], name="touch_retried_once", condition=Q(retry_of__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"…{str(self.task_id)[-8:]}"


class EndMark(models.Model):
    """How far one reader of ended touches has read (see `scheduling.ledger.ends`)."""

    reader = models.CharField(max_length=64, primary_key=True)
    settled_at = models.DateTimeField()
    task_id = models.UUIDField()
    #: Ends up to this instant may be read after all transactions before `ceiling_xid` have ended. Earlier ones are then
    #: committed or will never exist.
    ceiling = models.DateTimeField()
    ceiling_xid = models.BigIntegerField(default=0)

    class Meta:
        default_permissions = ()  # no page shows these rows

    def __str__(self) -> str:
        return f"{self.reader}: {self.settled_at}"
