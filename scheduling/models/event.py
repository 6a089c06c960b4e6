"""Store events and their types, what receivers report about sent messages, and the vendors' ids of these messages."""

from __future__ import annotations

from uuid import UUID

from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

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


class ReceiptKind(models.TextChoices):
    DELIVERED = "delivered", pgettext_lazy("receipt", "Reached the device")
    READ = "read", pgettext_lazy("receipt", "Read")
    CLICKED = "clicked", pgettext_lazy("receipt", "Link opened")
    REPLIED = "replied", pgettext_lazy("receipt", "Replied")
    BOUNCED = "bounced", pgettext_lazy("receipt", "Bounced")
    COMPLAINED = "complained", pgettext_lazy("receipt", "Complained")


class DeliveryReceipt(models.Model):
    """The first report of one kind about a message. A repeat can only move `at` back.

    It belongs to the delivery key: to a touch and all touches that publish it again.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    delivery_key = models.UUIDField(_("delivery key"))
    kind = models.CharField(_("receipt"), max_length=10, choices=ReceiptKind)
    node = models.ForeignKey(
        "scheduling.Node", on_delete=models.CASCADE, related_name="receipts", verbose_name=_("node"), db_index=False
    )
    #: When it happened, by the reporting system.
    at = models.DateTimeField(_("at"))
    received_at = models.DateTimeField(_("received at"), default=now)
    detail = models.CharField(_("detail"), max_length=300, blank=True)

    class Meta:
        verbose_name = _("receipt")
        verbose_name_plural = _("receipts")
        constraints = [models.UniqueConstraint(fields=["delivery_key", "kind"], name="receipt_once")]
        indexes = [models.Index(fields=["node", "received_at"], name="receipt_of_node")]  # read by the page of a node

    def __str__(self) -> str:
        return f"{self.kind} {self.delivery_key}"


class VendorMessage(models.Model):
    """The vendor's id of a sent message, by which its receipts name it.

    Only channels whose vendor reports by its own id write it. It is kept for `AFTERTOUCH_VENDOR_IDS_DAYS`.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    channel = models.ForeignKey(
        "scheduling.ChannelConfig", on_delete=models.CASCADE, verbose_name=_("channel"), db_index=False
    )
    vendor_id = models.CharField(_("vendor's id"), max_length=120)
    delivery_key = models.UUIDField(_("delivery key"), db_index=True)  # read by erasures

    class Meta:
        verbose_name = _("vendor's id of a message")
        verbose_name_plural = _("vendors' ids of messages")
        constraints = [models.UniqueConstraint(fields=["channel", "vendor_id"], name="vendor_message_once")]

    def __str__(self) -> str:
        return self.vendor_id
