"""What the database knows about RPA, for `/metrics`. Where it does not answer, the series are missing, not zero."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rpa_tasks.lanes import HOME_LEASE, TIERS
from scheduling import sql

WINDOW = timedelta(minutes=10)
LATEST = 5_000  #: runs that are looked at; more than fit into the window on any node we know
QUANTILES = (0.5, 0.9, 0.99)


class RpaMetrics(Collector):
    def collect(self) -> Iterator[Metric]:
        yield from _waits()
        yield _waiting()
        yield _browsers()
        yield _breakers()


def _waits() -> Iterator[Metric]:
    """Of the runs of the last ten minutes."""
    ((*found,),) = sql.rows(
        """
        SELECT percentile_cont(%(quantiles)b::float8[]) WITHIN GROUP (ORDER BY waited),
               percentile_cont(%(quantiles)b::float8[]) WITHIN GROUP (ORDER BY took)
        FROM (SELECT extract(epoch FROM pool_wait) AS waited, extract(epoch FROM ended_at - started_at) AS took,
                     ended_at
              FROM rpa_tasks_run ORDER BY id DESC LIMIT %(latest)s) AS latest
        WHERE ended_at > statement_timestamp() - %(window)s
        """,
        {"quantiles": list(QUANTILES), "latest": LATEST, "window": WINDOW},
    )
    names = {
        "aftertouch_rpa_pool_wait_seconds": "How long runs waited for their browser, over ten minutes.",
        "aftertouch_rpa_run_seconds": "How long runs took, over ten minutes.",
    }
    for (name, text), values in zip(names.items(), found, strict=True):
        family = GaugeMetricFamily(name, text, labels=["quantile"])
        for quantile, value in zip(QUANTILES, values or (), strict=False):
            if value is not None:
                family.add_metric([str(quantile)], value)
        yield family


def _waiting() -> Metric:
    family = GaugeMetricFamily("aftertouch_rpa_jobs_waiting", "Jobs that wait.", labels=["tier", "due"])
    found = sql.rows(
        """
        SELECT priority, due_at <= statement_timestamp(), count(*) FROM rpa_tasks_job
        WHERE state IN ('scheduled', 'queued') AND parked = '' GROUP BY 1, 2
        """,
        {},
    )
    for priority, due, count in found:
        family.add_metric([TIERS[priority], "yes" if due else "no"], count)
    return family


def _browsers() -> Metric:
    family = GaugeMetricFamily("aftertouch_rpa_browsers", "Browser slots by node.", labels=["node", "state"])
    found = sql.rows(
        """
        SELECT node.name, slot ->> 'state', count(*)
        FROM rpa_tasks_executionnode AS node CROSS JOIN LATERAL jsonb_array_elements(node.browsers) AS slot
        WHERE node.seen_at > statement_timestamp() - %(lease)s GROUP BY 1, 2
        """,
        {"lease": HOME_LEASE},
    )
    for node, state, count in found:
        family.add_metric([node, state], count)
    return family


def _breakers() -> Metric:
    family = GaugeMetricFamily(
        "aftertouch_rpa_breaker_open", "1 while a platform rests or is tried again.", labels=["platform"]
    )
    found = sql.rows(
        """
        SELECT platform.key, breaker.open_until IS NOT NULL
        FROM rpa_tasks_breaker AS breaker JOIN rpa_tasks_platform AS platform ON platform.id = breaker.platform_id
        WHERE platform.retired_at IS NULL
        """,
        {},
    )
    for platform, is_open in found:
        family.add_metric([platform], float(is_open))
    return family
