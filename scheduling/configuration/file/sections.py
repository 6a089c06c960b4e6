"""The sections of the configuration file that the core has, and all sections by name.

Other apps add theirs with `settings.CONFIG_SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

from django.conf import settings
from django.db.models.functions import Length
from django.utils.module_loading import import_string

from scheduling.channels.base import channel_kinds, redirects_secret
from scheduling.configuration import validation
from scheduling.configuration.condition_fields import FieldCatalogue, conditions_in
from scheduling.configuration.file.notation import (
    ANY_MAPPING,
    NUMBER,
    REQUIRED,
    SECONDS,
    SEND_WINDOWS,
    WHOLE,
    Notation,
    choice,
    group_of,
    list_of,
    map_of,
    text,
)
from scheduling.configuration.file.section import (
    Change,
    Field,
    Key,
    Listed,
    Place,
    Plan,
    Reference,
    Section,
    SingleRow,
    Stamp,
    check_row,
    is_retired,
    read_fields,
)
from scheduling.durations import to_seconds
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, FieldError, InvalidInput
from scheduling.models import (
    Calendar,
    ChannelConfig,
    Community,
    DelayRule,
    EventType,
    HarassmentRule,
    Holdout,
    Node,
    Priority,
    Stage,
    Template,
    TemplateText,
    WebhookEvent,
    WebhookSubscription,
)
from scheduling.policy.matrix import find_follow_problem
from scheduling.policy.node_conditions import JOINS
from scheduling.policy.rollout import PLAN_DEFAULTS
from scheduling.templating import MAX_SOURCE, read_locale

# --- what is sent, and where it goes ---


class Channels(Section):
    """Channels. Keys outside the table are settings of the channel's kind."""

    name = "channels"
    noun = "channel"
    model = ChannelConfig
    settings = "config"
    paths = {"retry_delays": "retry"}

    def own_defaults(self, values: Mapping[str, Any], position: int, stored: Any = None) -> dict[str, Any]:
        kind = channel_kinds().get(values.get("kind", ""))
        return {"idempotent": kind.default_idempotent} if kind else {}

    def find_secrets(self, entry: Mapping[str, Any]) -> Iterable[Place]:
        """Return the secrets of the kind; all settings if the kind is unknown."""
        kind = channel_kinds().get(str(entry.get("kind")))
        secret = entry.keys() if kind is None else kind.secret_fields
        return [(name,) for name in entry if name in secret and name not in self.own_keys]

    def restore_secrets(self, entry: dict[str, Any], stored: Any) -> tuple[dict[str, Any], list[Place]]:
        """Keep only secrets of the same kind. Of another kind nothing is stored, even if it cannot be read here."""
        is_same = stored is not None and stored.kind == entry["kind"]
        return super().restore_secrets(entry, stored if is_same else None)

    def check_kept_secrets(self, kept: Iterable[Place], stored: Any, row: Any) -> None:
        if ("secret",) in kept and redirects_secret(row.kind, stored.config, row.config):
            raise InvalidInput.of("secret", _("must be entered again for another host"))


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

    def check_among(self, rows: Sequence[Listed], plan: Plan) -> None:
        """Check the targets by the kinds of all channels, retired ones too: a target may outlive its channel."""
        channels = [*plan.stored(plan.section_of[ChannelConfig]).values(), *plan.in_use(ChannelConfig).values()]
        kinds = {channel.key: channel.kind for channel in channels}
        for one in rows:
            with self.errors_at(one):
                validation.check_community({"targets": one.row.targets}, kinds)

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

    def add(self, one: Listed, listed: dict[Key, Listed]) -> None:
        """Add the text of an entry to the template of its first entry, with which it must agree."""
        first = listed.setdefault(one.key, one)
        if first is one:
            one.row.listed_texts = {}
        for field in self.choose_fields(one.row):
            if field.path in one.entry and field.get(one.row) != field.get(first.row):
                raise InvalidInput.of(field.path, _("must be the same as at %(path)s", path=first.path))
        values = {field.name: field.default for field in self.further}
        values |= read_fields(one.entry, self.further, ErrorCollector(), rest=True)  # its errors are known
        locale, texts = values["locale"], first.row.listed_texts
        if read_locale(locale) in map(read_locale, texts):
            what = _("“%(locale)s” is listed already for “%(key)s”", locale=locale, key=first.row.key)
            raise InvalidInput.of("locale", what)
        if values["body"] is not None:
            texts[locale] = TemplateText(**values)
            check_row(texts[locale], ["template"])

    def write_entry(self, row: Any) -> dict[str, Any]:
        entry = super().write_entry(row)
        for locale, each in list_texts(row):
            entry |= {f"subject[{locale}]": each.subject} if each.subject else {}
            entry[f"body[{locale}]"] = each.body
        return entry

    def store(self, change: Change, stamp: Stamp) -> None:
        """Write the template and its texts as one version."""
        row, before = change.after, change.before
        with (row or before).store_as_one_version():
            if change.verb != "changed" or super().write_entry(before) != super().write_entry(row):
                super().store(change, stamp)
            if row is not None:
                self._store_texts(row, before, stamp)

    def _store_texts(self, row: Any, before: Any, stamp: Stamp) -> None:
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


# --- when a message is sent, and when not ---


class Calendars(Section):
    """Calendars in the order of the file; the first is the default."""

    name = "calendars"
    noun = "calendar"
    model = Calendar
    notations = {"closed": list_of(text(10)), "open": list_of(text(10)), "send_window": SEND_WINDOWS}


class Stages(Section):
    """Stages in the order of the file. `position` is written only if it differs from the place in the list."""

    name = "stages"
    noun = "stage"
    model = Stage


def _write_in_order(part: Any) -> Any:
    """Return variants, a condition of `policy.node_conditions` or a part of one, with the keys in the usual order."""
    if isinstance(part, list):
        return [_write_in_order(each) for each in part]
    if not isinstance(part, dict):
        return part
    names = ("key", "when", "template", "field", "op", "value", *JOINS)
    return {name: _write_in_order(part[name]) for name in names if name in part}


#: The plan of a roll-out. Every key has a default, so `{}` is the default plan.
CANARY_GUARD = group_of(
    "a mapping: `steps`, `time`, `touches`, `complaints`, `failures`",
    {
        name: ({"steps": list_of(NUMBER), "time": SECONDS, "touches": WHOLE}.get(name, NUMBER), default)
        for name, default in PLAN_DEFAULTS.items()
    },
)
#: A node's own rules, stored as seconds. The defaults give a flat delay.
OWN_DELAY_RULES = group_of(
    "a mapping like `delay_rules`",
    {
        "by_level": (map_of(SECONDS), {}),
        "default": (SECONDS, REQUIRED),
        "active_within": (SECONDS, to_seconds(DelayRule._meta.get_field("active_within").default)),
        "active_factor": (NUMBER, 1.0),
    },
)


class Nodes(Section):
    name = "nodes"
    noun = "node"
    model = Node
    named = (Node, Template)
    paths = {
        "rollout_": "rollout.", "canary_": "canary.", "goal_": "goal.", "guard_": "guards.",
        "holdout_percent": "holdout",
    }  # fmt: skip
    notations = {
        "delay_rules": OWN_DELAY_RULES,
        "priority": choice({each.name.lower(): each.value for each in Priority}),
        "canary_guard": CANARY_GUARD,
        "when": Notation("a condition: `all` or `any` with a list of rows", write=_write_in_order),
        "variants": Notation("a list of at most 10: `key`, `when` and `template`", write=_write_in_order),
        "send_window": SEND_WINDOWS,
    }

    def check_among(self, rows: Sequence[Listed], plan: Plan) -> None:
        # Retired nodes count: one may be restored.
        nodes = [*plan.stored(self).values(), *plan.in_use(Node).values()]
        followed = {node.key: node.from_nodes for node in nodes}
        catalogue = FieldCatalogue()
        for one in rows:
            with self.errors_at(one):
                row, depth = one.row, settings.AFTERTOUCH_JOURNEY_DEPTH
                if row.from_nodes and (problem := find_follow_problem(row.key, row.from_nodes, followed, depth)):
                    raise InvalidInput.of("from_nodes", problem)
                fields = conditions_in({"when": row.when, "variants": row.variants})
                used = conditions_in({"when": one.stored.when, "variants": one.stored.variants}) if one.stored else {}
                if unknown := list(catalogue.find_unknown(fields, row.trigger, used)):
                    raise InvalidInput(*(FieldError(place, problem) for place, problem in unknown))
        known = set(EventType.objects.values_list("key", flat=True))
        for one in rows:
            row = one.row
            named = [("trigger", row.trigger), *(("cancel_on", each) for each in row.cancel_on)]
            for place, event in [*named, ("goal.event", row.goal_event)]:
                if event and event not in known:
                    plan.note(f"{one.path}.{place}: no event of type “{event}” is known yet")

    def list_references(self, row: Any) -> Iterator[Reference]:
        yield from super().list_references(row)
        yield from (("from_nodes", Node, key) for key in row.from_nodes)
        for place, variant in enumerate(row.variants):
            yield f"variants[{place}].template", Template, variant["template"]


class DelayRules(SingleRow):
    name = "delay_rules"
    noun = "dynamic delay"
    model = DelayRule
    notations = {"by_level": map_of(SECONDS)}


class GlobalHoldout(SingleRow):
    name = "holdout"
    noun = "global hold-out"
    model = Holdout


class HarassmentRules(Section):
    """Rules, which have no key of their own. Of rules with equal `identity` the n-th listed is the n-th stored.

    A listed rule without such a row is the next stored one of its kind and scope that is in use and left over: its
    window or its part was edited.
    """

    name = "harassment_rules"
    noun = "anti-harassment rule"
    model = HarassmentRule
    named = (ChannelConfig,)
    identity = ("kind", "scope", "window", "channel", "category", "tag")
    required = frozenset({"limit", "window", "quiet_from", "quiet_to"})
    paths = {"quiet_": ""}
    notations = {"limits": map_of(WHOLE)}
    further = (Field("by", "", choice({"content_type": "content_type"}), "content_type"),)
    parts = ("channel", "category", "tag")  #: of the messages; a rule counts all without them
    of_kind: Mapping[str, Sequence[str]] = {
        "cap": ("limit", "limits", "window", *parts),
        "dedupe": ("by", "window", *parts),
        "conversation": (),
        "quiet_hours": ("from", "to", "timezone"),
    }

    def choose_fields(self, given: Any) -> Sequence[Field]:
        """Return the keys that apply to the kind. The other columns stay unchanged."""
        kind = given.get("kind") if isinstance(given, Mapping) else given.kind
        names = {"kind", "scope", "enabled", *self.of_kind[str(kind)]}
        return [field for field in self.fields if field.path in names]

    def read_entry(
        self, entry: dict[str, Any], position: int, path: str, earlier: Mapping[Key, Listed], plan: Plan
    ) -> Listed:
        if entry.get("kind") not in tuple(self.of_kind):  # it says which other keys are known
            found = ErrorCollector()
            read_fields(entry, [field for field in self.fields if field.path == "kind"], found, rest=True)
            found.raise_if_any()
        return super().read_entry(entry, position, path, earlier, plan)

    def list_rows(self, given: Any = None) -> Iterable[Any]:
        return sorted(HarassmentRule.objects.all(), key=lambda row: (is_retired(row), row.pk))

    def key_of(self, row: Any, taken: Collection[Key] = ()) -> Key:
        key = tuple(field.get(row) for field in self.choose_fields(row) if field.name in self.identity)
        return (*key, sum(each[:-1] == key for each in taken))

    def read(self, given: Any, plan: Plan) -> dict[Key, Listed]:
        listed, stored = super().read(given, plan), plan.stored(self)
        left = [key for key, row in stored.items() if key not in listed and not is_retired(row)]
        paired: dict[Key, Listed] = {}
        for one in listed.values():
            same = (key for key in left if key[:2] == one.key[:2])
            if (one.stored is None or is_retired(one.stored)) and (key := next(same, None)) is not None:
                left.remove(key)
                row = copy(stored[key])
                for field in self.choose_fields(one.row):
                    field.put(row, field.get(one.row))
                one = replace(one, key=key, row=row, stored=stored[key])
            paired[one.key] = one
        return paired

    def label(self, row: Any) -> str:
        return f"{row.kind} ({row.scope})"

    def check_among(self, rows: Sequence[Listed], plan: Plan) -> None:
        channels = {key for (key,) in plan.in_use(ChannelConfig)}
        tags = {tag for node in plan.in_use(Node).values() for tag in node.tags}
        for one in rows:
            with self.errors_at(one):
                validation.check_rule_channel(one.row.channel, channels)
            if one.row.tag and one.row.tag not in tags:
                plan.note(f"{one.path}.tag: no node has the tag “{one.row.tag}” yet")

    def list_references(self, row: Any) -> Iterator[Reference]:
        if row.channel and row.channel not in channel_kinds():
            yield "channel", ChannelConfig, row.channel


#: In the order of storage: rows come before the rows that refer to them.
OWN: tuple[type[Section], ...] = (
    Channels, Templates, Communities, Calendars, Stages, Nodes, DelayRules, HarassmentRules, GlobalHoldout, Webhooks,
)  # fmt: skip


@cache
def sections() -> dict[str, Section]:
    """Return the sections by name."""
    return {section.name: section() for section in (*OWN, *map(import_string, settings.CONFIG_SECTIONS))}


def list_users(row: Any) -> list[tuple[Section, Any]]:
    """Return the other rows in use that are valid only with this one, with their sections."""
    return [
        (section, user)
        for section in sections().values() if section.may_refer_to(type(row))
        for user in section.list_rows() if user != row and not is_retired(user)
        if any((model, key) == (type(row), row.key) for _place, model, key in section.list_references(user))
    ]  # fmt: skip
