"""Count and time the work of this process for Prometheus.

`scheduling.monitoring.collectors` reads the metrics of the cluster. Labels are bounded: a kind, a queue, a rule, a
route; never a customer, a chat or a touch.
"""

from __future__ import annotations

import platform
import tomllib
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec

import celery
import django
import structlog
from prometheus_client import Counter, Gauge, Histogram

log = structlog.get_logger(__name__)


Words = ParamSpec("Words")

LATENESS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 30, 60, 300, 900, 3600)
CALL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20)

# --- touches ------------------------------------------------------------------------------------------------------

lateness = Histogram(
    "aftertouch_delivery_lateness_seconds",
    "Delay between the due time of a touch and the first byte of its message, in seconds.",
    ["kind"],
    buckets=LATENESS_BUCKETS,
)
send_duration = Histogram(
    "aftertouch_send_duration_seconds",
    "Duration of a channel call, in seconds.",
    ["kind", "outcome"],
    buckets=CALL_BUCKETS,
)
attempts = Counter(
    "aftertouch_delivery_attempts", "Channel calls by outcome and reason.", ["channel", "outcome", "reason"]
)
deferrals = Counter(
    "aftertouch_deferrals", "Touches returned untried, because their receiver has no room.", ["kind", "reason"]
)
verdicts = Counter("aftertouch_verdicts", "Guard verdicts by decision and rule.", ["decision", "rule"])
ended = Counter(
    "aftertouch_touches_ended", "Touches ended by delivery or rescue, by state and reason.", ["state", "reason"]
)

webhook_attempts = Counter(
    "aftertouch_webhook_attempts", "Attempts to send messages of outgoing webhooks, by outcome.", ["webhook", "outcome"]
)

# --- Celery, by the names that its exporters use ------------------------------------------------------------------

published = Counter("aftertouch_publish", "Messages published to the broker.", ["queue"])
taken = Counter("aftertouch_deliver", "Messages that a worker started to process.", ["queue"])
queue_wait = Histogram(
    "celery_task_queue_wait_time",
    "Delay between publication (or a later eta) of a message and its start, in seconds.",
    ["name", "queue_name"],
    buckets=LATENESS_BUCKETS,
)
runtime = Histogram("celery_task_runtime", "Duration of tasks, in seconds.", ["name"], buckets=LATENESS_BUCKETS)
succeeded = Counter("celery_task_succeeded", "Tasks that succeeded.", ["name"])
failed = Counter("celery_task_failed", "Tasks that failed with an exception.", ["name", "exception"])
retried = Counter("celery_task_retried", "Task retries after infrastructure errors.", ["name"])
worker_up = Gauge(
    "celery_worker_up", "1 while the main process of the worker runs.", ["hostname"], multiprocess_mode="livesum"
)
consumers = Gauge(
    "aftertouch_queue_consumers", "Workers that consume the queue.", ["queue"], multiprocess_mode="livesum"
)
pool_processes = Gauge(
    "aftertouch_pool_processes",
    "Target number of processes in an autoscaled worker pool.",
    ["hostname"],
    multiprocess_mode="livesum",
)

# --- processes ----------------------------------------------------------------------------------------------------

processes = Gauge("aftertouch_processes", "Running processes by kind.", ["kind"], multiprocess_mode="livesum")
build = Gauge(
    "aftertouch_build_info",
    "1 for each set of versions that running processes use.",
    ["version", "python", "django", "celery"],
    multiprocess_mode="livemax",
)
sockets = Gauge(
    "aftertouch_websocket_connections", "Open WebSockets of live chats, by role.", ["role"], multiprocess_mode="livesum"
)
frames_dropped = Counter("aftertouch_frames_dropped", "Ignored frames of live chats, by reason.", ["reason"])
beat_ticked_at = Gauge(
    "aftertouch_scheduler_last_tick_timestamp_seconds",
    "Unix time of the leader's last scheduler tick.",
    ["node"],
    multiprocess_mode="max",
)
pass_ended_at = Gauge(
    "aftertouch_pass_last_timestamp_seconds",
    "Unix time of the last success of a periodic pass.",
    ["name"],
    multiprocess_mode="max",
)
replica_reads = Counter(
    "aftertouch_replica_reads", "Reads meant for the read replica, by the server that answered.", ["server", "problem"]
)
replica_lag = Gauge(
    "aftertouch_replica_lag_seconds",
    "Age of the read replica's data at the last look, in seconds.",
    ["server"],
    multiprocess_mode="livemax",
)


# --- recording ----------------------------------------------------------------------------------------------------


def never_raises(measure: Callable[Words, None]) -> Callable[Words, None]:
    """Log an exception of a metric instead of raising it: a metrics file without space must not fail a touch."""

    @wraps(measure)
    def safely(*args: Words.args, **kwargs: Words.kwargs) -> None:
        try:
            measure(*args, **kwargs)
        except Exception as error:
            metric = getattr(args[0], "_name", "") if args else ""
            log.warning("metric_not_recorded", measure=measure.__name__, metric=metric, error=str(error))

    return safely


@never_raises
def report_process(kind: str) -> None:
    """Report that this process runs, and its versions."""
    processes.labels(kind).set(1)
    build.labels(*versions()).set(1)


@cache
def versions() -> tuple[str, str, str, str]:
    """Return the versions of Aftertouch, Python, Django and Celery.

    Aftertouch is not an installed package, so `pyproject.toml` supplies its version.
    """
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    return project["version"], platform.python_version(), django.get_version(), celery.__version__


@never_raises
def count(counter: Counter | Gauge, *labels: str, by: int = 1) -> None:
    counter.labels(*labels).inc(by)


@never_raises
def set_gauge(gauge: Gauge, *labels: str, value: float) -> None:
    gauge.labels(*labels).set(value)


def observe_all(histogram: Histogram, seconds: Iterable[float]) -> None:
    """Add values with one write per bucket. `observe` writes twice per value, and a batch has hundreds."""
    values = list(seconds)
    bounds = histogram._upper_bounds
    for place, count in Tally(bisect_left(bounds, value) for value in values).items():
        histogram._buckets[place].inc(count)
    histogram._sum.inc(sum(values))


def reason_label(reason: Any) -> str:
    """Return a reason without its object, as a label with few values: `event:order.paid` is `event`."""
    return str(reason).partition(":")[0][:40]
