"""Store customers, communities and complaints."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.models.encrypted import EncryptedJSONField, Sealed
from scheduling.models.node import Addressed
from scheduling.policy.specs import CustomerSpec


class Customer(Addressed):
    """A person that touches are for. Its row lock makes the guards atomic."""

    user_id = models.CharField(_("user id"), max_length=200, unique=True)
    name = models.CharField(_("name"), max_length=200, blank=True)
    level = models.CharField(_("level"), max_length=40, blank=True)
    locale = models.CharField(_("locale"), max_length=20, blank=True)
    timezone = models.CharField(_("time zone"), max_length=60, blank=True)
    addresses = models.JSONField(_("addresses"), default=dict, blank=True)
    #: No marketing content; service content is still sent.
    opted_out = models.BooleanField(_("opted out of marketing"), default=False)
    opted_out_at = models.DateTimeField(_("opted out at"), null=True, blank=True)
    last_active_at = models.DateTimeField(_("last active at"), null=True, blank=True)
    #: Start of the current conversation. A touch planned by an earlier event is not sent.
    conversation_at = models.DateTimeField(_("conversation at"), null=True, blank=True)
    #: The `last_active_at` for which `customer.inactive` was raised: once per inactivity.
    inactive_since = models.DateTimeField(_("inactive since"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)

    class Meta:
        verbose_name = _("customer")
        verbose_name_plural = _("customers")
        indexes = [
            # Read by the inactivity scan.
            models.Index(
                fields=["last_active_at"],
                name="customer_present",
                condition=Q(last_active_at__isnull=False)
                & (Q(inactive_since__isnull=True) | ~Q(inactive_since=F("last_active_at"))),
            ),
            # Read by automatic roll-outs: recent opt-outs.
            models.Index(fields=["opted_out_at"], name="customer_opted_out", condition=Q(opted_out=True)),
        ]

    def __str__(self) -> str:
        return self.name or self.user_id

    def stored_addresses(self) -> set[str]:
        return {str(address) for address in self.addresses.values()} if isinstance(self.addresses, dict) else set()

    def spec(self) -> CustomerSpec:
        """Return the customer as the policy modules use it."""
        return CustomerSpec(
            id=self.pk,
            user_id=self.user_id,
            name=self.name,
            level=self.level,
            locale=self.locale,
            timezone=self.timezone,
            opted_out=self.opted_out,
            last_active_at=self.last_active_at,
            conversation_at=self.conversation_at,
            addresses=self.addresses,
        )


class Community(Addressed):
    """A group chat or conversation, and the targets of its messages."""

    chat_id = models.CharField(_("chat id"), max_length=200, unique=True)
    name = models.CharField(_("name"), max_length=200, blank=True)
    #: By channel key or kind: {"wecom": {"url": …, "secret": …}}.
    targets = EncryptedJSONField(_("targets"), default=dict, blank=True)
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)

    class Meta:
        verbose_name = _("community")
        verbose_name_plural = _("communities")
        ordering = ["chat_id"]

    def __str__(self) -> str:
        return self.name or self.chat_id

    def stored_addresses(self) -> set[str]:
        if isinstance(self.targets, Sealed) or not isinstance(self.targets, dict):
            return set()
        targets = [each for each in self.targets.values() if isinstance(each, dict)]
        return {str(each.get("url") or each.get("address") or "") for each in targets}


class Complaint(models.Model):
    """A complaint and its most likely touch: the latest one delivered to the customer before it."""

    event = models.OneToOneField("scheduling.Event", on_delete=models.CASCADE, verbose_name=_("event"))
    customer = models.ForeignKey(Customer, on_delete=models.CASCADE, verbose_name=_("customer"))
    touch = models.ForeignKey(
        "scheduling.Touch", null=True, on_delete=models.SET_NULL, related_name="complaints", verbose_name=_("touch")
    )
    complained_at = models.DateTimeField(_("complained at"))

    class Meta:
        verbose_name = _("complaint")
        verbose_name_plural = _("complaints")

    def __str__(self) -> str:
        return f"{self.customer} {self.complained_at:%Y-%m-%d %H:%M}"
