"""Keep the matrix and the rules as one frozen snapshot per process, reloaded after an edit."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from functools import cached_property
from typing import Any

from django.conf import settings
from django.db import connection

from scheduling.channels.base import CalendarQuota, channel_kinds
from scheduling.models import (
    Calendar,
    ChannelConfig,
    DelayRule,
    EventType,
    HarassmentRule,
    Holdout,
    Node,
    Pause,
    Template,
    WebhookSubscription,
)
from scheduling.policy.guards import Check, checks_for, pause_scopes
from scheduling.policy.matrix import END_TYPES
from scheduling.policy.node_conditions import NodeCondition, compile_condition
from scheduling.policy.send_times import CalendarSpec, CalendarsSpec, TimingSpec, compile_windows
from scheduling.policy.specs import (
    ChannelSpec,
    DelayRulesSpec,
    HoldoutSpec,
    NodeSpec,
    RuleCoverage,
    RuleSpec,
    TemplateSpec,
    TextSpec,
    WebhookSpec,
)
from scheduling.templating import reads_profile

DEFAULT_RETRY_DELAYS = (10, 60, 300, 1800, 7200)


@dataclass(frozen=True)
class Snapshot:
    """All configuration that operators edit, as of `version`."""

    version: tuple[Any, ...]  #: counter and time of the edit: after a rollback the counter alone repeats
    nodes: Mapping[int, NodeSpec]
    templates: Mapping[int, TemplateSpec]
    channels: Mapping[int, ChannelSpec]
    delay_rules: DelayRulesSpec
    rules: tuple[RuleSpec, ...]
    paused: frozenset[str]
    activity_types: Mapping[str, bool]
    calendars: CalendarsSpec
    webhooks: Mapping[int, WebhookSpec]  #: enabled subscriptions

    @cached_property
    def triggered(self) -> Mapping[str, tuple[NodeSpec, ...]]:
        """Return, by event type, the nodes that it triggers."""
        found: dict[str, list[NodeSpec]] = defaultdict(list)
        for node in self.nodes.values():
            if node.enabled:
                found[node.trigger].append(node)
        return {key: tuple(nodes) for key, nodes in found.items()}

    @cached_property
    def cancelling(self) -> Mapping[str, tuple[NodeSpec, ...]]:
        """Return, by event type, the nodes whose touches it cancels."""
        found: dict[str, list[NodeSpec]] = defaultdict(list)
        for node in self.nodes.values():
            for event_type in node.cancel_on:
                found[event_type].append(node)
        return {key: tuple(nodes) for key, nodes in found.items()}

    @cached_property
    def webhook_events(self) -> frozenset[str]:
        """Return the types of events that a subscription wants."""
        return frozenset[str]().union(*(each.events for each in self.webhooks.values()))

    @property
    def changed_at(self) -> datetime | None:
        """Return when an operator last edited the configuration."""
        return self.version[1] if self.version else None

    @cached_property
    def window(self) -> timedelta:
        """Return how far back the guards look."""
        return max((rule.window for rule in self.rules), default=timedelta(0))

    @cached_property
    def asking_presence(self) -> frozenset[int]:
        """Return the ids of the nodes whose touches ask about a live conversation of their customer."""
        if not any(rule.kind == "conversation" for rule in self.rules):
            return frozenset()
        return frozenset(node.id for node in self.nodes.values() if node.guard_conversation != "ignore")

    @cached_property
    def counting_quotas(self) -> frozenset[int]:
        """Return the ids of the nodes whose receivers have quotas. An idle node sends nothing."""
        kinds = channel_kinds()
        counting_kinds = {name for name, each in kinds.items() if each.quotas or each.own_quotas}
        counting = {
            node.id for node in self.nodes.values() if node.channel.limits or node.channel.kind in counting_kinds
        }
        return frozenset(counting - self.idle_nodes)

    @cached_property
    def paused_nodes(self) -> frozenset[int]:
        """Return the ids of the nodes that an operator paused, by themselves or with their channel or everything."""
        return frozenset(node.id for node in self.nodes.values() if self.paused.intersection(pause_scopes(node)))

    @cached_property
    def idle_nodes(self) -> frozenset[int]:
        """Return the ids of the nodes that are paused or switched off."""
        return self.paused_nodes | {node.id for node in self.nodes.values() if not node.enabled}

    @cached_property
    def checks(self) -> Mapping[int, tuple[Check, ...]]:
        """Return the checks that can object to the touches of a node, by its id."""
        return {node.id: checks_for(node, self.rules, self.paused) for node in self.nodes.values()}

    @cached_property
    def profile_templates(self) -> frozenset[int]:
        """Return the ids of the templates whose texts name attributes or tags of the customer."""
        return frozenset(each.id for each in self.templates.values() if reads_profile(each))

    @cached_property
    def profile_nodes(self) -> frozenset[int]:
        """Return the ids of the nodes whose touches may need attributes or tags of the customer."""
        return frozenset(
            node.id
            for node in self.nodes.values()
            if any(each.reads_profile for each in node.conditions)
            or any(each.id in self.profile_templates for each in node.contents)
        )

    @cached_property
    def judging_facts(self) -> frozenset[int]:
        """Return the ids of the nodes with a condition, with variants of their content, or with a depth limit."""
        return frozenset(node.id for node in self.nodes.values() if node.conditions or node.from_nodes)

    @cached_property
    def followed_ends(self) -> Mapping[str, frozenset[int]]:
        """Return, by state, the ids of the nodes whose touches in this state are followed, or cancel other touches."""
        found = {}
        for state, kind in END_TYPES.items():
            keys = frozenset().union(*(node.from_nodes for node in self.triggered.get(kind, ())))
            everything = kind in self.cancelling
            found[state] = frozenset(node.id for node in self.nodes.values() if everything or node.key in keys)
        return {state: nodes for state, nodes in found.items() if nodes}

    @cached_property
    def counting_earlier(self) -> Mapping[int, frozenset[str]]:
        """Return, by id of a node, the event types whose earlier events its conditions count."""
        return {node.id: node.counted for node in self.nodes.values() if node.counted}

    @cached_property
    def counts_communities(self) -> bool:
        """Return whether a rule counts the messages to a community."""
        return any(rule.scope == "community" for rule in self.rules)


_snapshot: Snapshot | None = None
_loading = threading.Lock()


def current() -> Snapshot:
    """Return the valid snapshot. One query compares versions; only an edit causes a reload."""
    global _snapshot
    with connection.cursor() as cursor:
        cursor.execute("SELECT version, changed_at FROM scheduling_configuration WHERE id = 1")
        version = cursor.fetchone() or ()
    if _snapshot is None or _snapshot.version != version:
        with _loading:
            if _snapshot is None or _snapshot.version != version:
                _snapshot = load_snapshot(version)
    return _snapshot


def load_snapshot(version: tuple[Any, ...]) -> Snapshot:
    """Load a snapshot.

    It may include rows newer than `version`. The version then differs at the next call, which reloads. Nodes are read
    first: the rows that they name are older and are never deleted.
    """
    rows = list(Node.objects.select_related("stage"))
    templates = {row.pk: template_spec(row) for row in Template.objects.prefetch_related("texts")}
    channels = {row.pk: channel_spec(row) for row in ChannelConfig.objects.all()}
    calendars = calendars_spec(list(Calendar.objects.filter(retired_at=None)))
    holdout = holdout_spec(Holdout.objects.first())
    nodes = {row.pk: node_spec(row, templates, channels, calendars, holdout) for row in rows}
    return Snapshot(
        version=version,
        nodes=nodes,
        templates=templates,
        channels=channels,
        delay_rules=delay_rules_spec(DelayRule.objects.first() or DelayRule()),
        rules=tuple(
            rule_spec(row, nodes, templates) for row in HarassmentRule.objects.filter(enabled=True, retired_at=None)
        ),
        paused=frozenset(Pause.objects.values_list("scope", flat=True)),
        activity_types=dict(EventType.objects.values_list("key", "is_activity")),
        calendars=calendars,
        webhooks={
            row.pk: webhook_spec(row) for row in WebhookSubscription.objects.filter(enabled=True, retired_at=None)
        },
    )


def webhook_spec(row: WebhookSubscription) -> WebhookSpec:
    filters = {name: frozenset(wanted) for name, wanted in row.filter.items() if wanted}
    return WebhookSpec(row.pk, row.key, row.version, row.config, frozenset(row.events), filters)


def template_spec(row: Template) -> TemplateSpec:
    texts = sort_texts(TextSpec(text.locale, text.subject, text.body) for text in row.texts.all())
    return TemplateSpec(row.pk, row.key, row.version, row.content_type, row.category, texts, row.tracks_links)


def sort_texts(texts: Iterable[TextSpec]) -> tuple[TextSpec, ...]:
    """Return the text in the default language first: a customer without a locale gets the first one."""
    return tuple(sorted(texts, key=lambda text: (text.locale != settings.LANGUAGE_CODE, text.locale)))


def channel_spec(row: ChannelConfig) -> ChannelSpec:
    delays = tuple(timedelta(seconds=each) for each in row.retry_delays or DEFAULT_RETRY_DELAYS)
    given = (("day", row.daily_limit), ("month", row.monthly_limit))
    limits = tuple(CalendarQuota(limit, period) for period, limit in given if limit)
    return ChannelSpec(
        row.pk, row.key, row.kind, row.config, row.idempotent, row.timeout, delays, row.version, bool(row.retired_at),
        limits,
    )  # fmt: skip


def delay_rules_spec(row: DelayRule) -> DelayRulesSpec:
    by_level = {level: timedelta(seconds=seconds) for level, seconds in row.by_level.items()}
    return DelayRulesSpec(by_level, row.default, row.active_within, row.active_factor)


def own_delay_rules(stored: Mapping[str, Any] | None) -> DelayRulesSpec | None:
    """Return a node's own delay rules. `Node.delay_rules` stores all spans in seconds."""
    if not stored:
        return None
    return DelayRulesSpec(
        {level: timedelta(seconds=seconds) for level, seconds in stored.get("by_level", {}).items()},
        timedelta(seconds=stored["default"]),
        timedelta(seconds=stored.get("active_within", 86400)),
        stored.get("active_factor", 1.0),
    )


def holdout_spec(row: Holdout | None) -> HoldoutSpec | None:
    return HoldoutSpec(row.percent, row.key, row.version) if row and row.percent else None


def rule_spec(
    row: HarassmentRule, nodes: Mapping[int, NodeSpec], templates: Mapping[int, TemplateSpec]
) -> RuleSpec:  # fmt: skip
    return RuleSpec(
        row.pk,
        row.kind,
        row.version,
        row.scope,
        row.limit or 0,
        row.window or timedelta(0),
        row.quiet_from or time(0),
        row.quiet_to or time(0),
        row.timezone,
        row.limits,
        tuple(f"{name} {value}" for name in ("channel", "category", "tag") if (value := getattr(row, name))),
        _find_coverage(row, nodes, templates),
    )


def _find_coverage(
    row: HarassmentRule, nodes: Mapping[int, NodeSpec], templates: Mapping[int, TemplateSpec]
) -> RuleCoverage | None:
    """Return what the rule counts; None for all. A touch counts by what its node and template are now."""
    if not (row.channel or row.category or row.tag):
        return None
    covered = [
        node
        for node in nodes.values()
        if (not row.channel or row.channel in (node.channel.key, node.channel.kind))
        and (not row.tag or row.tag in node.tags)
    ]
    found = frozenset(each.id for each in templates.values() if not row.category or each.category == row.category)
    awaited = frozenset(node.id for node in covered if any(each.id in found for each in node.contents))
    return RuleCoverage(frozenset(node.id for node in covered), found, awaited)


def calendars_spec(rows: Sequence[Calendar]) -> CalendarsSpec:
    """Return the calendars from their rows in order: the first is the default.

    Without rows it is that of China, in the installation's time zone.
    """
    if not rows:
        return CalendarsSpec(default=CalendarSpec(timezone=settings.TIME_ZONE))
    found = [calendar_spec(row) for row in rows]
    calendars = CalendarsSpec({each.key: each for each in found}, found[0])
    return replace(calendars, windows=compile_windows(rows[0].send_window, calendars))


def calendar_spec(row: Calendar) -> CalendarSpec:
    days = dict.fromkeys(map(date.fromisoformat, row.closed), False)
    days |= dict.fromkeys(map(date.fromisoformat, row.open), True)
    return CalendarSpec(row.key, row.timezone, row.country, days)


def timing_spec(row: Node, calendars: CalendarsSpec) -> TimingSpec | None:
    """Return the times of a node; None if the delay alone decides."""
    windows = calendars.windows if row.send_window is None else compile_windows(row.send_window, calendars)
    if row.at is None and row.not_before is None and not windows:
        return None
    return TimingSpec(calendars.default, row.at, row.at_day, row.not_before, windows)


def variant_specs(
    row: Node, templates: Mapping[int, TemplateSpec]
) -> tuple[tuple[NodeCondition, TemplateSpec], ...]:  # fmt: skip
    """Return the variants of a node's content. One whose template was deleted is left out."""
    by_key = {template.key: template for template in templates.values()} if row.variants else {}
    compiled = [(compile_condition(each["when"]), by_key.get(each["template"])) for each in row.variants]
    return tuple((condition, template) for condition, template in compiled if condition and template)


def node_spec(
    row: Node, templates: Mapping[int, TemplateSpec], channels: Mapping[int, ChannelSpec], calendars: CalendarsSpec,
    holdout: HoldoutSpec | None = None,
) -> NodeSpec:  # fmt: skip
    return NodeSpec(
        id=row.pk,
        key=row.key,
        version=row.version,
        trigger=row.trigger,
        delay=row.delay,
        dynamic=row.dynamic,
        delay_rules=own_delay_rules(row.delay_rules),
        template=templates[row.template_id],
        channel=channels[row.channel_id],
        priority=row.priority,
        enabled=row.enabled and row.retired_at is None,
        rollout_percent=row.rollout_percent,
        rollout_communities=frozenset(row.rollout_communities),
        over_cap=row.over_cap,
        expires_after=row.expires_after,
        canary_template=templates[row.canary_template_id] if row.canary_template_id else None,
        canary_percent=row.canary_percent,
        canary_communities=frozenset(row.canary_communities),
        cancel_on=frozenset(row.cancel_on),
        on_repeat=row.on_repeat,
        holdout_percent=row.holdout_percent,
        guard_cap=row.guard_cap,
        guard_dedupe=row.guard_dedupe,
        guard_conversation=row.guard_conversation,
        guard_quiet_hours=row.guard_quiet_hours,
        condition=compile_condition(row.when),
        variants=variant_specs(row, templates),
        timing=timing_spec(row, calendars),
        tags=frozenset(row.tags),
        global_holdout=None if row.guard_holdout == "ignore" else holdout,
        stage=row.stage.key,
        from_nodes=frozenset(row.from_nodes),
        most_depth=settings.AFTERTOUCH_JOURNEY_DEPTH,
    )
