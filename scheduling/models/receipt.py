"""Store what receivers report about sent messages, and the vendors' ids of these messages."""

from __future__ import annotations

from django.db import models
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from scheduling.ids import new_id


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
