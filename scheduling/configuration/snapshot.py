"""Keep the matrix and the rules as one frozen snapshot per process, reloaded after an edit."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import time, timedelta
from functools import cached_property
from typing import Any

from django.conf import settings
from django.db import connection

from scheduling.channels.base import is_immediate
from scheduling.channels.kinds import channel_kinds
from scheduling.models import ChannelConfig, DelayRule, EventType, HarassmentRule, Node, Pause, Template
from scheduling.policy.guards import Check, checks_for, pause_scopes
from scheduling.policy.specs import ChannelSpec, DelayRulesSpec, NodeSpec, RuleSpec, TemplateSpec, TextSpec

DEFAULT_RETRY_DELAYS = (10, 60, 300, 1800, 7200)


@dataclass(frozen=True)
class Snapshot:
    """All configuration that operators edit, as of `version`."""

    version: tuple[Any, ...]  #: counter and time of the edit: after a rollback the counter alone repeats
    nodes: Mapping[int, NodeSpec]
    triggered: Mapping[str, tuple[NodeSpec, ...]]  #: by event type, the nodes that it triggers
    cancelling: Mapping[str, tuple[NodeSpec, ...]]  #: by event type, the nodes whose touches it cancels
    templates: Mapping[int, TemplateSpec]
    channels: Mapping[int, ChannelSpec]
    delay_rules: DelayRulesSpec
    rules: tuple[RuleSpec, ...]
    paused: frozenset[str]
    activity_types: Mapping[str, bool]

    @property
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
    def delivering_inline(self) -> frozenset[int]:
        """Return the ids of the nodes whose channel delivers in the judging transaction, without the sender."""
        kinds = channel_kinds()
        return frozenset(node.id for node in self.nodes.values() if is_immediate(kinds.get(node.channel.kind)))

    @cached_property
    def counting_quotas(self) -> frozenset[int]:
        """Return the ids of the nodes whose receivers have quotas. A paused node sends nothing."""
        kinds = channel_kinds()
        counting = {node.id for node in self.nodes.values() if getattr(kinds.get(node.channel.kind), "quotas", ())}
        return frozenset(counting - self.paused_nodes)

    @cached_property
    def paused_nodes(self) -> frozenset[int]:
        """Return the ids of the nodes that an operator paused, by themselves or with their channel or everything."""
        return frozenset(node.id for node in self.nodes.values() if self.paused.intersection(pause_scopes(node)))

    @cached_property
    def checks(self) -> Mapping[int, tuple[Check, ...]]:
        """Return the checks that can object to the touches of a node, by its id."""
        return {node.id: checks_for(node, self.rules, self.paused) for node in self.nodes.values()}

    @property
    def counts_communities(self) -> bool:
        """Return whether a community cap is active."""
        return any(rule.kind == "cap" and rule.scope == "community" for rule in self.rules)


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
    rows = list(Node.objects.all())
    templates = {row.pk: template_spec(row) for row in Template.objects.prefetch_related("texts")}
    channels = {row.pk: channel_spec(row) for row in ChannelConfig.objects.all()}
    nodes = {row.pk: node_spec(row, templates, channels) for row in rows}
    triggered: dict[str, list[NodeSpec]] = defaultdict(list)
    cancelling: dict[str, list[NodeSpec]] = defaultdict(list)
    for node in nodes.values():
        if node.enabled:
            triggered[node.trigger].append(node)
        for event_type in node.cancel_on:
            cancelling[event_type].append(node)
    return Snapshot(
        version=version,
        nodes=nodes,
        triggered={key: tuple(value) for key, value in triggered.items()},
        cancelling={key: tuple(value) for key, value in cancelling.items()},
        templates=templates,
        channels=channels,
        delay_rules=delay_rules_spec(DelayRule.objects.first() or DelayRule()),
        rules=tuple(rule_spec(row) for row in HarassmentRule.objects.filter(enabled=True, retired_at=None)),
        paused=frozenset(Pause.objects.values_list("scope", flat=True)),
        activity_types=dict(EventType.objects.values_list("key", "is_activity")),
    )


def template_spec(row: Template) -> TemplateSpec:
    texts = sort_texts(TextSpec(text.locale, text.subject, text.body) for text in row.texts.all())
    return TemplateSpec(row.pk, row.key, row.version, row.content_type, row.category, texts)


def sort_texts(texts: Iterable[TextSpec]) -> tuple[TextSpec, ...]:
    """Return the text in the default language first: a customer without a locale gets the first one."""
    return tuple(sorted(texts, key=lambda text: (text.locale != settings.LANGUAGE_CODE, text.locale)))


def channel_spec(row: ChannelConfig) -> ChannelSpec:
    delays = tuple(timedelta(seconds=each) for each in row.retry_delays or DEFAULT_RETRY_DELAYS)
    return ChannelSpec(
        row.pk, row.key, row.kind, row.config, row.idempotent, row.timeout, delays, row.version, bool(row.retired_at)
    )


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


def rule_spec(row: HarassmentRule) -> RuleSpec:
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
    )


def node_spec(row: Node, templates: Mapping[int, TemplateSpec], channels: Mapping[int, ChannelSpec]) -> NodeSpec:
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
    )
