"""Event × nodes → the touches to plan, and the waiting ones that the event makes obsolete."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from scheduling.policy.delay import delay_for
from scheduling.policy.specs import CustomerSpec, DelayRules, EventSpec, NodeSpec


@dataclass(frozen=True, slots=True)
class PlannedTouch:
    node: NodeSpec
    due_at: datetime
    expires_at: datetime


def plan(
    event: EventSpec,
    customer: CustomerSpec,
    nodes: Iterable[NodeSpec],
    rules: DelayRules,
    *,
    time_scale: float = 1,
) -> list[PlannedTouch]:
    """A touch for each enabled node that the event triggers. Nothing is judged here: guards decide at fire time."""
    planned = []
    for node in nodes:
        if node.enabled and node.trigger == event.type:
            wait = delay_for(node, customer, rules, occurred_at=event.occurred_at, time_scale=time_scale)
            due_at = event.occurred_at + wait
            planned.append(PlannedTouch(node, due_at, due_at + node.expires_after))
    return planned
