from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from rpa_tasks.models.platform import Shop


class TakeOverEnd(models.TextChoices):
    ENDED = "ended", _("Ended by the operator")
    CONTINUED = "continued", _("Logged in, the jobs continue")
    IDLE = "idle", _("No input for too long")
    DISCONNECTED = "disconnected", _("The operator's connection was lost")
    RUN_ENDED = "run_ended", _("The run ended")
    NO_BROWSER = "no_browser", _("No browser was available")
    BROWSER_LOST = "browser_lost", _("The browser ended")
    NODE_STOPPING = "node_stopping", _("The node was stopping")
    NODE_LOST = "node_lost", _("The node did not answer")


class TakeOver(models.Model):
    """One operator's control of a shop's browser, and its audit record. What is typed is never stored.

    Its primary key fences the input. Without a job it holds the lane of the shop; with one it shares the run's browser.
    """

    shop = models.ForeignKey(Shop, on_delete=models.PROTECT, related_name="take_overs", verbose_name=_("shop"))
    #: The run whose browser it shares; empty: it holds the shop.
    task_id = models.UUIDField(_("shared run"), null=True)
    #: Of the lane while it lasts; the record of the browser has it too.
    lease_no = models.IntegerField(_("lease number"))
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, related_name="+", verbose_name=_("user")
    )
    username = models.CharField(_("taken over by"), max_length=150)
    address = models.GenericIPAddressField(_("address"), null=True)
    node = models.CharField(_("node"), max_length=100)
    #: Encrypts its messages in Redis; deleted at its end.
    key = models.BinaryField(null=True)
    started_at = models.DateTimeField(_("started at"), default=now)
    lease_until = models.DateTimeField()
    #: The end that the operator asked for; the node carries it out.
    wanted_end = models.CharField(max_length=15, choices=TakeOverEnd, blank=True)
    ended_at = models.DateTimeField(_("ended at"), null=True)
    end = models.CharField(_("why it ended"), max_length=15, choices=TakeOverEnd, blank=True)

    class Meta:
        verbose_name = _("take-over")
        verbose_name_plural = _("take-overs")
        ordering = ["-pk"]
        constraints = [models.UniqueConstraint(fields=["shop"], name="rpa_one_takeover", condition=Q(ended_at=None))]

    def __str__(self) -> str:
        return f"{self.shop} · {self.username}"
