"""How long silence may last: by tag, and for everybody while a campaign runs."""

from __future__ import annotations

from datetime import timedelta

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _
from simple_history.models import HistoricalRecords

from scheduling.models.node import key_validator
from scheduling.models.versioned import Versioned
from sessions.policy import DEFAULT_TAG, Override, Policy


class SilencePolicy(Versioned):
    """When sessions with a tag are silent. An edit holds from the next arming on, never for one that is armed."""

    tag = models.CharField(_("tag"), max_length=64, unique=True, validators=[key_validator])
    threshold = models.DurationField(_("silent after"), default=timedelta(seconds=60))
    #: Up to so much more, by chance, so that sessions that fell silent together do not all come at once.
    jitter = models.DurationField(_("and up to"), default=timedelta(0))
    #: So much longer, once, for a user who began to write and did not send it.
    grace = models.DurationField(_("longer while writing"), default=timedelta(0))
    #: How many messages go into one silence.
    max_nudges = models.PositiveSmallIntegerField(
        _("most messages"), default=1, validators=[MinValueValidator(1), MaxValueValidator(10)]
    )
    #: Each gap between messages is so many times the one before.
    growth = models.FloatField(
        _("growth of the gaps"), default=2.0, validators=[MinValueValidator(1), MaxValueValidator(10)]
    )
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("silence policy")
        verbose_name_plural = _("silence policies")
        ordering = ["tag"]

    def __str__(self) -> str:
        return self.tag

    @property
    def is_default(self) -> bool:
        """It holds for every tag without a policy of its own, and is never retired."""
        return self.tag == DEFAULT_TAG

    def spec(self) -> Policy:
        return Policy(self.threshold, self.jitter, self.grace, self.max_nudges, self.growth)


class Campaign(Versioned):
    """One threshold for all tags during a sale. Of several at once the latest to begin holds."""

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[key_validator])
    threshold = models.DurationField(_("silent after"), default=timedelta(seconds=90))
    starts_at = models.DateTimeField(_("starts at"))
    ends_at = models.DateTimeField(_("ends at"))
    enabled = models.BooleanField(_("enabled"), default=True)
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("campaign")
        verbose_name_plural = _("campaigns")
        ordering = ["starts_at", "key"]
        constraints = [
            models.CheckConstraint(name="campaign_ends_after_it_starts", condition=Q(ends_at__gt=F("starts_at")))
        ]

    def __str__(self) -> str:
        return self.key

    def spec(self) -> Override:
        return Override(self.starts_at, self.ends_at, self.threshold)


class NudgeTally(models.Model):
    """Of the guide messages that were delivered within five minutes, how many there were and what users did then (see
    `nudges`). A message is counted where it was delivered, and at most once as answered or as false."""

    at = models.DateTimeField(_("from"))
    tag = models.CharField(_("tag"), max_length=64)
    sent = models.PositiveIntegerField(_("sent"), default=0)
    answered = models.PositiveIntegerField(_("answered"), default=0)
    false = models.PositiveIntegerField(_("false"), default=0)

    class Meta:
        verbose_name = _("tally of guide messages")
        verbose_name_plural = _("tallies of guide messages")
        constraints = [models.UniqueConstraint(fields=["at", "tag"], name="nudge_tally_once")]

    def __str__(self) -> str:
        return f"{self.tag} {self.at:%Y-%m-%d %H:%M}"


class NudgeMark(models.Model):
    """One row: how far guide messages and signs of users are counted."""

    attempts_to = models.BigIntegerField(default=0)
    #: Attempts up to here may be counted as soon as every transaction before this one has ended: a number that was
    #: taken earlier is written by then, or never.
    ceiling = models.BigIntegerField(default=0)
    ceiling_xid = models.BigIntegerField(default=0)
    #: By shard, the last entry of its stream of signs.
    signs_to = models.JSONField(default=dict)

    def __str__(self) -> str:
        return str(self.attempts_to)
