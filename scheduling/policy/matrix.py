"""Plan the touches of an event from the nodes of the matrix. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from scheduling.policy.specs import CustomerSpec, DelayRulesSpec, EventSpec, NodeSpec


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
) -> list[PlannedTouch]:
    """Return a touch for each enabled node that the event triggers. Guards decide later, at fire time."""
    planned = []
    for node in nodes:
        if node.enabled and node.trigger == event.type:
            wait = delay_for(node, customer, rules, occurred_at=event.occurred_at, time_scale=time_scale)
            due_at = event.occurred_at + wait
            planned.append(PlannedTouch(node, due_at, due_at + node.expires_after))
    return planned
