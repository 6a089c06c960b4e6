"""Read the length, age and unacknowledged messages of each queue from the broker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from celery import current_app
from django.conf import settings
from django.db import DatabaseError
from django.utils.module_loading import import_string

from scheduling.dispatch import broker_health
from scheduling.dispatch.publisher import published_at

log = structlog.get_logger(__name__)

PATIENCE = 1.0  #: seconds for the connection, and for each response
SAMPLE = 50  #: unacknowledged messages that are sampled
_UNACKED = Path(__file__).with_name("unacked.lua").read_text()
#: kept in memory, because broker metrics are needed most while the database is unavailable
_further: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class QueueFigures:
    name: str
    length: int
    oldest_age: float | None = None  #: seconds; None if the broker does not show it
    unacked: int | None = None


def learn_queues() -> None:
    """Ask the other apps for their queue names (`settings.QUEUES`). Their functions query the database."""
    global _further
    _further = frozenset(name for path in settings.QUEUES for name in import_string(path)())


def known_queues() -> list[str]:
    """Return all queues that receive messages: the declared ones, and those that other apps last named."""
    return sorted({*current_app.amqp.queues, *_further})


def queue_figures(names: Sequence[str] | None = None) -> list[QueueFigures]:
    """Return statistics of the given queues; by default, of all known queues.

    Raises:
        Exception: whatever the broker's client raises if the broker does not answer in time.
    """
    names = _queue_names() if names is None else names
    with _broker() as connection:
        channel = connection.default_channel
        if hasattr(channel, "client"):
            return _redis(channel, names)
        return [QueueFigures(name, length) for name in names if (length := _declared(connection, name)) is not None]


def broker_takes_messages() -> bool | None:
    """Return whether the broker accepts messages; None if this cannot be determined.

    Raises the same as `queue_figures`.
    """
    with _broker() as connection:
        return broker_health.takes_messages(connection)


def _queue_names() -> list[str]:
    try:
        learn_queues()
    except DatabaseError as error:
        log.warning("queues_unknown", error=str(error))
    return known_queues()


@contextmanager
def _broker() -> Iterator[Any]:
    with current_app.connection_for_read(connect_timeout=PATIENCE) as connection:
        connection.transport_options = {**connection.transport_options, "socket_timeout": PATIENCE}
        connection.ensure_connection(max_retries=1, timeout=PATIENCE)
        yield connection


def _redis(channel: Any, names: Sequence[str]) -> list[QueueFigures]:
    with channel.client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.llen(name)
            # kombu adds the prefix only to commands that it uses itself; these are not among them.
            pipe.execute_command("LINDEX", channel.global_keyprefix + name, -1)
        pipe.execute_command("EVAL", _UNACKED, 1, channel.global_keyprefix + channel.unacked_key, SAMPLE)
        *found, (total, *sample) = pipe.execute()
    keys = [key.decode() for key in sample]
    return [
        QueueFigures(
            name, length, _age(oldest), round(total * keys.count(name) / len(keys)) if keys else 0
        )
        for name, length, oldest in zip(names, found[::2], found[1::2], strict=True)
    ]  # fmt: skip


def _age(oldest: bytes | None) -> float | None:
    """Return the age in seconds; 0 if the queue is empty, None if the message has no time."""
    if oldest is None:
        return 0.0
    instant = published_at(oldest)
    return None if instant is None else max(0.0, time.time() - instant.timestamp())


def _declared(connection: Any, name: str) -> int | None:
    """Return the length of a queue; None if it does not exist.

    RabbitMQ closes the channel after a question about a missing queue, so each question has its own channel.
    """
    channel = connection.channel()
    try:
        length = int(channel.queue_declare(name, passive=True).message_count)
    except connection.channel_errors:
        return None
    channel.close()
    return length
