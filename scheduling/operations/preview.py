"""Preview an event without writing: the touches that it would plan, and the verdict of each at its due time.

Also report, for one customer, which nodes may send now and how full the caps are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.utils.timezone import now

from scheduling.configuration import snapshot
from scheduling.delivery import due_batch
from scheduling.delivery.due_batch import History
from scheduling.ids import new_id
from scheduling.models import Customer
from scheduling.planning.ingest import NewEvent
from scheduling.policy import guards, matrix
from scheduling.policy.guards import SEND, Candidate, Slot, Surroundings, Verdict
from scheduling.policy.specs import CustomerSpec, EventSpec, NodeSpec, RuleSpec, TemplateSpec, template_for
from scheduling.rendering import CannotRender, render


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A touch that the event would plan."""

    node: NodeSpec
    template: TemplateSpec
    due_at: datetime
    expires_at: datetime
    verdict: Verdict
    subject: str
    body: str
    problem: str  #: why rendering failed, or ""


def foresee(event: NewEvent, *, customer: CustomerSpec | None = None) -> list[Foreseen]:
    """Return the touches that an event would plan now. Writes nothing.

    Verdicts are those at the due time, with the current rules and the messages sent until now.
    """
    config = snapshot.current()
    who = customer or _customer(event.user_id)
    spec = EventSpec(
        new_id(), event.source, event.event_id, event.type, event.occurred_at or now(), event.user_id, event.chat_id,
        event.data,
    )  # fmt: skip
    nodes = config.triggered.get(event.type, ())
    planned = matrix.plan(spec, who, nodes, config.delay_rules, time_scale=settings.AFTERTOUCH_TIME_SCALE)
    past = due_batch.of_customer(who.id, event.chat_id, config)
    return [_foresee_one(each, spec, who, past, config) for each in planned]


def _customer(user_id: str) -> CustomerSpec:
    row = Customer.objects.filter(user_id=user_id).first()
    return row.spec() if row else CustomerSpec(0, user_id)


def _foresee_one(
    planned: matrix.PlannedTouch, event: EventSpec, who: CustomerSpec, past: History, config: snapshot.Snapshot
) -> Foreseen:
    node = planned.node
    template = template_for(node, event.chat_id, event.user_id)
    candidate = Candidate(new_id(), node, who, template, event.chat_id, event.occurred_at, planned.expires_at)
    around = Surroundings(
        rules=config.rules,
        paused=config.paused,
        slots=past.slots.get(who.id, ()),
        community_slots=past.community_slots.get(event.chat_id, ()),
    )
    verdict = guards.judge(candidate, around, max(planned.due_at, now()))
    try:
        subject, body, _ = render(template, who, event)
        problem = ""
    except CannotRender as error:
        subject, body, problem = "", "", str(error)
    return Foreseen(node, template, planned.due_at, planned.expires_at, verdict, subject, body, problem)


@dataclass(frozen=True, slots=True)
class Answer:
    node: NodeSpec
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Room:
    """The usage of a cap."""

    rule: RuleSpec
    taken: int


@dataclass(frozen=True, slots=True)
class Eligibility:
    answers: list[Answer]  #: of the enabled nodes, in the order of their keys
    rooms: list[Room]

    @property
    def is_open(self) -> bool:
        """Return whether any node may send now."""
        return any(each.verdict.decision == SEND for each in self.answers)

    @property
    def opens_at(self) -> datetime | None:
        """Return when the first of the other nodes may send; None if unknown."""
        waits = [each.verdict.next_eligible_at for each in self.answers if each.verdict.next_eligible_at]
        return min(waits, default=None)


def of_customer(who: CustomerSpec, now: datetime) -> Eligibility:
    """Judge all enabled nodes for an event that occurs now without a community.

    The verdicts use the current rules and the messages sent until now.
    """
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
