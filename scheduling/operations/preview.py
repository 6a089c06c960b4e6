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
from scheduling.delivery.due_batch import CustomerHistory
from scheduling.ids import new_id
from scheduling.models import Customer
from scheduling.planning.ingest import NewEvent
from scheduling.policy import guards, matrix
from scheduling.policy.guards import SEND, Candidate, CapSlot, GuardContext, GuardVerdict
from scheduling.policy.specs import CustomerSpec, EventSpec, NodeSpec, RuleSpec, TemplateSpec, template_for
from scheduling.templating.rendering import render_message
from scheduling.templating.values import CannotRender


@dataclass(frozen=True, slots=True)
class PreviewedTouch:
    """A touch that the event would plan."""

    node: NodeSpec
    template: TemplateSpec
    due_at: datetime
    expires_at: datetime
    verdict: GuardVerdict
    subject: str
    body: str
    problem: str  #: why rendering failed, or ""


def preview_event(event: NewEvent, *, customer: CustomerSpec | None = None) -> list[PreviewedTouch]:
    """Return the touches that an event would plan now. Writes nothing.

    Verdicts are those at the due time, with the current rules and the messages sent until now.
    """
    config = snapshot.current()
    who = customer or _load_customer(event.user_id)
    spec = EventSpec(
        new_id(), event.source, event.event_id, event.type, event.occurred_at or now(), event.user_id, event.chat_id,
        event.data,
    )  # fmt: skip
    nodes = config.triggered.get(event.type, ())
    planned = matrix.plan_touches(spec, who, nodes, config.delay_rules, time_scale=settings.AFTERTOUCH_TIME_SCALE)
    past = due_batch.load_customer_history(who.id, event.chat_id, config)
    return [_preview_touch(each, spec, who, past, config) for each in planned]


def _load_customer(user_id: str) -> CustomerSpec:
    row = Customer.objects.filter(user_id=user_id).first()
    return row.spec() if row else CustomerSpec(0, user_id)


def _preview_touch(
    planned: matrix.PlannedTouch, event: EventSpec, who: CustomerSpec, past: CustomerHistory, config: snapshot.Snapshot
) -> PreviewedTouch:
    node = planned.node
    template = template_for(node, event.chat_id, event.user_id)
    candidate = Candidate(new_id(), node, who, template, event.chat_id, event.occurred_at, planned.expires_at)
    context = GuardContext(
        rules=config.rules,
        paused=config.paused,
        slots=past.slots.get(who.id, ()),
        community_slots=past.community_slots.get(event.chat_id, ()),
    )
    verdict = guards.judge_touch(candidate, context, max(planned.due_at, now()))
    try:
        subject, body, _ = render_message(template, who, event)
        problem = ""
    except CannotRender as error:
        subject, body, problem = "", "", str(error)
    return PreviewedTouch(node, template, planned.due_at, planned.expires_at, verdict, subject, body, problem)


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    node: NodeSpec
    verdict: GuardVerdict


@dataclass(frozen=True, slots=True)
class CapUsage:
    """The usage of a cap."""

    rule: RuleSpec
    taken: int


@dataclass(frozen=True, slots=True)
class Eligibility:
    answers: list[NodeVerdict]  #: of the enabled nodes, in the order of their keys
    rooms: list[CapUsage]

    @property
    def is_open(self) -> bool:
        """Return whether any node may send now."""
        return any(each.verdict.decision == SEND for each in self.answers)

    @property
    def opens_at(self) -> datetime | None:
        """Return when the first of the other nodes may send; None if unknown."""
        waits = [each.verdict.next_eligible_at for each in self.answers if each.verdict.next_eligible_at]
        return min(waits, default=None)


def check_eligibility(who: CustomerSpec, now: datetime) -> Eligibility:
    """Judge all enabled nodes for an event that occurs now without a community.

    The verdicts use the current rules and the messages sent until now.
    """
    config = snapshot.current()
    slots = due_batch.load_customer_history(who.id, "", config).slots.get(who.id, [])
    context = GuardContext(rules=config.rules, paused=config.paused, slots=slots)
    nodes = sorted((node for node in config.nodes.values() if node.enabled), key=lambda node: node.key)
    return Eligibility(
        [NodeVerdict(node, _judge_node(node, who, context, now)) for node in nodes],
        _cap_usages(config.rules, slots, now),
    )


def _judge_node(node: NodeSpec, who: CustomerSpec, context: GuardContext, now: datetime) -> GuardVerdict:
    template = template_for(node, "", who.user_id)
    return guards.judge_touch(Candidate(new_id(), node, who, template, "", now, now + node.expires_after), context, now)


def _cap_usages(rules: Sequence[RuleSpec], slots: Sequence[CapSlot], now: datetime) -> list[CapUsage]:
    caps = [rule for rule in rules if rule.kind == "cap" and rule.scope == "user"]
    return [CapUsage(rule, sum(slot.counts and slot.at > now - rule.window for slot in slots)) for rule in caps]
