"""Admit the due touches that their receivers take now. Give each of the others an instant of its own.

A deferral is one write of the row: no claim, no verdict, no message. Judging decides about everything else when a touch
is admitted. It ends an expired touch too. A wrong estimate costs another deferral.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from uuid import UUID

from scheduling import sql
from scheduling.channels.base import Quota
from scheduling.channels.quota import SlotRequest
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery.due_batch import Due, DueBatch
from scheduling.delivery.routing import Route, find_disabled_targets, find_route, load_community_targets
from scheduling.delivery.sender import sender
from scheduling.policy.specs import CustomerSpec

QUOTA = "quota"
LANE_STEP = 0.5  #: seconds; the touches of a lane return in groups, because each message to a worker has a price
MOST_REMEMBERED = 20_000  #: slots
NEARLY_DUE = timedelta(milliseconds=50)  #: longer than from the question about slots to the lock


Slots = Mapping[UUID, datetime]  #: reserved slots ahead, by PostgreSQL's clock
Postponed = dict[UUID, tuple[str, datetime]]  #: reason and new due time
recent_slots: dict[UUID, datetime] = {}  #: by PostgreSQL's clock, in the order of their reservation
_Wanted = dict[tuple[str, int], list[tuple[UUID, SlotRequest]]]  #: by receiver and priority


def reserve_slots(task_ids: Sequence[UUID], config: Snapshot) -> Slots:
    """Reserve a quota slot for each touch that needs one, in Redis. Call it before the transaction.

    Return the slots that lie ahead, by PostgreSQL's clock. A touch whose slot would lie after its expiry takes none. It
    waits until it expires, and judging ends it. The slot of a touch that is then cancelled or suppressed stays unused.
    """
    if not config.counting_quotas:
        return {}
    clock = time.monotonic()
    found = sql.rows(_WANTING, {"ids": list(task_ids), "nodes": list(config.counting_quotas), "nearly": NEARLY_DUE})
    # A touch with the reason `quota` was committed with its slot.
    known = {row[0]: recent_slots[row[0]] for row in found if row[0] in recent_slots and row[7] != QUOTA}
    found = [row for row in found if row[0] not in known]
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
    fresh = {row[0]: row[6] + passed + waits[row[0]] if waits[row[0]] else row[6] for row in found if row[0] in waits}
    _remember_slots(fresh)
    return known | fresh


def _remember_slots(slots: Slots) -> None:
    """Keep the latest slots. A batch that is halved, repeated or left for later must not reserve its slots again."""
    recent_slots.update(slots)
    for task_id in list(islice(recent_slots, max(len(recent_slots) - MOST_REMEMBERED, 0))):
        del recent_slots[task_id]


def _group_by_receiver(
    found: Sequence[tuple[Any, ...]], config: Snapshot
) -> tuple[dict[tuple[Quota, ...], _Wanted], dict[str, set[str]]]:
    """Return the touches by quotas, and the lanes of each receiver. Leave out touches with an unknown receiver."""
    communities = load_community_targets(row[2] for row in found)
    asked = [(config.nodes[row[1]].channel, CustomerSpec(0, "", addresses=row[3]), row[2]) for row in found]
    disabled = find_disabled_targets(asked, communities)
    groups: dict[tuple[Quota, ...], _Wanted] = {}
    lanes: dict[str, set[str]] = {}
    for (task_id, _, _, _, priority, expires_at, at, reason), touch in zip(found, asked, strict=True):
        route = find_route(*touch, communities, disabled)
        if route:
            wanted = groups.setdefault(route.channel.quotas, {}).setdefault((route.vendor_key, priority), [])
            wanted.append((task_id, SlotRequest(expires_at - at, slot_came=reason == QUOTA)))
            lanes.setdefault(route.vendor_key, set()).add(route.receiver)
    return groups, lanes


def admit_batch(batch: DueBatch, slots: Slots) -> tuple[DueBatch, Postponed]:
    """Admit the touches that their receivers have room for, the most important first. Change no row.

    Return the batch without the postponed touches, and these.
    Channels without a call always have room. Touches with an unknown receiver are admitted: judging reports the error.
    So are touches of paused nodes, which judging parks.
    """
    always = batch.config.delivering_inline | batch.config.paused_nodes
    if always.issuperset(row.node_id for row in batch.due):
        return batch, {}
    admitted: list[Due] = []
    routes: dict[UUID, Route] = {}
    postponed: Postponed = {}
    taken: Counter[str] = Counter()
    for row in sorted(batch.due, key=lambda row: (row.priority, row.due_at)):
        task_id = row.task_id
        if row.node_id not in always and row.expires_at > batch.locked_at:
            if (slot := slots.get(task_id, batch.locked_at)) > batch.locked_at:
                postponed[task_id] = (QUOTA, slot)
                continue
            route = _find_route(batch, row)
            wait = route and sender().lanes.find_wait(
                route.receiver, route.channel, row.priority, own=taken[route.receiver], total=len(routes)
            )
            if wait:
                postponed[task_id] = (wait[0], min(_round_up(batch.instant(wait[1])), row.expires_at))
                continue
            if route:
                taken[route.receiver] += 1
                routes[task_id] = route
        admitted.append(row)
    return replace(batch, due=admitted, routes=routes), postponed


def _find_route(batch: DueBatch, row: Due) -> Route | None:
    spec, customer = batch.config.nodes[row.node_id].channel, batch.customers[row.customer_id]
    return find_route(spec, customer, row.event.chat_id, batch.communities, batch.disabled)


def _round_up(at: datetime) -> datetime:
    return datetime.fromtimestamp(math.ceil(at.timestamp() / LANE_STEP) * LANE_STEP, UTC)


_WANTING = """
SELECT t.task_id, t.node_id, t.chat_id, c.addresses, t.priority, t.expires_at, statement_timestamp(), t.reason
FROM scheduling_touch AS t JOIN scheduling_customer AS c ON c.id = t.customer_id
WHERE t.task_id = ANY(%(ids)b) AND t.node_id = ANY(%(nodes)b::bigint[])
  AND COALESCE(t.state, '') IN ('scheduled', 'queued') AND COALESCE(t.parked, '') = ''
  AND t.due_at <= statement_timestamp() + %(nearly)s AND t.expires_at > statement_timestamp()
ORDER BY t.priority, t.due_at
"""
