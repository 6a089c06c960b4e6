"""Talking to the broker: hints go out in batches, and losing one costs nothing but time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any

import structlog
from celery import current_app
from kombu.exceptions import OperationalError

from scheduling.dispatch.broker_health import alarm
from scheduling.ledger.transitions import UNSEEN, Hint

log = structlog.get_logger(__name__)

TOUCH_QUEUES = {0: "touch.high", 1: "touch.normal", 2: "touch.low"}
BUCKET = 0.010  #: seconds; due times are rounded up to it, so that one message carries what falls due together
MESSAGE_LIMIT = 500  #: ids in a message
DELIVER = "scheduling.deliver"


def publish_touches(hints: Iterable[Hint], channels: dict[int, int]) -> int:
    """Publish hints about touches, those of one queue, channel and due bucket together. Returns the messages sent.

    `channels` maps a node to its channel, so that a slow channel fills messages of its own. Raises nothing: where the
    broker is away the rows' own leases bring them back.
    """
    messages = list(_messages(hints, channels))
    if alarm.is_on():
        log.warning("hints_lost", messages=len(messages), error="the broker takes no messages")
        return 0
    try:
        with current_app.producer_pool.acquire(block=True, timeout=1) as producer, producer.batch(max_size=200):
            for queue, eta, task_ids in messages:
                current_app.send_task(
                    DELIVER, args=[task_ids], queue=queue, eta=eta, producer=producer, headers=published_now()
                )
    except (OperationalError, OSError, TimeoutError) as error:
        log.warning("hints_lost", messages=len(messages), error=str(error))
        return 0
    except Exception:
        log.exception("hints_lost", messages=len(messages))
        return 0
    return len(messages)


def _messages(hints: Iterable[Hint], channels: dict[int, int]) -> Iterator[tuple[str, datetime | None, list[str]]]:
    now = datetime.now(UTC).timestamp()
    groups: dict[tuple[int, int, int], list[Hint]] = defaultdict(list)
    for hint in hints:
        due = hint.due_at.timestamp()
        groups[hint.priority, channels.get(hint.route, 0), ceil(max(due, now) / BUCKET)].append(hint)
    for (priority, _, bucket), members in sorted(groups.items(), key=lambda item: (item[0][0], item[0][2])):
        eta = datetime.fromtimestamp(bucket * BUCKET, UTC) if bucket * BUCKET > now + BUCKET else None
        for start in range(0, len(members), MESSAGE_LIMIT):
            task_ids = [str(hint.task_id) for hint in members[start : start + MESSAGE_LIMIT]]
            yield TOUCH_QUEUES[priority], eta, task_ids


def published_now() -> dict[str, Any]:
    return {"published_at": datetime.now(UTC).timestamp()}


def oldest_message_at(queue: str) -> datetime | None:
    """When the oldest message that still waits in `queue` was published; None where none waits.

    RabbitMQ does not show a waiting message: `UNSEEN` where its queue is not empty. Raises `OperationalError` where the
    broker cannot be asked.
    """
    with current_app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1, timeout=2)
        channel = connection.default_channel
        if hasattr(channel, "client"):
            # kombu prefixes only the commands it uses itself, and this is none of them.
            raw = channel.client.lindex(f"{channel.global_keyprefix}{queue}", -1)
            instant = published_at(raw) if raw else None
            # A little earlier, because the node that stamped it may be ahead of the database's clock by a second.
            return instant - timedelta(seconds=2) if instant else None
        try:
            waiting = channel.queue_declare(queue, passive=True).message_count
        except connection.channel_errors:
            return None
        return UNSEEN if waiting else None


def published_at(raw: bytes) -> datetime | None:
    """When a message as Redis keeps it was published, by the clock of the node that did; None where it does not say."""
    try:
        return datetime.fromtimestamp(json.loads(raw)["headers"]["published_at"], UTC)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
