"""`/metrics`: process metrics of this node, and cluster metrics, read from PostgreSQL, the broker and Redis.

A source that does not answer in time has no series, because a zero would hide the outage. Each app lists the functions
that read its sources (`Integration.metrics`); alerts compare the same metrics with their limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import structlog
from django.conf import settings
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduling import sql
from scheduling.app_integrations import integrations
from scheduling.db_timeouts import Deadline
from scheduling.experiments.rollouts import withdrawn_canaries
from scheduling.ledger import ends, partitions
from scheduling.monitoring import multiprocess
from scheduling.monitoring.complaint_stats import LEAST_TOUCHES, read_complaint_rates
from scheduling.monitoring.queues import read_broker
from scheduling.webhooks import FAILURES_TO_REST

log = structlog.get_logger(__name__)

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
    return generate_latest(_ReadMetrics(collect_metrics(Deadline(settings.TIMEOUTS.metrics))))


def collect_metrics(deadline: Deadline) -> list[Metric]:
    """Return the metrics of each source that answers in time."""
    found: list[Metric] = []
    for read in [read for app in integrations() for read in app.metrics]:
        try:
            found += list(read(deadline))
        except Exception as error:  # any exception of PostgreSQL, Redis or the broker's client
            log.warning("metrics_missing", source=read.__name__, error=str(error))
    return found


class _ReadMetrics(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def build_gauges(
    labels: Sequence[str], descriptions: Mapping[str, str], rows: Iterable[Sequence[Any]]
) -> list[GaugeMetricFamily]:
    """Return gauges, described by name. A row has the values of the labels, then of each gauge; None: no series."""
    gauges = [GaugeMetricFamily(name, text, labels=labels) for name, text in descriptions.items()]
    for row in rows:
        for gauge, value in zip(gauges, row[len(labels) :], strict=True):
            if value is not None:
                gauge.add_metric([str(label) for label in row[: len(labels)]], value)
    return gauges


# --- touches ------------------------------------------------------------------------------------------------------


def read_ledger(deadline: Deadline) -> Iterator[Metric]:
    """Count touches, failed tasks and pauses, and measure the age of erasures.

    Each statement reads a partial index of active rows, at most `MOST` rows.
    """
    with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
        ((overdue, hour, later, paused, late),) = sql.rows(_WAITING, {"most": MOST})
        states: dict[tuple[str, str], int] = {("queued", "overdue"): 0, ("queued", "hour"): 0}
        states |= {("running", "overdue"): 0, ("running", "hour"): 0}
        for state, due, count, age in sql.rows(_LEASED, {"most": MOST}):
            states[state, due] = count
            late = max(late, age) if state == "queued" and due == "overdue" else late
        states |= {("scheduled", "overdue"): overdue, ("scheduled", "hour"): hour, ("scheduled", "later"): later}
        states["paused", ""] = paused
        tasks = dict.fromkeys(("touch", "rpa_job", "message"), (0, 0.0))
        tasks |= {origin: (count, age) for origin, count, age in sql.rows(_FAILED, {"most": MOST})}
        pauses, erasures = sql.rows(_PAUSES, {}), sql.rows(_ERASURES, {})
    text = f"Touches that have not ended, by state and due time. At most {MOST} of each kind are counted."
    yield from build_gauges(["state", "due"], {"aftertouch_touches": text}, [(*key, n) for key, n in states.items()])
    text = "Delay of the most overdue touch that no worker has started, in seconds."
    yield from build_gauges([], {"aftertouch_touches_oldest_overdue_seconds": text}, [(late,)])
    ages = {
        "aftertouch_failed_tasks_open": "Open failed tasks by origin.",
        "aftertouch_failed_tasks_oldest_age_seconds": "Age of the oldest open failed task, in seconds.",
    }
    yield from build_gauges(["origin"], ages, [(origin, *figures) for origin, figures in tasks.items()])
    ages = {
        "aftertouch_pauses": "Active pauses by scope.",
        "aftertouch_pauses_oldest_age_seconds": "Age of the oldest active pause, in seconds.",
    }
    yield from build_gauges(["scope"], ages, pauses)
    text = "Age of the oldest erasure of a customer under way, in seconds; 0 if there is none."
    yield from build_gauges([], {"aftertouch_erasures_oldest_age_seconds": text}, erasures)


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


def read_ends(deadline: Deadline) -> Iterator[Metric]:
    with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
        ages, rest = ends.list_mark_ages(), sql.rows(_REST, {"most": MOST})
    text = "Age of the ends of touches up to which a reader has read, in seconds."
    yield from build_gauges(["reader"], {"aftertouch_ends_unread_seconds": text}, ages)
    text = f"Ended touches in the partition `rest`. At most {MOST} are counted."
    yield from build_gauges([], {"aftertouch_touches_rest": text}, rest)


_REST = f"SELECT count(*) FROM (SELECT FROM {partitions.REST} LIMIT %(most)s) AS batch"  # noqa: S608 (a constant)


# --- the broker ---------------------------------------------------------------------------------------------------


def read_broker_metrics(deadline: Deadline) -> Iterator[Metric]:
    """Read queue lengths and unacknowledged messages. RabbitMQ does not show the age of a waiting message."""
    reading = read_broker(deadline.limit_queries(settings.TIMEOUTS.metrics_statement))
    if reading is None:
        return
    queues, accepts = reading.queues, reading.accepts_messages
    text = "Messages that wait in the queue."
    lengths = [(queue.name, queue.length) for queue in queues]
    yield from build_gauges(["queue_name"], {"celery_queue_length": text}, lengths)
    texts = {
        "aftertouch_queue_oldest_age_seconds": "Age of the oldest message in the queue, in seconds; 0 if empty.",
        "aftertouch_queue_unacked": "Messages that workers received and did not acknowledge. Most wait for their eta.",
    }
    yield from build_gauges(["queue"], texts, [(queue.name, queue.oldest_age, queue.unacked) for queue in queues])
    text = "1 while the broker accepts no messages."
    yield from build_gauges([], {"aftertouch_broker_blocked": text}, [(None if accepts is None else not accepts,)])


# --- outgoing webhooks ------------------------------------------------------------------------------------------------

MOST_COUNTED = 10_000  #: messages of one subscription; this value means this many or more


class WebhookBacklog(NamedTuple):
    key: str
    waiting: int
    oldest_age: float  #: seconds since the event of the oldest one
    resting: bool  #: its receiver fails: it rests, is probed, or is disabled


def read_webhook_backlogs() -> dict[int, WebhookBacklog]:
    """Return the backlog of each enabled subscription by its id."""
    parameters = {"most": MOST_COUNTED, "failures": FAILURES_TO_REST}
    return {row[0]: WebhookBacklog(*row[1:]) for row in sql.rows(_BACKLOGS, parameters)}


def read_webhooks(deadline: Deadline) -> Iterator[Metric]:
    with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
        backlogs = read_webhook_backlogs()
    texts = {
        "aftertouch_webhook_messages_waiting":
            f"Messages of outgoing webhooks that wait, at most {MOST_COUNTED} of each.",
        "aftertouch_webhook_oldest_age_seconds":
            "Age of the event of the oldest waiting message of an outgoing webhook, in seconds.",
        "aftertouch_webhook_resting":
            "1 while the receiver of an outgoing webhook rests, is probed, or is disabled.",
    }  # fmt: skip
    yield from build_gauges(["webhook"], texts, backlogs.values())


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


# --- content ------------------------------------------------------------------------------------------------------


def read_rollouts(deadline: Deadline) -> Iterator[Metric]:
    with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
        ((running, age),) = sql.rows(_ROLLOUTS, {})
        withdrawn = withdrawn_canaries().count()
    text = "Automatic roll-outs that run, and withdrawn canaries."
    yield from build_gauges(["state"], {"aftertouch_rollouts": text}, [("running", running), ("withdrawn", withdrawn)])
    text = "Time since the longest unevaluated running roll-out was evaluated, in seconds."
    yield from build_gauges([], {"aftertouch_rollouts_oldest_judged_seconds": text}, [(age,)])


_ROLLOUTS = """
SELECT count(*), COALESCE(extract(epoch FROM statement_timestamp() - min(GREATEST(step_at, judged_at))), 0)::float8
FROM scheduling_automaticrollout WHERE state = 'running'
"""


def read_complaints(deadline: Deadline) -> Iterator[Metric]:
    """Return nothing while hours are left to count, so that no text looks free of complaints."""
    texts = read_complaint_rates(deadline)
    if texts is not None:
        descriptions = {
            "aftertouch_complaint_rate": "Share of touches of the last seven days with a complaint.",
            "aftertouch_complaint_rate_before":
                "The same share of the seven days before: of the text, or of its node if the text had fewer than "
                f"{LEAST_TOUCHES} touches.",
            "aftertouch_complaint_touches": "Delivered touches of the last seven days.",
        }  # fmt: skip
        rows = [(each.node, each.template, each.version, each.rate, each.before, each.touches) for each in texts]
        yield from build_gauges(["node", "template", "version"], descriptions, rows)
