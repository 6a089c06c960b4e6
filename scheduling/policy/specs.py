"""Define the matrix, the rules and the customer as frozen values for the policy modules.

Values of a configuration are dataclasses. Values that every touch needs are named tuples, which are built four times as
fast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from scheduling.policy.node_conditions import Facts, NodeCondition
from scheduling.policy.profile import NO_PROFILE, Profile
from scheduling.policy.send_times import TimingSpec

OVERDUE_AFTER = timedelta(seconds=5)  #: past its due time; a waiting touch then counts as overdue

_NO_ITEMS: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class DelayRulesSpec:
    by_level: Mapping[str, timedelta]
    default: timedelta
    active_within: timedelta
    active_factor: float


@dataclass(frozen=True, slots=True)
class TextSpec:
    locale: str
    subject: str
    body: str


@dataclass(frozen=True, slots=True)
class TemplateSpec:
    id: int
    key: str
    version: int
    content_type: str
    category: str
    texts: tuple[TextSpec, ...]
    tracks_links: bool = True


@dataclass(frozen=True, slots=True)
class WebhookSpec:
    id: int
    key: str
    version: int
    config: Mapping[str, Any]
    events: frozenset[str]
    filter: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    id: int
    key: str
    kind: str
    config: Mapping[str, Any]
    idempotent: bool
    timeout: timedelta
    retry_delays: tuple[timedelta, ...]
    version: int
    retired: bool = False
    limits: tuple[Any, ...] = ()  #: messages a day and a month to each receiver, beside the quotas of the kind


@dataclass(frozen=True, slots=True)
class HoldoutSpec:
    """The share of customers that all nodes leave out. Another `key` draws other customers."""

    percent: float
    key: str = ""
    version: int = 1

    def includes(self, user_id: str) -> bool:
        return hash_to_percent(f"holdout of all nodes:{self.key}", user_id) < self.percent


@dataclass(frozen=True, slots=True)
class NodeSpec:
    id: int
    key: str
    version: int
    trigger: str
    delay: timedelta
    dynamic: bool
    delay_rules: DelayRulesSpec | None
    template: TemplateSpec
    channel: ChannelSpec
    priority: int
    enabled: bool
    rollout_percent: float
    rollout_communities: frozenset[str]
    over_cap: str
    expires_after: timedelta
    canary_template: TemplateSpec | None
    canary_percent: float
    canary_communities: frozenset[str]
    cancel_on: frozenset[str]
    on_repeat: str
    holdout_percent: float
    guard_cap: str
    guard_dedupe: str
    guard_conversation: str
    guard_quiet_hours: str
    condition: NodeCondition | None = None
    variants: tuple[tuple[NodeCondition, TemplateSpec], ...] = ()  #: the first that holds gives the content
    timing: TimingSpec | None = None  #: None: the delay alone decides
    tags: frozenset[str] = frozenset()  #: caps may count one of them
    global_holdout: HoldoutSpec | None = None  #: None: there is none, or the node sends to it too
    stage: str = ""
    from_nodes: frozenset[str] = frozenset()  #: keys of the nodes whose touches it follows; empty: any event
    most_depth: int = 0  #: greatest depth of the events that it follows

    @property
    def counted(self) -> frozenset[str]:
        """Return the event types whose earlier events the node's conditions count."""
        return frozenset().union(*(each.counted for each in self.conditions))

    @property
    def contents(self) -> tuple[TemplateSpec, ...]:
        """Return all templates that the node's touches may get."""
        canary = (self.canary_template,) if self.canary_template else ()
        return (self.template, *canary, *(template for _, template in self.variants))

    @property
    def conditions(self) -> tuple[NodeCondition, ...]:
        """Return the node's condition and those of its variants."""
        own = (self.condition,) if self.condition else ()
        return (*own, *(condition for condition, _ in self.variants))


class RuleCoverage(NamedTuple):
    """The touches that a rule of a channel, category or tag counts and limits, by ids."""

    nodes: frozenset[int]  #: with its channel and tag
    templates: frozenset[int]  #: of its category
    awaited: frozenset[int]  #: of `nodes`, those with such a template: their next touch may count


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """An anti-harassment rule."""

    id: int
    kind: str
    version: int
    scope: str = "user"
    limit: int = 0
    window: timedelta = timedelta(0)
    quiet_from: time = time(0)
    quiet_to: time = time(0)
    timezone: str = "Asia/Shanghai"
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)  #: by level, instead of `limit`
    kinds: tuple[str, ...] = ()  #: what it counts, for verdicts: `channel sms`, `category marketing`, `tag sale`
    coverage: RuleCoverage | None = None  #: None: all touches

    def limit_for(self, level: str) -> int:
        return self.limits.get(level, self.limit)

    def covers(self, node_id: int, template_id: int) -> bool:
        coverage = self.coverage
        return coverage is None or (node_id in coverage.nodes and template_id in coverage.templates)

    def may_cover(self, node_id: int) -> bool:
        """Return whether a touch of this node, whose template is not chosen yet, may count."""
        return self.coverage is None or node_id in self.coverage.awaited


class CustomerSpec(NamedTuple):
    id: int
    user_id: str
    name: str = ""
    level: str = ""
    locale: str = ""
    timezone: str = ""
    opted_out: bool = False
    last_active_at: datetime | None = None
    conversation_at: datetime | None = None
    addresses: Mapping[str, Any] = _NO_ITEMS
    profile: Profile = NO_PROFILE  #: read only where a condition or a text of the batch needs it


class EventSpec(NamedTuple):
    id: UUID
    source: str
    event_id: str
    type: str
    occurred_at: datetime
    user_id: str
    chat_id: str
    data: Mapping[str, Any] = _NO_ITEMS
    trace_id: UUID | None = None  #: None: the event's id is the trace

    @property
    def trace(self) -> UUID:
        return self.trace_id or self.id


def hash_to_percent(salt: str, key: str) -> float:
    """Map `key` to a stable number from 0 to 100, equal on all nodes and independent between salts."""
    return int.from_bytes(hashlib.sha256(f"{salt}\0{key}".encode()).digest()[:8]) * 100 / 2**64


def in_rollout(node: NodeSpec, chat_id: str, user_id: str) -> bool:
    """Return whether the node's roll-out includes this community, or the customer if there is no community."""
    if node.rollout_percent >= 100 or chat_id in node.rollout_communities:
        return True
    return hash_to_percent(f"rollout:{node.key}", chat_id or user_id) < node.rollout_percent


def in_holdout(node: NodeSpec, user_id: str) -> bool:
    """Return whether the customer is in the node's hold-out.

    Hold-out customers never get the touch, so that its effect can be measured.
    """
    return node.holdout_percent > 0 and hash_to_percent(f"holdout:{node.key}", user_id) < node.holdout_percent


def template_for(node: NodeSpec, chat_id: str, user_id: str, facts: Facts | None = None) -> TemplateSpec:
    """Return the first variant whose condition holds; else the template, or its canary for the communities of that."""
    if node.variants and facts is not None:
        for condition, template in node.variants:
            if condition.holds(facts):
                return template
    canary = node.canary_template
    if canary is None:
        return node.template
    if chat_id in node.canary_communities:
        return canary
    return (
        canary
        if hash_to_percent(f"canary:{node.key}:{canary.key}", chat_id or user_id) < node.canary_percent
        else node.template
    )
