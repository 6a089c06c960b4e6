"""Store API keys with their scopes, and pauses."""

from __future__ import annotations

from collections.abc import Iterable

from django.conf import settings
from django.db import models
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _


class Scope(models.TextChoices):
    EVENTS = "events", _("Events")
    TOUCHES = "touches", _("Touches")
    CUSTOMERS = "customers", _("Customers")
    SESSIONS = "sessions", _("Sessions")
    RPA_PUBLISH = "rpa.publish", _("RPA: publish jobs")
    RPA_READ = "rpa.read", _("RPA: read jobs, payloads, evidence and shops")
    RPA_OPERATE = "rpa.operate", _("RPA: cancel jobs; pause, resume and log in shops")
    RPA = "rpa", _("RPA: all three")
    FAILED_TASKS = "failed-tasks", _("Failed tasks")
    METRICS = "metrics", _("Metrics: read the wanted numbers of workers, nodes and watchers")


#: Scopes that a scope includes. A key keeps the scope that it was created with.
INCLUDED = {Scope.RPA.value: frozenset({Scope.RPA_PUBLISH.value, Scope.RPA_READ.value, Scope.RPA_OPERATE.value})}


def expand_scopes(scopes: Iterable[str]) -> frozenset[str]:
    """Return the scopes with those that they include."""
    stored = frozenset(scopes)
    return stored.union(*(INCLUDED.get(scope, frozenset()) for scope in stored))


class ApiKey(models.Model):
    """A machine's credential: 256 random bits, of which only the SHA-256 is stored."""

    name = models.CharField(_("name"), max_length=100, unique=True)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    #: The first characters, which identify a key for people.
    prefix = models.CharField(_("prefix"), max_length=12, editable=False)
    scopes = models.JSONField(_("scopes"), default=list)
    rate_per_minute = models.PositiveIntegerField(_("requests per minute"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)
    expires_at = models.DateTimeField(_("expires at"), null=True, blank=True)
    revoked_at = models.DateTimeField(_("revoked at"), null=True, blank=True)

    class Meta:
        verbose_name = _("API key")
        verbose_name_plural = _("API keys")
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Pause(models.Model):
    """Pauses the due touches of its scope while it exists. Its deletion spreads them over the next minutes."""

    scope = models.CharField(_("scope"), max_length=120, unique=True)  #: "all", "channel:<key>", "node:<key>"
    reason = models.CharField(_("reason"), max_length=200, blank=True)
    paused_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, verbose_name=_("paused by")
    )
    paused_at = models.DateTimeField(_("paused at"), default=now, editable=False)

    class Meta:
        verbose_name = _("pause")
        verbose_name_plural = _("pauses")

    def __str__(self) -> str:
        return self.scope
