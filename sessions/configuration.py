"""The sections `silence_policies` and `campaigns` of the configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection
from scheduling.configuration.file.schema import DURATION, FLAG, KEY, NUMBER, Field, Whole
from sessions import validation
from sessions.models import Campaign, SilencePolicy


class Instant:
    """A date and time with offset, quoted because of the colons: "2026-11-11T00:00:00+08:00"."""

    def read(self, given: Any) -> datetime:
        try:
            at = datetime.fromisoformat(given)
        except (TypeError, ValueError):
            at = None
        if at is None or at.tzinfo is None:
            raise ValueError('must be an instant like "2026-11-11T00:00:00+08:00"')
        return at.astimezone(UTC)

    def write(self, stored: datetime) -> str:
        return stored.astimezone(UTC).isoformat()


class SilencePolicies(RowSection):
    """Silence policies by tag. The tag `default` applies to every tag without a policy; a file may omit it."""

    name = "silence_policies"
    noun = "silence policy"
    tables = (SilencePolicy,)
    model = SilencePolicy
    identity = ("tag",)
    fields = (
        Field("tag", KEY),
        Field("threshold", DURATION),
        Field("jitter", DURATION, default=timedelta(0)),
        Field("grace", DURATION, default=timedelta(0)),
        Field("max_nudges", Whole(), default=1),
        Field("growth", NUMBER, default=2.0),
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_policy(values)

    def may_be_unlisted(self, row: Any) -> bool:
        return bool(row.is_default)

    def export(self, *, with_secrets: bool) -> Any:
        rows = [row for row in self.stored() if row.retired_at is None]
        rows.sort(key=lambda row: (not row.is_default, row.tag))
        return [
            entry
            for position, row in enumerate(rows)
            for entry in self.entries_of(self.values_of(row), position, with_secrets)
        ]


class Campaigns(RowSection):
    name = "campaigns"
    noun = "campaign"
    tables = (Campaign,)
    model = Campaign
    fields = (
        Field("key", KEY),
        Field("threshold", DURATION),
        Field("starts_at", Instant()),
        Field("ends_at", Instant()),
        Field("enabled", FLAG, default=True),
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_campaign(values)
