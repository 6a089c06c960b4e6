"""Define silence policies, campaigns and counts of guide messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _
from simple_history.models import HistoricalRecords

from scheduling.errors import check_number, check_span, check_texts
from scheduling.models.versioned import KEY, Bound, Versioned
from sessions.frames import TAG_LENGTH
from sessions.policy import AGENT as AFTER_AGENT
from sessions.policy import ALL, ANY, DEFAULT_KEY, TYPING, Override, Policy, own_tags
from sessions.policy import CUSTOMER as AFTER_CUSTOMER

#: The watcher checks at least once a second, so it cannot miss a timer longer than that.
THRESHOLD = Bound(check_span, least=timedelta(seconds=2), most=timedelta(hours=12))


class SilencePolicy(Versioned):
    """Policy of sessions with certain tags. An edit applies from the next arming; deadlines already set do not change.

    Of several policies whose tags a session has, the one with most tags applies; of equal ones,
    the one with the shortest threshold, then the first by key.
    """

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[KEY])
    #: A session must have all of them. Only the default policy has none.
    tags = models.JSONField(_("tags"), default=list, blank=True, validators=[Bound(check_texts, longest=TAG_LENGTH)])
    after = models.CharField(
        _("timer runs after"), max_length=8, default=ANY,
        choices=[
            (ANY, _("any message")),
            (AFTER_AGENT, _("a message of an agent, until the customer writes")),
            (AFTER_CUSTOMER, _("a message of the customer, until an agent answers")),
        ],
    )  # fmt: skip
    threshold = models.DurationField(_("silent after"), default=timedelta(seconds=60), validators=[THRESHOLD])
    #: Send windows in the zone of their calendar. Only time inside counts. Empty: all time.
    hours = models.JSONField(_("opening hours"), default=list, blank=True)
    #: Random extra time, so that sessions that fell silent together are not due at the same moment.
    jitter = models.DurationField(
        _("random delay (jitter)"), default=timedelta(0), validators=[Bound(check_span, most=timedelta(hours=1))]
    )
    #: One-time extension at the last moment, by the policy of that moment.
    grace = models.DurationField(
        _("longer at the end"), default=timedelta(0), validators=[Bound(check_span, most=timedelta(minutes=10))]
    )
    grace_for = models.CharField(
        _("longer for"), max_length=8, default=ALL,
        choices=[(ALL, _("every chat")), (TYPING, _("customers who typed and have not sent"))],
    )  # fmt: skip
    #: Maximum number of messages in one silence.
    max_nudges = models.PositiveSmallIntegerField(
        _("most messages"), default=1, validators=[Bound(check_number, least=1, most=10)]
    )
    #: Factor between the gaps of consecutive messages.
    growth = models.FloatField(_("growth of the gaps"), default=2.0, validators=[Bound(check_number, least=1, most=10)])
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("silence policy")
        verbose_name_plural = _("silence policies")
        ordering = ["key"]

    def __str__(self) -> str:
        return self.key

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the row. A new row without tags has its key as tag, except the default policy."""
        self.tags = own_tags(self.key, self.tags)
        super().save(*args, **kwargs)

    @property
    def is_default(self) -> bool:
        """Whether the policy applies to all sessions without another one. It cannot be retired."""
        return self.key == DEFAULT_KEY

    def spec(self, hours: Sequence[tuple[datetime, datetime]] = ()) -> Policy:
        return Policy(
            self.threshold, self.jitter, self.grace, self.max_nudges, self.growth, self.after, self.tags,
            self.grace_for, self.version, hours,
        )  # fmt: skip


class Campaign(Versioned):
    """One threshold for all chats during a sale. Of overlapping campaigns the latest to start applies."""

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[KEY])
    threshold = models.DurationField(_("silent after"), default=timedelta(seconds=90), validators=[THRESHOLD])
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
