"""Read and write sections `delay_rules` and `harassment_rules`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from django.conf import settings

from scheduling.channels.kinds import channel_kinds
from scheduling.configuration import validation
from scheduling.configuration.file.base import Change
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection, SingleRowSection, Wanted
from scheduling.configuration.file.schema import (
    DURATION,
    FLAG,
    NUMBER,
    Choice,
    Clock,
    Field,
    FileProblem,
    MapOf,
    Seconds,
    Text,
    Whole,
    read_fields,
)
from scheduling.durations import to_seconds
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput
from scheduling.models import Category, DelayRule, HarassmentRule, Holdout
from scheduling.policy.profile import MAX_TAG

DAY = timedelta(hours=24)
PARTS = ("channel", "category", "tag")  #: of the messages; a rule counts all without them


class DelayRulesSection(SingleRowSection):
    name = "delay_rules"
    noun = "delay rule"
    tables = (DelayRule,)
    model = DelayRule
    fields = (
        Field("by_level", MapOf(Seconds()), default={}),
        Field("default", DURATION, default=DAY),
        Field("active_within", DURATION, default=DAY),
        Field("active_factor", NUMBER, default=0.6),
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_delay_rule(values)

    def label(self, values: Mapping[str, Any]) -> str:
        return "dynamic delay"


class HoldoutSection(SingleRowSection):
    name = "holdout"
    noun = "global hold-out"
    tables = (Holdout,)
    model = Holdout
    fields = (Field("percent", NUMBER, default=0.0), Field("key", Text(64, empty=True), default=""))

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_holdout(values)


class Group:
    """Several keys that are stored in one JSON column."""

    fields: tuple[Field, ...]
    otherwise: str  #: the message for a value that is not a mapping

    def read(self, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise ValueError(self.otherwise)
        problems: list[FileProblem] = []
        values = read_fields(given, self.fields, "", problems)
        if problems:
            raise InvalidInput(*(FieldError(each.path.lstrip("."), each.message) for each in problems))
        return self.whole(values)

    def whole(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        return {field.name: stored.get(field.name, field.default) for field in self.fields}

    def write(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        return {field.path: field.written(value) for field in self.fields if (value := stored[field.name]) is not None}


class OwnDelayRules(Group):
    """A node's own delay rules: the same keys, stored as seconds. The defaults give a flat delay."""

    otherwise = _("must be a mapping, like the section of this name")
    fields = (
        Field("by_level", MapOf(Seconds()), default={}),
        Field("default", Seconds()),
        Field("active_within", Seconds(), default=to_seconds(DAY)),
        Field("active_factor", NUMBER, default=1.0),
    )


class HarassmentRules(RowSection):
    """Rules, which have no key: the first cap of the file is the first stored cap, and so on."""

    name = "harassment_rules"
    noun = "anti-harassment rule"
    tables = (HarassmentRule,)
    model = HarassmentRule
    fields = (
        Field("kind", Choice(HarassmentRule.Kind.values)),
        Field("scope", Choice(HarassmentRule.Subject.values), default=HarassmentRule.Subject.USER.value),
        Field("limit", Whole()),
        Field("limits", MapOf(Whole()), default={}),
        Field("window", DURATION),
        Field("channel", Text(64, empty=True), default=""),
        Field("category", Choice(Category.values), default=""),
        Field("tag", Text(MAX_TAG, empty=True), default=""),
        Field("from", Clock(), column="quiet_from"),
        Field("to", Clock(), column="quiet_to"),
        Field("timezone", Text(60), default=settings.TIME_ZONE),
        Field("enabled", FLAG, default=True),
    )
    by = Field("by", Choice(("content_type",)), default="content_type")
    common = ("kind", "scope", "enabled")
    of_kind = {
        "cap": ("limit", "limits", "window", *PARTS),
        "dedupe": ("by", "window", *PARTS),
        "conversation": (),
        "quiet_hours": ("from", "to", "timezone"),
    }

    def fields_of(self, kind: str | None) -> tuple[Field, ...]:
        """Return the keys that apply to this kind. The other columns stay unchanged."""
        if kind not in self.of_kind:
            return (*self.fields, self.by)
        return tuple(field for field in (*self.fields, self.by) if field.path in (*self.common, *self.of_kind[kind]))

    def read(self, given: Any, draft: Draft) -> list[Wanted]:
        wanted = []
        for position, path, entry in self.entries(given, draft):
            kind = entry.get("kind")
            known = kind in self.of_kind if isinstance(kind, str) else False
            fields = self.fields_of(kind if known else None) if known else self.fields[:1]
            values = read_fields(entry, fields, path, draft.problems, rest=not known)
            if "kind" in values:
                self.fill(values, position, path, draft)
                self.judge(values, path, draft)
                self._note_unknown_tag(values.get("tag"), path, draft)
                wanted.append(Wanted(path, (values["kind"], values.get("scope")), values))
        return wanted

    def _note_unknown_tag(self, tag: Any, path: str, draft: Draft) -> None:
        nodes = draft.document.get("nodes") if "nodes" in draft.document else [
            {"tags": row.tags} for row in draft.rows("nodes") if row.retired_at is None
        ]  # fmt: skip
        tags = [each.get("tags") for each in nodes if isinstance(each, dict)] if isinstance(nodes, list) else []
        if tag and not any(isinstance(each, list) and tag in each for each in tags):
            draft.note(f"{path}.tag: no node has the tag “{tag}” yet")

    def fill(self, values: dict[str, Any], position: int, path: str, draft: Draft) -> None:
        super().fill(values, position, path, draft)
        kept = {field.name for field in self.fields_of(values["kind"])} - {"by"}
        for name in values.keys() - kept:
            del values[name]

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_rule(values, draft.keys("channels"))

    def label(self, values: Mapping[str, Any]) -> str:
        return f"{values['kind']} ({values['scope']})"

    def values_of(self, row: Any) -> dict[str, Any]:
        names = {field.name for field in self.fields_of(row.kind)}
        return {field.name: field.of(row) for field in self.fields if field.name in names}

    def stored(self) -> list[Any]:
        return list(HarassmentRule.objects.order_by("id"))

    def list_references(self, draft: Draft) -> Iterator[tuple[str, str, str]]:
        for row in draft.rows(self.name) if "channels" in draft.document else ():
            if row.retired_at is None and row.channel not in channel_kinds():
                yield self.label(self.values_of(row)), "channels", row.channel

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        wanted = self.read(given, draft)
        rows = list(draft.rows(self.name))
        pairs = self._same(wanted, rows)
        for each in wanted:
            if id(each) not in pairs:
                pairs[id(each)] = self._next(each, rows)
        found = [change for each in wanted if (change := self.change(each.values, pairs[id(each)]))]
        return found + [self.retirement(row) for row in rows if self.lives(row)]

    def _same(self, wanted: Iterable[Wanted], rows: list[Any]) -> dict[int, Any]:
        """Pair rules with equal active rows, wherever they are in the list, and take these out of `rows`."""
        pairs = {}
        for each in wanted:
            row = next((row for row in rows if row.retired_at is None and self.values_of(row) == each.values), None)
            if row is not None:
                pairs[id(each)] = row
                rows.remove(row)
        return pairs

    def _next(self, wanted: Wanted, rows: list[Any]) -> Any:
        """Take the next row of this kind and scope out of `rows`; active rows come before retired ones."""
        alike = [row for row in rows if (row.kind, row.scope) == wanted.key]
        row = min(alike, key=lambda row: (row.retired_at is not None, row.pk), default=None)
        if row is not None:
            rows.remove(row)
        return row

    def put(self, row: Any, values: Mapping[str, Any]) -> None:
        for field in self.fields:
            if field.name in values:
                field.put(row, values[field.name])

    def order(self, row: Any) -> Any:
        return row.pk
