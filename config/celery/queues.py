"""Declare the queues for each broker."""

from __future__ import annotations

from typing import Any

from celery.app.amqp import AMQP, Queues
from kombu import Exchange, Queue

TICK_QUEUES = ("ticks", "long")
CORE_QUEUES = ("touch.high", "touch.normal", "touch.low", *TICK_QUEUES)
RPA_QUEUES = ("high", "normal", "low")
#: On RabbitMQ the RPA queues share one topic exchange. On Redis a topic exchange loses messages of publishers that
#: did not declare it, so these queues are direct there.
TASKS = Exchange("tasks", type="topic", durable=True)


def is_rabbitmq(broker_url: str) -> bool:
    return broker_url.startswith(("amqp", "pyamqp"))


def declared_queues(broker_url: str, *, quorum: bool = False) -> list[Queue]:
    """Return the queues. `quorum` applies only to RabbitMQ: such queues survive the loss of a cluster node."""
    kind = {"queue_arguments": {"x-queue-type": "quorum"}} if quorum else {}
    core = [Queue(name, Exchange(name, type="direct"), routing_key=name, **kind) for name in CORE_QUEUES]
    if is_rabbitmq(broker_url):
        return core + [Queue(name, TASKS, routing_key=f"task.*.{name}", **kind) for name in RPA_QUEUES]
    return core + [Queue(name, Exchange(name, type="direct"), routing_key=name) for name in RPA_QUEUES]


def dedicated_routing_key(queue: str) -> str:
    """Return the key that binds the queue of a platform or shop to the topic exchange, or "" for other queues.

    A platform's dots become hyphens where a wildcard must match it as one word.
    """
    kind, _, rest = queue.partition(".")
    if kind == "p":
        platform, _, tier = rest.rpartition(".")
        return f"task.{platform.replace('.', '-')}.{tier}"
    return f"task.{rest}" if kind == "s" else ""


class TopicQueues(Queues):
    """Bind the queues of platforms and shops to the topic exchange when a worker or publisher first names them."""

    def new_missing(self, name: str) -> Queue:
        queue: Queue = super().new_missing(name)
        if key := dedicated_routing_key(name):
            queue.exchange, queue.routing_key = TASKS, key
        return queue


class BrokerQueues(AMQP):
    @property
    def queues_cls(self) -> Any:
        return TopicQueues if is_rabbitmq(str(self.app.conf.broker_url)) else Queues
