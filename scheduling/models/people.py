"""Store how people get in: invitations, second factors, identities of a provider, and open sign-ins."""

from __future__ import annotations

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.models.encrypted import EncryptedJSONField


class Role(models.TextChoices):
    """What a user may do. Each but the last is a shipped group; an administrator is a superuser."""

    VIEWER = "viewer", _("Viewer: sees everything, changes nothing")
    OPERATOR = "operator", _("Operator: settles failed tasks, pauses, cancels")
    EDITOR = "editor", _("Editor: also edits the matrix, rules and templates")
    COMMAND_EDITOR = "command editor", _("Command editor: edits commands on execution nodes")
    ADMINISTRATOR = "administrator", _("Administrator: everything, also users and keys")


class Invitation(models.Model):
    """An invitation with a role. Its link has 256 random bits, of which only the SHA-256 is stored."""

    email = models.EmailField(_("e-mail address"), blank=True)
    name = models.CharField(_("name"), max_length=150, blank=True)
    role = models.CharField(_("role"), max_length=20, choices=Role.choices)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    invited_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, editable=False, on_delete=models.SET_NULL, related_name="+",
        verbose_name=_("invited by"),
    )  # fmt: skip
    created_at = models.DateTimeField(_("invited at"), default=now, editable=False)
    expires_at = models.DateTimeField(_("valid until"), editable=False)
    accepted_at = models.DateTimeField(_("accepted at"), null=True, editable=False)
    withdrawn_at = models.DateTimeField(_("withdrawn at"), null=True, editable=False)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, editable=False, on_delete=models.SET_NULL, related_name="+",
        verbose_name=_("user"),
    )  # fmt: skip

    class Meta:
        verbose_name = _("invitation")
        verbose_name_plural = _("invitations")
        ordering = ["-created_at"]
        default_permissions = ()

    def __str__(self) -> str:
        return self.name or self.email


class TotpDevice(models.Model):
    """The authenticator app of a user. It protects the sign-in once it is confirmed."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="totp_device", editable=False
    )
    secret = EncryptedJSONField(editable=False)
    #: The time step of the last accepted code. A code of this step or an earlier one is refused.
    last_step = models.BigIntegerField(default=0, editable=False)
    #: The SHA-256 of each recovery code that is left: 80 random bits, for a lost app, used once.
    recovery_digests = ArrayField(models.CharField(max_length=64), default=list, editable=False)
    created_at = models.DateTimeField(default=now, editable=False)
    confirmed_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        verbose_name = _("second factor")
        verbose_name_plural = _("second factors")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.user)


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
