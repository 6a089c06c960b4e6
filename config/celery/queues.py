"""Declare the queues for each broker."""

from __future__ import annotations

from typing import Any

from celery.app.amqp import AMQP, Queues
from kombu import Exchange, Queue

from scheduling.queue_names import CORE_QUEUES, RPA_QUEUES
from scheduling.server_addresses import is_rabbitmq

#: On RabbitMQ the RPA queues share one topic exchange. On Redis a topic exchange loses messages of publishers that
#: did not declare it, so these queues are direct there.
TASKS = Exchange("tasks", type="topic", durable=True)


def declared_queues(broker_url: str, *, quorum: bool = False) -> list[Queue]:
    """Return the queues. `quorum` applies only to RabbitMQ: such queues survive the loss of a cluster node."""
    kind = {"queue_arguments": {"x-queue-type": "quorum"}} if quorum else {}
    core = [Queue(name, Exchange(name, type="direct"), routing_key=name, **kind) for name in CORE_QUEUES]
    if is_rabbitmq(broker_url):
        return core + [Queue(name, TASKS, routing_key=f"task.*.{name}", **kind) for name in RPA_QUEUES]
    return core + [Queue(name, Exchange(name, type="direct"), routing_key=name) for name in RPA_QUEUES]


def routing_key_of(queue: str) -> str:
    """Return the key that binds the queue of a shop, platform or node to the topic exchange, or "" for other queues."""
    kind, _, rest = queue.partition(".")
    return {"s": f"task.{rest}", "p": f"own.{rest}", "n": queue}.get(kind, "")


def queue_of_routing_key(routing_key: str) -> str:
    """Return the queue that receives the messages of a routing key."""
    kind, _, rest = routing_key.partition(".")
    if kind == "task":
        tier = rest.rpartition(".")[2]
        return tier if tier in RPA_QUEUES else f"s.{rest}"
    return f"p.{rest}" if kind == "own" else routing_key


class TopicQueues(Queues):
    """Bind the queues of shops, platforms and nodes to the topic exchange when a program first names them."""

    def new_missing(self, name: str) -> Queue:
        queue: Queue = super().new_missing(name)
        if key := routing_key_of(name):
            queue.exchange, queue.routing_key = TASKS, key
        return queue


class BrokerQueues(AMQP):
    @property
    def queues_cls(self) -> Any:
        return TopicQueues if is_rabbitmq(str(self.app.conf.broker_url)) else Queues
