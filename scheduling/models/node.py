"""Store the service-node matrix (stage × trigger × delay × content), and the rules that operators edit.

The rules are delays, anti-harassment rules, the global hold-out and calendars.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any

from django.apps import apps
from django.db import models, transaction
from django.utils.timezone import get_default_timezone_name
from django.utils.translation import gettext_lazy as _
from simple_history.models import HistoricalRecords

from scheduling.errors import TICK, check_number, check_retry_delays, check_span, check_texts
from scheduling.models.encrypted import EncryptedJSONField, Sealed
from scheduling.models.touch import Priority
from scheduling.models.versioned import KEY, PERCENT, Bound, Checked, Versioned, lock_for_write
from scheduling.policy.profile import MAX_TAG


def digest_address(address: object) -> str:
    """Return a digest that identifies an address without revealing it."""
    return sha256(str(address).encode()).hexdigest()


def enable_targets(addresses: Iterable[str]) -> None:
    """Enable receivers whose rejection a person has dealt with."""
    if digests := [digest_address(each) for each in sorted(set(addresses))]:
        disabled = apps.get_model("scheduling", "DisabledTarget")._default_manager
        disabled.filter(target_digest__in=digests).delete()


class Addressed(models.Model):
    """A row that holds addresses.

    A changed address enables the old and the new receiver again: a person has dealt with the receiver's rejection.
    """

    class Meta:
        abstract = True

    @classmethod
    def from_db(cls, *args: Any, **kwargs: Any) -> Any:
        found: Any = super().from_db(*args, **kwargs)
        found._held = set() if found.get_deferred_fields() else found.stored_addresses()
        return found

    def save(self, *args: Any, **kwargs: Any) -> None:  # noqa: DJ012 (`from_db` comes first)
        before: set[str] = self.__dict__.get("_held", set())
        after = self.stored_addresses()
        with transaction.atomic():
            super().save(*args, **kwargs)
            enable_targets(before ^ after)
        self._held = after

    def stored_addresses(self) -> set[str]:
        """Return the addresses that touches of this row go to."""
        raise NotImplementedError


MAX_TIMEOUT = timedelta(seconds=20)  #: a batch of touches ends at 20 s, inside its lease of 45 s
MAX_LIMIT = 1_000_000
CHATS = Bound(check_texts, longest=200)
SPAN, SOME_SPAN = Bound(check_span), Bound(check_span, least=TICK)
COUNT = Bound(check_number, least=1, most=MAX_LIMIT)
POSITION = Bound(check_number, least=0, most=32767)


class Stage(Checked):
    """A part of the customer's journey: a row of the matrix."""

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[KEY])
    name = models.CharField(_("name"), max_length=100, blank=True)
    position = models.PositiveSmallIntegerField(_("position"), default=0, validators=[POSITION])
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)

    class Meta:
        verbose_name = _("stage")
        verbose_name_plural = _("stages")
        ordering = ["position", "key"]

    def __str__(self) -> str:
        return self.name or self.key


class Category(models.TextChoices):
    MARKETING = "marketing", _("Marketing (blocked by opt-out)")
    SERVICE = "service", _("Service")


class Template(Versioned):
    """The content of a message, with one text per locale."""

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[KEY])
    content_type = models.CharField(
        _("content type"), max_length=64, help_text=_("The same type is not sent twice within the dedupe window.")
    )
    category = models.CharField(_("category"), max_length=10, choices=Category, default=Category.MARKETING)
    #: Effective where `AFTERTOUCH_LINK_BASE_URL` is set, and not for robots of group chats.
    tracks_links = models.BooleanField(_("count clicks on links"), default=True)
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("template")
        verbose_name_plural = _("templates")
        ordering = ["key"]

    def __str__(self) -> str:
        return self.key

    @contextmanager
    def store_as_one_version(self) -> Iterator[None]:
        """Make the changes of this template and its texts one version. A new template keeps its first."""
        with _lock_template(self.pk) as before:
            yield
            after = before + 1
            Template.objects.filter(pk=self.pk, version__gt=after).update(version=after)


@contextmanager
def _lock_template(template_id: Any) -> Iterator[int]:
    """Lock a template before its texts, in a transaction. Yield its version, 0 if it is new."""
    with transaction.atomic():
        row = lock_for_write(Template.objects.filter(pk=template_id)).values_list("version").first()
        yield row[0] if row else 0


class TemplateText(Checked):
    template = models.ForeignKey(Template, on_delete=models.CASCADE, related_name="texts", verbose_name=_("template"))
    locale = models.CharField(_("locale"), max_length=20, default="zh-hans")
    subject = models.CharField(_("subject"), max_length=200, blank=True)
    body = models.TextField(_("body"))
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("text")
        verbose_name_plural = _("texts")
        constraints = [models.UniqueConstraint(fields=["template", "locale"], name="one_text_a_locale")]
        ordering = ["locale"]

    def __str__(self) -> str:
        return f"{self.template_id}/{self.locale}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the text. A new or changed one increments the template's version."""
        with _lock_template(self.template_id):
            stored = TemplateText.objects.filter(pk=self.pk).values_list("template", "locale", "subject", "body")
            if (self.template_id, self.locale, self.subject, self.body) not in stored:
                Template.objects.filter(pk=self.template_id).update(version=models.F("version") + 1)
            super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        """Delete the text, which increments the template's version."""
        with _lock_template(self.template_id):
            Template.objects.filter(pk=self.template_id).update(version=models.F("version") + 1)
            return super().delete(*args, **kwargs)


class ChannelConfig(Addressed, Versioned):
    """A kind from `settings.CHANNELS` with its settings."""

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[KEY])
    name = models.CharField(_("name"), max_length=100, blank=True, default="", db_default="")
    kind = models.CharField(_("kind"), max_length=40)
    #: The settings of the kind ("url", "secret" …).
    config = EncryptedJSONField(_("settings"), default=dict, blank=True)
    idempotent = models.BooleanField(
        _("idempotent"),
        default=False,
        help_text=_("A repeat with the same delivery key has no second effect, so an unknown outcome may be retried."),
    )
    timeout = models.DurationField(
        _("timeout"), default=timedelta(seconds=10), validators=[Bound(check_span, least=TICK, most=MAX_TIMEOUT)]
    )
    retry_delays = models.JSONField(
        _("retry delays in seconds"), default=list, blank=True, validators=[Bound(check_retry_delays)]
    )
    daily_limit = models.PositiveIntegerField(_("messages a day"), null=True, blank=True, validators=[COUNT])
    monthly_limit = models.PositiveIntegerField(_("messages a month"), null=True, blank=True, validators=[COUNT])
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords(excluded_fields=["config"])

    class Meta:
        verbose_name = _("channel")
        verbose_name_plural = _("channels")
        ordering = ["key"]

    def __str__(self) -> str:
        return self.name or self.key

    def stored_addresses(self) -> set[str]:
        if isinstance(self.config, Sealed) or not isinstance(self.config, dict):
            return set()
        return {str(self.config.get("url") or "")}


class DisabledTarget(models.Model):
    """A receiver that answered 410 Gone.

    Its deletion enables the receiver again: `scheduling.delivery.routing`.
    """

    channel = models.ForeignKey(ChannelConfig, on_delete=models.CASCADE, verbose_name=_("channel"))
    target_digest = models.CharField(_("target"), max_length=64, help_text=_("SHA-256 of the address"))
    chat_id = models.CharField(_("chat id"), max_length=200, blank=True)
    reason = models.CharField(_("reason"), max_length=200, blank=True)
    disabled_at = models.DateTimeField(_("disabled at"), auto_now_add=True)

    class Meta:
        verbose_name = _("disabled target")
        verbose_name_plural = _("disabled targets")
        constraints = [models.UniqueConstraint(fields=["channel", "target_digest"], name="disabled_once")]
        indexes = [
            models.Index(fields=["disabled_at"], name="disabled_since"),  # read by retention
            models.Index(fields=["target_digest"], name="disabled_address"),  # read where an address changes
        ]

    def __str__(self) -> str:
        return f"{self.channel_id} {self.target_digest[:12]}"


class OverCap(models.TextChoices):
    SUPPRESS = "suppress", _("Suppress")
    DEFER = "defer", _("Defer to the next eligible time")


class OnRepeat(models.TextChoices):
    EACH = "each", _("Each event counts")
    KEEP = "keep", _("Keep the one that waits")
    RESTART = "restart", _("Restart the wait")


class CapSwitch(models.TextChoices):
    APPLY = "apply", _("Apply")
    COUNT_ONLY = "count_only", _("Send anyway, but count it")
    IGNORE = "ignore", _("Ignore")


class Switch(models.TextChoices):
    APPLY = "apply", _("Apply")
    IGNORE = "ignore", _("Ignore")


class AtDay(models.TextChoices):
    ANY = "any", _("The first day that has this time left")
    NEXT = "next", _("The next day")
    WORKING = "working", _("The first working day that has this time left")
    NEXT_WORKING = "next_working", _("The next working day")


class Node(Versioned):
    """One cell of the matrix: a trigger, a delay, a content and guards."""

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[KEY])
    name = models.CharField(_("name"), max_length=100, blank=True, default="", db_default="")
    stage = models.ForeignKey(Stage, on_delete=models.PROTECT, related_name="nodes", verbose_name=_("stage"))
    trigger = models.CharField(_("trigger event"), max_length=120)
    #: Keys of the nodes whose touches it follows, if the trigger is an event of a touch (`policy.matrix`).
    from_nodes = models.JSONField(
        _("follows these nodes"), default=list, blank=True, validators=[Bound(check_texts, longest=64)]
    )
    delay = models.DurationField(_("delay"), default=timedelta(0), validators=[SPAN])
    dynamic = models.BooleanField(_("dynamic delay"), default=False)
    #: Overrides the delay rules: {"by_level": {level: seconds}, "default", "active_within", "active_factor"}.
    delay_rules = models.JSONField(_("own delay rules"), null=True, blank=True)
    template = models.ForeignKey(Template, on_delete=models.PROTECT, related_name="nodes", verbose_name=_("template"))
    channel = models.ForeignKey(
        ChannelConfig, on_delete=models.PROTECT, related_name="nodes", verbose_name=_("channel")
    )
    priority = models.SmallIntegerField(_("priority"), choices=Priority, default=Priority.NORMAL)
    enabled = models.BooleanField(_("enabled"), default=True)
    rollout_percent = models.FloatField(_("rollout, percent of communities"), default=100, validators=[PERCENT])
    rollout_communities = models.JSONField(
        _("rollout, always these communities"), default=list, blank=True, validators=[CHATS]
    )
    over_cap = models.CharField(_("over the cap"), max_length=10, choices=OverCap, default=OverCap.SUPPRESS)
    expires_after = models.DurationField(_("expires after"), default=timedelta(days=3), validators=[SOME_SPAN])
    canary_template = models.ForeignKey(
        Template,
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="canary_nodes",
        verbose_name=_("canary template"),
    )
    canary_percent = models.FloatField(_("canary, percent of communities"), default=0, validators=[PERCENT])
    canary_communities = models.JSONField(
        _("canary, always these communities"), default=list, blank=True, validators=[CHATS]
    )
    #: The plan of an automatic roll-out (`scheduling.policy.rollout.read_plan`); None: the default plan.
    canary_guard = models.JSONField(_("canary, plan of an automatic roll-out"), null=True, blank=True)
    cancel_on = models.JSONField(
        _("cancelled by these events"), default=list, blank=True, validators=[Bound(check_texts, longest=120)]
    )
    on_repeat = models.CharField(_("on repetition"), max_length=10, choices=OnRepeat, default=OnRepeat.EACH)
    goal_event = models.CharField(_("goal event"), max_length=120, blank=True)
    goal_within = models.DurationField(_("goal within"), null=True, blank=True, validators=[SOME_SPAN])
    holdout_percent = models.FloatField(_("hold-out, percent of customers"), default=0, validators=[PERCENT])
    guard_cap = models.CharField(_("cap"), max_length=10, choices=CapSwitch, default=CapSwitch.APPLY)
    guard_dedupe = models.CharField(_("same content"), max_length=10, choices=Switch, default=Switch.APPLY)
    guard_conversation = models.CharField(_("live conversation"), max_length=10, choices=Switch, default=Switch.APPLY)
    guard_quiet_hours = models.CharField(_("quiet hours"), max_length=10, choices=Switch, default=Switch.APPLY)
    guard_holdout = models.CharField(_("global hold-out"), max_length=10, choices=Switch, default=Switch.APPLY)
    #: Caps may count the touches of all nodes with a tag.
    tags = models.JSONField(_("tags"), default=list, blank=True, validators=[Bound(check_texts, longest=MAX_TAG)])
    #: In the form of `scheduling.policy.node_conditions`; None: no condition.
    when = models.JSONField(_("conditions"), null=True, blank=True)
    #: [{"key": key, "when": {…}, "template": key}]: the first whose condition holds replaces the template.
    variants = models.JSONField(_("content variants"), default=list, blank=True)
    at = models.TimeField(_("at this time"), null=True, blank=True)
    at_day = models.CharField(_("on this day"), max_length=12, choices=AtDay, default=AtDay.ANY)
    not_before = models.TimeField(_("not before"), null=True, blank=True)
    #: A list in the form of `scheduling.policy.send_times`; None: those of the default calendar; []: at any time.
    send_window = models.JSONField(_("send windows"), null=True, blank=True)
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("service node")
        verbose_name_plural = _("service nodes")
        ordering = ["stage__position", "trigger", "key"]

    def __str__(self) -> str:
        return self.name or self.key


class DelayRule(Versioned):
    """The dynamic delay: a base by customer level, shorter after recent activity. One row."""

    #: {level: seconds}
    by_level = models.JSONField(_("seconds by level"), default=dict, blank=True)
    default = models.DurationField(_("otherwise"), default=timedelta(hours=24), validators=[SPAN])
    active_within = models.DurationField(_("active within"), default=timedelta(hours=24), validators=[SPAN])
    active_factor = models.FloatField(
        _("factor when active"), default=0.6, validators=[Bound(check_number, least=0.01, most=10)]
    )
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("delay rule")
        verbose_name_plural = _("delay rules")
        constraints = [models.CheckConstraint(name="one_delay_rule", condition=models.Q(pk=1))]

    def __str__(self) -> str:
        return str(_("Dynamic delay"))


class HarassmentRule(Versioned):
    """A limit on messages to a customer or a community, or on those of a channel, a category or a tag among them."""

    class Kind(models.TextChoices):
        CAP = "cap", _("At most so many in a rolling window")
        DEDUPE = "dedupe", _("The same content type not again within a window")
        CONVERSATION = "conversation", _("Not into a new conversation")
        QUIET_HOURS = "quiet_hours", _("Not during quiet hours")

    class Subject(models.TextChoices):
        USER = "user", _("Customer")
        COMMUNITY = "community", _("Community")

    kind = models.CharField(_("kind"), max_length=20, choices=Kind)
    scope = models.CharField(_("counted for"), max_length=10, choices=Subject, default=Subject.USER)
    limit = models.PositiveIntegerField(_("limit"), null=True, blank=True, validators=[COUNT])
    #: {level: limit}, instead of `limit`.
    limits = models.JSONField(_("limits by level"), default=dict, blank=True)
    channel = models.CharField(_("only this channel"), max_length=64, default="", blank=True)
    category = models.CharField(_("only this category"), max_length=10, choices=Category, default="", blank=True)
    tag = models.CharField(_("only nodes with this tag"), max_length=64, default="", blank=True)
    window = models.DurationField(_("window"), null=True, blank=True, validators=[SOME_SPAN])
    quiet_from = models.TimeField(_("quiet from"), null=True, blank=True)
    quiet_to = models.TimeField(_("quiet to"), null=True, blank=True)
    #: Used if the customer has no time zone.
    timezone = models.CharField(_("time zone"), max_length=60, default=get_default_timezone_name)
    enabled = models.BooleanField(_("enabled"), default=True)
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("anti-harassment rule")
        verbose_name_plural = _("anti-harassment rules")
        ordering = ["id"]
        constraints = [
            models.CheckConstraint(
                name="cap_has_limit_and_window",
                condition=~models.Q(kind="cap") | models.Q(limit__isnull=False, window__isnull=False),
            ),
            models.CheckConstraint(
                name="dedupe_has_window", condition=~models.Q(kind="dedupe") | models.Q(window__isnull=False)
            ),
            models.CheckConstraint(
                name="quiet_hours_have_ends",
                condition=~models.Q(kind="quiet_hours") | models.Q(quiet_from__isnull=False, quiet_to__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} ({self.get_scope_display()})"


class Holdout(Versioned):
    """The customers that no node sends to, so that the effect of all touches can be measured. One row."""

    percent = models.FloatField(_("percent of customers"), default=0, validators=[PERCENT])
    #: Salt of the draw: another key draws other customers.
    key = models.CharField(_("key of the draw"), max_length=64, default="", blank=True)
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("global hold-out")
        verbose_name_plural = _("global hold-outs")
        constraints = [models.CheckConstraint(name="one_holdout", condition=models.Q(pk=1))]

    def __str__(self) -> str:
        return str(_("Global hold-out"))


class Calendar(Versioned):
    """Working days and holidays that send windows name.

    The first calendar is the default: for windows that name none, and with the windows of nodes without own ones.
    """

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[KEY])
    position = models.PositiveSmallIntegerField(_("position"), default=0, validators=[POSITION])
    #: Used if the customer has no time zone.
    timezone = models.CharField(_("time zone"), max_length=60, default=get_default_timezone_name)
    #: Its public holidays and the days worked instead apply; empty: every weekday is a working day.
    country = models.CharField(_("country of the holidays"), max_length=6, default="CN", blank=True)
    #: Days like "2026-10-01" that differ from the country's.
    closed = models.JSONField(_("own days off"), default=list, blank=True)
    open = models.JSONField(_("own working days"), default=list, blank=True)
    #: A list in the form of `scheduling.policy.send_times`.
    send_window = models.JSONField(_("default send windows"), default=list, blank=True)
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("calendar")
        verbose_name_plural = _("calendars")
        ordering = ["position", "key"]

    def __str__(self) -> str:
        return self.key
