"""Store failed logins."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _


class FailedLogin(models.Model):
    """Failed logins of a name from an address since the last success there.

    Only `scheduling.web.login_lockout` writes them. The row with the address `*` counts the name over all addresses.
    """

    #: A keyed digest of the name: users sometimes type their password there.
    digest = models.CharField(max_length=64, editable=False)
    address = models.CharField(_("address"), max_length=45, editable=False)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, editable=False, on_delete=models.CASCADE, verbose_name=_("user")
    )
    tries = models.PositiveIntegerField(_("failed attempts"), editable=False)
    last_at = models.DateTimeField(_("last attempt"), editable=False, db_index=True)
    succeeded_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        verbose_name = _("failed login")
        verbose_name_plural = _("failed logins")
        ordering = ["-last_at"]
        constraints = [models.UniqueConstraint(fields=["digest", "address"], name="failed_login_once")]

    def __str__(self) -> str:
        return f"{self.user or '?'} · {self.address}"
