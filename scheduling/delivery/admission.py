"""Admit the due touches that their receivers take now. Each of the others gets an instant of its own.

A deferral is one write of the row: no claim, no verdict, no message. A wrong estimate costs another deferral.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple
from uuid import UUID

import structlog

from scheduling import sql
from scheduling.batching import BackgroundBatcher
from scheduling.channels.base import Quotas
from scheduling.channels.quota import SlotRequest
from scheduling.configuration import snapshot
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery.due_batch import AnnouncedTouch, DueBatch
from scheduling.delivery.routing import FoundRoute, Route, find_disabled_targets, find_route, load_community_targets
from scheduling.delivery.sender import sender
from scheduling.delivery.settling import measure_deferrals
from scheduling.ledger.touches import QuotaSlot
from scheduling.ledger.transitions import Settlement
from scheduling.policy.specs import CustomerSpec

log = structlog.get_logger(__name__)

QUOTA = "quota"
LANE_STEP = 0.5  #: seconds; the touches of a lane return in groups, because each message to a worker has a price
MOST_REMEMBERED = 20_000  #: slots
SLOT_MEMORY = 10.0  #: seconds; a slot that no commit used in this time may have passed
NEARLY_DUE = timedelta(milliseconds=50)  #: longer than from the question about slots to the lock


QuotaSlots = Mapping[UUID, datetime]  #: reserved slots ahead, by PostgreSQL's clock
LaneWaits = dict[UUID, tuple[str, float]]  #: reason and instant in monotonic time
#: In the order of reservation: the slot, and when it was reserved in monotonic seconds.
recent_quota_slots: dict[UUID, tuple[datetime, float]] = {}
_Wanted = dict[tuple[str, int], list[tuple[UUID, SlotRequest]]]  #: by receiver and priority


class _QuotaTouch(NamedTuple):
    """A touch that needs a quota slot, or gives one back. The columns of `_WANTING` and `_FREED`."""

    task_id: UUID
    node_id: int
    chat_id: str
    addresses: dict[str, str]
    priority: int
    expires_at: datetime
    at: datetime  #: of the query, by PostgreSQL's clock
    reason: str
    conversation_at: datetime | None


def reserve_quota_slots(task_ids: Sequence[UUID], config: Snapshot) -> QuotaSlots:
    """Reserve a quota slot for each touch that needs one, in Redis. Call it before the transaction.

    Return the slots that lie ahead, by PostgreSQL's clock. A touch whose slot would lie after its expiry takes none. It
    waits until it expires, and judging ends it. A touch that is cancelled gives its slot back.
    """
    if not config.counting_quotas:
        return {}
    clock = time.monotonic()
    rows = sql.rows(_WANTING, {"ids": list(task_ids), "nodes": list(config.counting_quotas), "nearly": NEARLY_DUE})
    found = [_QuotaTouch(*row) for row in rows]
    known = {  # slots that a lost batch reserved moments ago
        row.task_id: recent[0]
        for row in found
        if row.reason != QUOTA and (recent := recent_quota_slots.get(row.task_id)) and clock - recent[1] <= SLOT_MEMORY
    }
    found = [row for row in found if row.task_id not in known]
    groups, lanes = _group_by_receiver(found, config)
    sending = sender()
    in_transit = {key: sum(map(sending.lanes.count_ungranted, receivers)) for key, receivers in lanes.items()}
    waits: dict[UUID, timedelta] = {}
    for quotas, wanted in groups.items():
        requests = {key: [request for _, request in group] for key, group in wanted.items()}
        for key, slots in sending.quotas.reserve(quotas, requests, in_transit).items():
            for (task_id, request), wait in zip(wanted[key], slots, strict=True):
                waits[task_id] = request.longest if wait is None else wait
    passed = timedelta(seconds=time.monotonic() - clock)
    fresh = {
        row.task_id: row.at + passed + wait if (wait := waits[row.task_id]) else row.at
        for row in found
        if row.task_id in waits
    }
    # Keep the latest slots. A batch that is halved, repeated or left for later must not reserve its slots again.
    recent_quota_slots.update({task_id: (slot, clock) for task_id, slot in fresh.items()})
    forget_quota_slots(list(islice(recent_quota_slots, max(len(recent_quota_slots) - MOST_REMEMBERED, 0))))
    return known | fresh


def forget_quota_slots(task_ids: Iterable[UUID]) -> None:
    """Forget the slots of touches that are claimed or wait for their slot. Their next wake-up reserves again.

    Call it after the commit. A touch that waits half a second for its lane keeps its slot, for `SLOT_MEMORY`.
    """
    for task_id in task_ids:
        recent_quota_slots.pop(task_id, None)


def _group_by_receiver(
    found: Sequence[_QuotaTouch], config: Snapshot
) -> tuple[dict[Quotas, _Wanted], dict[str, set[str]]]:
    """Return the touches by quotas, and the lanes of each receiver. Leave out touches with an unknown receiver."""
    communities = load_community_targets(row.chat_id for row in found)
    asked = [
        (
            config.nodes[row.node_id].channel,
            CustomerSpec(0, "", addresses=row.addresses, conversation_at=row.conversation_at),
            row.chat_id,
        )
        for row in found
    ]
    disabled = find_disabled_targets(asked, communities)
    groups: dict[Quotas, _Wanted] = {}
    lanes: dict[str, set[str]] = {}
    for row, touch in zip(found, asked, strict=True):
        route = find_route(*touch, communities, disabled)
        if isinstance(route, Route) and route.channel.quotas:
            wanted = groups.setdefault(route.channel.quotas, {}).setdefault((route.vendor_key, row.priority), [])
            wanted.append((row.task_id, SlotRequest(row.expires_at - row.at, slot_came=row.reason == QUOTA)))
            if not route.channel.counts_addresses:  # else the lane's deliveries have other keys
                lanes.setdefault(route.vendor_key, set()).add(route.receiver)
    return groups, lanes


def return_quota_slots(slots: list[QuotaSlot], **_: object) -> None:
    """Give the slots of cancelled and moved touches back, so that later touches need not wait behind them.

    A thread of its own does it: the commit of intake waits for neither PostgreSQL nor Redis. A return that is lost
    leaves its slot unused. None is repeated.
    """
    freed_slots.submit(slots)


def _give_back(slots: Sequence[QuotaSlot]) -> None:
    config = snapshot.current()
    counted = [slot for slot in slots if slot.node_id in config.counting_quotas]
    rows = sql.rows(
        _FREED,
        {
            "ids": [slot.task_id for slot in counted],
            "nodes": [slot.node_id for slot in counted],
            "chats": [slot.chat_id for slot in counted],
            "customers": [slot.customer_id for slot in counted],
            "priorities": [slot.priority for slot in counted],
            "instants": [slot.at for slot in counted],
        },
    )
    groups, _lanes = _group_by_receiver([_QuotaTouch(*row) for row in rows], config)
    for found in groups.values():
        sender().quotas.give_back({key: [(each, slot.longest) for each, slot in group] for key, group in found.items()})


freed_slots = BackgroundBatcher(_give_back, name="freed_slots")


def admit_batch(batch: DueBatch, slots: QuotaSlots, waits: LaneWaits) -> tuple[DueBatch, dict[UUID, Settlement]]:
    """Admit the touches that their receivers have room for, the most important first. Change no row.

    `waits` keeps the instants of lanes for the tries and halves of one batch: a second question takes a second instant.

    Return the batch with the admitted touches and their routes, and the others. Touches with an unknown receiver are
    admitted: judging reports the error. So are touches of idle nodes and expired ones. They get no route, because
    judging defers or ends them.
    """
    idle = batch.config.idle_nodes
    admitted: list[AnnouncedTouch] = []
    routes: dict[UUID, FoundRoute] = {}
    deferred: dict[UUID, Settlement] = {}
    taken: Counter[str] = Counter()
    total = 0
    for touch in sorted(batch.due, key=lambda touch: (touch.locked.priority, touch.locked.due_at)):
        task_id, priority, expires_at = touch.task_id, touch.locked.priority, touch.locked.expires_at
        if touch.node_id not in idle and expires_at >= batch.locked_at:
            if (slot := slots.get(task_id, batch.locked_at)) > batch.locked_at:
                deferred[task_id] = Settlement("scheduled", QUOTA, slot)
                continue
            spec, customer = batch.config.nodes[touch.node_id].channel, batch.customers[touch.customer_id]
            route = find_route(spec, customer, touch.event.chat_id, batch.communities, batch.disabled)
            wait = waits.get(task_id)
            if wait is None and isinstance(route, Route):
                wait = sender().lanes.find_wait(
                    route.receiver, route.channel, priority, own=taken[route.receiver], total=total
                )
            if wait:
                waits[task_id] = wait
                steps = math.ceil(batch.clock.instant(wait[1]).timestamp() / LANE_STEP)
                due_at = min(datetime.fromtimestamp(steps * LANE_STEP, UTC), expires_at)
                deferred[task_id] = Settlement("scheduled", wait[0], due_at)
                continue
            routes[task_id] = route
            if isinstance(route, Route):
                taken[route.receiver] += 1
                total += 1
        admitted.append(touch)
    return replace(batch, due=admitted, routes=routes), deferred


def report_deferrals(batch: DueBatch, deferred: Mapping[UUID, Settlement]) -> None:
    """Log and measure the deferred touches of a batch. Call it after the commit."""
    found = Counter(
        (batch.config.nodes[touch.node_id].channel.kind, deferred[touch.task_id].reason)
        for touch in batch.due
        if touch.task_id in deferred
    )
    for (kind, reason), count in found.items():
        log.info("touches_deferred", kind=kind, reason=reason, count=count)
    measure_deferrals(found)


_FREED = """
SELECT t.task_id, t.node_id, t.chat_id, c.addresses, t.priority, t.at, statement_timestamp(), '', c.conversation_at
FROM unnest(%(ids)b::uuid[], %(nodes)b::bigint[], %(chats)b::text[], %(customers)b::bigint[], %(priorities)b::int[],
            %(instants)b::timestamptz[]) AS t(task_id, node_id, chat_id, customer_id, priority, at)
JOIN scheduling_customer AS c ON c.id = t.customer_id
WHERE t.at > statement_timestamp()
"""

_WANTING = """
SELECT t.task_id, t.node_id, t.chat_id, c.addresses, t.priority, t.expires_at, statement_timestamp(), t.reason,
    c.conversation_at
FROM scheduling_touch_live AS t JOIN scheduling_customer AS c ON c.id = t.customer_id
WHERE t.task_id = ANY(%(ids)b) AND t.node_id = ANY(%(nodes)b::bigint[])
  AND COALESCE(t.state, '') IN ('scheduled', 'queued') AND COALESCE(t.paused_by, '') = ''
  AND t.due_at <= statement_timestamp() + %(nearly)s AND t.expires_at > statement_timestamp()
ORDER BY t.priority, t.due_at
"""
