"""What processes count and time while they work, for Prometheus. What the database and the broker know is asked when
somebody scrapes (`scheduling.metrics`).

Labels are bounded: a kind, a queue, a rule; never a customer, a chat or a touch.
"""

from __future__ import annotations

import platform
import time
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

LATENESS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 30, 60, 300, 900, 3600)
CALLS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20)

# --- touches ------------------------------------------------------------------------------------------------------

lateness = Histogram(
    "aftertouch_delivery_lateness_seconds",
    "From the moment a touch was due to the first byte of its message.",
    ["kind"],
    buckets=LATENESS,
)
send_duration = Histogram(
    "aftertouch_send_duration_seconds", "How long a call of a channel took.", ["kind", "outcome"], buckets=CALLS
)
attempts = Counter("aftertouch_delivery_attempts", "Calls of channels.", ["channel", "outcome", "reason"])
verdicts = Counter("aftertouch_verdicts", "What the guards decided, by rule.", ["decision", "rule"])
ended = Counter("aftertouch_touches_ended", "Touches that ended, by state and reason.", ["state", "reason"])

# --- Celery, by the names that its exporters use ------------------------------------------------------------------

published = Counter("aftertouch_publish", "Messages handed to the broker.", ["queue"])
taken = Counter("aftertouch_deliver", "Messages that a worker began with.", ["queue"])
queue_wait = Histogram(
    "celery_task_queue_wait_time",
    "From the moment a message was published, or from its eta where that is later, to its start.",
    ["name", "queue_name"],
    buckets=LATENESS,
)
runtime = Histogram("celery_task_runtime", "How long tasks ran, in seconds.", ["name"], buckets=LATENESS)
succeeded = Counter("celery_task_succeeded", "Tasks that ended well.", ["name"])
failed = Counter("celery_task_failed", "Tasks that ended with an error.", ["name", "exception"])
retried = Counter("celery_task_retried", "Tasks that were put off because something was away.", ["name"])
worker_up = Gauge("celery_worker_up", "1 while the worker lives.", ["hostname"], multiprocess_mode="livesum")
consumers = Gauge("aftertouch_queue_consumers", "Workers that consume a queue.", ["queue"], multiprocess_mode="livesum")
pool_processes = Gauge(
    "aftertouch_pool_processes",
    "Processes that the pool of a worker whose size changes should have.",
    ["hostname"],
    multiprocess_mode="livesum",
)

# --- processes ----------------------------------------------------------------------------------------------------

processes = Gauge(
    "aftertouch_processes", "Living processes: web, worker, beat, watcher.", ["kind"], multiprocess_mode="livesum"
)
build = Gauge(
    "aftertouch_build_info",
    "What the living processes run: 1 for each set of versions.",
    ["version", "python", "django", "celery"],
    multiprocess_mode="livemax",
)
sockets = Gauge(
    "aftertouch_websocket_connections", "WebSockets in live chats, by side.", ["role"], multiprocess_mode="livesum"
)
frames_dropped = Counter(
    "aftertouch_frames_dropped", "Frames of live chats that were not counted, by reason.", ["reason"]
)
beat_ticked_at = Gauge(
    "aftertouch_scheduler_last_tick_timestamp_seconds",
    "When the beat that leads last looked what is due.",
    ["node"],
    multiprocess_mode="max",
)
pass_ended_at = Gauge(
    "aftertouch_pass_last_timestamp_seconds",
    "When a periodic pass last ended well.",
    ["name"],
    multiprocess_mode="max",
)


# --- taking the measure -------------------------------------------------------------------------------------------


def harmless(measure: Callable[Words, None]) -> Callable[Words, None]:
    """A file of measurements that cannot be written must not cost a touch."""

    @wraps(measure)
    def safely(*args: Words.args, **kwargs: Words.kwargs) -> None:
        try:
            measure(*args, **kwargs)
        except Exception as error:
            log.warning("not_measured", measure=measure.__name__, error=str(error))

    return safely


@harmless
def alive(kind: str) -> None:
    """This process lives, as long as its number does."""
    processes.labels(kind).set(1)
    build.labels(*versions()).set(1)


@cache
def versions() -> tuple[str, str, str, str]:
    """Ours, and of what we stand on. Nobody installs us as a package, so the file says it."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    return project["version"], platform.python_version(), django.get_version(), celery.__version__


@harmless
def pool_has(hostname: str, processes_of_it: int) -> None:
    pool_processes.labels(hostname).set(processes_of_it)


@harmless
def socket_opened(role: str, count: int = 1) -> None:
    sockets.labels(role).inc(count)


@harmless
def frames_not_counted(reason: str, count: int) -> None:
    frames_dropped.labels(reason).inc(count)


@harmless
def beat_ticked(node: str) -> None:
    beat_ticked_at.labels(node).set(time.time())


@harmless
def worker_lost(count: int) -> None:
    """These touches ended in doubt with the worker that had them."""
    if count:
        ended.labels("unknown", "worker_lost").inc(count)


def observe_all(histogram: Histogram, seconds: Iterable[float]) -> None:
    """As `observe` for each, but one write a bucket instead of two a value: a batch has hundreds."""
    values = list(seconds)
    bounds = histogram._upper_bounds
    for place, count in Tally(bisect_left(bounds, value) for value in values).items():
        histogram._buckets[place].inc(count)
    histogram._sum.inc(sum(values))


def code(reason: Any) -> str:
    """A reason without what it is about: `event:order.paid` is `event`. Reasons become labels, so they are few."""
    return str(reason).partition(":")[0][:40]
