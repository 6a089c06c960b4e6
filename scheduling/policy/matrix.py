"""Plan the touches of an event from the nodes of the matrix. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from scheduling.policy.journeys import is_followed
from scheduling.policy.node_conditions import Facts
from scheduling.policy.send_times import SendTime, find_send_time
from scheduling.policy.specs import CustomerSpec, DelayRulesSpec, EventSpec, NodeSpec

_NONE_EARLIER: Final[Mapping[str, int]] = {}


def delay_for(
    node: NodeSpec, customer: CustomerSpec, rules: DelayRulesSpec, *, occurred_at: datetime, time_scale: float = 1
) -> timedelta:
    """Return the wait from the event to the touch.

    `customer.last_active_at` is the activity before the event itself.
    """
    wait = dynamic_delay(node.delay_rules or rules, customer, occurred_at) if node.dynamic else node.delay
    return wait / time_scale


def dynamic_delay(rules: DelayRulesSpec, customer: CustomerSpec, occurred_at: datetime) -> timedelta:
    """Return the base delay of the customer's level, times `active_factor` after recent activity."""
    base = rules.by_level.get(customer.level, rules.default)
    active_at = customer.last_active_at
    if active_at is not None and occurred_at - active_at <= rules.active_within:
        return base * rules.active_factor
    return base


def find_due_time(
    node: NodeSpec, customer: CustomerSpec, rules: DelayRulesSpec, *, occurred_at: datetime, time_scale: float = 1
) -> SendTime:
    """Return when a touch is due: after the delay, then at the time and inside the windows of its node."""
    base = occurred_at + delay_for(node, customer, rules, occurred_at=occurred_at, time_scale=time_scale)
    if node.timing is None:
        return SendTime(base)
    return find_send_time(node.timing, base, customer.timezone, customer.user_id)


def collect_facts(event: EventSpec, customer: CustomerSpec, earlier: Mapping[str, int] = _NONE_EARLIER) -> Facts:
    """Return what conditions are judged by. `earlier` counts the customer's earlier events by type."""
    return Facts(
        event.data,
        event.chat_id,
        customer.level,
        customer.profile.tags,
        customer.profile.attributes,
        earlier,
        customer.locale,
        event.type,
        event.source,
    )


@dataclass(frozen=True, slots=True)
class PlannedTouch:
    node: NodeSpec
    due_at: datetime
    expires_at: datetime


def plan_touches(
    event: EventSpec,
    customer: CustomerSpec,
    nodes: Iterable[NodeSpec],
    rules: DelayRulesSpec,
    *,
    time_scale: float = 1,
    earlier: Mapping[str, int] = _NONE_EARLIER,
) -> list[PlannedTouch]:
    """Return a touch for each enabled node that the event triggers and whose condition holds.

    Guards decide later, at fire time. The condition is one of them.
    """
    planned = []
    for node in nodes:
        if node.enabled and node.trigger == event.type and is_followed(node, event):
            if node.condition and not node.condition.holds(collect_facts(event, customer, earlier)):
                continue
            due_at = find_due_time(
                node, customer, rules, occurred_at=event.occurred_at, time_scale=time_scale
            ).at  # fmt: skip
            planned.append(PlannedTouch(node, due_at, due_at + node.expires_after))
    return planned
