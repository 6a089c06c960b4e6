"""Store events and their types."""

from __future__ import annotations

from uuid import UUID

from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id


class EventType(models.Model):
    """A kind of event. The first event of an unknown type adds it, so that no event is lost."""

    key = models.CharField(_("type"), max_length=120, unique=True)
    name = models.CharField(_("name"), max_length=120, blank=True)
    #: Whether the customer caused it; such an event raises `last_active_at`.
    is_activity = models.BooleanField(_("is customer activity"), default=True)
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)

    class Meta:
        verbose_name = _("event type")
        verbose_name_plural = _("event types")
        ordering = ["key"]

    def __str__(self) -> str:
        return self.name or self.key


class Event(models.Model):
    """An event as received (CloudEvents 1.0). Never changed after it was stored.

    A trigger holds the reference to the customer instead of a foreign key constraint (see `Touch`).
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    source = models.CharField(_("source"), max_length=255)
    event_id = models.CharField(_("event id"), max_length=255)
    type = models.CharField(_("type"), max_length=120)
    occurred_at = models.DateTimeField(_("occurred at"))
    received_at = models.DateTimeField(_("received at"), default=now)
    # `event_of_customer` starts with this column.
    customer = models.ForeignKey(
        "scheduling.Customer",
        on_delete=models.PROTECT,
        related_name="events",
        verbose_name=_("customer"),
        db_index=False,
        db_constraint=False,
    )
    user_id = models.CharField(_("user id"), max_length=200)
    chat_id = models.CharField(_("chat id"), max_length=200, blank=True)
    data = models.JSONField(_("data"), default=dict)
    #: The trace that the event arrived with; otherwise the row's id is the trace.
    trace_id = models.UUIDField(_("trace id"), null=True, editable=False)

    class Meta:
        verbose_name = _("event")
        verbose_name_plural = _("events")
        constraints = [models.UniqueConstraint(fields=["source", "event_id"], name="event_once")]
        indexes = [
            # Read by planning (was the touch already cancelled?), by the page of a customer and by replays.
            models.Index(fields=["customer", "type", "occurred_at"], name="event_of_customer"),
            # Read where a condition names fields of a type's events.
            models.Index(fields=["type", "id"], name="event_of_type"),
            # Read by the search for a trace.
            models.Index(fields=["trace_id"], name="event_traced", condition=Q(trace_id__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.type} {self.source}#{self.event_id}"

    @property
    def trace(self) -> UUID:
        return self.trace_id or self.id
