"""The sections `silence_policies` and `campaigns` of the configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from scheduling.configuration.file.calendars import SEND_WINDOWS, check_window_calendars
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection, Wanted
from scheduling.configuration.file.schema import DURATION, FLAG, KEY, NUMBER, Choice, Field, ListOf, Text, Whole
from scheduling.error_text import ErrorText as _
from sessions import validation
from sessions.frames import TAG_LENGTH
from sessions.models import Campaign, SilencePolicy
from sessions.policy import AFTER, ALL, ANY, CUSTOMER, GRACE_FOR, own_tags


class Instant:
    """A date and time with offset, quoted because of the colons: "2026-11-11T00:00:00+08:00"."""

    def read(self, given: Any) -> datetime:
        try:
            at = datetime.fromisoformat(given)
        except (TypeError, ValueError):
            at = None
        if at is None or at.tzinfo is None:
            raise ValueError(_('must be an instant like "2026-11-11T00:00:00+08:00"'))
        return at.astimezone(UTC)

    def write(self, stored: datetime) -> str:
        return stored.astimezone(UTC).isoformat()


class SilencePolicies(RowSection):
    """Silence policies. The policy `default` applies to sessions without another one; a file may omit it.

    `tag: vip` is short for `key: vip`. Without `tags` the key is the tag.
    """

    name = "silence_policies"
    noun = "silence policy"
    tables = (SilencePolicy,)
    model = SilencePolicy
    fields = (
        Field("key", KEY),
        Field("tags", ListOf(Text(TAG_LENGTH)), default=[]),
        Field("after", Choice(AFTER), default=ANY),
        Field("threshold", DURATION),
        Field("hours", SEND_WINDOWS, default=[]),
        Field("jitter", DURATION, default=timedelta(0)),
        Field("grace", DURATION, default=timedelta(0)),
        Field("grace_for", Choice(GRACE_FOR), default=ALL),
        Field("max_nudges", Whole(), default=1),
        Field("growth", NUMBER, default=2.0),
    )

    def read_entry(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        if "tag" in entry and "key" not in entry:
            entry = {("key" if name == "tag" else name): value for name, value in entry.items()}
        values = super().read_entry(entry, position, path, draft)
        check_window_calendars(values.get("hours"), f"{path}.hours", draft)
        if "key" in values and "tags" in values:
            values["tags"] = own_tags(values["key"], values["tags"])
        return values

    def read(self, given: Any, draft: Draft) -> list[Wanted]:
        wanted = super().read(given, draft)
        seen: dict[tuple[bool, tuple[str, ...]], str] = {}
        for each in wanted:
            # A guide and an answer policy may have the same tags: both apply.
            kind = each.values.get("after") == CUSTOMER, tuple(each.values.get("tags", ()))
            if seen.setdefault(kind, each.path) != each.path:
                draft.problem(f"{each.path}.tags", _("are those of %(other)s", other=seen[kind]))
        return wanted

    def defaults(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        return {"tags": own_tags(values["key"], None)} if "key" in values else {}

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_policy(values)

    def may_be_unlisted(self, row: Any) -> bool:
        return bool(row.is_default)

    def export(self, *, with_secrets: bool) -> Any:
        rows = [row for row in self.stored() if row.retired_at is None]
        rows.sort(key=lambda row: (not row.is_default, row.key))
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
