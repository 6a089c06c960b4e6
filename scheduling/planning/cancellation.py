"""What a batch of events calls off: touches that wait already, and touches that the batch itself planned.

The customers of the batch are locked meanwhile, so nobody plans for them or calls off beside us.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from scheduling import sql
from scheduling.configuration.snapshot import Snapshot
from scheduling.ledger.touches import touches
from scheduling.policy import matrix
from scheduling.policy.specs import EventSpec

#: A touch to be: the event, what the matrix says, and the id it will have.
Planned = tuple[EventSpec, matrix.PlannedTouch, UUID]


class CallingOff:
    """The calling-off of one batch, in the order of its events."""

    def __init__(self, config: Snapshot, events: Sequence[EventSpec], customers: Mapping[str, int]) -> None:
        """`events`: those that are news; `customers`: their rows, by the user's id."""
        self.config = config
        self.events = events
        self.customers = customers
        self.reasons: dict[UUID, str] = {}  #: why a planned touch is called off before it begins
        self.kept: dict[UUID, list[UUID]] = {}  #: by event, the touches that wait and made it plan nothing

    def cancel_waiting(self) -> None:
        """`cancel_on`: what is stored and not sent yet because of an earlier event is obsolete now. One look for the
        whole batch; where two events call the same touch off, the first is its reason."""
        calling = [(event, node.id) for event in self.events for node in self.config.cancelling.get(event.type, ())]
        if not calling:
            return
        unsent = _unsent({self.customers[event.user_id] for event, _ in calling}, {node_id for _, node_id in calling})
        reasons: dict[UUID, str] = {}
        for event, node_id in calling:
            for touch in unsent.get((self.customers[event.user_id], node_id), ()):
                if touch.happened_at <= event.occurred_at:
                    reasons.setdefault(touch.task_id, event.type)
        for kind in sorted(set(reasons.values())):
            obsolete = [task_id for task_id, why in reasons.items() if why == kind]
            touches.cancel(obsolete, reason=f"event:{kind}", wait=False)

    def sift(self, planned: list[Planned]) -> list[Planned]:
        """The planned touches to store, with `reasons` for those that begin called off."""
        self._find_obsolete(planned)
        return self._settle_repeats(planned)

    def _find_obsolete(self, planned: list[Planned]) -> None:
        """Obsolete before it begins: by an event that came before it but happened after it, or comes next in its batch.
        Before repeats are settled, so that what is called off does not stand in the way of what follows it."""
        revocable = [row for row in planned if row[1].node.cancel_on]
        if not revocable:
            return
        happened: dict[tuple[int, str], datetime] = {
            (customer_id, kind): latest
            for customer_id, kind, latest in sql.rows(
                _HAPPENED,
                {
                    "customers": sorted({self.customers[event.user_id] for event, _, _ in revocable}),
                    "types": sorted({kind for _, each, _ in revocable for kind in each.node.cancel_on}),
                },
            )
        }
        following = self._following()
        for event, each, task_id in revocable:
            for kind in sorted(each.node.cancel_on - {event.type}):
                latest = happened.get((self.customers[event.user_id], kind))
                if latest and latest > event.occurred_at:
                    self.reasons.setdefault(task_id, f"event:{kind}")
            for other in following[event.id]:
                if other.type in each.node.cancel_on and other.occurred_at >= event.occurred_at:
                    self.reasons.setdefault(task_id, f"event:{other.type}")

    def _following(self) -> dict[UUID, list[EventSpec]]:
        """For each event, those after it in the batch that are about the same customer and may call something off."""
        following: dict[UUID, list[EventSpec]] = {}
        rest: dict[str, list[EventSpec]] = defaultdict(list)
        for event in reversed(self.events):
            following[event.id] = list(rest[event.user_id])
            if event.type in self.config.cancelling:
                rest[event.user_id].append(event)
        return following

    def _settle_repeats(self, planned: list[Planned]) -> list[Planned]:
        """`on_repeat`: keep leaves the touch that waits and plans nothing, restart calls it off and plans anew."""
        repeating = [row for row in planned if row[1].node.on_repeat != "each" and row[2] not in self.reasons]
        if not repeating:
            return planned
        unsent = _unsent(
            {self.customers[event.user_id] for event, _, _ in repeating}, {each.node.id for _, each, _ in repeating}
        )
        dropped: set[UUID] = set()
        for event, each, task_id in repeating:
            key = (self.customers[event.user_id], each.node.id)
            planned_now = _Unsent(task_id, event.occurred_at, stored=False, running=False)
            if each.node.on_repeat == "restart":
                stored = [other.task_id for other in unsent.get(key, ()) if other.stored]
                touches.cancel(stored, reason=f"restarted:{event.type}", wait=False)
                for other in unsent.get(key, ()):
                    if not other.stored:
                        self.reasons[other.task_id] = f"restarted:{event.type}"
                unsent[key] = [planned_now]
            elif waiting := [other.task_id for other in unsent.get(key, ()) if not other.running]:
                dropped.add(task_id)
                self.kept.setdefault(event.id, []).extend(waiting)
            else:
                unsent[key] = [planned_now]
        return [row for row in planned if row[2] not in dropped]


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A touch that an event can still stop."""

    task_id: UUID
    happened_at: datetime  #: its event
    stored: bool = True  #: False: the present batch plans it
    running: bool = False  #: a worker has it and has not marked it as sending


def _unsent(customers: set[int], nodes: set[int]) -> dict[tuple[int, int], list[_Unsent]]:
    """Touches that are not marked as sending, by customer and node."""
    found: dict[tuple[int, int], list[_Unsent]] = {}
    parameters = {"customers": sorted(customers), "nodes": sorted(nodes)}
    for customer_id, node_id, task_id, happened_at, running in sql.rows(_UNSENT, parameters):
        found.setdefault((customer_id, node_id), []).append(_Unsent(task_id, happened_at, running=running))
    return found


_HAPPENED = """
SELECT customer_id, type, max(occurred_at) FROM scheduling_event
WHERE customer_id = ANY(%(customers)b) AND type = ANY(%(types)b) GROUP BY 1, 2
"""

# One index has what waits and what runs: a customer's slots, which also show what runs, may be thousands. The node is
# hidden from the planner, which would look for other indexes where it has no statistics.
_UNSENT = """
WITH t AS MATERIALIZED (
    SELECT customer_id, node_id, task_id, event_id, state FROM scheduling_touch
    WHERE customer_id = ANY(%(customers)b) AND COALESCE(node_id, 0) = ANY(%(nodes)b)
      AND state IN ('scheduled', 'queued', 'running') AND (state <> 'running' OR sending_at IS NULL)
)
SELECT t.customer_id, t.node_id, t.task_id, e.occurred_at, t.state = 'running'
FROM t JOIN scheduling_event AS e ON e.id = t.event_id
ORDER BY t.task_id
"""
