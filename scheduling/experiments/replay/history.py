"""Read the events to replay, and the state at the start of the replay, from PostgreSQL.

Levels, names, time zones, addresses, attributes and tags are the current ones, because earlier values are not stored.
Activity is read from events. Frames of a chat count only for customers without later activity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from uuid import UUID

from scheduling import sql
from scheduling.experiments.replay.simulation import SimulatedCustomer
from scheduling.ids import first_id_at
from scheduling.ledger import locks
from scheduling.models import Customer, Event, EventType
from scheduling.policy.event_counts import MOST_EARLIER
from scheduling.policy.guards import CapSlot
from scheduling.policy.journeys import END_TYPES, SOURCE
from scheduling.policy.profile import NO_PROFILE, Profile
from scheduling.policy.specs import EventSpec

MOST_EVENTS = 50_000  #: per replay; with more, the replay starts later
MOST_WAITING_AT_START = 50_000  #: touches that wait at the start
CHUNK = 2_000
SKEW = timedelta(hours=1)  #: by which an id may seem older than its row

Batch = tuple[datetime, list[EventSpec]]


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


def iterate_batches(within: Window) -> Iterator[list[Batch]]:
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


def load_customers(
    user_ids: Collection[str], since: datetime, memory: timedelta, counted: Collection[str]
) -> dict[str, SimulatedCustomer]:
    """Load customers as of `since`: their cap slots of the `memory` before it, and the times of `counted` events."""
    rows = Customer.objects.filter(user_id__in=user_ids)
    profiles = locks.load_profiles(row.pk for row in rows)
    found = {row.pk: _build_customer(row, profiles.get(row.pk, NO_PROFILE), since) for row in rows}
    passive = set(EventType.objects.filter(is_activity=False).values_list("key", flat=True))
    asked = {"customers": sorted(found), "since": since, "counted": sorted(counted), "most": MOST_EARLIER}
    for customer_id, kind, latest, times in sql.rows(_HAPPENED, asked):
        if times:
            found[customer_id].times[kind] = times[::-1]
        _apply_past_event(found[customer_id], kind, latest, active=kind not in passive)
    for customer_id, *slot in sql.rows(_SLOTS, {"customers": sorted(found), "since": since, "memory": memory}):
        found[customer_id].slots.append(_build_slot(*slot))
    return {person.spec.user_id: person for person in found.values()}


def _build_customer(row: Customer, profile: Profile, since: datetime) -> SimulatedCustomer:
    opted_out_at = (row.opted_out_at or since) if row.opted_out else None
    active_at = row.last_active_at if row.last_active_at and row.last_active_at < since else None
    known = row.spec(profile)._replace(last_active_at=active_at, conversation_at=None)
    return SimulatedCustomer(known, opted_out_at)


def _apply_past_event(person: SimulatedCustomer, kind: str, latest: datetime, *, active: bool) -> None:
    person.latest_events[kind] = latest
    spec = person.spec
    if active and (spec.last_active_at is None or latest > spec.last_active_at):
        person.spec = spec = spec._replace(last_active_at=latest)
    if kind == "conversation.started":
        person.spec = spec._replace(conversation_at=latest)


def _build_slot(
    task_id: UUID, at: datetime, content_type: str, counts: bool, node_id: int, template_id: int
) -> CapSlot:
    return CapSlot(task_id, at, content_type, counts, settled=True, node_id=node_id, template_id=template_id)


def load_community_slots(chat_ids: Collection[str], since: datetime, memory: timedelta) -> dict[str, list[CapSlot]]:
    found: dict[str, list[CapSlot]] = {chat_id: [] for chat_id in chat_ids}
    for chat_id, *slot in sql.rows(_CHAT_SLOTS, {"chats": sorted(chat_ids), "since": since, "memory": memory}):
        found[chat_id].append(_build_slot(*slot))
    return found


@dataclass(frozen=True, slots=True)
class TouchAtStart:
    """A touch that waited at the start."""

    node_id: int
    due_at: datetime
    expires_at: datetime
    event: EventSpec


@dataclass(frozen=True, slots=True)
class TouchesAtStart:
    touches: list[TouchAtStart]
    incomplete: bool  #: there were more; the last planned ones are left out


def load_touches_at_start(since: datetime) -> TouchesAtStart:
    """Return the touches that were planned before `since` and not decided then."""
    rows = sql.rows(_CARRIED, {"since": since, "limit": MOST_WAITING_AT_START + 1})
    touches = [TouchAtStart(*row[:3], EventSpec(*row[3:])) for row in rows[:MOST_WAITING_AT_START]]  # type: ignore[call-arg]
    return TouchesAtStart(touches, incomplete=len(rows) > MOST_WAITING_AT_START)


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
SELECT customer_id, task_id, reserved_at, content_type, counts_toward_cap, node_id, COALESCE(template_id, 0)
FROM scheduling_touch
WHERE customer_id = ANY(%(customers)b) AND reserved_at IS NOT NULL
  AND reserved_at < %(since)s AND reserved_at > %(since)s - %(memory)s
ORDER BY reserved_at, task_id
"""

_CHAT_SLOTS = """
SELECT chat_id, task_id, reserved_at, content_type, counts_toward_cap, node_id, COALESCE(template_id, 0)
FROM scheduling_touch
WHERE chat_id = ANY(%(chats)b) AND chat_id <> '' AND reserved_at IS NOT NULL
  AND reserved_at < %(since)s AND reserved_at > %(since)s - %(memory)s
ORDER BY reserved_at, task_id
"""

# Touches that an operator published again are left out: their first attempt was earlier.
_CARRIED = """
SELECT t.node_id, GREATEST(COALESCE(held.until, t.planned_at), %(since)s), t.expires_at,
       e.id, e.source, e.event_id, e.type, e.occurred_at, e.user_id, e.chat_id, e.data
FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id
LEFT JOIN LATERAL (
    SELECT v.next_eligible_at AS until FROM touch_verdicts(t.verdicts) AS v
    WHERE v.decision = 'hold' AND v.at < %(since)s ORDER BY v.number DESC LIMIT 1
) AS held ON true
WHERE t.created_at < %(since)s AND t.retry_of IS NULL AND (t.reserved_at IS NULL OR t.reserved_at >= %(since)s)
  AND (t.state IN ('scheduled', 'queued', 'running') OR t.settled_at >= %(since)s)
ORDER BY t.task_id LIMIT %(limit)s
"""
