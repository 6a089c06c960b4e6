"""Store the rules that operators edit: delays, anti-harassment rules and calendars."""

from __future__ import annotations

from datetime import timedelta

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils.timezone import get_default_timezone_name
from django.utils.translation import gettext_lazy as _
from simple_history.models import HistoricalRecords

from scheduling.models.node import Category, key_validator, percent_validators
from scheduling.models.versioned import Versioned


class DelayRule(Versioned):
    """The dynamic delay: a base by customer level, shorter after recent activity. One row."""

    #: {level: seconds}
    by_level = models.JSONField(_("seconds by level"), default=dict, blank=True)
    default = models.DurationField(_("otherwise"), default=timedelta(hours=24))
    active_within = models.DurationField(_("active within"), default=timedelta(hours=24))
    active_factor = models.FloatField(
        _("factor when active"), default=0.6, validators=[MinValueValidator(0.01), MaxValueValidator(10)]
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
    limit = models.PositiveIntegerField(_("limit"), null=True, blank=True)
    #: {level: limit}, instead of `limit`.
    limits = models.JSONField(_("limits by level"), default=dict, blank=True)
    channel = models.CharField(_("only this channel"), max_length=64, default="", blank=True)
    category = models.CharField(
        _("only this category"), max_length=10, choices=Category, default="", blank=True
    )  # fmt: skip
    tag = models.CharField(_("only nodes with this tag"), max_length=64, default="", blank=True)
    window = models.DurationField(_("window"), null=True, blank=True)
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

    percent = models.FloatField(_("percent of customers"), default=0, validators=percent_validators)
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

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[key_validator])
    position = models.PositiveSmallIntegerField(_("position"), default=0)
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
