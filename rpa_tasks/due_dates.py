"""Estimate which waiting jobs will miss their due date, before they are late."""

from __future__ import annotations

from datetime import timedelta

from rpa_tasks.jobs.pick import NODE_SILENT, QUEUE_PREFIX, TIERS
from scheduling import sql

RECENT_RUNS = 2_000  #: runs whose mean is the time that a flow takes
RECENT = timedelta(days=1)


def count_jobs_at_risk(most: int) -> list[tuple[str, int]]:
    """Return the number of jobs at risk for each active platform, of at most `most` waiting and running jobs each.

    A job is at risk if its due date comes before its queue, its shop, or its own run can be done, or if no node serves
    its queue. A flow takes the mean of its recent runs; without one its timeout. Jobs that are late already do not
    count. Without a job with a due date nothing else is read.
    """
    given = {"most": most, "runs": RECENT_RUNS, "recent": RECENT, "silent": NODE_SILENT, "tiers": list(TIERS.values())}
    return [(platform, count) for platform, count in sql.rows(_AT_RISK, given)]


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
     WHERE EXISTS (SELECT FROM dated) AND state = 'scheduled' AND paused_by = '' ORDER BY due_at LIMIT %(most)s)
    UNION ALL
    (SELECT task_id, shop_id, flow_id, priority, due_at, deadline, state FROM rpa_tasks_job
     WHERE EXISTS (SELECT FROM dated) AND state IN ('queued', 'running') ORDER BY lease_until LIMIT %(most)s)
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
