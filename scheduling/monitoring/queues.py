"""Read the length, age and unacknowledged messages of each queue, and the reports of workers.

RabbitMQ gives the lengths of queues only. There, workers report their unacknowledged messages every five seconds. Redis
keeps the state of each worker for a short time, and its clock decides which reports are recent.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
from celery import current_app
from django.conf import settings

from scheduling import broker_health
from scheduling.app_integrations import integrations
from scheduling.dispatch import read_publication_time
from scheduling.redis_client import RedisError, connect_once

log = structlog.get_logger(__name__)

SAMPLE = 50  #: unacknowledged messages that are sampled
_UNACKED = Path(__file__).with_name("unacked.lua").read_text()
#: kept in memory, because broker metrics are needed most while the database is unavailable
_app_queues: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class QueueStats:
    name: str
    length: int
    oldest_age: float | None = None  #: seconds; None if the broker does not show it
    unacked: int | None = None  #: None while Redis does not answer


@dataclass(frozen=True, slots=True)
class BrokerReading:
    queues: list[QueueStats]  #: all that receive messages: the declared ones, and those that other apps name
    accepts_messages: bool | None  #: None: this broker or account does not show it


def read_broker(limit_queries: AbstractContextManager[None] | None = None) -> BrokerReading | None:
    """Return the state of the broker; None if it does not answer in time.

    Apps name their queues by queries, within `limit_queries`. While PostgreSQL does not answer, the last names count.
    """
    global _app_queues
    try:
        with limit_queries or nullcontext():
            _app_queues = frozenset(
                name for app in integrations() for list_names in app.queues for name in list_names()
            )
    except Exception as error:  # any exception of PostgreSQL: the broker is needed most while it is unavailable
        log.warning("queues_unknown", error=str(error))
    names = sorted({*current_app.amqp.queues, *_app_queues})
    try:
        with broker_health.connect_broker(settings.TIMEOUTS.broker_stats) as connection:
            channel = connection.default_channel
            is_redis = hasattr(channel, "client")
            stats = _read_redis_stats(channel, names) if is_redis else _read_rabbitmq_stats(connection, names)
            # After the lengths: it publishes, because RabbitMQ tells only publishers that it is blocked.
            return BrokerReading(stats, broker_health.accepts_messages(connection))
    except Exception as error:  # any exception of the broker's client
        log.warning("broker_stats_unavailable", error=str(error))
        return None


def _read_redis_stats(channel: Any, names: Sequence[str]) -> list[QueueStats]:
    with channel.client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.llen(name)
            # kombu adds the prefix only to commands that it uses itself; these are not among them.
            pipe.execute_command("LINDEX", channel.global_keyprefix + name, -1)
        pipe.execute_command("EVAL", _UNACKED, 1, channel.global_keyprefix + channel.unacked_key, SAMPLE)
        *found, (total, *sample) = pipe.execute()
    keys = [key.decode() for key in sample]
    stats = []
    for name, length, oldest in zip(names, found[::2], found[1::2], strict=True):
        age: float | None = 0.0
        if oldest is not None:
            published_at = read_publication_time(oldest)
            age = None if published_at is None else max(0.0, time.time() - published_at.timestamp())
        stats.append(QueueStats(name, length, age, round(total * keys.count(name) / len(keys)) if keys else 0))
    return stats


def _read_rabbitmq_stats(connection: Any, names: Sequence[str]) -> list[QueueStats]:
    unacked: Counter[str] | None = None
    try:
        unacked = count_unacked_messages()
    except RedisError as error:
        log.warning("worker_reports_unavailable", error=str(error))
    stats = []
    for name in names:
        channel = connection.channel()  # RabbitMQ closes the channel of a question about a missing queue
        with suppress(*connection.channel_errors):
            length = int(channel.queue_declare(name, passive=True).message_count)
            stats.append(QueueStats(name, length, unacked=None if unacked is None else unacked[name]))
            channel.close()
    return stats


# --- workers ----------------------------------------------------------------------------------------------------------


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

    Execution workers report on RabbitMQ only.
    """
    now, found = _read_reports()
    reports = []
    for _key, text in sorted(found.items()):
        said = json.loads(text)
        age = now - said.pop("at")
        if age < REPORT_LIFETIME:
            reports.append(WorkerReport(**said | {"age": max(0.0, age)}))
    return reports


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
