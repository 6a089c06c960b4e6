"""Plan the touches of an event from the nodes of the matrix, and join nodes to journeys. Pure functions.

In a journey a node follows the touches of other nodes. The end of a followed touch is an event, `touch.delivered` and
so on. Its `depth` counts the touches that led to it: 1 after a touch that another system's event planned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from scheduling.error_text import ErrorText as _
from scheduling.policy.node_conditions import Facts
from scheduling.policy.send_times import SendTime, find_send_time
from scheduling.policy.specs import CustomerSpec, DelayRulesSpec, EventSpec, NodeSpec

_NONE_EARLIER: Final[Mapping[str, int]] = {}


def delay_for(
    node: NodeSpec, customer: CustomerSpec, rules: DelayRulesSpec, *, occurred_at: datetime, time_scale: float = 1
) -> timedelta:
    """Return the wait from the event to the touch.

    A dynamic delay is that of the customer's level, times `active_factor` after recent activity.
    `customer.last_active_at` is the activity before the event itself.
    """
    if not node.dynamic:
        return node.delay / time_scale
    rules, active_at = node.delay_rules or rules, customer.last_active_at
    wait = rules.by_level.get(customer.level, rules.default)
    if active_at is not None and occurred_at - active_at <= rules.active_within:
        wait *= rules.active_factor
    return wait / time_scale


def find_due_time(
    node: NodeSpec, customer: CustomerSpec, rules: DelayRulesSpec, *, occurred_at: datetime, time_scale: float = 1
) -> SendTime:
    """Return when a touch is due: after the delay, then at the time and inside the windows of its node."""
    base = occurred_at + delay_for(node, customer, rules, occurred_at=occurred_at, time_scale=time_scale)
    if node.timing is None:
        return SendTime(base)
    return find_send_time(node.timing, base, customer.timezone, customer.user_id)


def collect_facts(event: EventSpec, customer: CustomerSpec, earlier: Mapping[str, int] = _NONE_EARLIER) -> Facts:
    """Return what conditions are judged by. `earlier` counts the customer's earlier events by type."""
    return Facts(
        event.data,
        event.chat_id,
        customer.level,
        customer.profile.tags,
        customer.profile.attributes,
        earlier,
        customer.locale,
        event.type,
        event.source,
    )


#: The times of a customer's last activity and conversation.
Activity = tuple[datetime | None, datetime | None]


def advance_activity(activity: Activity, event: EventSpec, activity_types: Mapping[str, bool]) -> Activity:
    """Return a customer's activity after an event. A type that `activity_types` lacks counts unless it is passive."""
    active_at, talking_at = activity
    is_activity = activity_types.get(event.type, event.type not in PASSIVE_TYPES)
    if is_activity and (active_at is None or event.occurred_at > active_at):
        active_at = event.occurred_at
    if event.type == "conversation.started" and (talking_at is None or event.occurred_at > talking_at):
        talking_at = event.occurred_at
    return active_at, talking_at


@dataclass(eq=False, slots=True)
class PlannedTouch:
    """A touch that an event plans, before it is stored."""

    event: EventSpec
    node: NodeSpec
    customer_id: int
    due_at: datetime
    expires_at: datetime
    task_id: UUID = field(init=False, repr=False)  #: given by the attempt to store it
    cancelled_as: str = ""  #: the reason if another event cancels it before it is stored


def plan_touches(
    event: EventSpec,
    customer: CustomerSpec,
    nodes: Iterable[NodeSpec],
    rules: DelayRulesSpec,
    *,
    time_scale: float = 1,
    earlier: Mapping[str, int] = _NONE_EARLIER,
) -> list[PlannedTouch]:
    """Return a touch for each enabled node that the event triggers and whose condition holds.

    Guards decide later, at fire time. The condition is one of them.
    """
    planned = []
    for node in nodes:
        if node.enabled and node.trigger == event.type and is_followed(node, event):
            if node.condition and not node.condition.holds(collect_facts(event, customer, earlier)):
                continue
            due_at = find_due_time(node, customer, rules, occurred_at=event.occurred_at, time_scale=time_scale).at
            planned.append(PlannedTouch(event, node, customer.id, due_at, due_at + node.expires_after))
    return planned


SOURCE: Final = "aftertouch"  #: of the events that Aftertouch records itself
#: By state of an ended touch, the type of its event.
END_TYPES: Final = {state: f"touch.{state}" for state in ("delivered", "failed", "suppressed", "cancelled", "unknown")}
#: Events of receipts (`scheduling.receipts`).
RECEIPT_TYPES: Final = frozenset({"touch.read", "touch.clicked", "touch.replied", "touch.bounced"})
#: Events about a touch. Their data names its node, so nodes with such a trigger name the nodes they follow.
TOUCH_TYPES: Final = frozenset({*END_TYPES.values()}) | RECEIPT_TYPES
#: Event types that are no activity of the customer, unless an operator decides otherwise.
PASSIVE_TYPES: Final = frozenset(
    {"customer.inactive", "session.silent", "session.unanswered", "touch.bounced", *END_TYPES.values()}
)
#: The data of an end.
END_FIELDS: Final = (
    "task_id", "delivery_key", "node", "stage", "channel", "reason", "depth", "origin", "origin_type", "origin_at"
)  # fmt: skip
LARGEST_ORIGIN = 8_192  #: bytes of JSON; an end carries no larger data of the first event


def is_followed(node: NodeSpec, event: EventSpec) -> bool:
    """Return whether the node's trigger includes this event of its type: it follows all nodes, or this one."""
    named = event.data.get("node")  # any value, if another system sent the event
    return not node.from_nodes or (isinstance(named, str) and named in node.from_nodes)


def read_depth(event_type: str, data: Mapping[str, Any]) -> int:
    """Return how many touches led to an event; 0 for an event of another system."""
    depth = data.get("depth") if event_type in TOUCH_TYPES else 0
    return depth if isinstance(depth, int) and depth > 0 else 0


def compose_end_data(node: NodeSpec, task_id: UUID, root_id: UUID, reason: str, cause: EventSpec) -> dict[str, Any]:
    """Return the data of an event about a touch. `cause` is the event that planned the touch.

    The data of the first event of the journey is passed on as `origin`, unless it is larger than `LARGEST_ORIGIN`.
    """
    if cause.type in TOUCH_TYPES:
        kept = {name: cause.data[name] for name in ("origin", "origin_type", "origin_at") if name in cause.data}
    else:
        size = len(json.dumps(cause.data, ensure_ascii=False, default=str).encode(errors="replace"))
        origin = cause.data if size <= LARGEST_ORIGIN else {}
        kept = {"origin": origin, "origin_type": cause.type, "origin_at": cause.occurred_at.isoformat()}
    return {
        "task_id": str(task_id), "delivery_key": str(root_id), "node": node.key, "stage": node.stage,
        "channel": node.channel.key, "reason": reason, "depth": read_depth(cause.type, cause.data) + 1, **kept,
    }  # fmt: skip


def find_follow_problem(
    key: str, from_nodes: Sequence[str], followed: Mapping[str, Sequence[str]], most_depth: int
) -> str:
    """Return why the node `key` cannot follow `from_nodes`, or "". `followed` has the other nodes' own.

    At most `most_depth` touches may come before one of its touches, and before those of the nodes that follow it.
    """
    graph = {**followed, key: from_nodes}
    paths = [[key, each] for each in from_nodes]
    seen: set[str] = set()
    while paths:
        path = paths.pop(0)
        if path[-1] == key:
            return _("a node cannot follow itself: %(cycle)s", cycle=" ← ".join(path))
        if path[-1] not in seen:
            seen.add(path[-1])
            paths += [[*path, each] for each in graph.get(path[-1], ())]
    followers: dict[str, list[str]] = {}
    for follower, nodes in graph.items():
        for each in nodes:
            followers.setdefault(each, []).append(follower)
    most = most_depth + 1  #: nodes in a row
    chain = (*reversed(_find_longest_chain(key, followers, most)), *_find_longest_chain(key, graph, most)[1:])
    if from_nodes and len(chain) > most:
        return _(
            "at most %(most)s touches may come before another one: %(chain)s", most=most_depth, chain=" ← ".join(chain)
        )
    return ""


def _find_longest_chain(key: str, graph: Mapping[str, Sequence[str]], most: int) -> tuple[str, ...]:
    """Return the longest way from `key`, or one of `most` + 1 nodes."""
    level: dict[str, tuple[str, ...]] = {key: (key,)}
    for _step in range(most):
        further = {each: (*path, each) for node, path in level.items() for each in graph.get(node, ())}
        if not further:
            break
        level = further
    return next(iter(level.values()))
