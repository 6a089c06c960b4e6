"""Sample data of the core's tests: one customer, one node, the article's limits."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any
from uuid import UUID

from scheduling.ids import new_id
from scheduling.policy.guards import Candidate, CapSlot, GuardContext
from scheduling.policy.specs import (
    ChannelSpec,
    CustomerSpec,
    DelayRulesSpec,
    EventSpec,
    NodeSpec,
    RuleSpec,
    TemplateSpec,
    TextSpec,
)

NOON = datetime(2026, 3, 3, 12, 0, tzinfo=UTC)  #: the present of the pure tests; 20:00 in Shanghai
HOUR, DAY = timedelta(hours=1), timedelta(days=1)

CAP = RuleSpec(1, "cap", 7, limit=3, window=24 * HOUR)
DEDUPE = RuleSpec(2, "dedupe", 8, window=72 * HOUR)
CONVERSATION = RuleSpec(3, "conversation", 9)
NIGHT = RuleSpec(4, "quiet_hours", 10, quiet_from=time(22), quiet_to=time(8), timezone="Asia/Shanghai")
COMMUNITY_CAP = RuleSpec(5, "cap", 11, scope="community", limit=2, window=HOUR)
COMMUNITY_DEDUPE = RuleSpec(6, "dedupe", 12, scope="community", window=72 * HOUR)
RULES = (CAP, DEDUPE, CONVERSATION, NIGHT, COMMUNITY_CAP, COMMUNITY_DEDUPE)

ARTICLE = DelayRulesSpec({"vip": timedelta(seconds=3600), "normal": timedelta(seconds=7200)}, DAY, DAY, 0.6)


def template(key: str = "guide", body: str = "hi", **changes: Any) -> TemplateSpec:
    usual: dict[str, Any] = {
        "id": 1, "key": key, "version": 1, "content_type": key, "category": "marketing",
        "texts": (TextSpec("zh-hans", "", body),),
    }  # fmt: skip
    return TemplateSpec(**usual | changes)


def node(key: str = "guide", **changes: Any) -> NodeSpec:
    usual: dict[str, Any] = {
        "id": 1, "key": key, "version": 5, "trigger": "material.downloaded", "delay": timedelta(minutes=15),
        "dynamic": False, "delay_rules": None, "template": template(key),
        "channel": ChannelSpec(1, "log", "log", {}, True, timedelta(seconds=10), (), 1),
        "priority": 1, "enabled": True, "rollout_percent": 100.0, "rollout_communities": frozenset(),
        "over_cap": "suppress", "expires_after": 3 * DAY, "canary_template": None, "canary_percent": 0.0,
        "canary_communities": frozenset(), "cancel_on": frozenset(), "on_repeat": "each", "holdout_percent": 0.0,
        "guard_cap": "apply", "guard_dedupe": "apply", "guard_conversation": "apply", "guard_quiet_hours": "apply",
    }  # fmt: skip
    return NodeSpec(**usual | changes)


def ann(**changes: Any) -> CustomerSpec:
    return CustomerSpec(**{"id": 1, "user_id": "ann", "name": "Ann"} | changes)


def event(type: str = "material.downloaded", **changes: Any) -> EventSpec:
    usual: dict[str, Any] = {
        "id": new_id(), "source": "shop", "event_id": "e1", "type": type, "occurred_at": NOON, "user_id": "ann",
        "chat_id": "c1",
    }  # fmt: skip
    return EventSpec(**usual | changes)


def candidate(**changes: Any) -> Candidate:
    """A touch of Ann's that every guard accepts."""
    usual: dict[str, Any] = {
        "task_id": new_id(), "node": node(), "customer": ann(), "template": template(), "chat_id": "c1",
        "event_at": NOON - HOUR, "expires_at": NOON + 3 * DAY,
    }  # fmt: skip
    return Candidate(**usual | changes)


def slot(hours_ago: float = 1, content_type: str = "other", **changes: Any) -> CapSlot:
    usual: dict[str, Any] = {
        "task_id": new_id(), "at": NOON - hours_ago * HOUR, "content_type": content_type, "counts": True,
        "settled": True,
    }  # fmt: skip
    return CapSlot(**usual | changes)


def unsettled(until: datetime, **changes: Any) -> CapSlot:
    return slot(settled=False, until=until, **changes)


def around(*, rules: tuple[RuleSpec, ...] = (CAP, DEDUPE, CONVERSATION), **changes: Any) -> GuardContext:
    return GuardContext(rules=rules, **changes)


def ids(*numbers: int) -> list[UUID]:
    return [UUID(int=number) for number in numbers]
