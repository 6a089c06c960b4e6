"""Store the second factor of a user: the secret of an authenticator app, and recovery codes."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.models.encrypted import EncryptedJSONField


class TotpDevice(models.Model):
    """The authenticator app of a user. It protects the sign-in once it is confirmed."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="totp_device", editable=False
    )
    secret = EncryptedJSONField(editable=False)
    #: The time step of the last accepted code. A code of this step or an earlier one is refused.
    last_step = models.BigIntegerField(default=0, editable=False)
    created_at = models.DateTimeField(default=now, editable=False)
    confirmed_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        verbose_name = _("second factor")
        verbose_name_plural = _("second factors")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.user)


class RecoveryCode(models.Model):
    """A one-use code for a lost authenticator app: 80 random bits, of which only the SHA-256 is stored."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="recovery_codes", editable=False
    )
    digest = models.CharField(max_length=64, editable=False)
    used_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        verbose_name = _("recovery code")
        verbose_name_plural = _("recovery codes")
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["user", "digest"], name="recovery_code_once")]

    def __str__(self) -> str:
        return str(self.user)
