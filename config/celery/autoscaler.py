"""Scale the pool of a core worker: from `-c` to the number of cores, or between AFTERTOUCH_WORKER_MIN and
AFTERTOUCH_WORKER_MAX.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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


#: Seconds that the oldest message may wait for a process. The publisher's clock may be a second behind.
MAX_MESSAGE_WAIT = 1.5
MESSAGES_PER_SECOND = 50  #: messages that a process handles per second


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of a worker at one moment.

    All values come from the worker's main process. A slow or unavailable broker therefore costs nothing. RabbitMQ,
    which does not show waiting messages, needs no special case.
    """

    processes: int
    busy: int  #: processes with a task
    waiting: int  #: due messages without a process; messages still in the broker come after these
    oldest: float  #: seconds that the oldest waits since its publication or eta
    soon: int  #: unacknowledged messages that fall due within a second


class PoolSizer:
    def __init__(self, shrink_after: float, now: float) -> None:
        self._shrink_after = shrink_after
        self._calm_since = now  #: since then every measurement showed an idle process

    def size(self, seen: WorkerLoad, *, least: int, most: int, now: float) -> int:
        """Return the wanted number of processes: at most double, at least one less."""
        is_short = (
            seen.waiting and seen.oldest >= MAX_MESSAGE_WAIT
        ) or seen.soon > MESSAGES_PER_SECOND * seen.processes
        if is_short or seen.busy + seen.waiting >= seen.processes:
            self._calm_since = now
        if is_short:
            return max(min(seen.processes + max(1, min(seen.waiting, seen.processes)), most), least)
        if now - self._calm_since >= self._shrink_after and seen.processes > least:
            self._calm_since = now - self._shrink_after * 3 / 4  # shrink again soon if the load stays low
            return seen.processes - 1
        return seen.processes


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
    """Celery's autoscaler with different measurements and a safe way to shrink. Runs between events of the worker's
    loop.
    """

    def __init__(self, *args: Any, keepalive: float = SCALE_INTERVAL, **kwargs: Any) -> None:
        super().__init__(*args, keepalive=keepalive, **kwargs)
        now = time.monotonic()
        self._sizer = PoolSizer(settings.AFTERTOUCH_WORKER_SHRINK_AFTER.total_seconds(), now)
        self._looks_at = now

    def maybe_scale(self, req: Any = None) -> None:
        """Measure and scale at most every `SCALE_INTERVAL` seconds. Celery also calls this for each message."""
        now = time.monotonic()
        if now < self._looks_at:
            return
        self._looks_at = now + SCALE_INTERVAL
        seen = self._measure_load()
        wanted = self._sizer.size(seen, least=self.min_concurrency, most=self.max_concurrency, now=now)
        if wanted > seen.processes:
            self._grow(wanted - seen.processes)
            log.info("pool_grows", by=wanted - seen.processes, processes=self.processes, why=str(seen))
        elif wanted < seen.processes:
            self._shrink(seen.processes - wanted)
        metrics.set_gauge(metrics.pool_processes, self.worker.hostname, value=self.processes)

    def _measure_load(self) -> WorkerLoad:
        now, active = datetime.now(UTC), state.active_requests
        waiting = [request for request in state.reserved_requests if request not in active]
        soon = now + timedelta(seconds=1)
        return WorkerLoad(
            processes=self.processes,
            busy=len(active),
            waiting=len(waiting),
            oldest=max((measure_wait(request, now) for request in waiting), default=0.0),
            soon=sum(request.eta <= soon for request in state.scheduled_requests),
        )

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


def measure_wait(request: Any, now: datetime) -> float:
    """Return the seconds that a request has waited, 0 for one without a timestamp (ticks of beat)."""
    published_at = request.request_dict.get("published_at")
    if not isinstance(published_at, int | float):
        return 0.0
    ready_at = max(published_at, request.eta.timestamp() if request.eta else 0.0)
    return max(0.0, now.timestamp() - ready_at)
