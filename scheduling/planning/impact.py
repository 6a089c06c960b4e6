"""What a plan means for touches that wait already."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from django.db.models import Count

from scheduling.configuration import snapshot as configuration
from scheduling.configuration.file.apply import Plan
from scheduling.configuration.snapshot import Snapshot, delay_rules_spec, own_delay_rules
from scheduling.models import WAITING, DelayRule, Node, Touch
from scheduling.planning.rescheduling import Moved, foresee, move_waiting
from scheduling.policy.specs import DelayRules, NodeSpec

DELAY = ("delay", "dynamic", "delay_rules")  #: the columns of a node that say how long it waits


@dataclass(frozen=True, slots=True)
class Impact:
    """On one node that exists already."""

    node: str
    verb: str
    waiting: int
    moved: Moved | None  #: None where the delay is as it was


def impacts(planned: Plan) -> list[Impact]:
    """Of every node that is changed, or whose delay the delay rules change."""
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
    """The nodes whose delay is another afterwards, as they will be."""
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
    """After the plan was stored: bring waiting touches to where their node's delay now says. Besides the nodes whose
    delay this plan changed these are all the file's nodes with a fixed delay, so that a move that was cut short is
    finished by applying the same file again."""
    before = {node.id for node in _delayed(planned, configuration.current())}
    after = configuration.current()
    listed = set()
    if "nodes" in planned.given:
        listed = set(Node.objects.filter(retired_at=None, dynamic=False).values_list("pk", flat=True))
    return move_waiting([after.nodes[pk] for pk in sorted(before | listed)], after.delay_rules, within)
