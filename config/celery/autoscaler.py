"""Scale the pool of a core worker: from `-c` to the number of cores, or between AFTERTOUCH_WORKER_MIN and
AFTERTOUCH_WORKER_MAX.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import structlog
from celery.apps import worker
from celery.concurrency import get_implementation
from celery.concurrency.asynpool import AsynPool
from celery.concurrency.prefork import TaskPool
from celery.worker import state
from celery.worker.autoscale import Autoscaler
from django.conf import settings

from scheduling import metrics
from scheduling.queue_names import CORE_QUEUES, TICK_QUEUES

log = structlog.get_logger(__name__)

MAX_WAIT = 1.5  #: seconds in which messages may wait without a pause; then a process is missing
SCALE_INTERVAL = 0.5  #: seconds between measurements
LARGEST_DEFAULT = 16  #: processes: 80 MB each, and the unit has 2 GB
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  #: of this container: microseconds of processor time, and their period


class ScalingWorker(worker.Worker):  # type: ignore[misc]
    def prepare_args(self, **kwargs: Any) -> dict[str, Any]:
        """Apply the limits to workers that consume only core queues.

        An execution node is limited by its browsers instead. `--autoscale` on the command line takes precedence.
        """
        queues = kwargs.get("queues") or ()
        asked = set(queues.split(",") if isinstance(queues, str) else queues)
        if asked <= set(CORE_QUEUES) and asked - set(TICK_QUEUES) and not kwargs.get("autoscale"):
            bounds = self._pool_bounds(int(kwargs.get("concurrency") or 0))
            if bounds:
                kwargs["autoscale"] = list(bounds)
        return kwargs

    def _pool_bounds(self, concurrency: int) -> tuple[int, int] | None:
        """Return the largest and smallest number of processes; None for a pool of fixed size."""
        most, is_prefork = settings.AFTERTOUCH_WORKER_MAX, issubclass(get_implementation(self.pool_cls), TaskPool)
        if most is None:
            is_fixed = not is_prefork or getattr(settings, "CELERY_TASK_CREATE_MISSING_QUEUE_TYPE", "") == "quorum"
            most = min(count_usable_cores(), LARGEST_DEFAULT)
            return (most, concurrency) if most > concurrency > 0 and not is_fixed else None
        if most and not is_prefork:
            sys.exit(f"AFTERTOUCH_WORKER_MAX needs the pool prefork, and this worker has {self.pool_cls}")
        return (most, settings.AFTERTOUCH_WORKER_MIN) if most else None


def count_usable_cores() -> int:
    """Return the cores that this process may use, at least one. A container's quota counts."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text("utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


class PoolScaler(Autoscaler):  # type: ignore[misc]
    """Celery's autoscaler with a measure in time and a safe way to shrink. Runs between events of the worker's loop.

    It measures what the main process knows. A slow or unavailable broker therefore costs nothing, RabbitMQ, which does
    not show waiting messages, needs no special case, and the clocks of publishers do not matter.
    """

    def __init__(self, *args: Any, keepalive: float = SCALE_INTERVAL, **kwargs: Any) -> None:
        super().__init__(*args, keepalive=keepalive, **kwargs)
        self._looks_at = self._kept_up_at = self._spare_since = time.monotonic()

    def maybe_scale(self, req: Any = None) -> None:
        """Measure and scale at most every `SCALE_INTERVAL` seconds. Celery also calls this for each message.

        Grows to at most twice the size where messages wait at each measurement of `MAX_WAIT`. Shrinks by one where each
        measurement showed an idle process for `AFTERTOUCH_WORKER_SHRINK_AFTER`, and soon again if the load stays low.
        """
        now = time.monotonic()
        if now < self._looks_at:
            return
        self._looks_at = now + SCALE_INTERVAL
        processes, shrink_after = self.processes, settings.AFTERTOUCH_WORKER_SHRINK_AFTER.total_seconds()
        received = len(state.reserved_requests)  # with those that run; messages in the broker come after these
        if received <= processes:
            self._kept_up_at = now
        if received >= processes:
            self._spare_since = now
        wanted = processes
        if now - self._kept_up_at >= MAX_WAIT:
            wanted = max(min(received, 2 * processes, self.max_concurrency), self.min_concurrency)
        elif now - self._spare_since >= shrink_after and processes > self.min_concurrency:
            self._spare_since = now - shrink_after * 3 / 4
            wanted = processes - 1
        if wanted > processes:
            self._grow(wanted - processes)
            log.info("pool_grows", by=wanted - processes, processes=self.processes, received=received)
        elif wanted < processes:
            self._shrink(processes - wanted)
        metrics.set_gauge(metrics.pool_processes, self.worker.hostname, value=self.processes)

    def _grow(self, n: int) -> None:
        """Start the processes at once, also for `celery control autoscale`."""
        self.pool.grow(n)
        self.pool.maintain_pool()

    def _shrink(self, n: int) -> None:
        """End only idle processes, which get no further task.

        Celery's own method may select a process that gets another message. It also signals again while that process
        settles sent touches, which kills it.
        """
        pool: AsynPool = self.pool._pool
        idle = [
            child
            for child in pool._pool
            if child.inqW_fd in pool._all_inqueues
            and child.inqW_fd not in pool._busy_workers
            and child.inqW_fd not in pool._active_writes
            and not getattr(child, "_controlled_termination", False)
        ]
        for child in [] if pool.outbound_buffer else idle[:n]:
            pool._busy_workers.add(child.inqW_fd)
            pool._processes -= 1
            pool._putlock.shrink()
            child.terminate_controlled()  # runs `config.celery.application.drain_sender`
            log.info("pool_shrinks", pid=child.pid, processes=self.processes)
