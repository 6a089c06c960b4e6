"""Simulate one configuration in memory: events arrive; touches are planned, cancelled, judged, deferred and sent.

It applies the pure parts of ingest and delivery in their order. A send always succeeds at once. Pauses are ignored, and
Presence is not asked: only conversations from events count. Ends of followed touches are events at the same instant.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import heappop, heappush
from typing import Protocol
from uuid import UUID

from scheduling.policy import guards, matrix
from scheduling.policy.event_counts import EventTimes, add_event_time, count_recent
from scheduling.policy.guards import AwaitedTouch, Candidate, CapSlot, GuardContext
from scheduling.policy.journeys import END_TYPES, PASSIVE_TYPES, SOURCE, compose_end_data
from scheduling.policy.specs import (
    CustomerSpec,
    DelayRulesSpec,
    EventSpec,
    NodeSpec,
    RuleSpec,
    TemplateSpec,
    template_for,
)


class SimulationConfig(Protocol):
    """The parts of a configuration snapshot that a simulation reads."""

    @property
    def nodes(self) -> Mapping[int, NodeSpec]: ...
    @property
    def triggered(self) -> Mapping[str, tuple[NodeSpec, ...]]: ...
    @property
    def cancelling(self) -> Mapping[str, tuple[NodeSpec, ...]]: ...
    @property
    def delay_rules(self) -> DelayRulesSpec: ...
    @property
    def rules(self) -> tuple[RuleSpec, ...]: ...
    @property
    def activity_types(self) -> Mapping[str, bool]: ...
    @property
    def followed_ends(self) -> Mapping[str, frozenset[int]]: ...


@dataclass(slots=True)
class SimulatedCustomer:
    """A customer in the current state of the simulation."""

    spec: CustomerSpec
    opted_out_at: datetime | None = None
    times: EventTimes = field(default_factory=dict)  #: of counted types
    latest_events: dict[str, datetime] = field(default_factory=dict)  #: by event type: latest time of occurrence
    slots: deque[CapSlot] = field(default_factory=deque)
    waiting: dict[int, SimulatedTouch] = field(default_factory=dict)

    def copy(self) -> SimulatedCustomer:
        """Return the same customer for another simulation, before the first touch."""
        times = {kind: list(known) for kind, known in self.times.items()}
        return SimulatedCustomer(self.spec, self.opted_out_at, times, dict(self.latest_events), deque(self.slots))


@dataclass(slots=True, eq=False)
class SimulatedTouch:
    number: int
    node_id: int
    event: EventSpec  #: without its data after the end of the touch
    customer: SimulatedCustomer
    due_at: datetime
    expires_at: datetime
    priority: int
    earlier: Mapping[str, int]  #: by event type: events of the customer before its own
    judged_at: datetime | None = None
    verdicts: list[tuple[str, str]] = field(default_factory=list)  #: decision and rule; equal ones in a row once
    state: str = "waiting"
    reason: str = ""

    @property
    def task_id(self) -> UUID:
        return UUID(int=self.number)


#: Return why a permitted touch cannot be sent (missing data, no target), or "".
Prepare = Callable[[NodeSpec, TemplateSpec, CustomerSpec, EventSpec], str]


@dataclass
class Simulation:
    config: SimulationConfig
    now: datetime
    slot_hold: timedelta
    activity_grain: timedelta
    time_scale: float = 1
    prepare: Prepare = lambda node, template, customer, event: ""
    customers: dict[str, SimulatedCustomer] = field(default_factory=dict)
    communities: dict[str, deque[CapSlot]] = field(default_factory=lambda: defaultdict(deque))
    touches: list[SimulatedTouch] = field(default_factory=list)  #: all, ended ones included
    _agenda: list[tuple[datetime, int, datetime, int, SimulatedTouch]] = field(default_factory=list)
    _ends: deque[EventSpec] = field(default_factory=deque)
    _built: int = 0

    def __post_init__(self) -> None:
        rules = self.config.rules
        self._window = max((rule.window for rule in rules), default=timedelta(0))
        self._counts_communities = any(rule.scope == "community" for rule in rules)
        self._counted = frozenset[str]().union(*(node.counted for node in self.config.nodes.values()))
        self._capped = any(rule.kind == "cap" for rule in rules)

    # --- in the order of ingest ---

    def receive(self, events: Sequence[EventSpec], at: datetime) -> None:
        """Process events that arrived at one instant, in order. Their customers must be loaded."""
        self.advance(at)
        self._process_events(events)
        self._process_ends()

    def _process_ends(self) -> None:
        while self._ends:
            self._process_events([self._ends.popleft()])

    def _process_events(self, events: Sequence[EventSpec]) -> None:
        self._cancel_revoked(events)
        for event in events:
            person = self.customers[event.user_id]
            latest = person.latest_events.get(event.type)
            person.latest_events[event.type] = max(latest, event.occurred_at) if latest else event.occurred_at
        before = {event.user_id: self.customers[event.user_id].spec for event in events}
        fresh = [touch for event in events for touch in self._plan_touches(event)]
        obsolete = self._find_obsolete(fresh, events)
        for touch in fresh:
            self._add_planned_touch(touch, obsolete.get(touch.number, ""))
        self._remember_activity(events, before)

    def add_waiting_touch(
        self, node_id: int, event: EventSpec, due_at: datetime, expires_at: datetime, earlier: Mapping[str, int]
    ) -> None:
        """Add a touch that waited already at the start of the replay."""
        touch = self._build_touch(node_id, event, due_at, expires_at, self.config.nodes[node_id].priority, earlier)
        self.touches.append(touch)
        self._schedule(touch)

    def _cancel_revoked(self, events: Sequence[EventSpec]) -> None:
        for event in events:
            for node in self.config.cancelling.get(event.type, ()):
                for touch in self._list_waiting(event.user_id, node.id):
                    if touch.event.occurred_at <= event.occurred_at:
                        self._end_touch(touch, "cancelled", f"event:{event.type}")

    def _plan_touches(self, event: EventSpec) -> Iterator[SimulatedTouch]:
        """Plan the touches of an event. It sees the activity of earlier events, not its own."""
        person = self.customers[event.user_id]
        nodes = self.config.triggered.get(event.type, ())
        earlier = count_recent(person.times, event.occurred_at) if any(node.counted for node in nodes) else {}
        planned = matrix.plan_touches(
            event, person.spec, nodes, self.config.delay_rules, time_scale=self.time_scale, earlier=earlier
        )
        if event.type in self._counted:
            add_event_time(person.times, event.type, event.occurred_at)
        for each in planned:
            yield self._build_touch(each.node.id, event, each.due_at, each.expires_at, each.node.priority, earlier)
        active_at, talking_at = person.spec.last_active_at, person.spec.conversation_at
        is_activity = self.config.activity_types.get(event.type, event.type not in PASSIVE_TYPES)
        if is_activity and (active_at is None or event.occurred_at > active_at):
            active_at = event.occurred_at
        if event.type == "conversation.started" and (talking_at is None or event.occurred_at > talking_at):
            talking_at = event.occurred_at
        person.spec = person.spec._replace(last_active_at=active_at, conversation_at=talking_at)

    def _find_obsolete(self, fresh: Sequence[SimulatedTouch], events: Sequence[EventSpec]) -> dict[int, str]:
        """Return the new touches to cancel at once, with the reason.

        The reason is an earlier event that occurred later, or a following event of the batch.
        """
        positions = {event.id: place for place, event in enumerate(events)}
        found: dict[int, str] = {}
        for touch in fresh:
            revoking, event = self.config.nodes[touch.node_id].cancel_on, touch.event
            for kind in sorted(revoking - {event.type}):
                latest = touch.customer.latest_events.get(kind)
                if latest and latest > event.occurred_at:
                    found.setdefault(touch.number, f"event:{kind}")
            # The last event of the batch is checked first, as in ingest.
            for other in reversed(events[positions[event.id] + 1 :]) if revoking else ():
                if other.user_id == event.user_id and other.type in revoking and other.occurred_at >= event.occurred_at:
                    found.setdefault(touch.number, f"event:{other.type}")
        return found

    def _add_planned_touch(self, touch: SimulatedTouch, cancel_reason: str) -> None:
        """Add a touch with `on_repeat` applied.

        `keep` leaves the waiting touch and plans nothing. `restart` cancels it and plans a new one, or cancels the new
        one if its event occurred earlier.
        """
        node = self.config.nodes[touch.node_id]
        if not cancel_reason and node.on_repeat != "each":
            earlier = self._list_waiting(touch.event.user_id, node.id)
            if node.on_repeat == "keep" and earlier:
                return
            restarted = f"restarted:{touch.event.type}"
            if any(each.event.occurred_at > touch.event.occurred_at for each in earlier):
                cancel_reason = restarted
            else:
                for each in earlier:
                    self._end_touch(each, "cancelled", restarted)
        self.touches.append(touch)
        self._schedule(touch)
        if cancel_reason:
            self._end_touch(touch, "cancelled", cancel_reason)

    def _remember_activity(self, events: Sequence[EventSpec], before: Mapping[str, CustomerSpec]) -> None:
        """Update activity as ingest does: not for a change below the grain, unless another field changes too."""
        unhappy = {event.user_id for event in events if event.type == "complaint.received"}
        for user_id, was in before.items():
            person = self.customers[user_id]
            active_at, known = person.spec.last_active_at, was.last_active_at
            further = active_at is not None and (known is None or active_at > known + self.activity_grain)
            if not (further or user_id in unhappy or person.spec.conversation_at != was.conversation_at):
                person.spec = person.spec._replace(last_active_at=known)
            if user_id in unhappy and (person.opted_out_at is None or person.opted_out_at > self.now):
                person.opted_out_at = self.now

    def _build_touch(
        self, node_id: int, event: EventSpec, due_at: datetime, expires_at: datetime, priority: int,
        earlier: Mapping[str, int],
    ) -> SimulatedTouch:  # fmt: skip
        self._built += 1
        return SimulatedTouch(
            self._built, node_id, event, self.customers[event.user_id], due_at, expires_at, priority, earlier
        )

    def _schedule(self, touch: SimulatedTouch) -> None:
        touch.customer.waiting[touch.number] = touch
        # An overdue touch is judged with the others of its moment, the most important first.
        heappush(self._agenda, (max(touch.due_at, self.now), touch.priority, touch.due_at, touch.number, touch))

    def _list_waiting(self, user_id: str, node_id: int) -> list[SimulatedTouch]:
        return [each for each in self.customers[user_id].waiting.values() if each.node_id == node_id]

    # --- in the order of delivery ---

    def advance(self, until: datetime) -> None:
        """Advance the time and judge the touches that fall due."""
        while self._agenda and self._agenda[0][0] <= until:
            at, _, due_at, number, touch = heappop(self._agenda)
            if touch.customer.waiting.get(number) is touch and touch.due_at == due_at:
                self.now = max(self.now, at)
                self._judge_touch(touch)
                self._process_ends()
        self.now = max(self.now, until)

    def _judge_touch(self, touch: SimulatedTouch) -> None:
        node, event, person = self.config.nodes[touch.node_id], touch.event, touch.customer
        out_at = person.opted_out_at
        customer = person.spec._replace(opted_out=out_at is not None and out_at <= self.now)
        judged = node.conditions or node.from_nodes
        facts = matrix.collect_facts(event, customer, touch.earlier) if judged else None
        template = template_for(node, event.chat_id, event.user_id, facts)
        candidate = Candidate(
            touch.task_id, node, customer, template, event.chat_id, event.occurred_at, touch.expires_at, facts=facts
        )
        verdict = guards.judge_touch(candidate, self._build_context(touch), self.now)
        touch.judged_at = self.now
        if touch.verdicts[-1:] != [(verdict.decision, verdict.rule)]:
            touch.verdicts.append((verdict.decision, verdict.rule))
        if verdict.decision == guards.HOLD:
            assert verdict.next_eligible_at is not None, "only a pause has no end, and a simulation has no pauses"
            touch.due_at = verdict.next_eligible_at
            self._schedule(touch)
        elif verdict.decision == guards.SUPPRESS:
            self._end_touch(touch, "suppressed", verdict.rule)
        elif problem := self.prepare(node, template, customer, event):
            self._end_touch(touch, "failed", problem)
        else:
            self._send_touch(touch, node, template)

    def _build_context(self, touch: SimulatedTouch) -> GuardContext:
        oldest = self.now - self._window
        chat = self.communities[touch.event.chat_id] if self._counts_communities and touch.event.chat_id else deque()
        for slots in (touch.customer.slots, chat):
            while slots and slots[0].at <= oldest:
                slots.popleft()
        important = list(self._list_important(touch)) if touch.priority > 0 and self._capped and self.slot_hold else []
        return GuardContext(
            rules=self.config.rules, slots=touch.customer.slots, community_slots=chat, important=important
        )  # fmt: skip

    def _list_important(self, touch: SimulatedTouch) -> Iterator[AwaitedTouch]:
        for each in touch.customer.waiting.values():
            node = self.config.nodes[each.node_id]
            soon = each.due_at <= self.now + self.slot_hold and each.judged_at != self.now
            if soon and each.priority < touch.priority and node.enabled and node.guard_cap != "ignore":
                yield AwaitedTouch(each.due_at, each.node_id)

    def _send_touch(self, touch: SimulatedTouch, node: NodeSpec, template: TemplateSpec) -> None:
        slot = CapSlot(
            touch.task_id, self.now, template.content_type, node.guard_cap != "ignore", settled=True,
            node_id=node.id, template_id=template.id,
        )  # fmt: skip
        touch.customer.slots.append(slot)
        if self._counts_communities and touch.event.chat_id:
            self.communities[touch.event.chat_id].append(slot)
        self._end_touch(touch, "delivered", "")

    def _end_touch(self, touch: SimulatedTouch, state: str, reason: str) -> None:
        del touch.customer.waiting[touch.number]
        node, event = self.config.nodes[touch.node_id], touch.event
        touch.state, touch.reason = state, reason
        touch.event = event._replace(data={})  # memory: the data of most events is needed only until here
        if node.id in self.config.followed_ends.get(state, ()) and reason != "depth":
            data = compose_end_data(node, touch.task_id, touch.task_id, reason, event)
            self._ends.append(
                event._replace(
                    id=UUID(int=touch.number | 1 << 64),
                    source=SOURCE,
                    type=END_TYPES[state],
                    occurred_at=self.now,
                    data=data,
                )
            )

    def count_outcomes(self) -> dict[str, dict[str, int]]:
        """Return the number of touches by node and outcome.

        Outcomes are `planned`, `held` at least once, and the state at the end, with its reason: `suppressed:cap`.
        """
        nodes: dict[str, Counter[str]] = defaultdict(Counter)
        for touch in self.touches:
            counts = nodes[self.config.nodes[touch.node_id].key]
            counts["planned"] += 1
            counts[f"{touch.state}:{touch.reason}" if touch.reason else touch.state] += 1
            if any(decision == guards.HOLD for decision, _ in touch.verdicts):
                counts["held"] += 1
        return {key: dict(sorted(nodes[key].items())) for key in sorted(nodes)}
