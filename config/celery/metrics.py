"""Update metrics of workers and messages from Celery's signals, and report the state of each worker.

A page shows the reports, the wanted number of workers is computed from them, and on RabbitMQ they are the only source
of unacknowledged messages. A thread of the main process reports, because its loop must not wait for Redis. Worker
processes do not inherit it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import structlog
from celery.signals import (
    beat_init,
    before_task_publish,
    celeryd_init,
    task_failure,
    task_postrun,
    task_prerun,
    task_retry,
    task_success,
    worker_process_init,
    worker_ready,
    worker_shutdown,
)
from celery.worker import state

from config.celery.queues import queue_of_routing_key
from scheduling import metrics
from scheduling.monitoring.multiprocess import share_metrics
from scheduling.queue_names import CORE_QUEUES
from scheduling.redis_client import RedisError
from scheduling.server_addresses import is_rabbitmq


@celeryd_init.connect
def share_worker_metrics(**_: Any) -> None:
    """Share the metrics before the children are forked."""
    share_metrics()


@beat_init.connect
def share_beat_metrics(**_: Any) -> None:
    share_metrics()
    metrics.report_process("beat")


@worker_ready.connect
def count_worker(sender: Any, **_: Any) -> None:
    metrics.worker_up.labels(sender.hostname).set(1)
    for queue in sender.app.amqp.queues.consume_from:
        metrics.consumers.labels(queue).set(1)


@worker_process_init.connect
def count_process(**_: Any) -> None:
    metrics.report_process("worker")


@before_task_publish.connect
@metrics.never_raises
def count_published(routing_key: str | None = None, **_: Any) -> None:
    metrics.published.labels(queue_of_routing_key(routing_key or "")).inc()


@task_prerun.connect
@metrics.never_raises
def observe_wait(task: Any, **_: Any) -> None:
    request = task.request
    queue = queue_of_routing_key((request.delivery_info or {}).get("routing_key") or "")
    metrics.taken.labels(queue).inc()
    published_at = (request.headers or {}).get("published_at")
    if isinstance(published_at, int | float):
        due_at = datetime.fromisoformat(request.eta).timestamp() if isinstance(request.eta, str) else 0.0
        ready_at = max(published_at, due_at)
        metrics.queue_wait.labels(task.name, queue).observe(max(0.0, time.time() - ready_at))
    request.measured_from = time.monotonic()


@task_postrun.connect
@metrics.never_raises
def observe_run(task: Any, state: str | None = None, **_: Any) -> None:
    began_at = getattr(task.request, "measured_from", None)
    if began_at is not None:
        metrics.runtime.labels(task.name).observe(time.monotonic() - began_at)
    if state == "SUCCESS" and getattr(task, "is_tick", False):
        metrics.pass_ended_at.labels(task.name).set(time.time())


@task_success.connect
@metrics.never_raises
def count_success(sender: Any, **_: Any) -> None:
    metrics.succeeded.labels(sender.name).inc()


@task_failure.connect
@metrics.never_raises
def count_failure(sender: Any, exception: Any = None, **_: Any) -> None:
    metrics.failed.labels(sender.name, type(exception).__name__).inc()


@task_retry.connect
@metrics.never_raises
def count_retry(sender: Any, **_: Any) -> None:
    metrics.retried.labels(sender.name).inc()


log = structlog.get_logger(__name__)

SAMPLE_INTERVAL = 0.5  #: seconds
SAMPLES_PER_REPORT = 10

STOP_TIMEOUT = 3.0  #: seconds for the last call to Redis

_stopping = threading.Event()
_threads: list[threading.Thread] = []


@worker_ready.connect
def start_load_reports(sender: Any, **_: Any) -> None:
    """Start the thread in a core worker, and on RabbitMQ in an execution worker."""
    queues = sorted(sender.app.amqp.queues.consume_from)
    if any(name in CORE_QUEUES for name in queues) or is_rabbitmq(str(sender.app.conf.broker_url)):
        worker = sender.controller
        given = (sender.hostname, int(worker.max_concurrency or worker.concurrency), queues)
        _threads.append(threading.Thread(target=_report_load, args=given, name="load", daemon=True))
        _threads[-1].start()


@worker_shutdown.connect
def stop_load_reports(**_: Any) -> None:
    _stopping.set()
    for thread in _threads:
        thread.join(STOP_TIMEOUT)


def _report_load(name: str, processes: int, queues: list[str]) -> None:
    from scheduling.monitoring.queues import WorkerReport, remove_worker_report, send_worker_report

    busy = 0.0
    while not _stopping.is_set():
        # The main loop changes the mapping meanwhile; list() copies it in one step.
        unacked = Counter(
            queue_of_routing_key(request.delivery_info.get("routing_key") or "")  # other programs may leave it out
            for request in list(state.requests.values())
            if not request.acknowledged
        )
        report = WorkerReport(name, processes, busy, queues, len(state.active_requests), unacked=dict(unacked))
        _call_redis(partial(send_worker_report, report))
        samples: list[int] = []
        while len(samples) < SAMPLES_PER_REPORT and not _stopping.wait(SAMPLE_INTERVAL):
            samples.append(min(len(state.active_requests), processes))
        busy = sum(samples) / (SAMPLES_PER_REPORT * processes)
    _call_redis(partial(remove_worker_report, report))


def _call_redis(call: Callable[[], None]) -> None:
    try:
        call()
    except RedisError as error:
        log.warning("load_not_reported", error=str(error))
