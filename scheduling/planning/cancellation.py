"""Cancel the touches that a batch of events makes obsolete: stored ones and those that the batch itself plans.

The caller holds the locks of the batch's customers. No other process plans or cancels for them concurrently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from scheduling import sql
from scheduling.configuration.snapshot import Snapshot
from scheduling.ledger.touches import touch_ledger
from scheduling.policy.matrix import PlannedTouch
from scheduling.policy.specs import EventSpec, NodeSpec


class Cancellation:
    """Apply `cancel_on` and `on_repeat` for one batch, in the order of its events."""

    def __init__(self, config: Snapshot, events: Sequence[EventSpec], customers: Mapping[str, int]) -> None:
        """Take the new `events` without duplicates, and customer row ids by user id."""
        self.config = config
        self.events = events
        self.customers = customers
        #: By event: the waiting touches because of which it planned nothing.
        self.kept_touches: dict[UUID, list[UUID]] = {}

    def cancel_waiting(self) -> None:
        """Cancel stored, unsent touches that an event of the batch makes obsolete (`cancel_on`).

        An event cancels only touches of earlier or simultaneous events. One query serves the whole batch. If two events
        cancel the same touch, the first is its reason.
        """
        calling = [(event, node.id) for event in self.events for node in self.config.cancelling.get(event.type, ())]
        if not calling:
            return
        unsent = _load_unsent_touches(
            {self.customers[event.user_id] for event, _ in calling}, {node_id for _, node_id in calling}
        )
        reasons: dict[UUID, str] = {}
        for event, node_id in calling:
            for touch in unsent.get((self.customers[event.user_id], node_id), ()):
                if touch.happened_at <= event.occurred_at:
                    reasons.setdefault(touch.task_id, event.type)
        for kind in sorted(set(reasons.values())):
            obsolete = [task_id for task_id, why in reasons.items() if why == kind]
            touch_ledger.cancel(obsolete, reason=f"event:{kind}", wait=False)

    def apply_to_planned(self, planned: list[PlannedTouch]) -> list[PlannedTouch]:
        """Return the planned touches to store. Those that are stored as cancelled have `cancelled_as`."""
        self._find_obsolete(planned)
        return self._apply_on_repeat(planned)

    def _find_obsolete(self, planned: list[PlannedTouch]) -> None:
        """Find planned touches that another event cancels before they are stored.

        That event is a stored one that occurred later, or a following one of the batch. This runs before `on_repeat`,
        so that a cancelled touch does not block its successor.
        """
        revocable = [touch for touch in planned if touch.node.cancel_on]
        if not revocable:
            return
        happened = _load_latest_events(
            {touch.customer_id for touch in revocable},
            {kind for touch in revocable for kind in touch.node.cancel_on},
            min(touch.event.occurred_at for touch in revocable),
        )
        # For each event, the later events of the batch for the same customer that may cancel touches.
        following: dict[UUID, list[EventSpec]] = {}
        rest: dict[str, list[EventSpec]] = defaultdict(list)
        for event in reversed(self.events):
            following[event.id] = list(rest[event.user_id])
            if event.type in self.config.cancelling:
                rest[event.user_id].append(event)
        for touch in revocable:
            event, cancel_on = touch.event, touch.node.cancel_on
            kinds = [
                kind
                for kind in sorted(cancel_on - {event.type})
                if happened.get((touch.customer_id, kind), event.occurred_at) > event.occurred_at
            ]
            kinds += [
                other.type
                for other in following[event.id]
                if other.type in cancel_on and other.occurred_at >= event.occurred_at
            ]
            if kinds:
                touch.cancelled_as = f"event:{kinds[0]}"

    def _apply_on_repeat(self, planned: list[PlannedTouch]) -> list[PlannedTouch]:
        """Apply `on_repeat`.

        `keep` leaves the waiting touch and plans nothing. `restart` cancels it and plans a new one. An event that
        occurred before that of the waiting touch restarts nothing: its own touch is stored as cancelled.
        """
        repeating = [touch for touch in planned if touch.node.on_repeat != "each" and not touch.cancelled_as]
        if not repeating:
            return planned
        unsent = _load_unsent_touches(
            {touch.customer_id for touch in repeating}, {touch.node.id for touch in repeating}
        )
        dropped: set[UUID] = set()
        restarted: dict[str, list[UUID]] = defaultdict(list)  #: stored touches by the type of the new event
        revoked = _find_revoked(unsent, [touch.node for touch in repeating if touch.node.on_repeat == "keep"])
        for touch in repeating:
            event, key = touch.event, (touch.customer_id, touch.node.id)
            earlier = unsent.get(key, ())
            if touch.node.on_repeat == "restart":
                if any(other.happened_at > event.occurred_at for other in earlier):
                    touch.cancelled_as = f"restarted:{event.type}"
                    continue
                for other in earlier:
                    if other.planned:
                        other.planned.cancelled_as = f"restarted:{event.type}"
                    else:
                        restarted[event.type].append(other.task_id)
            elif waiting := [other.task_id for other in earlier if not (other.running or other.task_id in revoked)]:
                dropped.add(touch.task_id)
                self.kept_touches.setdefault(event.id, []).extend(waiting)
                continue
            unsent[key] = [_UnsentTouch(touch.task_id, event.occurred_at, planned=touch)]
        for kind, task_ids in restarted.items():
            touch_ledger.cancel(task_ids, reason=f"restarted:{kind}", wait=False)
        return [touch for touch in planned if touch.task_id not in dropped]


@dataclass(frozen=True, slots=True)
class _UnsentTouch:
    """A touch that has not ended. An event can still cancel it, unless it is marked as sending."""

    task_id: UUID
    happened_at: datetime  #: when its event occurred
    planned: PlannedTouch | None = None  #: by this batch; None: a stored one
    running: bool = False  #: claimed by a worker
    released: bool = False  #: by a worker, for a retry or after a deferral


def _load_unsent_touches(customers: set[int], nodes: set[int]) -> dict[tuple[int, int], list[_UnsentTouch]]:
    """Return the touches that have not ended, by customer and node."""
    found: dict[tuple[int, int], list[_UnsentTouch]] = {}
    parameters = {"customers": sorted(customers), "nodes": sorted(nodes)}
    for customer_id, node_id, task_id, happened_at, running, released in sql.rows(_UNSENT, parameters):
        touch = _UnsentTouch(task_id, happened_at, running=running, released=released)
        found.setdefault((customer_id, node_id), []).append(touch)
    return found


def _find_revoked(unsent: Mapping[tuple[int, int], Sequence[_UnsentTouch]], nodes: Iterable[NodeSpec]) -> set[UUID]:
    """Return the touches of these nodes that their next claim cancels: an event came while a worker had them."""
    cancel_on = {node.id: node.cancel_on for node in nodes if node.cancel_on}
    released = [
        (customer_id, cancel_on[node_id], touch)
        for (customer_id, node_id), found in unsent.items()
        for touch in (found if node_id in cancel_on else ())
        if touch.released
    ]
    if not released:
        return set()
    happened = _load_latest_events(
        {customer_id for customer_id, _, _ in released},
        {kind for _, kinds, _ in released for kind in kinds},
        min(touch.happened_at for _, _, touch in released),
    )
    return {
        touch.task_id
        for customer_id, kinds, touch in released
        if any(happened.get((customer_id, kind), touch.happened_at) > touch.happened_at for kind in kinds)
    }


def _load_latest_events(customers: set[int], types: set[str], since: datetime) -> dict[tuple[int, str], datetime]:
    """Return when the latest event of each type after `since` occurred, by customer and type."""
    parameters = {"customers": sorted(customers), "types": sorted(types), "since": since}
    return {(customer_id, kind): latest for customer_id, kind, latest in sql.rows(_HAPPENED, parameters)}


_HAPPENED = """
SELECT customer_id, type, max(occurred_at) FROM scheduling_event
WHERE customer_id = ANY(%(customers)b) AND type = ANY(%(types)b) AND occurred_at > %(since)s GROUP BY 1, 2
"""

# One index covers waiting and running touches. The index of cap slots also shows running ones, but a customer may have
# thousands of slots. COALESCE hides the node from the planner, which would choose other indexes where it has no
# statistics.
_UNSENT = """
WITH t AS MATERIALIZED (
    SELECT customer_id, node_id, task_id, event_id, state, lease_no FROM scheduling_touch_live
    WHERE customer_id = ANY(%(customers)b) AND COALESCE(node_id, 0) = ANY(%(nodes)b)
      AND state IN ('scheduled', 'queued', 'running')
)
SELECT t.customer_id, t.node_id, t.task_id, e.occurred_at, t.state = 'running',
       t.state <> 'running' AND t.lease_no > 0
FROM t JOIN scheduling_event AS e ON e.id = t.event_id
ORDER BY t.task_id
"""
