"""Metrics of RPA: process metrics of runs, and cluster metrics from PostgreSQL.

Without PostgreSQL the cluster metrics have no series, not zero. Waiting jobs that will miss their due date are
estimated before they are late. The need for execution nodes feeds `scheduling.monitoring.wanted_numbers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db.models import Count
from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from rpa_tasks.jobs.ledger import NODE_SILENT, QUEUE_PREFIX, TIERS, job_ledger
from rpa_tasks.jobs.shops import needs_login
from rpa_tasks.models import Shop
from rpa_tasks.outcomes import Verdict
from scheduling import metrics, sql
from scheduling.db_timeouts import Deadline
from scheduling.monitoring.collectors import MOST, build_gauges
from scheduling.monitoring.wanted_numbers import BUSY_GOAL, round_up
from scheduling.queue_names import RPA_QUEUES

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


def read_rpa(deadline: Deadline) -> Iterator[Metric]:
    with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
        for name, text, labels, statement in _GAUGES:
            yield from build_gauges(labels, {name: text}, read_gauge(statement))
        shops = Shop.objects.filter(needs_login()).order_by().values_list("platform__key").annotate(Count("pk"))
        text = "Shops whose jobs wait for a login."
        yield from build_gauges(["platform"], {"aftertouch_rpa_logins_needed": text}, shops)


RECENT_RUNS = 2_000  #: runs whose mean is the time that a flow takes
RECENT = timedelta(days=1)


def read_gauge(statement: str, most: int | None = None) -> list[Any]:
    """Return rows with the values of the gauge's labels and its value. At most `most` or `MOST` of a kind count."""
    given = {
        "most": most or MOST,
        "runs": RECENT_RUNS,
        "recent": RECENT,
        "silent": NODE_SILENT,
        "tiers": list(TIERS.values()),
    }
    return sql.rows(statement, given)


# Uses the index `rpa_job_due`.
WAITING = """
SELECT (%(tiers)s::text[])[priority + 1], CASE WHEN due_at <= statement_timestamp() THEN 'yes' ELSE 'no' END, count(*)
FROM (
    (SELECT priority, due_at FROM rpa_tasks_job
     WHERE state = 'scheduled' AND due_at <= statement_timestamp() ORDER BY due_at LIMIT %(most)s)
    UNION ALL
    (SELECT priority, due_at FROM rpa_tasks_job
     WHERE state = 'scheduled' AND due_at > statement_timestamp() ORDER BY due_at LIMIT %(most)s)
    UNION ALL
    (SELECT priority, due_at FROM rpa_tasks_job WHERE state = 'queued' ORDER BY due_at LIMIT %(most)s)
) AS waiting GROUP BY 1, 2
"""
BROWSERS = """
SELECT node.name, slot ->> 'state', count(*)
FROM rpa_tasks_executionnode AS node CROSS JOIN LATERAL jsonb_array_elements(node.browsers) AS slot
WHERE node.seen_at > statement_timestamp() - %(silent)s GROUP BY 1, 2
"""
DRAINS = """
SELECT name, (draining_at IS NOT NULL)::int FROM rpa_tasks_executionnode
WHERE seen_at > statement_timestamp() - %(silent)s
"""
_BREAKERS = """
SELECT platform.key, (breaker.open_until IS NOT NULL)::int
FROM rpa_tasks_breaker AS breaker JOIN rpa_tasks_platform AS platform ON platform.id = breaker.platform_id
WHERE platform.retired_at IS NULL
"""
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
# A job is at risk if its due date comes before its queue, its shop, or its own run can be done, or if no node serves
# its queue. A flow takes the mean of its recent runs; without one its timeout. Jobs that are late already do not count.
# Without a job with a due date nothing else is read.
#
# Jobs with a due date, and all others that take slots of the same nodes. `line`: the queues that they share.
_AT_RISK = f"""
WITH dated AS MATERIALIZED (
    SELECT FROM rpa_tasks_job
    WHERE deadline > statement_timestamp() AND state IN ('scheduled', 'queued', 'running') LIMIT 1
), lately AS MATERIALIZED (
    SELECT job_id, ended_at - started_at AS took FROM rpa_tasks_run
    WHERE EXISTS (SELECT FROM dated) AND outcome <> 'held' AND ended_at > statement_timestamp() - %(recent)s
    ORDER BY ended_at DESC LIMIT %(runs)s
), measured AS MATERIALIZED (
    SELECT job.flow_id, avg(lately.took) AS took
    FROM lately JOIN rpa_tasks_job AS job ON job.task_id = lately.job_id GROUP BY 1
), open AS MATERIALIZED (
    (SELECT task_id, shop_id, flow_id, priority, due_at, deadline, state FROM rpa_tasks_job
     WHERE EXISTS (SELECT FROM dated) AND state = 'scheduled' ORDER BY due_at LIMIT %(most)s)
    UNION ALL
    (SELECT task_id, shop_id, flow_id, priority, due_at, deadline, state FROM rpa_tasks_job
     WHERE EXISTS (SELECT FROM dated) AND state = 'queued' ORDER BY due_at LIMIT %(most)s)
    UNION ALL
    (SELECT task_id, shop_id, flow_id, priority, due_at, deadline, state FROM rpa_tasks_job
     WHERE EXISTS (SELECT FROM dated) AND state = 'running' ORDER BY lease_until LIMIT %(most)s)
), placed AS MATERIALIZED (
    SELECT open.*, platform.key AS platform, shop.platform_id,
           {QUEUE_PREFIX} AS line,
           -- On average half of a run is done.
           COALESCE(measured.took, flow.timeout) / CASE WHEN state = 'running' THEN 2 ELSE 1 END AS takes
    FROM open JOIN rpa_tasks_shop AS shop ON shop.id = open.shop_id
    JOIN rpa_tasks_platform AS platform ON platform.id = shop.platform_id
    JOIN rpa_tasks_flow AS flow ON flow.id = open.flow_id
    LEFT JOIN measured ON measured.flow_id = open.flow_id
), served AS (
    SELECT line, (
        SELECT COALESCE(sum(node.slots), 0) FROM rpa_tasks_executionnode AS node
        WHERE node.seen_at > statement_timestamp() - %(silent)s AND node.draining_at IS NULL AND EXISTS (
            SELECT FROM jsonb_array_elements_text(node.queues) AS queue
            WHERE queue = line OR starts_with(line, 'p.') AND starts_with(queue, line)
               OR line = '' AND queue = ANY(%(tiers)b::text[])
        )
    ) AS slots
    FROM (SELECT DISTINCT line FROM placed) AS lines
), needed AS (
    SELECT placed.*,
           sum(takes) OVER (PARTITION BY line ORDER BY turn, priority, due_at, task_id) / NULLIF(slots, 0) AS by_line,
           sum(takes) OVER (PARTITION BY shop_id ORDER BY turn, priority, due_at, task_id) AS by_shop
    FROM (
        SELECT *, CASE WHEN state = 'running' THEN '-infinity'
                       ELSE GREATEST(due_at, statement_timestamp()) END AS turn
        FROM placed
    ) AS placed JOIN served USING (line)
)
SELECT platform.key, count(needed.task_id)
FROM rpa_tasks_platform AS platform
LEFT JOIN needed ON needed.platform_id = platform.id AND needed.state <> 'running'
    AND needed.deadline > statement_timestamp()
    AND (by_line IS NULL  -- no node serves its queue
         OR needed.deadline < GREATEST(statement_timestamp() + GREATEST(by_line, by_shop), needed.due_at + takes))
WHERE platform.retired_at IS NULL GROUP BY 1
"""  # noqa: S608 (made of constants)
#: Name, description and labels of gauges, and the statement that reads values of the labels and the value.
_GAUGES = (
    (
        "aftertouch_rpa_jobs_waiting",
        f"Waiting jobs by tier. At most {MOST} each of due, later and dispatched jobs are counted.",
        ["tier", "due"], WAITING,
    ),
    ("aftertouch_rpa_browsers", "Browser slots by execution node and state.", ["node", "state"], BROWSERS),
    ("aftertouch_rpa_node_draining", "1 while the reporting execution node is drained.", ["node"], DRAINS),
    (
        "aftertouch_rpa_breaker_open", "1 while the circuit breaker of the platform is open or half-open.",
        ["platform"], _BREAKERS,
    ),
    (
        "aftertouch_rpa_jobs_late",
        f"Jobs that are not done although their due date has passed, at most {MOST}.", ["platform"], _LATE,
    ),
    (
        "aftertouch_rpa_jobs_at_risk",
        "Waiting jobs whose due date comes before their queue can have them done.", ["platform"], _AT_RISK,
    ),
)  # fmt: skip


ASSUMED_RUN = 60.0  #: seconds of a run before any has ended
DRAIN_SECONDS = (60.0, 300.0, 900.0)  #: in which the jobs of free shops should have started, by priority


def measure_execution_nodes(deadline: Deadline) -> tuple[int, int]:
    """Return the execution nodes that run and those that are needed, at least one.

    A shop runs one job at a time. Jobs whose queue no running node consumes, or that wait for the node of their browser
    profile, count for nothing: a new node would not start them. A draining node and its jobs count for nothing either.

    Raises:
        OperationalError: PostgreSQL does not answer.
    """
    with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
        ((running, slots, queues, busy, seconds),) = sql.rows(_NODES, {"silent": NODE_SILENT})
        startable = job_ledger.count_startable([*RPA_QUEUES, *queues])
    slots = slots if running else settings.AFTERTOUCH_RPA_SLOTS
    work = sum(count * (seconds or ASSUMED_RUN) / span for count, span in zip(startable, DRAIN_SECONDS, strict=True))
    needed = max(busy / BUSY_GOAL, busy + min(work, sum(startable)))
    return running, max(round_up(needed / slots), 1)


_NODES = """
SELECT count(*), COALESCE(avg(slots), 0)::float8, COALESCE((
           SELECT array_agg(DISTINCT queue) FROM rpa_tasks_executionnode, jsonb_array_elements_text(queues) AS queue
           WHERE seen_at > statement_timestamp() - %(silent)s AND draining_at IS NULL
       ), '{}'),
       (SELECT count(*) FROM rpa_tasks_job WHERE state = 'running' AND node <> ALL(ARRAY(
           SELECT name FROM rpa_tasks_executionnode WHERE draining_at IS NOT NULL
       ))),
       (SELECT extract(epoch FROM avg(ended_at - started_at))::float8 FROM (
           SELECT started_at, ended_at FROM rpa_tasks_run
           WHERE outcome <> 'held' AND ended_at > statement_timestamp() - interval '1 hour'
           ORDER BY ended_at DESC LIMIT 200
       ) AS latest)
FROM rpa_tasks_executionnode WHERE seen_at > statement_timestamp() - %(silent)s AND draining_at IS NULL
"""
