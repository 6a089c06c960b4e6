"""Store customers with their profiles, communities and complaints."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex
from django.db import models
from django.db.models import F, Q, Value
from django.db.models.fields.json import KeyTextTransform
from django.utils.crypto import salted_hmac
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id, reveal_odd_characters
from scheduling.models.batch_job import BatchJob
from scheduling.models.encrypted import EncryptedJSONField, Sealed
from scheduling.models.node import Addressed
from scheduling.policy.profile import MAX_TAG, NO_PROFILE, Profile, read_profile
from scheduling.policy.specs import CustomerSpec

#: Keys of addresses whose owner a vendor's callback names.
REPLYING = ("wecom_app", "wechat_kf", "wechat_official")


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
    #: The person's latest own act against marketing; null while only a client has opted the customer out. It is lifted
    #: by a later consent, never by an update.
    objected_at = models.DateTimeField(_("objected at"), null=True, blank=True)
    #: The latest consent to marketing: `given_at`, an instant, and `source`; empty for none.
    consent = models.JSONField(_("consent"), default=dict, db_default=Value({}, models.JSONField()), blank=True)
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
            # Read by callbacks of vendors. Only customers with such an address have an entry.
            *(
                models.Index(
                    KeyTextTransform(each, "addresses"), name=f"customer_{each}", condition=Q(addresses__has_key=each)
                )
                for each in REPLYING
            ),
        ]

    def __str__(self) -> str:
        return self.name or reveal_odd_characters(self.user_id)

    def stored_addresses(self) -> set[str]:
        return {str(address) for address in self.addresses.values()} if isinstance(self.addresses, dict) else set()

    def spec(self, profile: Profile | None = None) -> CustomerSpec:
        """Return the customer as the policy modules use it. Without `profile` one more query reads it."""
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
            profile=self.read_profile() if profile is None else profile,
        )

    def read_profile(self) -> Profile:
        """Return attributes and tags, with one query."""
        stored = CustomerProfile.objects.filter(pk=self.pk).first() if self.pk else None
        return read_profile(stored.attributes, stored.tags) if stored else NO_PROFILE


class CustomerProfile(models.Model):
    """What clients know about a customer. Written while the customer's row is locked.

    It has a row of its own: activity updates the customer's row often, and each update would copy these values and
    write an entry for each tag and each part of the name. A customer without attributes, tags and name may have none.
    """

    customer = models.OneToOneField(
        Customer, primary_key=True, on_delete=models.CASCADE, related_name="profile", verbose_name=_("customer")
    )
    #: In the stored form of `policy.profile`.
    attributes = models.JSONField(_("attributes"), default=dict, blank=True)
    tags = ArrayField(models.CharField(max_length=MAX_TAG), verbose_name=_("tags"), default=list, blank=True)
    #: A copy of the customer's name for the search, kept by a trigger.
    name = models.CharField(_("name"), max_length=200, blank=True, editable=False)

    class Meta:
        verbose_name = _("customer profile")
        verbose_name_plural = _("customer profiles")
        indexes = [GinIndex(fields=["tags"], name="customer_tags")]

    def __str__(self) -> str:
        return self.name


class CustomerChange(models.Model):
    """One change of a customer by a client or an operator. Append-only; the erasure deletes it."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    customer = models.ForeignKey(
        Customer, on_delete=models.CASCADE, related_name="changes", verbose_name=_("customer"), db_index=False
    )
    at = models.DateTimeField(_("at"), default=now)
    actor = models.CharField(_("who"), max_length=160)
    created = models.BooleanField(_("created"), default=False)
    #: The changed fields only; of `attributes` the changed ones, null for none.
    before = models.JSONField(_("before"), default=dict)
    after = models.JSONField(_("after"), default=dict)

    class Meta:
        verbose_name = _("change of a customer")
        verbose_name_plural = _("changes of customers")
        indexes = [models.Index(fields=["customer", "-id"], name="customer_history")]

    def __str__(self) -> str:
        return f"{self.customer_id} {self.at:%Y-%m-%d %H:%M}"


def digest_user_id(user_id: str) -> str:
    """Return the keyed digest that the log of erasures keeps."""
    return salted_hmac("scheduling.customers.erasure", user_id, algorithm="sha256").hexdigest()


class CustomerErasure(models.Model):
    """The log of an erasure. It holds no personal data: a keyed digest proves later that an id was erased.

    running → done
    """

    class State(models.TextChoices):
        RUNNING = "running", _("Under way")
        DONE = "done", _("Done")

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    digest = models.CharField(_("digest of the user id"), max_length=64, db_index=True)
    #: Needed until the erasure has ended, then empty.
    user_id = models.CharField(_("user id"), max_length=200, blank=True)
    #: Lists `addresses` and `names`, present and former ones. Needed until the erasure has ended, then empty.
    identifiers = models.JSONField(default=dict)
    #: The anonymous row that statistics keep.
    customer = models.ForeignKey(
        Customer, null=True, on_delete=models.SET_NULL, related_name="+", verbose_name=_("customer")
    )
    actor = models.CharField(_("who"), max_length=160)
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.RUNNING)
    requested_at = models.DateTimeField(_("requested at"), default=now)
    ended_at = models.DateTimeField(_("ended at"), null=True)
    #: Changed or deleted rows by table.
    counts = models.JSONField(_("rows"), default=dict)

    class Meta:
        verbose_name = _("erasure")
        verbose_name_plural = _("erasures")
        ordering = ["-id"]
        default_permissions = ("view",)
        indexes = [models.Index(fields=["requested_at"], name="erasure_running", condition=Q(state="running"))]

    def __str__(self) -> str:
        return f"…{str(self.pk)[-8:]}"


class CustomerImport(BatchJob):
    """An import of customers from a CSV file.

    uploading → checking → ready → running → done
    running → stopped; uploading, checking, ready → discarded; uploading, checking, running → failed
    """

    class State(models.TextChoices):
        UPLOADING = "uploading", _("Incomplete")
        CHECKING = "checking", _("Being checked")
        READY = "ready", _("Waits for your decision")
        RUNNING = "running", _("Under way")
        DONE = "done", _("Done")
        STOPPED = "stopped", _("Stopped")  #: finished batches stay done
        DISCARDED = "discarded", _("Discarded")
        FAILED = "failed", _("Failed")

    file_name = models.CharField(_("file"), max_length=200)
    size = models.BigIntegerField(_("size in bytes"))
    #: Bytes that have arrived.
    stored = models.BigIntegerField(default=0)
    #: Of the text; empty until it is detected.
    encoding = models.CharField(_("encoding"), max_length=10, blank=True)
    empty_clears = models.BooleanField(_("empty cells clear values"), default=False)
    created_at = models.DateTimeField(_("started at"), default=now)
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.UPLOADING)
    #: The cells of the header.
    header = models.JSONField(default=list)
    delimiter = models.CharField(max_length=1, default=",")
    #: Of the next record: its offset in bytes and its line.
    position = models.BigIntegerField(default=0)
    line = models.PositiveIntegerField(default=1)
    #: Numbers by outcome: of the check, and of the import once it has started.
    counts = models.JSONField(default=dict)
    #: Why the file cannot be read: [[column, message]].
    problems = models.JSONField(default=list)

    class Meta:
        verbose_name = _("customer import")
        verbose_name_plural = _("customer imports")
        ordering = ["-id"]
        default_permissions = ("view", "add")

    def __str__(self) -> str:
        return self.file_name

    @property
    def place(self) -> int:
        return self.line


class CustomerImportPart(models.Model):
    """A part of an uploaded file, until the import has ended."""

    upload = models.ForeignKey(CustomerImport, on_delete=models.CASCADE, related_name="parts", db_index=False)
    #: Of the first byte.
    start = models.BigIntegerField()
    content = models.BinaryField()

    class Meta:
        default_permissions = ()  # no page shows these rows
        constraints = [models.UniqueConstraint(fields=["upload", "start"], name="import_part")]

    def __str__(self) -> str:
        return f"{self.upload_id} {self.start}"


class RefusedLines(models.Model):
    """What one batch of an import could not do. It holds no values of the file and no personal data."""

    upload = models.ForeignKey(CustomerImport, on_delete=models.CASCADE, related_name="refused", db_index=False)
    #: [[line, column, message]]
    entries = models.JSONField()

    class Meta:
        default_permissions = ()  # no page shows these rows
        indexes = [models.Index(fields=["upload", "id"], name="import_refused")]

    def __str__(self) -> str:
        return str(self.upload_id)


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
    # No constraint: the key of a partitioned table is not unique by itself. Retention empties it.
    touch = models.ForeignKey(
        "scheduling.Touch",
        null=True,
        on_delete=models.SET_NULL,
        related_name="complaints",
        verbose_name=_("touch"),
        db_constraint=False,
    )
    complained_at = models.DateTimeField(_("complained at"))

    class Meta:
        verbose_name = _("complaint")
        verbose_name_plural = _("complaints")

    def __str__(self) -> str:
        return str(self.customer)
