"""Preview and apply the effect of an edited delay on waiting touches.

For a dynamic delay the customer's last activity before the event is read from stored events. Activity from frames is
not stored as events. Such a touch may move as if the customer had been inactive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import inf
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Count, Q

from scheduling.configuration import snapshot as configuration
from scheduling.configuration.file.apply import Plan
from scheduling.configuration.snapshot import Snapshot, delay_rules_spec, own_delay_rules
from scheduling.ledger import locks
from scheduling.ledger.touches import touches
from scheduling.models import WAITING, DelayRule, EventType, Node, Touch
from scheduling.policy.matrix import delay_for
from scheduling.policy.specs import CustomerSpec, DelayRules, NodeSpec, bucket

BATCH = 1_000
SPREAD = timedelta(minutes=10)  #: overdue touches are spread over this span instead of sent at once
WATCHED = timedelta(seconds=20)  #: time limit of a move that an operator awaits on a page
MOST_LEFT = 100_000  #: upper limit of the count of touches that a stopped move left


class Waiting(NamedTuple):
    """One row of `_WAITING`."""

    task_id: UUID
    due_at: datetime
    planned_at: datetime
    occurred_at: datetime
    level: str
    active_at: datetime | None  #: last activity before the event; only for a dynamic delay
    now: datetime


@dataclass(frozen=True, slots=True)
class Movement:
    """A waiting touch whose node's delay now gives another due time."""

    task_id: UUID
    due_at: datetime
    overdue: bool


@dataclass(frozen=True, slots=True)
class Moved:
    touches: int = 0
    overdue: int = 0
    left: int = 0  #: not checked within the time limit; counted up to `MOST_LEFT`
    broken: bool = False  #: PostgreSQL returned an error

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.touches + other.touches, self.overdue + other.overdue)


def foresee(nodes: Sequence[NodeSpec], rules: DelayRules, within: timedelta | None = None) -> dict[int, Moved]:
    """Count, by node, the waiting touches that would move, and those of them that would be overdue.

    Raises:
        TimeoutError: the count takes longer than `within`.
    """
    ends_at = _end(within)
    found = {}
    for node in nodes:
        found[node.id] = Moved()
        for _, batch in _batches(node, rules):
            found[node.id] += _count(batch)
            if monotonic() > ends_at:
                raise TimeoutError
    return found


def move_waiting(nodes: Sequence[NodeSpec], rules: DelayRules, within: timedelta | None = None) -> Moved:
    """Move the waiting touches of `nodes` to the due time of the delay, one batch per transaction.

    Idempotent: a touch with the right due time does not change. After `within` no further batch starts.
    """
    moved, ends_at = Moved(), _end(within)
    for place, node in enumerate(nodes):
        for after, batch in _batches(node, rules):
            if monotonic() > ends_at:
                return replace(moved, left=_left(nodes[place:], after))
            if batch:
                _move(batch, node)
            moved += _count(batch)
    return moved


def _move(batch: Sequence[Movement], node: NodeSpec) -> None:
    with transaction.atomic():
        task_ids = [each.task_id for each in batch]
        locks.lock_customers(task_ids)  # before the touches, as in every writer
        touches.reschedule(task_ids, [each.due_at for each in batch], expires_after=node.expires_after)


def _left(nodes: Sequence[NodeSpec], after: UUID) -> int:
    """Count the waiting touches of the first node after `after`, and all of the other nodes, up to `MOST_LEFT`."""
    first, *others = [node.id for node in nodes]
    behind = Q(node_id=first, task_id__gt=after) | Q(node_id__in=others)
    first_turn = Touch.objects.filter(state__in=("scheduled", "queued"), attempt=0, retry_of=None, reserved_at=None)
    return first_turn.filter(behind)[:MOST_LEFT].count()


def _end(within: timedelta | None) -> float:
    return inf if within is None else monotonic() + within.total_seconds()


def _count(batch: Sequence[Movement]) -> Moved:
    return Moved(len(batch), sum(each.overdue for each in batch))


def _batches(node: NodeSpec, rules: DelayRules) -> Iterator[tuple[UUID, list[Movement]]]:
    """Yield the movements of each batch with the key after which the batch starts. A batch may be empty."""
    passive = list(EventType.objects.filter(is_activity=False).values_list("key", flat=True))
    after = UUID(int=0)
    while True:
        with connection.cursor() as cursor:
            cursor.execute(
                _WAITING,
                {"node": node.id, "after": after, "limit": BATCH, "dynamic": node.dynamic, "passive": passive},
            )
            rows = cursor.fetchall()
        found = [_movement(Waiting(*row), node, rules) for row in rows]
        yield after, [each for each in found if each]
        if len(rows) < BATCH:
            return
        after = rows[-1][0]


def _movement(touch: Waiting, node: NodeSpec, rules: DelayRules) -> Movement | None:
    customer = CustomerSpec(id=0, user_id="", level=touch.level, last_active_at=touch.active_at)
    wait = delay_for(node, customer, rules, occurred_at=touch.occurred_at, time_scale=settings.AFTERTOUCH_TIME_SCALE)
    planned_at = touch.occurred_at + wait
    if touch.due_at > touch.planned_at:  # deferred by a guard: it may move later, never earlier
        return Movement(touch.task_id, planned_at, overdue=False) if planned_at > touch.due_at else None
    if planned_at > touch.now:
        return Movement(touch.task_id, planned_at, overdue=False) if planned_at != touch.due_at else None
    # The place in the span depends only on the touch, so a second pass does not move it later.
    spread_at = touch.now + SPREAD * (bucket("moved", str(touch.task_id)) / 100)
    return Movement(touch.task_id, spread_at, overdue=True) if spread_at < touch.due_at else None


# Only touches before their first attempt: retries and touches that an operator published again have another due time.
_WAITING = """
SELECT t.task_id, t.due_at, t.planned_at, e.occurred_at, c.level,
       CASE WHEN NOT %(dynamic)s THEN NULL
            WHEN c.last_active_at < e.occurred_at THEN c.last_active_at
            ELSE (SELECT max(o.occurred_at) FROM scheduling_event AS o
                  WHERE o.customer_id = t.customer_id AND o.occurred_at < e.occurred_at
                    AND o.type <> ALL(%(passive)s::text[]))
       END, statement_timestamp()
FROM scheduling_touch AS t
    JOIN scheduling_event AS e ON e.id = t.event_id
    JOIN scheduling_customer AS c ON c.id = t.customer_id
WHERE t.state IN ('scheduled', 'queued') AND t.node_id = %(node)s AND t.attempt = 0 AND t.retry_of IS NULL
  AND t.reserved_at IS NULL AND t.task_id > %(after)s
ORDER BY t.task_id LIMIT %(limit)s
"""


DELAY = ("delay", "dynamic", "delay_rules")  #: columns of a node that determine its delay


@dataclass(frozen=True, slots=True)
class Impact:
    """The effect of a change on one existing node."""

    node: str
    verb: str
    waiting: int
    moved: Moved | None  #: None: the delay does not change


def impacts(planned: Plan) -> list[Impact]:
    """Return the effect on each node that is edited or whose delay the delay rules change."""
    snapshot = configuration.current()
    affected = _affected(planned, snapshot)
    counts = dict(
        Touch.objects.filter(node__in=affected, state__in=WAITING).values_list("node").annotate(Count("pk")).order_by()
    )
    delayed = _delayed(planned, snapshot)
    foreseen = foresee([node for node in delayed if counts.get(node.id)], _rules(planned, snapshot))
    moved = {node.id: foreseen.get(node.id, Moved()) for node in delayed}
    return [
        Impact(snapshot.nodes[pk].key, verb, counts.get(pk, 0), moved.get(pk)) for pk, verb in affected.items()
    ]  # fmt: skip


def _affected(planned: Plan, snapshot: Snapshot) -> dict[int, str]:
    by_rules = {node.id: "changed" for node in _delayed(planned, snapshot)}
    return by_rules | {each.row.pk: each.verb for each in planned.of("nodes") if each.row is not None}


def _delayed(planned: Plan, snapshot: Snapshot) -> list[NodeSpec]:
    """Return the nodes whose delay changes, with their new values."""
    edited = {each.row.pk: each for each in planned.of("nodes") if each.row is not None and each.verb != "retired"}
    rules_change = bool(planned.of("delay_rules"))
    found = []
    for node in snapshot.nodes.values():
        change = edited.get(node.id)
        after = _afterwards(node, change.values) if change else node
        own = change is not None and any(change.before[column] != change.values[column] for column in DELAY)
        if own or (rules_change and after.dynamic and after.delay_rules is None):
            found.append(after)
    return found


def _afterwards(node: NodeSpec, values: Any) -> NodeSpec:
    return replace(
        node,
        delay=values["delay"],
        dynamic=values["dynamic"],
        delay_rules=own_delay_rules(values["delay_rules"]),
        expires_after=values["expires_after"],
    )


def _rules(planned: Plan, snapshot: Snapshot) -> DelayRules:
    for change in planned.of("delay_rules"):
        return delay_rules_spec(DelayRule(**change.values))
    return snapshot.delay_rules


def follow(planned: Plan, within: timedelta | None = None) -> Moved:
    """Move waiting touches after a plan was stored.

    Besides nodes with a changed delay this includes all nodes of the file with a fixed delay. Applying the same file
    again therefore finishes an interrupted move.
    """
    before = {node.id for node in _delayed(planned, configuration.current())}
    after = configuration.current()
    listed = set()
    if "nodes" in planned.given:
        listed = set(Node.objects.filter(retired_at=None, dynamic=False).values_list("pk", flat=True))
    return move_waiting([after.nodes[pk] for pk in sorted(before | listed)], after.delay_rules, within)
