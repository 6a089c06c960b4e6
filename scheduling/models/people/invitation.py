"""Store invitations of colleagues."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _


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
