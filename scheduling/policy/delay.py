"""How long to wait after an event. Mission A3: a base by the customer's level, shorter for who was active lately."""

from __future__ import annotations

from datetime import datetime, timedelta

from scheduling.policy.specs import CustomerSpec, DelayRules, NodeSpec


def delay_for(
    node: NodeSpec, customer: CustomerSpec, rules: DelayRules, *, occurred_at: datetime, time_scale: float = 1
) -> timedelta:
    """The wait from the event to the touch. `customer.last_active_at` is the activity before the event itself."""
    wait = dynamic_delay(node.delay_rules or rules, customer, occurred_at) if node.dynamic else node.delay
    return wait / time_scale


def dynamic_delay(rules: DelayRules, customer: CustomerSpec, occurred_at: datetime) -> timedelta:
    base = rules.by_level.get(customer.level, rules.default)
    active_at = customer.last_active_at
    if active_at is not None and occurred_at - active_at <= rules.active_within:
        return base * rules.active_factor
    return base
