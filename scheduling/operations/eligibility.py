"""What the guards would say to a customer's next touch, node by node, if it were due at this moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from scheduling.configuration import snapshot
from scheduling.delivery import due_batch
from scheduling.ids import new_id
from scheduling.policy import guards
from scheduling.policy.guards import SEND, Candidate, Slot, Surroundings, Verdict
from scheduling.policy.specs import CustomerSpec, NodeSpec, RuleSpec, template_for


@dataclass(frozen=True, slots=True)
class Answer:
    node: NodeSpec
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Room:
    """How full a cap is."""

    rule: RuleSpec
    taken: int


@dataclass(frozen=True, slots=True)
class Eligibility:
    answers: list[Answer]  #: of the nodes that are switched on, in the order of their keys
    rooms: list[Room]

    @property
    def is_open(self) -> bool:
        """Some node may send now."""
        return any(each.verdict.decision == SEND for each in self.answers)

    @property
    def opens_at(self) -> datetime | None:
        """When the first of the others may, as far as it is known."""
        waits = [each.verdict.next_eligible_at for each in self.answers if each.verdict.next_eligible_at]
        return min(waits, default=None)


def of_customer(who: CustomerSpec, now: datetime) -> Eligibility:
    """By today's rules and what was sent until now, for an event that comes now and belongs to no community."""
    config = snapshot.current()
    slots = due_batch.of_customer(who.id, "", config).slots.get(who.id, [])
    around = Surroundings(rules=config.rules, paused=config.paused, slots=slots)
    nodes = sorted((node for node in config.nodes.values() if node.enabled), key=lambda node: node.key)
    return Eligibility(
        [Answer(node, _judge(node, who, around, now)) for node in nodes], _rooms(config.rules, slots, now)
    )


def _judge(node: NodeSpec, who: CustomerSpec, around: Surroundings, now: datetime) -> Verdict:
    template = template_for(node, "", who.user_id)
    return guards.judge(Candidate(new_id(), node, who, template, "", now, now + node.expires_after), around, now)


def _rooms(rules: Sequence[RuleSpec], slots: Sequence[Slot], now: datetime) -> list[Room]:
    caps = [rule for rule in rules if rule.kind == "cap" and rule.scope == "user"]
    return [Room(rule, sum(slot.counts and slot.at > now - rule.window for slot in slots)) for rule in caps]
