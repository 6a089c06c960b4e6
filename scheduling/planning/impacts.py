"""Count the waiting touches and customers that an edited rule, hold-out or condition concerns. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from scheduling import sql
from scheduling.configuration.file.apply import ChangePlan
from scheduling.configuration.file.section import Change
from scheduling.configuration.snapshot import Snapshot, current, holdout_spec, rule_spec
from scheduling.models import WAITING, Touch
from scheduling.planning.earlier_events import CountedEvent, count_before
from scheduling.policy.matrix import collect_facts
from scheduling.policy.node_conditions import NodeCondition
from scheduling.policy.profile import read_profile
from scheduling.policy.specs import CustomerSpec, EventSpec, NodeSpec, RuleSpec

TOUCHES = ("waiting touch", "waiting touches")
CUSTOMERS = ("waiting customer inside the share", "waiting customers inside the share")
MOST_JUDGED = 5_000  #: waiting touches of a node, the first planned ones


@dataclass(frozen=True, slots=True)
class RuleImpact:
    """The effect of a change of a rule or of the global hold-out."""

    rule: str
    verb: str
    waiting: int  #: touches that it covers; of the hold-out customers with such touches inside the share
    noun: tuple[str, str]  #: of one and of others


class FailingCount(NamedTuple):
    judged: int
    failing: int


def list_rule_impacts(planned: ChangePlan) -> list[RuleImpact]:
    """Return the effect of changed rules and of the hold-out, by the nodes and templates as they are stored.

    Changes that concern no waiting touch are left out.
    """
    snapshot = current()
    found = [_measure_rule(change, snapshot) for change in planned.of("harassment_rules")]
    for change in planned.of("holdout"):
        after = holdout_spec(change.after)
        waiting = sum(after.includes(each) for each in list_waiting_users()) if after else 0
        found.append(RuleImpact("global hold-out", change.verb, waiting, CUSTOMERS))
    return [each for each in found if each.waiting]


def _measure_rule(change: Change, snapshot: Snapshot) -> RuleImpact:
    rows = [row for row in (change.before, change.after) if row is not None and row.enabled]
    specs = [rule_spec(row, snapshot.nodes, snapshot.templates) for row in rows]
    return RuleImpact(f"rule {change.label}", change.verb, count_limited_touches(specs, snapshot), TOUCHES)


def count_limited_touches(rules: Iterable[RuleSpec], snapshot: Snapshot, most: int | None = None) -> int:
    """Count the waiting touches that any of these rules may limit, up to `most`."""
    nodes: set[int] = set()
    in_chats = True
    for rule in rules:
        nodes |= {node.id for node in snapshot.nodes.values() if _is_limited(node, rule)}
        in_chats &= rule.scope == "community"
    found = Touch.objects.filter(node__in=nodes, state__in=WAITING)
    return (found.exclude(chat_id="") if in_chats else found)[:most].count()


def _is_limited(node: NodeSpec, rule: RuleSpec) -> bool:
    return getattr(node, f"guard_{rule.kind}") == "apply" and rule.may_cover(node.id)


def list_waiting_users(most: int | None = None) -> list[str]:
    """Return the user ids of customers with waiting touches that the hold-out concerns, at most `most`."""
    return [row[0] for row in sql.rows(_WAITING_USERS, {"most": most})]


def count_failing(node_id: int, condition: NodeCondition) -> FailingCount:
    """Judge waiting touches of a node by a condition, as if they were due now, at most `MOST_JUDGED`."""
    rows = sql.rows(_WAITING_FACTS, {"node": node_id, "most": MOST_JUDGED})
    counted = condition.counted
    earlier = count_before(CountedEvent(row[0], row[1], counted) for row in rows) if counted else {}
    failing = 0
    for row in rows:
        task_id, event = row[0], EventSpec(*row[1:9])
        customer = CustomerSpec(*row[9:14])._replace(profile=read_profile(*row[14:]))
        failing += not condition.holds(collect_facts(event, customer, earlier.get(task_id, {})))
    return FailingCount(len(rows), failing)


_WAITING_USERS = """
SELECT DISTINCT c.user_id
FROM scheduling_touch_live AS t
    JOIN scheduling_node AS n ON n.id = t.node_id
    JOIN scheduling_customer AS c ON c.id = t.customer_id
WHERE t.state IN ('scheduled', 'queued') AND n.guard_holdout = 'apply' LIMIT %(most)s::bigint
"""
_WAITING_FACTS = """
SELECT t.task_id, e.id, e.source, e.event_id, e.type, e.occurred_at, e.user_id, e.chat_id, e.data,
       c.id, c.user_id, c.name, c.level, c.locale, COALESCE(p.attributes, '{}'), COALESCE(p.tags, '{}')
FROM scheduling_touch_live AS t
    JOIN scheduling_event AS e ON e.id = t.event_id
    JOIN scheduling_customer AS c ON c.id = t.customer_id
    LEFT JOIN scheduling_customerprofile AS p ON p.customer_id = c.id
WHERE t.state IN ('scheduled', 'queued') AND t.node_id = %(node)s
ORDER BY t.task_id LIMIT %(most)s
"""
