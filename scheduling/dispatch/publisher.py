"""Publish wake-up messages in batches. A lost message only delays its touches until their lease expires."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import structlog
from celery import current_app
from django.conf import settings
from kombu.exceptions import OperationalError

from scheduling.dispatch.broker_health import broker_alarm
from scheduling.ledger.transitions import AGE_UNKNOWN, WakeUp
from scheduling.policy.specs import NodeSpec
from scheduling.queue_names import TOUCH_QUEUES

log = structlog.get_logger(__name__)

#: Touches that fall due within this span share a message, at the instant of the last one.
DUE_SPAN = timedelta(milliseconds=10)
#: Fewer touches wait up to `LONGEST_SPAN` for others. A message costs a worker as much as several touches.
FEW, LONGEST_SPAN = 8, timedelta(milliseconds=50)
ETA_MARGIN = timedelta(milliseconds=1)  #: so that a clock that is a fraction of it ahead claims no touch too early
MESSAGE_LIMIT = 500  #: ids per message
DELIVER_TASK = "scheduling.deliver"


def publish_touches(wakeups: Sequence[WakeUp], nodes: Mapping[int, NodeSpec]) -> int:
    """Publish wake-ups, grouped by queue, channel and due time. Return the number of messages.

    A channel gets messages of its own, so that a slow one delays no other. Nodes that `nodes` lacks share messages: a
    snapshot may be older than a new node. Raises nothing: if the broker is unavailable, the leases of the rows expire
    and they are dispatched again.
    """
    if not wakeups:
        return 0
    messages = list(build_wakeup_messages(wakeups, nodes))
    if broker_alarm.is_on():
        log.warning("wakeups_lost", messages=len(messages), error="the broker takes no messages")
        return 0
    try:
        with (
            current_app.producer_pool.acquire(block=True, timeout=settings.TIMEOUTS.broker_producer) as producer,
            producer.batch(max_size=200),
        ):
            for queue, eta, task_ids in messages:
                current_app.send_task(
                    DELIVER_TASK,
                    args=[task_ids],
                    queue=queue,
                    eta=eta,
                    producer=producer,
                    headers=publication_headers(),
                )
    except (OperationalError, OSError, TimeoutError) as error:
        log.warning("wakeups_lost", messages=len(messages), error=str(error))
        return 0
    except Exception:
        log.exception("wakeups_lost", messages=len(messages))
        return 0
    return len(messages)


def build_wakeup_messages(
    wakeups: Iterable[WakeUp], nodes: Mapping[int, NodeSpec]
) -> Iterator[tuple[str, datetime | None, list[str]]]:
    """Yield the queue, the earliest time and the task ids of each message, the most important first."""
    now = datetime.now(UTC)

    def find_route(wakeup: WakeUp) -> tuple[int, int]:
        node = nodes.get(wakeup.route)
        return wakeup.priority, node.channel.id if node else 0

    ordered = sorted(wakeups, key=lambda wakeup: (find_route(wakeup), wakeup.due_at))
    shared = [message for _, alike in groupby(ordered, key=find_route) for message in _share_messages(alike, now)]
    for members in sorted(shared, key=lambda members: (members[0].priority, members[0].due_at)):
        last = members[-1].due_at
        eta = last + ETA_MARGIN if last > now + DUE_SPAN else None
        yield TOUCH_QUEUES[members[0].priority], eta, [str(wakeup.task_id) for wakeup in members]


def _share_messages(wakeups: Iterable[WakeUp], now: datetime) -> Iterator[list[WakeUp]]:
    """Yield the members of each message. `wakeups` are in the order of their due times."""
    members: list[WakeUp] = []
    for wakeup in wakeups:
        if members:
            first = members[0].due_at
            span = DUE_SPAN if first <= now or len(members) >= FEW else LONGEST_SPAN
            if len(members) == MESSAGE_LIMIT or wakeup.due_at - max(first, now) > span:
                yield members
                members = []
        members.append(wakeup)
    if members:
        yield members


def publication_headers() -> dict[str, Any]:
    return {"published_at": datetime.now(UTC).timestamp()}


def oldest_message_at(queue: str) -> datetime | None:
    """Return when the oldest waiting message of `queue` was published; None for an empty queue.

    RabbitMQ does not show waiting messages: the result is `AGE_UNKNOWN` if its queue is not empty.

    Raises:
        OperationalError: the broker is unreachable.
    """
    with current_app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1, timeout=settings.TIMEOUTS.broker_age)
        channel = connection.default_channel
        if hasattr(channel, "client"):
            # kombu adds the prefix only to commands that it uses itself; LINDEX is not one of them.
            raw = channel.client.lindex(f"{channel.global_keyprefix}{queue}", -1)
            instant = read_publication_time(raw) if raw else None
            # Subtract a margin: the clock of the publishing node may be a second ahead of PostgreSQL's clock.
            return instant - timedelta(seconds=2) if instant else None
        try:
            waiting = channel.queue_declare(queue, passive=True).message_count
        except connection.channel_errors:
            return None
        return AGE_UNKNOWN if waiting else None


def read_publication_time(raw: bytes) -> datetime | None:
    """Return the publication time of a message as stored in Redis, by the publisher's clock; None if absent."""
    try:
        return datetime.fromtimestamp(json.loads(raw)["headers"]["published_at"], UTC)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
