"""Store the receiver of alerts and the alerts that are open."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class AlertReceiver(models.Model):
    """Where alerts are sent. There is at most one row."""

    channel = models.ForeignKey(
        "scheduling.ChannelConfig", on_delete=models.PROTECT, related_name="+", verbose_name=_("channel")
    )
    community = models.ForeignKey(
        "scheduling.Community", null=True, blank=True, on_delete=models.PROTECT, related_name="+",
        verbose_name=_("community"),
    )  # fmt: skip
    address = models.CharField(_("mail address"), max_length=254, blank=True)
    enabled = models.BooleanField(_("enabled"), default=True)
    #: Why the last message failed; "" after a delivered one.
    problem = models.CharField(_("problem"), max_length=500, blank=True, editable=False)
    notified_at = models.DateTimeField(_("last notified at"), null=True, editable=False)

    class Meta:
        verbose_name = _("alert receiver")
        verbose_name_plural = _("alert receivers")

    def __str__(self) -> str:
        return str(self.channel)


class Alert(models.Model):
    """A condition that holds for a subject. Deleted after the message about its end."""

    condition = models.CharField(_("condition"), max_length=40)
    subject = models.CharField(_("about"), max_length=200, blank=True)
    since = models.DateTimeField(_("since"))
    value = models.FloatField(_("value"))
    ended_at = models.DateTimeField(_("resolved at"), null=True)
    #: A message was under way, so the receiver may know of the alert.
    tried = models.BooleanField(default=False)
    notified_at = models.DateTimeField(_("notified at"), null=True)
    #: When the next message is due: about the start, a reminder or the end.
    message_at = models.DateTimeField()

    class Meta:
        verbose_name = _("alert")
        verbose_name_plural = _("alerts")
        ordering = ["since", "id"]
        constraints = [models.UniqueConstraint(fields=["condition", "subject"], name="one_alert_a_subject")]

    def __str__(self) -> str:
        return f"{self.condition} {self.subject}".strip()
