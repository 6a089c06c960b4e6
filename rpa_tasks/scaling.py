"""Measure the need for execution nodes (see `scheduling.monitoring.wanted_numbers`)."""

from __future__ import annotations

from django.conf import settings

from rpa_tasks.jobs.pick import NODE_SILENT, jobs
from scheduling import sql
from scheduling.db_timeouts import Deadline
from scheduling.monitoring.wanted_numbers import BUSY_GOAL, round_up
from scheduling.queue_names import RPA_QUEUES

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
        startable = jobs.count_startable([*RPA_QUEUES, *queues], ageing=settings.AFTERTOUCH_RPA_AGEING)
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
