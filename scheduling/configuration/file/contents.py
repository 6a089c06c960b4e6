"""The sections of what is sent and where it goes: channels, outgoing webhooks, targets and texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.db.models import F
from django.db.models.functions import Length

from scheduling.channels.base import channel_kinds, redirects_secret
from scheduling.configuration import validation
from scheduling.configuration.file.notation import ANY_MAPPING, REQUIRED, SECONDS, choice, list_of, map_of, text
from scheduling.configuration.file.section import (
    Change,
    Field,
    Key,
    Listed,
    Place,
    Section,
    Stamp,
    list_row_problems,
    read_fields,
)
from scheduling.error_text import ErrorText as _
from scheduling.models import (
    ChannelConfig,
    Community,
    Template,
    TemplateText,
    WebhookEvent,
    WebhookSubscription,
)
from scheduling.templating import MAX_SOURCE, read_locale

if TYPE_CHECKING:
    from scheduling.configuration.file.apply import Plan


class Channels(Section):
    """Channels. Keys outside the table are settings of the channel's kind."""

    name = "channels"
    noun = "channel"
    model = ChannelConfig
    settings = "config"
    paths = {"retry_delays": "retry"}
    notations = {"retry_delays": list_of(SECONDS)}

    def own_defaults(self, values: Mapping[str, Any], position: int, stored: Any = None) -> dict[str, Any]:
        kind = channel_kinds().get(values.get("kind", ""))
        return {"idempotent": kind.default_idempotent} if kind else {}

    def find_secrets(self, entry: Mapping[str, Any]) -> Iterable[Place]:
        """Return the secrets of the kind; all settings if the kind is unknown."""
        kind = channel_kinds().get(str(entry.get("kind")))
        secret = entry.keys() if kind is None else kind.secret_fields
        return [(name,) for name in entry if name in secret and name not in self.own_keys]

    def entry_to_keep(self, stored: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
        of_kind = stored is not None and stored.kind == entry.get("kind")
        return super().entry_to_keep(stored, entry) if of_kind else {}

    def find_forbidden_secret(self, kept: Iterable[Place], stored: Any, row: Any) -> tuple[str, str] | None:
        if ("secret",) in kept and redirects_secret(row.kind, stored.config, row.config):
            return "secret", _("must be entered again for another host")
        return None


class Webhooks(Section):
    """Subscriptions of outgoing webhooks. Address and secret are secrets."""

    name = "webhooks"
    noun = "webhook"
    scope = "webhooks"
    model = WebhookSubscription
    settings = "config"
    notations = {
        "events": list_of(choice({value: value for value in WebhookEvent.values})),
        "filter": map_of(list_of(text(140))),
    }

    def find_secrets(self, entry: Mapping[str, Any]) -> Iterable[Place]:
        return [(name,) for name in entry if name not in self.own_keys]


class Communities(Section):
    """Communities with a name or a target. Others are as many as conversations are counted; no person wrote them."""

    name = "communities"
    noun = "community"
    model = Community
    identity = ("chat_id",)
    notations = {"targets": map_of(ANY_MAPPING)}

    def list_rows(self, given: Any = None) -> Iterable[Any]:
        entries = given if isinstance(given, list) else []
        listed = {str(entry.get("chat_id")) for entry in entries if isinstance(entry, dict)}
        rows = Community.objects.alias(size=Length("targets"))
        return rows.exclude(name="", size=0) | rows.filter(chat_id__in=listed)

    def may_be_unlisted(self, row: Any) -> bool:
        return not row.name and not row.targets

    def export(self, *, with_secrets: bool) -> Any:
        """Leave out rows that a person cleared: they are as those that were only counted."""
        return [entry for entry in super().export(with_secrets=with_secrets) if entry.keys() != {"chat_id"}]

    def check_values(self, values: Mapping[str, Any], one: Listed, plan: Plan) -> None:
        kinds = plan.once("channel kinds", lambda: self._map_kinds(plan))
        validation.check_community(values, kinds)

    def _map_kinds(self, plan: Plan) -> dict[str, str]:
        """Return the kind of each channel, retired ones included, because targets may outlive a channel."""
        rows = [*plan.stored(plan.section_of[ChannelConfig]).values(), *plan.in_use(ChannelConfig).values()]
        return {row.key: row.kind for row in rows}

    def find_secrets(self, entry: Mapping[str, Any]) -> Iterable[Place]:
        """Return all values of targets: a later channel may give the name of a target another kind."""
        targets = entry.get("targets")
        for name, target in targets.items() if isinstance(targets, dict) else ():
            yield from (("targets", name, field) for field in (target if isinstance(target, dict) else ()))


class Templates(Section):
    """Templates with their texts. Entries with one key and several locales are one template."""

    name = "templates"
    noun = "template"
    model = Template
    further_tables = (TemplateText,)
    #: Of the texts.
    further = (
        Field("locale", "", text(20), TemplateText._meta.get_field("locale").default),
        Field("subject", "", text(200, empty=True), ""),
        # `body: null` is a template that has no text yet.
        Field("body", "", text(MAX_SOURCE), REQUIRED, nullable=True),
    )

    def choose_fields(self, given: Any) -> Sequence[Field]:
        return self.fields if isinstance(given, Mapping) else [field for field in self.fields if field.column]

    def list_rows(self, given: Any = None) -> Iterable[Any]:
        return Template.objects.prefetch_related("texts")

    def read(self, given: Any, plan: Plan) -> dict[Key, Listed]:
        listed: dict[Key, Listed] = {}
        for position, (path, entry) in enumerate(self.list_entries(given, plan)):
            one = self.read_entry(entry, position, path, listed, plan)
            if one is None:
                continue
            first = listed.setdefault(one.key, one)
            if first is one:
                one.row.listed_texts = {}
            comparable = [field for field in self.choose_fields(one.row) if field.name not in first.wrong | one.wrong]
            for field in comparable:
                if field.path in entry and field.get(one.row) != field.get(first.row):
                    plan.problem(f"{path}.{field.path}", _("must be the same as at %(path)s", path=first.path))
            values, wrong = read_fields(entry, self.further, path, plan, rest=True)
            if not wrong:
                self._add_text(first.row, {field.name: field.default for field in self.further} | values, path, plan)
        return listed

    def _add_text(self, template: Any, values: Mapping[str, Any], path: str, plan: Plan) -> None:
        locale, texts = values["locale"], template.listed_texts
        if read_locale(locale) in map(read_locale, texts):
            plan.problem(
                f"{path}.locale", _("“%(locale)s” is listed already for “%(key)s”", locale=locale, key=template.key)
            )
        elif values["body"] is not None:
            texts[locale] = TemplateText(**values)
            for name, message in list_row_problems(texts[locale], ["template"]):
                plan.problem(f"{path}.{name}", message)

    def write_entry(self, row: Any) -> dict[str, Any]:
        entry = super().write_entry(row)
        for locale, each in list_texts(row):
            entry |= {f"subject[{locale}]": each.subject} if each.subject else {}
            entry[f"body[{locale}]"] = each.body
        return entry

    def store(self, change: Change, stamp: Stamp) -> None:
        """Write the template before its texts: saving a text increments the template's version."""
        row, before = change.after, change.before
        if change.verb != "changed" or super().write_entry(before) != super().write_entry(row):
            super().store(change, stamp)
        if row is None:
            return
        stored = {} if before is None else dict(list_texts(before))
        for locale, wanted in row.listed_texts.items():
            saved = stored.pop(locale, None) or TemplateText(template=row, locale=locale)
            if saved.pk is None or (saved.subject, saved.body) != (wanted.subject, wanted.body):
                saved.subject, saved.body = wanted.subject, wanted.body
                stamp.on(saved)
                saved.save()
        for unlisted in stored.values():
            stamp.on(unlisted)
            unlisted.delete()
        # Saving a changed text increments the version; adding or removing one does not.
        if before is not None and dict(list_texts(before)).keys() != row.listed_texts.keys():
            Template.objects.filter(pk=row.pk).update(version=F("version") + 1)

    def export_row(self, row: Any, position: int, with_secrets: bool) -> list[dict[str, Any]]:
        own = super().write_entry(row)
        # The usual keys first, the long body last.
        entries = [
            own | {"locale": locale} | ({"subject": each.subject} if each.subject else {}) | {"body": each.body}
            for locale, each in list_texts(row)
        ]
        return entries or [own | {"body": None}]


def list_texts(template: Any) -> Iterator[tuple[str, TemplateText]]:
    """Yield the texts of a template by locale: those of the file, or the stored ones."""
    texts = getattr(template, "listed_texts", None)
    stored = {each.locale: each for each in template.texts.all()} if texts is None else texts
    yield from sorted(stored.items(), key=lambda each: each[0])
