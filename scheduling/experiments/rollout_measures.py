"""Cluster metrics of guarded roll-outs."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduling import sql


class Rollouts(Collector):
    """Roll-outs that have not ended: at most one per node of the matrix."""

    def collect(self) -> Iterator[Metric]:
        ((running, paused, waited),) = sql.rows(_OPEN, {})
        counts = GaugeMetricFamily("aftertouch_rollouts", "Guarded roll-outs that have not ended.", labels=["state"])
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
FROM scheduling_guardedrollout WHERE state IN ('running', 'paused')
"""
