"""Count the results of one simulation as plain values for storage in a row."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime, tzinfo
from typing import Any

from scheduling.experiments.replay.simulation import SimulatedTouch, Simulation
from scheduling.policy.guards import HOLD, GuardVerdict
from scheduling.policy.specs import NodeSpec

MANY = 4  #: customers with this many sends or more are counted together


class ReplayCounter:
    """An observer that counts the events of a simulation."""

    def __init__(self, zone: tzinfo) -> None:
        self.zone = zone
        self.totals: Counter[str] = Counter()
        self.nodes: dict[str, Counter[str]] = defaultdict(Counter)
        self.suppressed: Counter[str] = Counter()
        self.suppressed_by_node: dict[str, Counter[str]] = defaultdict(Counter)
        self.deferred: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.days: Counter[str] = Counter()
        self.customers_at_cap: set[str] = set()
        self.communities_at_cap: set[str] = set()
        self.sends: Counter[str] = Counter()

    def planned(self, touch: SimulatedTouch, node: NodeSpec) -> None:
        self._count(node, "planned")
        if touch.waiting_at_start:
            self.totals["carried"] += 1

    def judged(self, touch: SimulatedTouch, node: NodeSpec, verdict: GuardVerdict, at: datetime) -> None:
        if verdict.rule == "cap":
            self.customers_at_cap.add(touch.event.user_id)
        elif verdict.rule == "community_cap":
            self.communities_at_cap.add(touch.event.chat_id)
        if verdict.decision == HOLD and verdict.rule not in touch.deferred_by:
            self.deferred[verdict.rule] += 1
            if not touch.deferred_by:
                self._count(node, "held")

    def ended(self, touch: SimulatedTouch, node: NodeSpec, state: str, reason: str, at: datetime) -> None:
        self._count(node, state)
        if state == "delivered":
            self.days[at.astimezone(self.zone).date().isoformat()] += 1
            self.sends[touch.event.user_id] += 1
        elif state == "suppressed":
            self.suppressed[reason] += 1
            self.suppressed_by_node[node.key][reason] += 1
        elif state == "cancelled":
            self.cancelled[reason] += 1
        else:
            self.failed[reason] += 1

    def summarize(self, simulation: Simulation) -> dict[str, Any]:
        """Return all counts, including the touches that wait at the end."""
        for touch in simulation.still_waiting():
            self._count(simulation.config.nodes[touch.node_id], "waiting")
        return {
            "totals": _sort_counts(self.totals),
            "nodes": {key: _sort_counts(self.nodes[key]) for key in sorted(self.nodes)},
            "suppressed": _sort_counts(self.suppressed),
            "suppressed_by_node": {key: _sort_counts(each) for key, each in sorted(self.suppressed_by_node.items())},
            "held": _sort_counts(self.deferred),
            "cancelled": _sort_counts(self.cancelled),
            "failed": _sort_counts(self.failed),
            "days": _sort_counts(self.days),
            "customers_at_cap": len(self.customers_at_cap),
            "communities_at_cap": len(self.communities_at_cap),
            "customers_reached": len(self.sends),
            "sends_a_customer": _sort_counts(Counter(str(min(count, MANY)) for count in self.sends.values())),
        }

    def _count(self, node: NodeSpec, what: str) -> None:
        self.totals[what] += 1
        self.nodes[node.key][what] += 1


def _sort_counts(counter: Counter[str]) -> dict[str, int]:
    """Sort by key, so that the same replay gives the same text."""
    return {key: counter[key] for key in sorted(counter)}
