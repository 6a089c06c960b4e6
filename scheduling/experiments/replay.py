"""Replay past events in memory, under several configurations at once, and count what becomes of the touches.

The pure policy plans and judges, in the order of ingest and delivery. A send succeeds at once. Pauses are ignored, and
Presence is not asked: only conversations from events count. Ends of followed touches are events at the same instant.
Touches that waited at the start are left out. Levels, names, time zones, addresses, attributes and tags are the
current ones, because earlier values are not stored. Activity is read from events. Frames of a chat count only for
customers without later activity.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import UUID

from django.conf import settings

from scheduling import sql
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery.routing import NoTarget, TargetLookup, channel_of, load_community_targets, target_for
from scheduling.ids import first_id_at
from scheduling.ledger import locks
from scheduling.models import Customer, Event, EventType
from scheduling.models.encrypted import Unreadable
from scheduling.planning.ingest import ACTIVITY_GRAIN
from scheduling.policy import guards, matrix
from scheduling.policy.guards import AwaitedTouch, Candidate, CapSlot, GuardContext
from scheduling.policy.matrix import END_TYPES, SOURCE, compose_end_data
from scheduling.policy.node_conditions import MOST_EARLIER, EventTimes, add_event_time, count_recent
from scheduling.policy.profile import NO_PROFILE
from scheduling.policy.specs import CustomerSpec, EventSpec, NodeSpec, TemplateSpec, template_for
from scheduling.templating import CannotRender, render_message

MOST_EVENTS = 50_000  #: per replay; with more, the replay starts later
CHUNK = 2_000
SKEW = timedelta(hours=1)  #: by which an id may seem older than its row


# --- past events ---


@dataclass(frozen=True, slots=True)
class Window:
    """The time span of a replay and its events."""

    since: datetime
    until: datetime
    arrivals: Sequence[tuple[datetime, UUID]]  #: time of arrival and id of each event, a few bytes each
    shortened: bool  #: it starts later than requested, to keep the limit of events


def choose_window(since: datetime, until: datetime, most: int = MOST_EVENTS) -> Window:
    """Return the span with its latest events, without ends of touches that the simulation makes itself.

    The filter by id has an index: ids grow with time.
    """
    events = Event.objects.filter(id__gte=first_id_at(since - SKEW), received_at__gte=since, received_at__lt=until)
    events = events.exclude(source=SOURCE, type__in=END_TYPES.values(), occurred_at__gte=since)
    arrivals = list(events.order_by("-received_at", "-id").values_list("received_at", "id")[: most + 1])[::-1]
    if shortened := len(arrivals) > most:
        # Events of one instant belong together: that instant is left out completely.
        since = arrivals[0][0] + timedelta(microseconds=1)
        arrivals = [arrival for arrival in arrivals if arrival[0] >= since]
    return Window(since, until, arrivals, shortened)


def iterate_batches(within: Window) -> Iterator[list[tuple[datetime, list[EventSpec]]]]:
    """Yield the events in order of arrival, grouped by instant, about `CHUNK` at a time.

    Events that were deleted since are left out. A cursor would need its own session, which does not exist behind a
    pooler.
    """
    arrivals, start = within.arrivals, 0
    while start < len(arrivals):
        end = start + CHUNK
        while end < len(arrivals) and arrivals[end][0] == arrivals[end - 1][0]:
            end += 1
        some, start = arrivals[start:end], end
        rows = sql.rows(_EVENTS, {"ids": [key for _, key in some]})
        found = {row[0]: EventSpec(*row) for row in rows}
        by_instant = groupby(some, key=itemgetter(0))
        yield [(at, [found[key] for _, key in together if key in found]) for at, together in by_instant]


def _load_customers(
    user_ids: Collection[str], since: datetime, memory: timedelta, counted: Collection[str]
) -> dict[str, SimulatedCustomer]:
    """Load customers as of `since`: their cap slots of the `memory` before it, and the times of `counted` events."""
    rows = Customer.objects.filter(user_id__in=user_ids)
    profiles = locks.load_profiles(row.pk for row in rows)
    found: dict[int, SimulatedCustomer] = {}
    for row in rows:
        active_at = row.last_active_at if row.last_active_at and row.last_active_at < since else None
        spec = row.spec(profiles.get(row.pk, NO_PROFILE))._replace(last_active_at=active_at, conversation_at=None)
        found[row.pk] = SimulatedCustomer(spec, (row.opted_out_at or since) if row.opted_out else None)
    passive = set(EventType.objects.filter(is_activity=False).values_list("key", flat=True))
    asked = {"customers": sorted(found), "since": since, "counted": sorted(counted), "most": MOST_EARLIER}
    for customer_id, kind, latest, times in sql.rows(_HAPPENED, asked):
        person = found[customer_id]
        person.latest_events[kind] = latest
        if times:
            person.times[kind] = times[::-1]
        if kind not in passive and (person.spec.last_active_at is None or latest > person.spec.last_active_at):
            person.spec = person.spec._replace(last_active_at=latest)
        if kind == "conversation.started":
            person.spec = person.spec._replace(conversation_at=latest)
    slots = sql.rows(
        _SLOTS.format(owner="customer_id", condition="customer_id"),
        {"owners": sorted(found), "since": since, "memory": memory},
    )
    for customer_id, *slot in slots:
        found[customer_id].slots.append(_build_slot(*slot))
    return {person.spec.user_id: person for person in found.values()}


def _build_slot(
    task_id: UUID, at: datetime, content_type: str, counts: bool, node_id: int, template_id: int
) -> CapSlot:
    return CapSlot(task_id, at, content_type, counts, settled=True, node_id=node_id, template_id=template_id)


_EVENTS = """
SELECT id, source, event_id, type, occurred_at, user_id, chat_id, data FROM scheduling_event
WHERE id = ANY(%(ids)b::uuid[])
"""
_HAPPENED = """
SELECT customer_id, type, max(occurred_at),
       (array_agg(occurred_at ORDER BY occurred_at DESC) FILTER (WHERE type = ANY(%(counted)b::text[])))[:%(most)s]
FROM scheduling_event
WHERE customer_id = ANY(%(customers)b) AND received_at < %(since)s GROUP BY 1, 2
"""
_SLOTS = """
SELECT {owner}, task_id, reserved_at, content_type, counts_toward_cap, node_id, COALESCE(template_id, 0)
FROM scheduling_touch
WHERE {condition} = ANY(%(owners)b) AND reserved_at IS NOT NULL
  AND reserved_at < %(since)s AND reserved_at > %(since)s - %(memory)s
ORDER BY reserved_at, task_id
"""


# --- the replay ---


def replay_events(configs: Mapping[str, Snapshot], within: Window) -> dict[str, Any]:
    """Return the outcomes of each configuration for the window's events. Reads only. The values fit into JSON."""
    simulations = run_simulations(list(configs.values()), within)
    counts = {name: simulation.count_outcomes() for name, simulation in zip(configs, simulations, strict=True)}
    return counts | {
        "since": within.since.isoformat(), "until": within.until.isoformat(), "events": len(within.arrivals),
        "shortened": within.shortened,
    }  # fmt: skip


def run_simulations(configs: Sequence[Snapshot], within: Window) -> Sequence[Simulation]:
    """Return the simulations at the end of the window, in the order of `configs`."""
    targets: dict[str, Mapping[str, Any]] = {}
    prepare = partial(_prepare_send, targets, TargetLookup())
    simulations = [Simulation(config, within.since, prepare) for config in configs]
    loaded: set[str] = set()  #: chats
    counted = {kind for config in configs for types in config.counting_earlier.values() for kind in types}
    memory = max(config.window for config in configs)
    counts_chats = any(config.counts_communities for config in configs)
    for batches in iterate_batches(within):
        # Customers and communities are loaded before their first event, as of the start of the replay.
        events = [event for _, some in batches for event in some]
        people = _load_customers(
            {event.user_id for event in events} - simulations[0].customers.keys(), within.since, memory, counted
        )
        chats = sorted({event.chat_id for event in events if event.chat_id} - loaded)
        loaded.update(chats)
        targets.update(load_community_targets(chats))
        asked = {"owners": chats if counts_chats else [], "since": within.since, "memory": memory}
        slots = sql.rows(_SLOTS.format(owner="chat_id", condition="chat_id <> '' AND chat_id"), asked)
        for simulation in simulations:
            simulation.customers.update({key: person.copy() for key, person in people.items()})
            for chat_id, *slot in slots:
                simulation.communities[chat_id].append(_build_slot(*slot))
            for at, some in batches:
                simulation.receive(some, at)
    for simulation in simulations:
        simulation.advance(within.until)
    return simulations


def _prepare_send(
    targets: Mapping[str, Mapping[str, Any]], disabled: TargetLookup,
    node: NodeSpec, template: TemplateSpec, customer: CustomerSpec, event: EventSpec,
) -> str:  # fmt: skip
    """Check that a target exists and the text renders, with the current addresses and targets."""
    try:
        target_for(node.channel, channel_of(node.channel), customer, event.chat_id, targets, disabled)
        render_message(template, customer, event)
    except NoTarget as error:
        return error.reason
    except CannotRender:
        return "template_data_missing"
    except Unreadable:
        pass  # only on this node; a node with the key would send it
    return ""


# --- one configuration ---


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
    config: Snapshot
    now: datetime
    prepare: Prepare
    customers: dict[str, SimulatedCustomer] = field(default_factory=dict)
    communities: dict[str, deque[CapSlot]] = field(default_factory=lambda: defaultdict(deque))
    touches: list[SimulatedTouch] = field(default_factory=list)  #: all, ended ones included
    _agenda: list[tuple[datetime, int, datetime, int, SimulatedTouch]] = field(default_factory=list)
    _ends: deque[EventSpec] = field(default_factory=deque)
    _built: int = 0

    def __post_init__(self) -> None:
        self._counted = frozenset[str]().union(*(node.counted for node in self.config.nodes.values()))
        self._capped = any(rule.kind == "cap" for rule in self.config.rules)

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
        for event in events:
            for node in self.config.cancelling.get(event.type, ()):
                for touch in self._list_waiting(event.user_id, node.id):
                    if touch.event.occurred_at <= event.occurred_at:
                        self._end_touch(touch, "cancelled", f"event:{event.type}")
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

    def _plan_touches(self, event: EventSpec) -> Iterator[SimulatedTouch]:
        """Plan the touches of an event. It sees the activity of earlier events, not its own."""
        person = self.customers[event.user_id]
        nodes = self.config.triggered.get(event.type, ())
        earlier = count_recent(person.times, event.occurred_at) if any(node.counted for node in nodes) else {}
        planned = matrix.plan_touches(
            event, person.spec, nodes, self.config.delay_rules, time_scale=settings.AFTERTOUCH_TIME_SCALE,
            earlier=earlier,
        )  # fmt: skip
        if event.type in self._counted:
            add_event_time(person.times, event.type, event.occurred_at)
        for each in planned:
            self._built += 1
            yield SimulatedTouch(
                self._built, each.node.id, event, person, each.due_at, each.expires_at, each.node.priority, earlier
            )
        before = person.spec.last_active_at, person.spec.conversation_at
        active_at, talking_at = matrix.advance_activity(before, event, self.config.activity_types)
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
            further = active_at is not None and (known is None or active_at > known + ACTIVITY_GRAIN)
            if not (further or user_id in unhappy or person.spec.conversation_at != was.conversation_at):
                person.spec = person.spec._replace(last_active_at=known)
            if user_id in unhappy and (person.opted_out_at is None or person.opted_out_at > self.now):
                person.opted_out_at = self.now

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
            slot = CapSlot(
                touch.task_id, self.now, template.content_type, node.guard_cap != "ignore", settled=True,
                node_id=node.id, template_id=template.id,
            )  # fmt: skip
            touch.customer.slots.append(slot)
            if self.config.counts_communities and touch.event.chat_id:
                self.communities[touch.event.chat_id].append(slot)
            self._end_touch(touch, "delivered", "")

    def _build_context(self, touch: SimulatedTouch) -> GuardContext:
        oldest, hold = self.now - self.config.window, settings.AFTERTOUCH_SLOT_HOLD
        counts_chat = self.config.counts_communities and touch.event.chat_id
        chat = self.communities[touch.event.chat_id] if counts_chat else deque()
        for slots in (touch.customer.slots, chat):
            while slots and slots[0].at <= oldest:
                slots.popleft()
        important: list[AwaitedTouch] = []
        if touch.priority > 0 and self._capped and hold:
            for each in touch.customer.waiting.values():
                node = self.config.nodes[each.node_id]
                soon = each.due_at <= self.now + hold and each.judged_at != self.now
                if soon and each.priority < touch.priority and node.enabled and node.guard_cap != "ignore":
                    important.append(AwaitedTouch(each.due_at, each.node_id))
        slots = touch.customer.slots
        return GuardContext(rules=self.config.rules, slots=slots, community_slots=chat, important=important)

    def _end_touch(self, touch: SimulatedTouch, state: str, reason: str) -> None:
        del touch.customer.waiting[touch.number]
        node, event = self.config.nodes[touch.node_id], touch.event
        touch.state, touch.reason = state, reason
        touch.event = event._replace(data={})  # memory: the data of most events is needed only until here
        if node.id in self.config.followed_ends.get(state, ()) and reason != "depth":
            data = compose_end_data(node, touch.task_id, touch.task_id, reason, event)
            key = UUID(int=touch.number | 1 << 64)
            self._ends.append(
                event._replace(id=key, source=SOURCE, type=END_TYPES[state], occurred_at=self.now, data=data)
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
