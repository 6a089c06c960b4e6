"""Store access and its use: API keys with their scopes, pauses, failed logins, the audit log."""

from __future__ import annotations

import hashlib

from django.conf import settings
from django.db import models
from django.db.models.functions import Now
from django.utils.functional import cached_property
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id


class Scope(models.TextChoices):
    EVENTS = "events", _("Events")
    TOUCHES = "touches", _("Touches")
    CUSTOMERS = "customers", _("Customers")
    CUSTOMERS_ERASE = "customers.erase", _("Customers: export all data of one, and erase one")
    RECEIPTS = "receipts", _("Receipts of sent messages")
    SESSIONS = "sessions", _("Sessions")
    RPA_PUBLISH = "rpa.publish", _("RPA: publish jobs")
    RPA_READ = "rpa.read", _("RPA: read jobs, payloads, evidence and shops")
    RPA_OPERATE = "rpa.operate", _("RPA: cancel jobs; pause, resume and log in shops")
    RPA_CONFIGURE = "rpa.configure", _("RPA: set proxies and browsers of shops")
    RPA_COMMANDS = "rpa.commands", _("RPA: define commands of flows")
    RPA = "rpa", _("RPA: publish, read and operate")
    FAILED_TASKS = "failed-tasks", _("Failed tasks")
    FAILED_TASKS_EDIT = "failed-tasks.edit", _("Failed tasks: change what a retry publishes")
    WEBHOOKS = "webhooks", _("Webhooks: read, edit and replay outgoing ones")
    CONFIG_READ = "config.read", _("Configuration: read it, without secrets")
    CONFIG_WRITE = "config.write", _("Configuration: publish it")
    METRICS = "metrics", _("Metrics: read the wanted numbers of workers, nodes and watchers")


#: Scopes that a scope includes. A key keeps the scope that it was created with.
INCLUDED = {Scope.RPA.value: frozenset({Scope.RPA_PUBLISH.value, Scope.RPA_READ.value, Scope.RPA_OPERATE.value})}


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

    @cached_property
    def granted_scopes(self) -> frozenset[str]:
        """The scopes with those that they include."""
        stored = frozenset(self.scopes)
        return stored.union(*(INCLUDED.get(scope, frozenset()) for scope in stored))

    def is_valid(self) -> bool:
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now())


def digest_api_key(key: str) -> str:
    """Return the SHA-256 digest of a key.

    256 random bits need no slow hash. A slow one would cost more than storing the event.
    """
    return hashlib.sha256(key.encode()).hexdigest()


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


class AuditEntry(models.Model):
    """An action of a user, an API client or the system. `scheduling.audit` inserts them.

    A trigger refuses updates, and deletions within a year. Entries refer to no other row, so that nothing changes them.
    """

    class Action(models.TextChoices):
        ADDED = "added", _("Added")
        CHANGED = "changed", _("Changed")
        DELETED = "deleted", _("Deleted")
        ACTED = "acted", _("Acted")
        LOGGED_IN = "logged_in", _("Signed in")
        LOGGED_OUT = "logged_out", _("Signed out")
        LOGIN_FAILED = "login_failed", _("Failed sign-in")
        PAUSED = "paused", _("Paused")
        RESUMED = "resumed", _("Resumed")
        CANCELLED = "cancelled", _("Cancelled")
        PUBLISHED = "published", _("Published")
        DISCARDED = "discarded", _("Discarded")
        RETRIED = "retried", _("Retried")
        RESOLVED = "resolved", _("Resolved")
        IGNORED = "ignored", _("Ignored")
        ARCHIVED = "archived", _("Archived")
        STARTED = "started", _("Started")
        ENDED = "ended", _("Ended")
        EXPORTED = "exported", _("Exported")
        ERASED = "erased", _("Erased")
        UNDONE = "undone", _("Undone")

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    at = models.DateTimeField(_("at"), db_default=Now(), editable=False)
    #: The name of the user, `api:<name of the key>`, or empty for the system and the configuration file.
    actor = models.CharField(_("who"), max_length=150, blank=True)
    address = models.CharField(_("address"), max_length=45, blank=True)
    action = models.CharField(_("action"), max_length=20, choices=Action)
    #: The label of the model in lower case, `scheduling.node`, or a word like `scheduling.scope`.
    kind = models.CharField(_("kind"), max_length=60)
    object_id = models.CharField(max_length=100)
    label = models.CharField(_("object"), max_length=200, blank=True)
    reason = models.CharField(_("reason"), max_length=500, blank=True)
    #: `[field, before, after]` each.
    changes = models.JSONField(_("changes"), default=list)

    class Meta:
        verbose_name = _("audit entry")
        verbose_name_plural = _("audit log")
        ordering = ["-id"]
        default_permissions = ("view",)
        indexes = [
            models.Index(fields=["kind", "object_id", "id"], name="audit_object"),
            models.Index(fields=["actor", "id"], name="audit_actor"),
        ]

    def __str__(self) -> str:
        return f"{self.actor or '–'} · {self.get_action_display()} · {self.label or self.kind}"
