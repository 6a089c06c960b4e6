"""Define silence policies, campaigns and counts of guide messages."""

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
    """Policy of sessions with a tag. An edit applies from the next arming; deadlines already set do not change."""

    tag = models.CharField(_("tag"), max_length=64, unique=True, validators=[key_validator])
    threshold = models.DurationField(_("silent after"), default=timedelta(seconds=60))
    #: Random extra time, so that sessions that fell silent together are not due at the same moment.
    jitter = models.DurationField(_("random delay (jitter)"), default=timedelta(0))
    #: One-time extension for a user who typed and did not send.
    grace = models.DurationField(_("longer while writing"), default=timedelta(0))
    #: Maximum number of messages in one silence.
    max_nudges = models.PositiveSmallIntegerField(
        _("most messages"), default=1, validators=[MinValueValidator(1), MaxValueValidator(10)]
    )
    #: Factor between the gaps of consecutive messages.
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
        """Whether the policy applies to all tags without a policy. It cannot be retired."""
        return self.tag == DEFAULT_TAG

    def spec(self) -> Policy:
        return Policy(self.threshold, self.jitter, self.grace, self.max_nudges, self.growth)


class Campaign(Versioned):
    """One threshold for all tags during a sale. Of overlapping campaigns the latest to start applies."""

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
    """Counts of guide messages delivered within five minutes, and of users' reactions (see `nudge_stats`).

    A message counts in the interval of its delivery, and at most once as answered or false.
    """

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
    """Single row: the position up to which guide messages and signs of users are counted."""

    attempts_to = models.BigIntegerField(default=0)
    #: Attempts up to this id may be counted after all transactions before `ceiling_xid` have ended. Lower ids are
    #: then committed or will never exist.
    ceiling = models.BigIntegerField(default=0)
    ceiling_xid = models.BigIntegerField(default=0)
    #: Last counted entry of the stream of signs, by shard.
    signs_to = models.JSONField(default=dict)

    def __str__(self) -> str:
        return str(self.attempts_to)
