"""Store the receivers of alerts and the alerts sent to them."""

from __future__ import annotations

from datetime import timedelta

from django.core.validators import MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _


class AlertReceiver(models.Model):
    """A receiver of alerts, with its channel and its limits."""

    name = models.CharField(_("name"), max_length=100, unique=True)
    channel = models.ForeignKey(
        "scheduling.ChannelConfig", on_delete=models.PROTECT, related_name="+", verbose_name=_("channel")
    )
    community = models.ForeignKey(
        "scheduling.Community", null=True, blank=True, on_delete=models.PROTECT, related_name="+",
        verbose_name=_("community"),
    )  # fmt: skip
    address = models.CharField(_("mail address"), max_length=254, blank=True)
    #: Limits by the key of a condition. A condition without a limit sends no alert.
    limits = models.JSONField(_("notified alerts"), default=dict, blank=True)
    holds_for = models.DurationField(
        _("notify after"), default=timedelta(minutes=1), validators=[MinValueValidator(timedelta(0))]
    )
    remind_every = models.DurationField(_("repeat every"), null=True, blank=True, default=timedelta(hours=1))
    enabled = models.BooleanField(_("enabled"), default=True)
    #: Fence of the evaluation pass that holds this row until `watched_until`.
    lease_no = models.IntegerField(default=0, editable=False)
    watched_until = models.DateTimeField(null=True, editable=False)
    #: Consecutive failed notifications, and the time of the next try.
    tries = models.PositiveIntegerField(_("tries"), default=0, editable=False)
    retry_at = models.DateTimeField(_("tried again at"), null=True, editable=False)
    problem = models.CharField(_("problem"), max_length=500, blank=True, editable=False)
    notified_at = models.DateTimeField(_("last notified at"), null=True, editable=False)

    class Meta:
        verbose_name = _("alert receiver")
        verbose_name_plural = _("alert receivers")
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Alert(models.Model):
    """A condition that holds, as last sent to one receiver. Deleted after the receiver knows that it ended."""

    receiver = models.ForeignKey(AlertReceiver, on_delete=models.CASCADE, related_name="alerts")
    condition = models.CharField(_("condition"), max_length=40)
    subject = models.CharField(_("about"), max_length=200, blank=True)
    since = models.DateTimeField(_("since"))
    value = models.FloatField(_("value"))
    first_value = models.FloatField(_("value at the start"))
    #: A notification was under way. `notified_at` shows whether it arrived.
    tried = models.BooleanField(default=False)
    notified_at = models.DateTimeField(_("notified at"), null=True)
    last_message_at = models.DateTimeField(_("last reminder at"), null=True)
    absent_since = models.DateTimeField(_("resolved at"), null=True)

    class Meta:
        verbose_name = _("alert")
        verbose_name_plural = _("alerts")
        ordering = ["since", "id"]
        constraints = [
            models.UniqueConstraint(
                fields=["receiver", "condition", "subject"], name="one_alert_a_receiver_and_subject"
            )
        ]

    def __str__(self) -> str:
        return f"{self.condition} {self.subject}".strip()
