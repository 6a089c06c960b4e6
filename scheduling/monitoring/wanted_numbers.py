"""Answer how many workers, execution nodes and watchers the present load needs.

`/metrics` and `GET /api/v1/scaling` show the numbers. A number has no memory and no limits:
KEDA and the HPA smooth it and bound it (`deploy/kubernetes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import structlog
from django.conf import settings
from prometheus_client.core import Metric

from scheduling.app_integrations import integrations
from scheduling.db_timeouts import Deadline
from scheduling.monitoring.collectors import build_gauges
from scheduling.monitoring.queues import list_worker_reports
from scheduling.monitoring.statistics import count_late
from scheduling.queue_names import TOUCH_QUEUES

log = structlog.get_logger(__name__)

BUSY_GOAL = 0.7  #: share of processes or slots that may be busy: above it queues grow quickly
IDLE_SHARE = 0.5  #: below this share of busy processes a backlog has another cause, so more of them do not help
MOST_DUE = 100_000  #: due touches that are counted of each priority in the table, and of all at the broker
DRAIN_SECONDS = (5.0, 30.0, 300.0)  #: in which the due touches of each priority should be done
SPEED = 500.0  #: touches a second of a worker: two processes with 200 open requests of 0.8 s each


@dataclass(frozen=True, slots=True)
class Scale:
    """`None` means that a source did not answer: keep what runs."""

    running: int | None
    wanted: int | None


def read_scaling(deadline: Deadline) -> dict[str, Scale]:
    """Return the numbers of each kind."""
    answers = {}
    for kind, measure in [entry for app in integrations() for entry in app.scaling.items()]:
        try:
            answers[kind] = Scale(*measure(deadline))
        except Exception as error:  # any exception of PostgreSQL, Redis or the store of live chats
            log.warning("scaling_unanswered", kind=kind, error=str(error))
            answers[kind] = Scale(None, None)
    return answers


def read_wanted_numbers(deadline: Deadline) -> Iterator[Metric]:
    for kind, answer in read_scaling(deadline).items():
        text = f"Number of {kind.replace('_', ' ')} that the load needs."
        if answer.wanted is not None:
            yield from build_gauges([], {f"aftertouch_{kind}_wanted": text}, [(answer.wanted,)])


def measure_workers(deadline: Deadline) -> tuple[int, int]:
    """Return the workers of touches that run and those that are needed, at least one.

    The busy share counts open requests too, so slow receivers raise it. The backlog raises the number before the
    processes are busy.

    Raises:
        RedisError: Redis does not answer.
        OperationalError: PostgreSQL does not answer.
    """
    reports = [report for report in list_worker_reports() if set(report.queues) & set(TOUCH_QUEUES.values())]
    with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
        due = count_late(timedelta(0), MOST_DUE)
    running, processes = len(reports), sum(report.processes for report in reports)
    busy = sum(report.processes * report.busy for report in reports) / processes if processes else 0.0
    backlog = math.ceil(sum(count / DRAIN_SECONDS[priority] for priority, count, _ in due) / SPEED)
    if running and busy < IDLE_SHARE:
        backlog = min(backlog, running)
    return running, max(round_up(running * busy / BUSY_GOAL), backlog, 1)


def round_up(value: float) -> int:
    """Round up, except a rounding error of the division above a whole number."""
    return math.ceil(value - 1e-9)
