"""Route and publish wake-up messages. A message asks a worker to look for work; it names no job.

A lost message costs seconds. The queue of a job with a browser is that of the shop's preferred node. Otherwise it is
the shared queue of its tier, or a queue of its platform or shop. On RabbitMQ all are bound to the topic exchange
`tasks`: the shared ones with `task.<platform>.<tier>`, a shop's with `task.<platform>.<shop>`, a platform's with
`own.<platform>.<tier>`, a node's with the queue's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog
from celery import current_app
from django.conf import settings

from rpa_tasks.jobs.ledger import NODE_SILENT, TIERS
from rpa_tasks.models import Job, Platform, Shop
from scheduling import sql
from scheduling.batching import BackgroundBatcher
from scheduling.broker_health import broker_alarm
from scheduling.dispatch import publication_headers
from scheduling.ledger.transitions import WakeUp
from scheduling.server_addresses import is_rabbitmq

log = structlog.get_logger(__name__)

WAKE_UP_TASK = "rpa_tasks.run"
UNKNOWN_CAPACITY = 50  #: messages that may wait in a queue without a known running node
MESSAGE_LIFE = 60.0  #: seconds after it is due; `dispatch.wake_queues` publishes another if work can still start


def queue_of(shop: Shop, priority: int) -> str:
    """Return the one queue that receives the wake-ups of a shop's jobs. `ledger.QUEUE_PREFIX` names the same."""
    if shop.dedicated_queue:
        return f"s.{escape_dots(shop.platform.key)}.{escape_dots(shop.shop_id)}"
    if shop.platform.dedicated_queue:
        return f"p.{escape_dots(shop.platform.key)}.{TIERS[priority]}"
    return TIERS[priority]


def escape_dots(name: str) -> str:
    """Return a key, an id or a node's name as one word of a queue's name or routing key.

    Keys, ids and names of hosts have no “:”, so different ones stay different.
    """
    return name.replace(".", ":")


@dataclass(frozen=True, slots=True)
class WakeUpMessage:
    """One wake-up message: its queue, platform and due time."""

    queue: str
    platform: str
    due_at: datetime | None = None  #: None: now


def publish_wakeups(wakeups: Sequence[WakeUp]) -> None:
    """Publish a wake-up message for each job at its due time, limited by the free slots of nodes.

    Raises nothing: the next pass over the lanes replaces a lost message.
    """
    jobs = Job.objects.select_related("shop__platform", "shop__lane", "flow").defer("payload", "result")
    found = jobs.in_bulk([wakeup.task_id for wakeup in wakeups])
    nodes = node_capacities()
    now = sql.now()
    tokens = []
    for wakeup in sorted(wakeups, key=lambda each: each.due_at):  # those that find no free slot are the last ones
        if job := found.get(wakeup.task_id):
            queue = _queue_of_job(job, wakeup.priority, nodes)
            due_at = wakeup.due_at if wakeup.due_at > now else None
            tokens.append(WakeUpMessage(queue, job.shop.platform.key, due_at))
    publish_within_capacity(tokens, nodes)


def _queue_of_job(job: Job, priority: int, nodes: Mapping[str, NodeCapacity]) -> str:
    """Return the queue of a job: the preferred node's if it needs a browser, otherwise the shared one.

    A platform that does not wait for the preferred node uses its queue only while that node has a free slot.
    """
    shared, home = queue_of(job.shop, priority), job.shop.lane.home
    own = node_queue(home, shared)
    if not job.flow.needs_browser or home not in nodes or own not in nodes[home].queues:
        return shared
    return own if job.shop.platform.waits_for_home or nodes[home].idle else shared


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A running node: the queues it consumes and how many more jobs it could start now."""

    queues: frozenset[str]
    idle: int


def node_capacities() -> dict[str, NodeCapacity]:
    """Return running nodes by name with their free slots. A draining node is known and has none.

    A message to a full node is useless, because its worker looks for the next job when a run ends. Both sides look
    after their commit: the producer after storing the job, the worker after settling its run. So one of them sees the
    other.
    """
    found = sql.rows(
        """
        SELECT node.name, node.queues,
               CASE WHEN node.draining_at IS NULL THEN node.slots - count(job.task_id) ELSE 0 END
        FROM rpa_tasks_executionnode AS node
        LEFT JOIN rpa_tasks_job AS job ON job.node = node.name AND job.state = 'running'
        WHERE node.seen_at > statement_timestamp() - %(lease)s
        GROUP BY node.name
        """,
        {"lease": NODE_SILENT},
    )
    return {name: NodeCapacity(frozenset(queues), max(0, idle)) for name, queues, idle in found}


def queue_capacity(queue: str, nodes: Mapping[str, NodeCapacity]) -> int:
    """Return how many messages of this queue can start work. `UNKNOWN_CAPACITY` if no running node consumes it."""
    idle = [node.idle for node in nodes.values() if queue in node.queues]
    return sum(idle) if idle else UNKNOWN_CAPACITY


def node_queue(node: str, queue: str) -> str:
    """Name the queue that only this node consumes, next to the shared `queue`.

    There is one for each shared queue: a worker of the node that does not serve that queue could not use the message.
    """
    return f"n.{escape_dots(node)}.{queue}"


def list_extra_queues() -> list[str]:
    """List queues besides the shared ones: dedicated queues of shops and platforms, and queues of running nodes."""
    shops = Shop.objects.filter(dedicated_queue=True, retired_at=None, platform__retired_at=None)
    platforms = Platform.objects.filter(dedicated_queue=True, retired_at=None)
    nodes = sql.rows(
        """
        SELECT DISTINCT queue.name
        FROM rpa_tasks_executionnode AS node CROSS JOIN jsonb_array_elements_text(node.queues) AS queue(name)
        WHERE node.seen_at > statement_timestamp() - %(lease)s AND starts_with(queue.name, 'n.')
        """,
        {"lease": NODE_SILENT},
    )
    return [
        *(queue_of(shop, 0) for shop in shops.select_related("platform")),
        *(f"p.{escape_dots(platform.key)}.{tier}" for platform in platforms for tier in TIERS.values()),
        *(name for (name,) in nodes),
    ]


def publish_within_capacity(tokens: Iterable[WakeUpMessage], nodes: Mapping[str, NodeCapacity]) -> None:
    """Publish the messages for which nodes have free slots.

    On Redis the queue's length reduces that number. RabbitMQ drops a message that was not consumed for `MESSAGE_LIFE`.
    The worker's clock does not matter.
    """
    if broker_alarm.is_on():
        log.warning("job_wakeups_lost", error="the broker takes no messages")
        return
    by_queue: dict[str, list[WakeUpMessage]] = {}
    for token in tokens:
        by_queue.setdefault(token.queue, []).append(token)
    wanted = {queue: each[: queue_capacity(queue, nodes)] for queue, each in by_queue.items()}
    if not any(wanted.values()):
        return
    try:
        with (
            current_app.producer_pool.acquire(block=True, timeout=settings.TIMEOUTS.broker_producer) as producer,
            producer.batch(max_size=200),
        ):
            for queue, each in wanted.items():
                for token in each[: max(0, queue_capacity(queue, nodes) - count_queue_messages(producer, queue))]:
                    send_wakeup_message(token, producer)
    except Exception as error:
        log.warning("job_wakeups_lost", error=str(error))


def send_wakeup_message(token: WakeUpMessage, producer: Any) -> None:
    address = {"queue": token.queue}
    if token.queue in TIERS.values() and is_rabbitmq(str(current_app.conf.broker_url)):
        address["routing_key"] = f"task.{escape_dots(token.platform)}.{token.queue}"
    life = MESSAGE_LIFE + max(0.0, (token.due_at - datetime.now(UTC)).total_seconds() if token.due_at else 0.0)
    headers = publication_headers()
    current_app.send_task(
        WAKE_UP_TASK, eta=token.due_at, producer=producer, headers=headers, expiration=life, **address
    )


def count_queue_messages(producer: Any, queue: str) -> int:
    """Return the number of messages in a queue; 0 if the broker would have to declare the queue for that."""
    channel = producer.channel
    return int(channel.client.llen(queue)) if hasattr(channel, "client") else 0


def wake_for_shops(shop_pks: Iterable[int]) -> None:
    """Publish a wake-up message for each of these shops that has due work."""
    found = sql.rows(
        """
        SELECT shop.id, head.task_id, head.due_at, head.priority
        FROM unnest(%(shops)b::bigint[]) AS shop(id)
        CROSS JOIN LATERAL (
            SELECT task_id, due_at, priority FROM rpa_tasks_job
            WHERE shop_id = shop.id AND state IN ('scheduled', 'queued')
              AND due_at <= statement_timestamp()
            ORDER BY priority, due_at LIMIT 1
        ) AS head
        """,
        {"shops": list(shop_pks)},
    )
    wakeup_publisher.submit(
        [WakeUp(task_id, due_at, priority, shop_id) for shop_id, task_id, due_at, priority in found]
    )


wakeup_publisher = BackgroundBatcher(publish_wakeups, name="job_wakeups")
