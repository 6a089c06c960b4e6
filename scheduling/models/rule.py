"""Store the rules that operators edit: delays and anti-harassment rules."""

from __future__ import annotations

from datetime import timedelta

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _
from simple_history.models import HistoricalRecords

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
    """A limit on messages to a customer or a community."""

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
    window = models.DurationField(_("window"), null=True, blank=True)
    quiet_from = models.TimeField(_("quiet from"), null=True, blank=True)
    quiet_to = models.TimeField(_("quiet to"), null=True, blank=True)
    #: Used if the customer has no time zone.
    timezone = models.CharField(_("time zone"), max_length=60, default="Asia/Shanghai")
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
