"""Store open sign-ins, and identities that a provider knows users by."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _


class SignIn(models.Model):
    """An open session of a user. It is deleted with its session."""

    #: The SHA-256 of the session key. The key itself would let a reader of this table take over the session.
    digest = models.CharField(max_length=64, unique=True, editable=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="sign_ins")
    signed_in_at = models.DateTimeField(_("signed in at"), default=now, editable=False)
    address = models.CharField(_("address"), max_length=45, editable=False)
    browser = models.CharField(_("browser"), max_length=300, editable=False)

    class Meta:
        verbose_name = _("sign-in")
        verbose_name_plural = _("sign-ins")
        ordering = ["-signed_in_at", "-pk"]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.user} · {self.address}"


class IdentityLink(models.Model):
    """The subject by which an OpenID provider names a user. The provider never reuses it."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="identity_links")
    issuer = models.CharField(_("issuer"), max_length=255)
    subject = models.CharField(_("subject at the provider"), max_length=255)
    linked_at = models.DateTimeField(_("linked at"), default=now, editable=False)

    class Meta:
        verbose_name = _("identity of the provider")
        verbose_name_plural = _("identities of the provider")
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["issuer", "subject"], name="identity_once")]

    def __str__(self) -> str:
        return self.subject
