"""Preview an event without writing: the touches that it would plan, and the verdict of each at its due time.

Also report, for one customer, which nodes may send now and how full the caps are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.utils.timezone import now

from scheduling.configuration import snapshot
from scheduling.customers.inputs import CustomerFields
from scheduling.delivery import due_batch
from scheduling.delivery.due_batch import CustomerHistory
from scheduling.delivery.routing import find_preview_escape
from scheduling.ids import new_id
from scheduling.models import Customer
from scheduling.planning.earlier_events import load_event_times
from scheduling.planning.ingest import NewEvent
from scheduling.policy import guards, matrix
from scheduling.policy.guards import SEND, Candidate, GuardContext, GuardVerdict
from scheduling.policy.matrix import TOUCH_TYPES, is_followed
from scheduling.policy.node_conditions import Facts, count_recent
from scheduling.policy.profile import read_value
from scheduling.policy.specs import CustomerSpec, EventSpec, NodeSpec, RuleSpec, TemplateSpec, template_for
from scheduling.templating import CannotRender, render_message


@dataclass(frozen=True, slots=True)
class PreviewedTouch:
    """A touch that the event would plan, or with `planned` false one that the node's condition keeps it from."""

    node: NodeSpec
    template: TemplateSpec
    due_at: datetime
    expires_at: datetime
    verdict: GuardVerdict
    subject: str
    body: str
    problem: str  #: why rendering failed, or ""
    locale: str = ""  #: of the text
    customer_locale: str = ""
    planned: bool = True
    steps: tuple[tuple[str, datetime], ...] = ()  #: the end of the delay, then what moved the due time, and where to
    followers: tuple[NodeSpec, ...] = ()  #: the nodes that follow the touch


def preview_event(
    event: NewEvent, *, customer: CustomerSpec | None = None, node_id: int | None = None
) -> list[PreviewedTouch]:
    """Return the touches that an event would plan now, and the nodes whose condition plans none. Writes nothing.

    Verdicts are those at the due time, with the current rules and the messages sent until now. `customer` replaces the
    stored one (see `imagine_customer`). With `node_id` only this node is asked, as if it were enabled.
    """
    config = snapshot.current()
    who = customer or _load_customer(event.user_id)
    spec = EventSpec(
        new_id(), event.source, event.event_id, event.type, event.occurred_at or now(), event.user_id, event.chat_id,
        event.data,
    )  # fmt: skip
    if node_id is None:
        nodes = [node for node in config.triggered.get(event.type, ()) if is_followed(node, spec)]
    else:
        nodes = [replace(config.nodes[node_id], enabled=True)] if node_id in config.nodes else []
    times = load_event_times([who.id], {kind for node in nodes for kind in node.counted}, spec.occurred_at)
    facts = matrix.collect_facts(spec, who, count_recent(times.get(who.id, {}), spec.occurred_at))
    past = due_batch.load_customer_history(who.id, event.chat_id, config)
    return [_preview_touch(node, spec, who, facts, past, config) for node in nodes]


def _load_customer(user_id: str) -> CustomerSpec:
    row = Customer.objects.filter(user_id=user_id).first()
    return row.spec() if row else CustomerSpec(0, user_id)


def imagine_customer(
    user_id: str, *, level: str = "", tags: Sequence[str] = (), attributes: Mapping[str, Any] | None = None
) -> CustomerSpec:
    """Return the customer, stored or not, as it would be with these values. Attributes are merged by name.

    Raises:
        InvalidInput: `level`, `tags` or `attributes` are not accepted.
    """
    who = _load_customer(user_id)
    given = CustomerFields.read({"level": level, "tags": list(tags), "attributes": dict(attributes or {})})
    added = {name: read_value(value) for name, value in given.attributes.items()}
    merged = {name: value for name, value in {**who.profile.attributes, **added}.items() if value is not None}
    profile = who.profile._replace(attributes=merged, tags=tuple(given.tags) or who.profile.tags)
    return who._replace(level=level or who.level, profile=profile)


def _preview_touch(
    node: NodeSpec, event: EventSpec, who: CustomerSpec, facts: Facts, past: CustomerHistory, config: snapshot.Snapshot
) -> PreviewedTouch:
    scaled: dict[str, Any] = {"occurred_at": event.occurred_at, "time_scale": settings.AFTERTOUCH_TIME_SCALE}
    due_at, moved = matrix.find_due_time(node, who, config.delay_rules, **scaled)
    steps = (("delay", event.occurred_at + matrix.delay_for(node, who, config.delay_rules, **scaled)), *moved)
    expires_at = due_at + node.expires_after
    template = template_for(node, event.chat_id, event.user_id, facts)
    candidate = Candidate(new_id(), node, who, template, event.chat_id, event.occurred_at, expires_at, facts=facts)
    context = GuardContext(
        rules=config.rules,
        paused=config.paused,
        slots=past.slots.get(who.id, ()),
        community_slots=past.community_slots.get(event.chat_id, ()),
    )
    verdict = guards.judge_touch(candidate, context._replace(checks=guards.PLANNING_CHECKS), now())
    if verdict.decision != SEND:
        return PreviewedTouch(node, template, due_at, expires_at, verdict, "", "", "", planned=False)
    verdict = guards.judge_touch(candidate, context, max(due_at, now()))
    try:
        subject, body, locale = render_message(template, who, event, find_preview_escape(node.channel))
        problem = ""
    except CannotRender as error:
        subject, body, locale, problem = "", "", "", str(error)
    followers = tuple(
        each for kind in sorted(TOUCH_TYPES) for each in config.triggered.get(kind, ()) if node.key in each.from_nodes
    )
    return PreviewedTouch(
        node, template, due_at, expires_at, verdict, subject, body, problem, locale, who.locale,
        steps=steps, followers=followers,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    node: NodeSpec
    verdict: GuardVerdict
    reads_event: bool  #: a condition of the node or of a variant reads the event, which is empty here


@dataclass(frozen=True, slots=True)
class CapUsage:
    """The usage of a cap."""

    rule: RuleSpec
    taken: int
    limit: int  #: for the customer's level


@dataclass(frozen=True, slots=True)
class Eligibility:
    answers: list[NodeVerdict]  #: of the enabled nodes, in the order of their keys
    usages: list[CapUsage]

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
    """Judge all enabled nodes for an event that occurs now without data and without a community.

    The verdicts use the current rules and the messages sent until now.
    """
    config = snapshot.current()
    slots = due_batch.load_customer_history(who.id, "", config).slots.get(who.id, [])
    context = GuardContext(rules=config.rules, paused=config.paused, slots=slots)
    nodes = sorted((node for node in config.nodes.values() if node.enabled), key=lambda node: node.key)
    times = load_event_times([who.id], {kind for node in nodes for kind in node.counted}, now)
    event = EventSpec(new_id(), "", "", "", now, who.user_id, "")
    facts = matrix.collect_facts(event, who, count_recent(times.get(who.id, {}), now))
    answers = []
    for node in nodes:
        template = template_for(node, "", who.user_id, facts)
        touch = Candidate(new_id(), node, who, template, "", now, now + node.expires_after, facts=facts)
        verdict = guards.judge_touch(touch, context, now)
        reads_event = any(not row.field.startswith("customer.") for each in node.conditions for row in each.rows())
        answers.append(NodeVerdict(node, verdict, reads_event))
    usages = []
    for rule in config.rules:
        if (rule.kind, rule.scope) == ("cap", "user"):
            taken = sum(
                slot.counts and slot.at > now - rule.window and rule.covers(slot.node_id, slot.template_id)
                for slot in slots
            )
            usages.append(CapUsage(rule, taken, rule.limit_for(who.level)))
    return Eligibility(answers, usages)
