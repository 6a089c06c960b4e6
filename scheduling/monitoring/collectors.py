"""`/metrics`: process metrics of this node, and cluster metrics, read from PostgreSQL, the broker and Redis.

A source that does not answer in time has no series, because a zero would hide the outage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple, TypeVar

import structlog
from django.conf import settings
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduling import sql
from scheduling.app_integrations import integrations
from scheduling.db_timeouts import Deadline
from scheduling.ledger import ends, partitions
from scheduling.monitoring import multiprocess
from scheduling.monitoring.queues import (
    broker_accepts_messages,
    list_known_queues,
    read_queue_stats,
    refresh_app_queues,
)
from scheduling.webhooks import FAILURES_TO_REST

log = structlog.get_logger(__name__)

MOST_COUNTED = 10_000  #: messages of one subscription; this value means this many or more


class WebhookBacklog(NamedTuple):
    key: str
    waiting: int
    oldest_age: float  #: seconds since the event of the oldest one
    resting: bool  #: its receiver fails: it rests, is probed, or is disabled


def read_webhook_backlogs() -> dict[int, WebhookBacklog]:
    """Return the backlog of each enabled subscription by its id."""
    given = {"most": MOST_COUNTED, "failures": FAILURES_TO_REST}
    return {row[0]: WebhookBacklog(*row[1:]) for row in sql.rows(_BACKLOGS, given)}


def count_failing_webhooks() -> int:
    """Return the number of enabled subscriptions whose receiver rests, is probed, or is disabled."""
    return sum(each.resting for each in read_webhook_backlogs().values())


class WebhookCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "aftertouch_webhook_messages_waiting",
            f"Messages of outgoing webhooks that wait, at most {MOST_COUNTED} of each.", labels=["webhook"],
        )  # fmt: skip
        oldest = GaugeMetricFamily(
            "aftertouch_webhook_oldest_age_seconds",
            "Age of the event of the oldest waiting message of an outgoing webhook, in seconds.", labels=["webhook"],
        )  # fmt: skip
        resting = GaugeMetricFamily(
            "aftertouch_webhook_resting",
            "1 while the receiver of an outgoing webhook rests, is probed, or is disabled.", labels=["webhook"],
        )  # fmt: skip
        for backlog in read_webhook_backlogs().values():
            waiting.add_metric([backlog.key], backlog.waiting)
            oldest.add_metric([backlog.key], backlog.oldest_age)
            resting.add_metric([backlog.key], float(backlog.resting))
        yield from (waiting, oldest, resting)


# A rest ends before each probe. The failures without a success show that it goes on.
_BACKLOGS = """
SELECT s.id, s.key, found.count, COALESCE(extract(epoch FROM statement_timestamp() - found.oldest), 0)::float8,
       e.disabled_at IS NOT NULL OR e.failures >= %(failures)s OR COALESCE(e.rest_until > statement_timestamp(), false)
FROM scheduling_webhooksubscription AS s JOIN scheduling_webhookendpoint AS e ON e.subscription_id = s.id
CROSS JOIN LATERAL (
    SELECT count(*), min(occurred_at) AS oldest FROM (
        SELECT occurred_at FROM scheduling_webhookmessage AS m
        WHERE m.state = 'waiting' AND m.subscription_id = s.id ORDER BY due_at LIMIT %(most)s
    ) AS first
) AS found
WHERE s.enabled AND s.retired_at IS NULL
"""


T = TypeVar("T")

MOST = 100_000  #: rows counted of each kind; this value means this many or more


def export_node_metrics() -> bytes:
    """Return the process metrics of this node in text format; empty if they cannot be read."""
    try:
        return multiprocess.export_process_metrics()
    except Exception:
        log.exception("metrics_missing", source="processes")
        return b""


def export_cluster_metrics() -> bytes:
    """Return the cluster metrics of every app in text format."""
    found = collect_metrics(Deadline(settings.TIMEOUTS.metrics))
    return generate_latest(_ReadMetrics([metric for metrics in found for metric in metrics]))


def collect_metrics(deadline: Deadline) -> Iterator[list[Metric]]:
    """Yield the metrics of each collector; an empty list if its source does not answer in time."""
    _read_source("queues", refresh_app_queues, deadline)
    for collector in [kind() for app in integrations() for kind in app.metrics]:
        if hasattr(collector, "deadline"):
            collector.deadline = deadline
        asked = deadline if getattr(collector, "asks_database", True) else None
        name = type(collector).__name__
        yield _read_source(name, lambda collector=collector: list(collector.collect()), asked) or []  # type: ignore[misc]


def _read_source(source: str, read: Callable[[], T], asked: Deadline | None) -> T | None:
    try:
        with asked.limit_queries(settings.TIMEOUTS.metrics_statement) if asked else nullcontext():
            return read()
    except Exception as error:
        log.warning("metrics_missing", source=source, error=str(error))
        return None


class _ReadMetrics(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


# --- touches ------------------------------------------------------------------------------------------------------


class LedgerCollector(Collector):
    """Collect counts of touches, failed tasks and pauses, and the age of erasures.

    Each statement reads a partial index of active rows, at most `MOST` rows.
    """

    def collect(self) -> Iterator[Metric]:
        counts = GaugeMetricFamily(
            "aftertouch_touches",
            f"Touches that have not ended, by state and due time. At most {MOST} of each kind are counted.",
            labels=["state", "due"],
        )
        ((overdue, hour, later, paused, late),) = sql.rows(_WAITING, {"most": MOST})
        figures = {("queued", "overdue"): 0, ("queued", "hour"): 0, ("running", "overdue"): 0}
        for state, due, count, age in sql.rows(_LEASED, {"most": MOST}):
            # A running touch is overdue, even if its due time was deferred since.
            figures[state, due if state == "queued" else "overdue"] = count
            late = max(late, age) if state == "queued" and due == "overdue" else late
        figures |= {("scheduled", "overdue"): overdue, ("scheduled", "hour"): hour, ("scheduled", "later"): later}
        for labels, count in {**figures, ("paused", ""): paused}.items():
            counts.add_metric(labels, count)
        yield counts
        yield GaugeMetricFamily(
            "aftertouch_touches_oldest_overdue_seconds",
            "Delay of the most overdue touch that no worker has started, in seconds.",
            value=late,
        )
        found = dict.fromkeys(("touch", "rpa_job", "message"), (0, 0.0))
        found |= {origin: (count, age) for origin, count, age in sql.rows(_FAILED, {"most": MOST})}
        counts = GaugeMetricFamily("aftertouch_failed_tasks_open", "Open failed tasks by origin.", labels=["origin"])
        ages = GaugeMetricFamily(
            "aftertouch_failed_tasks_oldest_age_seconds", "Age of the oldest open failed task, in seconds.",
            labels=["origin"],
        )  # fmt: skip
        for origin, (count, age) in found.items():
            counts.add_metric([origin], count)
            ages.add_metric([origin], age)
        yield from (counts, ages)
        counts = GaugeMetricFamily("aftertouch_pauses", "Active pauses by scope.", labels=["scope"])
        ages = GaugeMetricFamily(
            "aftertouch_pauses_oldest_age_seconds", "Age of the oldest active pause, in seconds.", labels=["scope"]
        )
        for scope, count, age in sql.rows(_PAUSES, {}):
            counts.add_metric([scope], count)
            ages.add_metric([scope], age)
        yield from (counts, ages)
        yield GaugeMetricFamily(
            "aftertouch_erasures_oldest_age_seconds",
            "Age of the oldest erasure of a customer under way, in seconds; 0 if there is none.",
            value=sql.rows(_ERASURES, {})[0][0],
        )


_ERASURES = """
SELECT COALESCE(extract(epoch FROM statement_timestamp() - min(requested_at)), 0)::float8
FROM scheduling_customererasure WHERE state = 'running'
"""

_PAUSES = """
SELECT split_part(scope, ':', 1), count(*), extract(epoch FROM statement_timestamp() - min(paused_at))::float8
FROM scheduling_pause GROUP BY 1
"""

_WAITING = """
SELECT
    (SELECT count(*) FROM (
        SELECT FROM scheduling_touch_live WHERE state = 'scheduled' AND paused_by = '' AND priority IN (0, 1, 2)
            AND due_at <= statement_timestamp()
        LIMIT %(most)s) AS overdue),
    (SELECT count(*) FROM (
        SELECT FROM scheduling_touch_live WHERE state = 'scheduled' AND paused_by = '' AND priority IN (0, 1, 2)
            AND due_at > statement_timestamp() AND due_at <= statement_timestamp() + interval '1 hour'
        LIMIT %(most)s) AS hour),
    (SELECT count(*) FROM (
        SELECT FROM scheduling_touch_live WHERE state = 'scheduled' AND paused_by = '' AND priority IN (0, 1, 2)
            AND due_at > statement_timestamp() + interval '1 hour'
        LIMIT %(most)s) AS later),
    (SELECT count(*) FROM (SELECT FROM scheduling_touch_live WHERE paused_by <> '' LIMIT %(most)s) AS paused_by),
    (SELECT GREATEST(0, COALESCE(extract(epoch FROM statement_timestamp() - min(first.due_at)), 0))::float8
     FROM unnest(ARRAY[0, 1, 2]) AS level CROSS JOIN LATERAL (
         SELECT due_at FROM scheduling_touch_live WHERE state = 'scheduled' AND paused_by = '' AND priority = level
         ORDER BY due_at LIMIT 1) AS first)
"""

_LEASED = """
SELECT state, CASE WHEN due_at <= statement_timestamp() THEN 'overdue' ELSE 'hour' END, count(*),
       extract(epoch FROM statement_timestamp() - min(due_at))::float8
FROM (
    SELECT state, due_at FROM scheduling_touch_live
    WHERE state IN ('queued', 'running') ORDER BY lease_until LIMIT %(most)s
) AS leased GROUP BY 1, 2
"""

_FAILED = """
SELECT origin, count(*), extract(epoch FROM statement_timestamp() - min(failed_at))::float8
FROM (
    SELECT origin, failed_at FROM scheduling_failedtask WHERE state = 'open' ORDER BY failed_at LIMIT %(most)s
) AS open GROUP BY 1
"""


# --- the broker ---------------------------------------------------------------------------------------------------


class BrokerCollector(Collector):
    """Collect queue lengths and unacknowledged messages. RabbitMQ does not show the age of a waiting message."""

    asks_database = False

    def collect(self) -> Iterator[Metric]:
        length = GaugeMetricFamily("celery_queue_length", "Messages that wait in the queue.", labels=["queue_name"])
        age = GaugeMetricFamily(
            "aftertouch_queue_oldest_age_seconds", "Age of the oldest message in the queue, in seconds; 0 if empty.",
            labels=["queue"],
        )  # fmt: skip
        unacked = GaugeMetricFamily(
            "aftertouch_queue_unacked",
            "Messages that workers received and did not acknowledge. Most of them wait for their eta.",
            labels=["queue"],
        )
        for queue in read_queue_stats(list_known_queues()):
            length.add_metric([queue.name], queue.length)
            if queue.oldest_age is not None:
                age.add_metric([queue.name], queue.oldest_age)
            if queue.unacked is not None:
                unacked.add_metric([queue.name], queue.unacked)
        # Detect a blocked broker by publishing, because RabbitMQ notifies only publishers.
        blocked = GaugeMetricFamily("aftertouch_broker_blocked", "1 while the broker accepts no messages.")
        if (takes := broker_accepts_messages()) is not None:
            blocked.add_metric([], float(not takes))
        yield from (length, age, unacked, blocked)


class HistoryCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        unread = GaugeMetricFamily(
            "aftertouch_ends_unread_seconds",
            "Age of the ends of touches up to which a reader has read, in seconds.", labels=["reader"],
        )  # fmt: skip
        for reader, age in ends.list_mark_ages():
            unread.add_metric([reader], age)
        yield unread
        yield GaugeMetricFamily(
            "aftertouch_touches_rest",
            f"Ended touches in the partition `rest`. At most {MOST} are counted.",
            value=sql.rows(_REST, {"most": MOST})[0][0],
        )


_REST = f"SELECT count(*) FROM (SELECT FROM {partitions.REST} LIMIT %(most)s) AS batch"  # noqa: S608 (a constant)
