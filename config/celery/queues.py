"""The queues, by broker."""

from __future__ import annotations

from kombu import Exchange, Queue

CORE_QUEUES = ("ticks", "touch.high", "touch.normal", "touch.low")
RPA_QUEUES = ("high", "normal", "low")
#: On RabbitMQ RPA queues hang on one topic exchange. On Redis a topic exchange loses messages whose publisher has not
#: declared it, so there the same names are plain queues.
TASKS = Exchange("tasks", type="topic", durable=True)


def declared_queues(broker_url: str, *, quorum: bool = False) -> list[Queue]:
    """`quorum` only on RabbitMQ: queues that outlive the loss of a node of its cluster."""
    kind = {"queue_arguments": {"x-queue-type": "quorum"}} if quorum else {}
    core = [Queue(name, Exchange(name, type="direct"), routing_key=name, **kind) for name in CORE_QUEUES]
    if broker_url.startswith(("amqp", "pyamqp")):
        return core + [Queue(name, TASKS, routing_key=f"task.*.{name}", **kind) for name in RPA_QUEUES]
    return core + [Queue(name, Exchange(name, type="direct"), routing_key=name) for name in RPA_QUEUES]
