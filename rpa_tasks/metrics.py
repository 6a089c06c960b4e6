"""Metrics of RPA: process metrics of runs, and cluster metrics from PostgreSQL.

Without PostgreSQL the cluster metrics have no series, not zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from django.db.models import Count
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rpa_tasks.due_dates import count_jobs_at_risk
from rpa_tasks.jobs.gates.login_checks import is_being_checked
from rpa_tasks.jobs.pick import NODE_SILENT, TIERS
from rpa_tasks.models import LoginState, Shop
from rpa_tasks.outcomes import Verdict
from scheduling import metrics, sql
from scheduling.monitoring.collectors import MOST

RUN_BUCKETS = (1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600)
WAIT_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 20, 30, 60)

runs = Counter("aftertouch_rpa_runs", "Ended runs by platform and outcome.", ["platform", "outcome"])
run_seconds = Histogram(
    "aftertouch_rpa_run_seconds",
    "Duration of runs that got a browser or need none, in seconds.",
    ["outcome"],
    buckets=RUN_BUCKETS,
)
pool_wait = Histogram(
    "aftertouch_rpa_pool_wait_seconds",
    "Wait of runs for a browser, in seconds, by result.",
    ["got"],
    buckets=WAIT_BUCKETS,
)
browsers_found = Counter(
    "aftertouch_rpa_browsers_found", "Runs with a browser, by whether it was already running.", ["warm"]
)


@metrics.never_raises
def record_ended_run(
    platform: str, verdict: Verdict, took: timedelta, waited: timedelta | None, warm: bool | None = None
) -> None:
    """Record an ended run. A run without a browser only waited, so it has no duration."""
    runs.labels(platform, verdict.outcome).inc()
    if verdict.reason in ("browser_wait", "profile_busy"):
        pool_wait.labels("none").observe(max(0.0, took.total_seconds()))
        return
    run_seconds.labels(verdict.outcome).observe(max(0.0, took.total_seconds()))
    if waited is not None:
        pool_wait.labels("browser").observe(waited.total_seconds())
    if warm is not None:
        browsers_found.labels("yes" if warm else "no").inc()


class RpaMetrics(Collector):
    def collect(self) -> Iterator[Metric]:
        yield _waiting_metric()
        yield _browser_metric()
        yield _drain_metric()
        yield _breaker_metric()
        yield _late_metric()
        yield _risk_metric()
        yield _login_metric()


def _waiting_metric() -> Metric:
    family = GaugeMetricFamily(
        "aftertouch_rpa_jobs_waiting",
        f"Waiting jobs by tier. At most {MOST} each of due, later and dispatched jobs are counted.",
        labels=["tier", "due"],
    )
    for priority, due, count in sql.rows(_WAITING, {"most": MOST}):
        family.add_metric([TIERS[priority], "yes" if due else "no"], count)
    return family


# Uses two indexes: `rpa_job_due` for due jobs and `rpa_job_leased`.
_WAITING = """
SELECT priority, due_at <= statement_timestamp(), count(*)
FROM (
    (SELECT priority, due_at FROM rpa_tasks_job
     WHERE state = 'scheduled' AND paused_by = '' AND due_at <= statement_timestamp() ORDER BY due_at LIMIT %(most)s)
    UNION ALL
    (SELECT priority, due_at FROM rpa_tasks_job
     WHERE state = 'scheduled' AND paused_by = '' AND due_at > statement_timestamp() ORDER BY due_at LIMIT %(most)s)
    UNION ALL
    (SELECT priority, due_at FROM (
        SELECT priority, due_at, state, paused_by FROM rpa_tasks_job
        WHERE state IN ('queued', 'running') ORDER BY lease_until LIMIT %(most)s
     ) AS leased WHERE state = 'queued' AND paused_by = '')
) AS waiting GROUP BY 1, 2
"""


def _browser_metric() -> Metric:
    family = GaugeMetricFamily(
        "aftertouch_rpa_browsers", "Browser slots by execution node and state.", labels=["node", "state"]
    )
    found = sql.rows(
        """
        SELECT node.name, slot ->> 'state', count(*)
        FROM rpa_tasks_executionnode AS node CROSS JOIN LATERAL jsonb_array_elements(node.browsers) AS slot
        WHERE node.seen_at > statement_timestamp() - %(lease)s GROUP BY 1, 2
        """,
        {"lease": NODE_SILENT},
    )
    for node, state, count in found:
        family.add_metric([node, state], count)
    return family


def _drain_metric() -> Metric:
    family = GaugeMetricFamily(
        "aftertouch_rpa_node_draining", "1 while the reporting execution node is drained.", labels=["node"]
    )
    found = sql.rows(
        """
        SELECT name, draining_at IS NOT NULL FROM rpa_tasks_executionnode
        WHERE seen_at > statement_timestamp() - %(lease)s
        """,
        {"lease": NODE_SILENT},
    )
    for node, drains in found:
        family.add_metric([node], float(drains))
    return family


def _breaker_metric() -> Metric:
    family = GaugeMetricFamily(
        "aftertouch_rpa_breaker_open",
        "1 while the circuit breaker of the platform is open or half-open.",
        labels=["platform"],
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


def _late_metric() -> Metric:
    family = GaugeMetricFamily(
        "aftertouch_rpa_jobs_late",
        f"Jobs that are not done although their due date has passed, at most {MOST}.",
        labels=["platform"],
    )
    for platform, count in sql.rows(_LATE, {"most": MOST}):
        family.add_metric([platform], count)
    return family


# A platform without late jobs has the value 0, so that its alert resolves.
_LATE = """
SELECT platform.key, count(late.task_id)
FROM rpa_tasks_platform AS platform
LEFT JOIN (
    SELECT job.task_id, shop.platform_id FROM (
        SELECT task_id, shop_id FROM rpa_tasks_job
        WHERE deadline < statement_timestamp() AND state IN ('scheduled', 'queued', 'running') LIMIT %(most)s
    ) AS job JOIN rpa_tasks_shop AS shop ON shop.id = job.shop_id
) AS late ON late.platform_id = platform.id
WHERE platform.retired_at IS NULL GROUP BY 1
"""


def _risk_metric() -> Metric:
    family = GaugeMetricFamily(
        "aftertouch_rpa_jobs_at_risk",
        "Waiting jobs whose due date comes before their queue can have them done.",
        labels=["platform"],
    )
    for platform, count in count_jobs_at_risk(MOST):
        family.add_metric([platform], count)
    return family


def _login_metric() -> Metric:
    family = GaugeMetricFamily(
        "aftertouch_rpa_logins_needed", "Shops whose jobs wait for a login.", labels=["platform"]
    )
    needed = Shop.objects.filter(~is_being_checked(), retired_at=None, login_state=LoginState.NEEDED)
    for platform, count in needed.order_by().values_list("platform__key").annotate(Count("pk")):
        family.add_metric([platform], count)
    return family
