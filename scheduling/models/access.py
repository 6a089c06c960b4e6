"""Store access and its use: API keys with their scopes, how people sign in, pauses, the audit log."""

from __future__ import annotations

import hashlib

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now
from django.utils.functional import cached_property
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id
from scheduling.models.encrypted import EncryptedJSONField


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
