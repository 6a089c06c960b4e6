"""Keep the state of each worker in Redis for a short time. Redis' clock decides which reports are recent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from django.conf import settings

from scheduling.queue_names import TOUCH_QUEUES
from scheduling.redis_client import connect_once

WORKER_REPORTS = "at:workers"
REPORT_LIFETIME = 20.0  #: seconds; a worker reports every five


@dataclass(frozen=True, slots=True)
class WorkerReport:
    name: str
    processes: int  #: at its largest size
    busy: float  #: mean share of them that ran a task since the previous report
    queues: Sequence[str] = ()
    running: int = field(default=0, compare=False)  #: tasks at the time of the report
    age: float = field(default=0.0, compare=False)  #: seconds since the report
    unacked: Mapping[str, int] = field(default_factory=dict, compare=False)  #: unacknowledged messages by queue

    @property
    def key(self) -> str:
        """Return the name and the queues. Workers that were started without `-n` on one machine share a name."""
        return f"{self.name} {','.join(self.queues)}"


def send_worker_report(report: WorkerReport) -> None:
    """Write the report and remove expired ones. Raises `RedisError`."""
    now, found = _read_reports()
    gone = [name for name, text in found.items() if now - json.loads(text)["at"] >= REPORT_LIFETIME]
    with connect_once(settings.REDIS_URL).pipeline(transaction=False) as pipe:
        if gone:
            pipe.hdel(WORKER_REPORTS, *gone)
        pipe.hset(WORKER_REPORTS, report.key, json.dumps({"at": now, **asdict(report)}))
        pipe.pexpire(WORKER_REPORTS, int(REPORT_LIFETIME * 1000))
        pipe.execute()


def remove_worker_report(report: WorkerReport) -> None:
    """Remove the report of a worker that stops. Raises `RedisError`."""
    connect_once(settings.REDIS_URL).hdel(WORKER_REPORTS, report.key)


def list_worker_reports() -> list[WorkerReport]:
    """Return the reports of the last `REPORT_LIFETIME` seconds. Raises `RedisError`.

    A worker of an older version reports no queues: it is taken as a core worker. Execution workers report on RabbitMQ
    only.
    """
    now, found = _read_reports()
    return [
        WorkerReport(
            said["name"],
            said["processes"],
            said["busy"],
            said.get("queues", list(TOUCH_QUEUES.values())),
            said.get("running", 0),
            max(0.0, now - said["at"]),
            said.get("unacked", {}),
        )
        for _key, said in sorted((key, json.loads(text)) for key, text in found.items())
        if now - said["at"] < REPORT_LIFETIME
    ]


def count_unacked_messages() -> Counter[str]:
    """Return the messages that running workers have not acknowledged, by queue. Raises `RedisError`."""
    total: Counter[str] = Counter()
    for report in list_worker_reports():
        total.update(report.unacked)
    return total


def _read_reports() -> tuple[float, dict[bytes, bytes]]:
    """Return Redis' time in seconds and all reports."""
    with connect_once(settings.REDIS_URL).pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(WORKER_REPORTS)
        (seconds, micros), found = pipe.execute()
    return seconds + micros / 1e6, found
