"""Preview and apply the effect of edits on waiting touches: of a delay, a rule, a hold-out or a condition.

For a dynamic delay the customer's last activity before the event is read from stored events. Activity from frames is
not stored as events. Such a touch may move as if the customer had been inactive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import inf
from time import monotonic
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Q

from scheduling import sql
from scheduling.configuration.file.apply import ChangePlan
from scheduling.configuration.snapshot import (
    Snapshot,
    current,
    delay_rules_spec,
    holdout_spec,
    own_delay_rules,
    rule_spec,
    timing_spec,
)
from scheduling.ledger import locks
from scheduling.ledger.touches import touch_ledger
from scheduling.models import WAITING, EventType, Node, Touch
from scheduling.planning.earlier_events import count_before
from scheduling.policy.matrix import collect_facts, find_due_time
from scheduling.policy.node_conditions import NodeCondition, compile_condition
from scheduling.policy.profile import read_profile
from scheduling.policy.specs import CustomerSpec, DelayRulesSpec, EventSpec, NodeSpec, RuleSpec, hash_to_percent

MOST_JUDGED = 5_000  #: waiting touches of a node, the first planned ones


@dataclass(frozen=True, slots=True)
class RuleImpact:
    """The effect of a change of a rule or of the global hold-out."""

    rule: str
    verb: str
    waiting: int
    counted: str  #: what `waiting` counts: "touches"; for the hold-out "customers" inside its share


class FailingCount(NamedTuple):
    judged: int
    failing: int


def list_rule_impacts(planned: ChangePlan) -> list[RuleImpact]:
    """Return the effect of changed rules and of the hold-out, by the nodes and templates as they are stored.

    Changes that concern no waiting touch are left out.
    """
    snapshot = current()
    found = []
    for change in planned.of("harassment_rules"):
        rows = [row for row in (change.before, change.after) if row is not None and row.enabled]
        specs = [rule_spec(row, snapshot.nodes, snapshot.templates) for row in rows]
        waiting = count_limited_touches(specs, snapshot)
        found.append(RuleImpact(f"rule {change.label}", change.verb, waiting, "touches"))
    for change in planned.of("holdout"):
        after = holdout_spec(change.after)
        waiting = sum(after.includes(user_id) for (user_id,) in sql.rows(_WAITING_USERS, {})) if after else 0
        found.append(RuleImpact("global hold-out", change.verb, waiting, "customers"))
    return [each for each in found if each.waiting]


def count_limited_touches(rules: Iterable[RuleSpec], snapshot: Snapshot) -> int:
    """Count the waiting touches that any of these rules may limit."""
    nodes: set[int] = set()
    in_chats = True
    for rule in rules:
        for node in snapshot.nodes.values():
            if getattr(node, f"guard_{rule.kind}") == "apply" and rule.may_cover(node.id):
                nodes.add(node.id)
        in_chats &= rule.scope == "community"
    found = Touch.objects.filter(node__in=nodes, state__in=WAITING)
    return (found.exclude(chat_id="") if in_chats else found).count()


def count_failing(node_id: int, condition: NodeCondition) -> FailingCount:
    """Judge waiting touches of a node by a condition, as if they were due now, at most `MOST_JUDGED`."""
    rows = sql.rows(_WAITING_FACTS, {"node": node_id, "most": MOST_JUDGED})
    counted = condition.counted
    earlier = count_before((row[0], counted) for row in rows) if counted else {}
    failing = 0
    for row in rows:
        event = EventSpec(*row[:8])
        customer = CustomerSpec(*row[8:13])._replace(profile=read_profile(*row[13:]))
        failing += not condition.holds(collect_facts(event, customer, earlier.get(event.id, {})))
    return FailingCount(len(rows), failing)


# Customers with waiting touches that the hold-out concerns.
_WAITING_USERS = """
SELECT DISTINCT c.user_id
FROM scheduling_touch_live AS t
    JOIN scheduling_node AS n ON n.id = t.node_id
    JOIN scheduling_customer AS c ON c.id = t.customer_id
WHERE t.state IN ('scheduled', 'queued') AND n.guard_holdout = 'apply'
"""
_WAITING_FACTS = """
SELECT e.id, e.source, e.event_id, e.type, e.occurred_at, e.user_id, e.chat_id, e.data,
       c.id, c.user_id, c.name, c.level, c.locale, COALESCE(p.attributes, '{}'), COALESCE(p.tags, '{}')
FROM scheduling_touch_live AS t
    JOIN scheduling_event AS e ON e.id = t.event_id
    JOIN scheduling_customer AS c ON c.id = t.customer_id
    LEFT JOIN scheduling_customerprofile AS p ON p.customer_id = c.id
WHERE t.state IN ('scheduled', 'queued') AND t.node_id = %(node)s
ORDER BY t.task_id LIMIT %(most)s
"""


BATCH = 1_000
SPREAD = timedelta(minutes=10)  #: overdue touches are spread over this span instead of sent at once
PAGE_TIME_LIMIT = timedelta(seconds=20)  #: time limit of a move that an operator awaits on a page
MOST_LEFT = 100_000  #: upper limit of the count of touches that a stopped move left


class WaitingTouch(NamedTuple):
    """One row of `_WAITING`."""

    task_id: UUID
    due_at: datetime
    planned_at: datetime
    occurred_at: datetime
    level: str
    timezone: str
    user_id: str
    active_at: datetime | None  #: last activity before the event; only for a dynamic delay
    now: datetime


@dataclass(frozen=True, slots=True)
class Movement:
    """A waiting touch whose node's delay now gives another due time."""

    task_id: UUID
    due_at: datetime
    overdue: bool


@dataclass(frozen=True, slots=True)
class MoveCounts:
    touches: int = 0
    overdue: int = 0
    left: int = 0  #: not checked within the time limit; counted up to `MOST_LEFT`
    broken: bool = False  #: PostgreSQL returned an error

    def __add__(self, other: MoveCounts) -> MoveCounts:
        return MoveCounts(self.touches + other.touches, self.overdue + other.overdue)


def preview_moves(
    nodes: Sequence[NodeSpec], rules: DelayRulesSpec, within: timedelta | None = None
) -> dict[int, MoveCounts]:
    """Count, by node, the waiting touches that would move, and those of them that would be overdue.

    Raises:
        TimeoutError: the count takes longer than `within`.
    """
    ends_at = _deadline_after(within)
    found = {}
    for node in nodes:
        found[node.id] = MoveCounts()
        for _, batch in _iterate_batches(node, rules):
            found[node.id] += _count_moves(batch)
            if monotonic() > ends_at:
                raise TimeoutError
    return found


def move_waiting(nodes: Sequence[NodeSpec], rules: DelayRulesSpec, within: timedelta | None = None) -> MoveCounts:
    """Move the waiting touches of `nodes` to the due time of the delay, one batch per transaction.

    Idempotent: a touch with the right due time does not change. After `within` no further batch starts.
    """
    moved, ends_at = MoveCounts(), _deadline_after(within)
    for place, node in enumerate(nodes):
        for after, batch in _iterate_batches(node, rules):
            if monotonic() > ends_at:
                # The waiting touches of this node after `after`, and all of the other nodes, up to `MOST_LEFT`.
                behind = Q(node_id=node.id, task_id__gt=after) | Q(node_id__in=[each.id for each in nodes[place + 1 :]])
                left = Touch.objects.filter(behind, state__in=WAITING, attempt=0, retry_of=None, reserved_at=None)
                return replace(moved, left=left[:MOST_LEFT].count())
            if batch:
                with transaction.atomic():
                    task_ids = [each.task_id for each in batch]
                    locks.lock_customers_of_touches(task_ids)  # before the touches, as in every writer
                    touch_ledger.reschedule(task_ids, [each.due_at for each in batch], expires_after=node.expires_after)
            moved += _count_moves(batch)
    return moved


def _deadline_after(within: timedelta | None) -> float:
    return inf if within is None else monotonic() + within.total_seconds()


def _count_moves(batch: Sequence[Movement]) -> MoveCounts:
    return MoveCounts(len(batch), sum(each.overdue for each in batch))


def _iterate_batches(node: NodeSpec, rules: DelayRulesSpec) -> Iterator[tuple[UUID, list[Movement]]]:
    """Yield the movements of each batch with the key after which the batch starts. A batch may be empty."""
    passive = list(EventType.objects.filter(is_activity=False).values_list("key", flat=True))
    after = UUID(int=0)
    while True:
        parameters = {"node": node.id, "after": after, "limit": BATCH, "dynamic": node.dynamic, "passive": passive}
        rows = sql.rows(_WAITING, parameters)
        found = [_movement(WaitingTouch(*row), node, rules) for row in rows]
        yield after, [each for each in found if each]
        if len(rows) < BATCH:
            return
        after = rows[-1][0]


def _movement(touch: WaitingTouch, node: NodeSpec, rules: DelayRulesSpec) -> Movement | None:
    customer = CustomerSpec(
        id=0, user_id=touch.user_id, level=touch.level, timezone=touch.timezone, last_active_at=touch.active_at
    )
    planned_at = find_due_time(
        node, customer, rules, occurred_at=touch.occurred_at, time_scale=settings.AFTERTOUCH_TIME_SCALE
    ).at
    if touch.due_at > touch.planned_at:  # deferred by a guard: it may move later, never earlier
        return Movement(touch.task_id, planned_at, overdue=False) if planned_at > touch.due_at else None
    if planned_at > touch.now:
        return Movement(touch.task_id, planned_at, overdue=False) if planned_at != touch.due_at else None
    # The place in the span depends only on the touch, so a second pass does not move it later.
    spread_at = touch.now + SPREAD * (hash_to_percent("moved", str(touch.task_id)) / 100)
    return Movement(touch.task_id, spread_at, overdue=True) if spread_at < touch.due_at else None


# Only touches before their first attempt: retries and touches that an operator published again have another due time.
_WAITING = """
SELECT t.task_id, t.due_at, t.planned_at, e.occurred_at, c.level, c.timezone, c.user_id,
       CASE WHEN NOT %(dynamic)s THEN NULL
            WHEN c.last_active_at < e.occurred_at THEN c.last_active_at
            ELSE (SELECT max(o.occurred_at) FROM scheduling_event AS o
                  WHERE o.customer_id = t.customer_id AND o.occurred_at < e.occurred_at
                    AND o.type <> ALL(%(passive)b::text[]))
       END, statement_timestamp()
FROM scheduling_touch_live AS t
    JOIN scheduling_event AS e ON e.id = t.event_id
    JOIN scheduling_customer AS c ON c.id = t.customer_id
WHERE t.state IN ('scheduled', 'queued') AND t.node_id = %(node)s AND t.attempt = 0 AND t.retry_of IS NULL
  AND t.reserved_at IS NULL AND t.task_id > %(after)s
ORDER BY t.task_id LIMIT %(limit)s
"""


TIMING_COLUMNS = ("at", "at_day", "not_before", "send_window")
#: Columns of a node that determine when its touches are due.
DELAY_COLUMNS = ("delay", "dynamic", "delay_rules", *TIMING_COLUMNS)


@dataclass(frozen=True, slots=True)
class Impact:
    """The effect of a change on one existing node."""

    node: str
    verb: str
    waiting: int
    moved: MoveCounts | None  #: None: the delay does not change
    failing: FailingCount | None = None  #: None: it has no new condition


def list_impacts(planned: ChangePlan, within: timedelta | None = None) -> list[Impact]:
    """Return the effect on each node that is edited or whose delay the delay rules change.

    Raises:
        TimeoutError: the count takes longer than `within`.
    """
    snapshot = current()
    delayed = _nodes_with_new_delay(planned, snapshot)
    by_rules = {node.id: "changed" for node in delayed}
    affected = by_rules | {each.before.pk: each.verb for each in planned.of("nodes") if each.before is not None}
    counts = dict(
        Touch.objects.filter(node__in=affected, state__in=WAITING).values_list("node").annotate(Count("pk")).order_by()
    )
    rules = snapshot.delay_rules
    for change in planned.of("delay_rules")[:1]:
        rules = delay_rules_spec(change.after)
    moves = preview_moves([node for node in delayed if counts.get(node.id)], rules, within)
    moved = {node.id: moves.get(node.id, MoveCounts()) for node in delayed}
    failing: dict[int, FailingCount] = {}  # by node with waiting touches and a new condition
    for change in planned.of("nodes"):
        before, after = change.before, change.after
        if before and after and counts.get(before.pk) and after.when and after.when != before.when:
            condition = compile_condition(after.when)
            if condition:
                failing[before.pk] = count_failing(before.pk, condition)
    return [
        Impact(snapshot.nodes[pk].key, verb, counts.get(pk, 0), moved.get(pk), failing.get(pk))
        for pk, verb in affected.items()
    ]


def _nodes_with_new_delay(planned: ChangePlan, snapshot: Snapshot) -> list[NodeSpec]:
    """Return the nodes whose delay changes, with their new values."""
    edited = {each.before.pk: each for each in planned.of("nodes") if each.verb in ("changed", "restored")}
    rules_change = bool(planned.of("delay_rules"))
    found = []
    for node in snapshot.nodes.values():
        change = edited.get(node.id)
        after, own = node, False
        if change:
            row = change.after
            after = replace(
                node,
                delay=row.delay,
                dynamic=row.dynamic,
                delay_rules=own_delay_rules(row.delay_rules),
                expires_after=row.expires_after,
                timing=timing_spec(row, snapshot.calendars),
            )
            # Entries are compared, because they have the defaults of own delay rules.
            old, new = (change.section.write_entry(row) for row in (change.before, change.after))
            own = any(old[column] != new[column] for column in DELAY_COLUMNS)
        if own or (rules_change and after.dynamic and after.delay_rules is None):
            found.append(after)
    return found


def move_after_plan(planned: ChangePlan, within: timedelta | None = None) -> MoveCounts:
    """Move waiting touches after a plan was stored.

    Besides nodes with a changed delay this includes all nodes of the file with a fixed delay. Applying the same file
    again therefore finishes an interrupted move.
    """
    before = {node.id for node in _nodes_with_new_delay(planned, current())}
    after = current()
    listed = set()
    if "nodes" in planned.given:
        listed = set(Node.objects.filter(retired_at=None, dynamic=False).values_list("pk", flat=True))
    # A node that another user has added since has no touch to move.
    return move_waiting(
        [after.nodes[pk] for pk in sorted(before | listed) if pk in after.nodes], after.delay_rules, within
    )
