"""What beat knows of the queue of passes where the broker is RabbitMQ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kombu import Connection, Queue

from config.celery.beat_scheduler import TICK_QUEUE, TickBacklog
from config.local.processes import wait_until
from tests.faults.brokers import missing_for_rabbitmq, rabbitmq


@pytest.mark.rabbitmq
@pytest.mark.skipif(bool(missing_for_rabbitmq()), reason=f"missing service: {missing_for_rabbitmq()}")
def test_tick_backlog_on_rabbitmq_is_full_above_limit(
    state_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TickBacklog, "ASK_EVERY", -1.0)  # at each question
    with rabbitmq(state_folder("pile")) as node, Connection(node.url) as connection:
        producer, pile = connection.Producer(), TickBacklog()
        assert not pile.is_full(producer), "the queue is not there"

        queue = Queue(TICK_QUEUE)(connection.default_channel)
        queue.declare()
        for _ in range(TickBacklog.MOST):
            producer.publish("", routing_key=TICK_QUEUE)
        assert wait_until(lambda: int(queue.queue_declare(passive=True).message_count) == TickBacklog.MOST, 30)
        assert not pile.is_full(producer)

        producer.publish("", routing_key=TICK_QUEUE)
        assert wait_until(lambda: pile.is_full(producer), 30)
        queue.purge()
        assert not pile.is_full(producer)
        producer.publish("", routing_key=TICK_QUEUE)  # the channel that published is still open
