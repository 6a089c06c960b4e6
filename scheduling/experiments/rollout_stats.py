"""Count the results of the canary and of the stable version since the start of a step.

A touch counts for its template if its first decision to send falls into the step and it has ended. A complaint counts
for the touch it names, else for the latest one delivered before it. An opt-out counts for the latest touch delivered
before it. A complaint that opted the customer out counts as both. Republished touches are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduling import sql
from scheduling.ids import first_id_at
from scheduling.models import AutomaticRollout
from scheduling.policy.rollout import VersionCounts

#: Age below which an end is not stored yet. A touch of a transaction that stays open for longer may be missed; no
#: transaction stays open so long.
MIN_STORED_AGE = timedelta(minutes=2)
PART_SIZE = 100_000  #: touches of all nodes read by one statement
PERSIST_SECONDS = 20.0  #: seconds of a pass for storing counts
MAX_CLOCK_LAG = timedelta(minutes=5)  #: more than the clock of any API node is behind


@dataclass(frozen=True, slots=True)
class EndCounts:
    """Counts of the touches of one version."""

    ended: int = 0
    failed: int = 0  #: included in `ended`

    def __add__(self, other: EndCounts) -> EndCounts:
        return EndCounts(self.ended + other.ended, self.failed + other.failed)


@dataclass(frozen=True, slots=True)
class StoredCounts:
    """Counts of touches that ended before `until`.

    There may be millions of touches, too many to read every minute. An end is final. Touches that ended some minutes
    ago are therefore counted once, in parts, and stored with the roll-out. A judgement adds those of the last minutes.
    Complaints and opt-outs arrive later and are few, so their touches are found through them.
    """

    until: datetime
    canary: EndCounts  #: of this step
    stable: EndCounts  #: of this step
    stable_in_all: EndCounts  #: since the start of the roll-out: at 100 % no community gets the stable version any more


def persist_older_counts(seen: AutomaticRollout, time_limit: float) -> bool:
    """Count older touches and store the counts, part by part.

    Return whether the roll-out still runs and no other process holds it.

    Raises:
        TimeoutError: much is left, for example after a long pause; the next pass continues.
    """
    ends_at = monotonic() + PERSIST_SECONDS
    while True:
        with sql.limit_statement_time(time_limit):
            if not count_next_part(seen):
                return True
        with sql.limit_statement_time(time_limit):
            mine = AutomaticRollout.objects.select_for_update(skip_locked=True)
            row = mine.filter(pk=seen.pk, state=AutomaticRollout.State.RUNNING).first()
            if row is None:
                return False
            row.counted = seen.counted
            row.save(update_fields=["counted"])
        if monotonic() > ends_at:
            raise TimeoutError("what ended earlier is not counted yet; the next pass goes on with it")


def count_next_part(rollout: AutomaticRollout) -> bool:
    """Add one more part to `rollout.counted` without saving it. Return whether more is left."""
    before = _read_stored_counts(rollout)
    ((until, more),) = sql.rows(_STRETCH, {"since": before.until, "most": PART_SIZE, "lately": MIN_STORED_AGE})
    if until <= before.until:
        return False
    after = _add_ended_touches(rollout, before, until)
    rollout.counted = {
        "step_at": rollout.step_at.isoformat(),
        "until": until.isoformat(),
        **{name: [ends.ended, ends.failed] for name, ends in _map_end_counts(after).items()},
    }
    return bool(more)


def count_version_results(rollout: AutomaticRollout) -> tuple[VersionCounts, VersionCounts]:
    """Return the counts of the canary and of the stable version."""
    # Complaints first: touches that end in between are counted below, so no rate exceeds 1.
    complained, opted_out = _count_by_version(rollout, _COMPLAINED), _count_by_version(rollout, _OPTED_OUT)
    ends = _add_ended_touches(rollout, _read_stored_counts(rollout), None)
    stable = ends.stable_in_all if _is_last_step(rollout) else ends.stable
    return (
        VersionCounts(ends.canary.ended, ends.canary.failed, complained.get(True, 0), opted_out.get(True, 0)),
        VersionCounts(stable.ended, stable.failed, complained.get(False, 0), opted_out.get(False, 0)),
    )


def _is_last_step(rollout: AutomaticRollout) -> bool:
    """Return whether the stable version's figures are those of all steps."""
    return rollout.percent >= 100


def _read_stored_counts(rollout: AutomaticRollout) -> StoredCounts:
    """Return the stored counts. A new step starts with those that cover all steps."""
    kept = rollout.counted
    if not kept:
        return StoredCounts(rollout.started_at, EndCounts(), EndCounts(), EndCounts())
    until = datetime.fromisoformat(kept["until"])
    counted = StoredCounts(until, **{name: EndCounts(*kept[name]) for name in ("canary", "stable", "stable_in_all")})
    if datetime.fromisoformat(kept["step_at"]) == rollout.step_at:
        return counted
    if until <= rollout.step_at:
        return StoredCounts(until, EndCounts(), EndCounts(), counted.stable_in_all)
    return StoredCounts(rollout.started_at, EndCounts(), EndCounts(), EndCounts())


def _map_end_counts(counted: StoredCounts) -> dict[str, EndCounts]:
    return {"canary": counted.canary, "stable": counted.stable, "stable_in_all": counted.stable_in_all}


def _add_ended_touches(rollout: AutomaticRollout, before: StoredCounts, until: datetime | None) -> StoredCounts:
    """Return the counts with the touches that ended from then on, up to `until` or now."""
    given = {**_build_parameters(rollout), "from": before.until, "until": until}
    found = {(canary, of_step): EndCounts(*counts) for canary, of_step, *counts in sql.rows(_ENDED, given)}
    canary, stable, earlier = (found.get(each, EndCounts()) for each in ((True, True), (False, True), (False, False)))
    return StoredCounts(
        until or before.until,
        before.canary + canary,
        before.stable + stable,
        before.stable_in_all + stable + earlier,
    )


def _count_by_version(rollout: AutomaticRollout, statement: str) -> dict[bool, int]:
    rows: Sequence[Any] = sql.rows(statement, _build_parameters(rollout))
    return dict(rows)


def _build_parameters(rollout: AutomaticRollout) -> dict[str, Any]:
    stable_since = rollout.started_at if _is_last_step(rollout) else rollout.step_at
    return {
        "node": rollout.node_id,
        "canary": rollout.canary_id,
        "stable": rollout.stable_id,
        "started": rollout.started_at,
        "since": rollout.step_at,
        "stable_since": stable_since,
        "first_event": first_id_at(stable_since - MAX_CLOCK_LAG),
    }


_STRETCH = """
SELECT LEAST(min(at), statement_timestamp() - %(lately)s), min(at) < statement_timestamp() - %(lately)s
FROM (
    SELECT settled_at AS at FROM scheduling_touch_ended
    WHERE settled_at > %(since)s ORDER BY settled_at OFFSET %(most)s LIMIT 1
) AS enough
"""

_OF_BOTH = "t.node_id = %(node)s AND t.retry_of IS NULL AND t.template_id IN (%(canary)s, %(stable)s)"
_DECIDED = "(SELECT min(v.at) FROM touch_verdicts(t.verdicts) AS v WHERE v.decision = 'send')"
_COUNTS = f"""{_OF_BOTH} AND t.state = 'delivered'
  AND CASE WHEN t.template_id = %(canary)s THEN %(since)s ELSE %(stable_since)s END <= {_DECIDED}"""

_ENDED = f"""
WITH ended AS MATERIALIZED (
    SELECT t.template_id = %(canary)s AS canary, t.state <> 'delivered' AS failed, {_DECIDED} AS decided_at
    FROM scheduling_touch AS t
    WHERE t.settled_at >= %(from)s AND t.settled_at < COALESCE(%(until)s::timestamptz, 'infinity')
      AND {_OF_BOTH} AND t.state IN ('delivered', 'failed', 'unknown')
)
SELECT canary, decided_at >= %(since)s, count(*), count(*) FILTER (WHERE failed)
FROM ended WHERE decided_at >= %(started)s GROUP BY 1, 2
"""  # noqa: S608 (made of constants)

# The event of a complaint is stored with it, and its id grows with time.
_COMPLAINED = f"""
SELECT t.template_id = %(canary)s, count(DISTINCT t.task_id)
FROM scheduling_complaint AS c JOIN scheduling_touch AS t ON t.task_id = c.touch_id
WHERE c.event_id >= %(first_event)s AND {_COUNTS}
GROUP BY 1
"""  # noqa: S608 (made of constants)

_OPTED_OUT = f"""
SELECT t.template_id = %(canary)s, count(*)
FROM scheduling_customer AS c JOIN scheduling_touch AS t ON t.customer_id = c.id
WHERE c.opted_out AND c.opted_out_at >= %(stable_since)s
  AND t.reserved_at >= %(stable_since)s AND t.reserved_at <= c.opted_out_at AND {_COUNTS}
  AND NOT EXISTS (
      SELECT FROM scheduling_touch AS later
      WHERE later.customer_id = c.id AND later.state = 'delivered'
        AND later.reserved_at > t.reserved_at AND later.reserved_at <= c.opted_out_at
  )
GROUP BY 1
"""  # noqa: S608 (made of constants)


class RolloutCollector(Collector):
    """Metrics of roll-outs that have not ended: at most one per node of the matrix."""

    def collect(self) -> Iterator[Metric]:
        ((running, paused, waited),) = sql.rows(_OPEN, {})
        counts = GaugeMetricFamily("aftertouch_rollouts", "Automatic roll-outs that have not ended.", labels=["state"])
        counts.add_metric(["running"], running)
        counts.add_metric(["paused"], paused)
        yield counts
        yield GaugeMetricFamily(
            "aftertouch_rollouts_oldest_judged_seconds",
            "Time since the longest unevaluated running roll-out was evaluated, in seconds.",
            value=waited,
        )


_OPEN = """
SELECT count(*) FILTER (WHERE state = 'running'), count(*) FILTER (WHERE state = 'paused'),
    COALESCE(extract(epoch FROM statement_timestamp() -
        min(GREATEST(step_at, judged_at)) FILTER (WHERE state = 'running')), 0)::float8
FROM scheduling_automaticrollout WHERE state IN ('running', 'paused')
"""
