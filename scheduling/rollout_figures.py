"""What came of the canary and of the stable version since a step began.

A touch counts by the template that was decided for it, once its first decision to send was made in that time and it
has ended. A complaint counts for the touch that it names, or else for the latest one delivered to the customer before
it, as everywhere; an opt-out for the latest one delivered before it. Where a complaint opted the customer out, it is
both. What a person published again is left out: it is a second try at something counted.
"""

from __future__ import annotations

from datetime import datetime

from scheduling import sql
from scheduling.guardrail import Tally
from scheduling.models import GuardedRollout


def tallies(rollout: GuardedRollout) -> tuple[Tally, Tally]:
    """Of the canary, and of the stable version."""
    parameters = {
        "node": rollout.node_id,
        "canary": rollout.canary_id,
        "stable": rollout.stable_id,
        "since": rollout.step_at,
        "stable_since": _stable_since(rollout),
    }
    found = {canary: Tally(*counts) for canary, *counts in sql.rows(_TALLIES, parameters)}
    return found.get(True, Tally()), found.get(False, Tally())


def _stable_since(rollout: GuardedRollout) -> datetime:
    """At 100 % nobody gets the stable version any more: its figures are those of the steps before."""
    return rollout.started_at if rollout.percent >= 100 else rollout.step_at


_TALLIES = """
WITH ended AS MATERIALIZED (
    SELECT t.task_id, t.customer_id, t.state, t.reserved_at, t.template_id = %(canary)s AS canary
    FROM scheduling_touch AS t
    WHERE t.settled_at >= LEAST(%(since)s, %(stable_since)s) AND t.node_id = %(node)s AND t.retry_of IS NULL
      AND t.template_id IN (%(canary)s, %(stable)s) AND t.state IN ('delivered', 'failed', 'unknown')
      AND CASE WHEN t.template_id = %(canary)s THEN %(since)s ELSE %(stable_since)s END <= (
          SELECT min(v.at) FROM scheduling_verdict AS v WHERE v.touch_id = t.task_id AND v.decision = 'send'
      )
)
SELECT e.canary, count(*), count(*) FILTER (WHERE e.state <> 'delivered'),
    count(*) FILTER (WHERE e.state = 'delivered' AND EXISTS (
        SELECT FROM scheduling_complaint AS c WHERE c.touch_id = e.task_id
    )),
    count(*) FILTER (WHERE e.state = 'delivered' AND EXISTS (
        SELECT FROM scheduling_customer AS c
        WHERE c.id = e.customer_id AND c.opted_out AND c.opted_out_at >= e.reserved_at AND NOT EXISTS (
            SELECT FROM scheduling_touch AS later
            WHERE later.customer_id = e.customer_id AND later.state = 'delivered'
              AND later.reserved_at > e.reserved_at AND later.reserved_at <= c.opted_out_at
        )
    ))
FROM ended AS e GROUP BY e.canary
"""
