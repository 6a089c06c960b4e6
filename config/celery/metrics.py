"""Update metrics of workers and messages from Celery's signals (see `scheduling.metrics`)."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

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
)

from config.celery.queues import queue_of_routing_key
from scheduling import metrics
from scheduling.monitoring.multiprocess import share_metrics


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
        ready_at = max(published_at, _timestamp_of(request.eta))
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


def _timestamp_of(eta: Any) -> float:
    return datetime.fromisoformat(eta).timestamp() if isinstance(eta, str) else 0.0
