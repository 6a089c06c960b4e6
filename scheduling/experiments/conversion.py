"""Compare how many customers reach the goal of a node, with and without its touches.

A customer counts once per node if the goal's event of the same customer occurs within the goal's span.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime

from scheduling import sql
from scheduling.policy.guards import ALL_NODES
from scheduling.policy.rollout import Lift, Share

#: Rules of verdicts from the hold-out draw on. All other rules apply before the draw and are no evidence of it; their
#: codes also come from Presence and events.
DRAWN_RULES = (
    "holdout", "rollout", "quiet_hours", "send_window", "dedupe", "community_dedupe", "cap", "community_cap",
    "slot_hold",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VersionShare:
    template: str
    number: int
    share: Share


@dataclass(slots=True)
class NodeEffect:
    """The effect of one node."""

    node: str
    goal: str
    lift: Lift
    overall: Lift  #: of all touches of all nodes: beside the global hold-out
    versions: list[VersionShare] = field(default_factory=list)


def compute_effects(since: datetime, until: datetime) -> list[NodeEffect]:
    """Return the effect of each node with a goal. Decisions younger than the goal's span are left out.

    There are three comparisons:

    1. Hold-out against all other customers who reached the draw. The latter include cancelled touches and those
       stopped later by a limit or a roll-out. Both groups are observed from the draw on. With a later start one group
       would lose the customers who reach the goal while a touch is deferred. This comparison is unbiased. It
       understates the effect on customers who received a message.
    2. The global hold-out against the same customers. It measures all touches of all nodes together.
    3. Template versions, among the receivers. The version of a community is also drawn at random. The edits over time
       from one version to the next are not.
    """
    parameters = {"since": since, "until": until, "drawn": list(DRAWN_RULES), "all_nodes": ALL_NODES}
    found = {}
    for key, goal, *counts in sql.rows(_BY_NODE, parameters):
        treated, control, everywhere = (
            Share(hits or 0, count) for count, hits in zip(counts[::2], counts[1::2], strict=True)
        )
        found[key] = NodeEffect(key, goal, Lift(treated, control), Lift(treated, everywhere))
    versions: dict[str, list[VersionShare]] = defaultdict(list)
    for node, template, number, count, hits in sql.rows(_BY_VERSION, parameters):
        versions[node].append(VersionShare(template, number, Share(hits or 0, count)))
    for key, effect in found.items():
        effect.versions = versions[key]
    return list(found.values())


_GOALS = """
WITH goals AS MATERIALIZED (
    SELECT id, key, goal_event, goal_within FROM scheduling_node
    WHERE goal_event <> '' AND goal_within IS NOT NULL AND retired_at IS NULL
),
"""

_COUNTED = """
counted AS (
    SELECT d.*, EXISTS (
        SELECT FROM scheduling_event AS e
        WHERE e.customer_id = d.customer_id AND e.type = d.goal_event
          AND e.occurred_at > d.at AND e.occurred_at <= d.at + d.goal_within
    )::int AS hit FROM decided AS d
)
"""

# The first draw of each customer at each node, if the span of the goal is over.
_BY_NODE = "".join((
    _GOALS,
    """
decided AS MATERIALIZED (
    SELECT DISTINCT ON (t.node_id, t.customer_id)
           t.node_id, t.customer_id, g.key, g.goal_event, g.goal_within, draw.at,
           CASE WHEN draw.rule <> 'holdout' THEN 'treated' WHEN draw.observed = %(all_nodes)s THEN 'everywhere'
                ELSE 'control' END AS part
    FROM scheduling_touch AS t JOIN goals AS g ON g.id = t.node_id
    JOIN LATERAL (
        SELECT at, rule, observed FROM touch_verdicts(t.verdicts)
        WHERE decision = 'send' OR rule = ANY(%(drawn)b)
        ORDER BY at, number LIMIT 1
    ) AS draw ON draw.at >= %(since)s AND draw.at < %(until)s - g.goal_within
    WHERE t.settled_at >= %(since)s AND t.retry_of IS NULL
    ORDER BY t.node_id, t.customer_id, draw.at, t.task_id
),
""",
    _COUNTED,
    """
SELECT g.key, g.goal_event,
       count(c.key) FILTER (WHERE c.part = 'treated'), sum(c.hit) FILTER (WHERE c.part = 'treated'),
       count(c.key) FILTER (WHERE c.part = 'control'), sum(c.hit) FILTER (WHERE c.part = 'control'),
       count(c.key) FILTER (WHERE c.part = 'everywhere'), sum(c.hit) FILTER (WHERE c.part = 'everywhere')
FROM goals AS g LEFT JOIN counted AS c ON c.node_id = g.id GROUP BY g.key, g.goal_event ORDER BY g.key
""",
))  # fmt: skip

# The first delivery to each customer at each node.
_BY_VERSION = "".join((
    _GOALS,
    """
decided AS MATERIALIZED (
    SELECT DISTINCT ON (t.node_id, t.customer_id)
           t.customer_id, t.template_id, t.template_version, g.key, g.goal_event, g.goal_within,
           COALESCE(t.reserved_at, t.settled_at) AS at
    FROM scheduling_touch AS t JOIN goals AS g ON g.id = t.node_id
    WHERE t.settled_at >= %(since)s AND t.settled_at < %(until)s - g.goal_within AND t.retry_of IS NULL
      AND t.state = 'delivered'
    ORDER BY t.node_id, t.customer_id, t.settled_at, t.task_id
),
""",
    _COUNTED,
    """
SELECT c.key, m.key, c.template_version, count(*), sum(c.hit)
FROM counted AS c JOIN scheduling_template AS m ON m.id = c.template_id
GROUP BY c.key, m.key, c.template_version ORDER BY c.key, m.key, c.template_version
""",
))  # fmt: skip
