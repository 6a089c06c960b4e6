"""Declare the queues for each broker."""

from __future__ import annotations

from kombu import Exchange, Queue

CORE_QUEUES = ("touch.high", "touch.normal", "touch.low", "ticks")
RPA_QUEUES = ("high", "normal", "low")
#: On RabbitMQ the RPA queues share one topic exchange. On Redis a topic exchange loses messages of publishers that
#: did not declare it, so these queues are direct there.
TASKS = Exchange("tasks", type="topic", durable=True)


def declared_queues(broker_url: str, *, quorum: bool = False) -> list[Queue]:
    """Return the queues. `quorum` applies only to RabbitMQ: such queues survive the loss of a cluster node."""
    kind = {"queue_arguments": {"x-queue-type": "quorum"}} if quorum else {}
    core = [Queue(name, Exchange(name, type="direct"), routing_key=name, **kind) for name in CORE_QUEUES]
    if broker_url.startswith(("amqp", "pyamqp")):
        return core + [Queue(name, TASKS, routing_key=f"task.*.{name}", **kind) for name in RPA_QUEUES]
    return core + [Queue(name, Exchange(name, type="direct"), routing_key=name) for name in RPA_QUEUES]
