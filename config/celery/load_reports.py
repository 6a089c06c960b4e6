"""Report the state of a worker. A page shows it, and the wanted number of workers is computed from it.

On RabbitMQ it is the only source of unacknowledged messages.

A thread of the main process reports, because its loop must not wait for Redis. Worker processes do not inherit it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
from celery.signals import worker_ready, worker_shutdown
from celery.worker import state

from config.celery.queues import queue_of_routing_key
from scheduling.queue_names import CORE_QUEUES
from scheduling.redis_client import RedisError
from scheduling.server_addresses import is_rabbitmq

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
    from scheduling.monitoring.worker_reports import WorkerReport, remove_worker_report, send_worker_report

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
