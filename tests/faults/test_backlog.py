"""What the rescue sees of a backlog, on a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.utils.timezone import now
from kombu import Connection, Queue

from config.celery.application import app
from scheduling.dispatch import dispatcher
from scheduling.dispatch.publisher import oldest_message_at, publication_headers
from scheduling.ledger.transitions import AGE_UNKNOWN
from scheduling.models import Touch
from tests.faults.brokers import missing_for_rabbitmq, rabbitmq

pytestmark = pytest.mark.faults


def test_oldest_message_at_returns_publication_time(valkey: Any) -> None:
    """It prolongs the hints behind it, so that a backlog is never amplified. The key of a queue has a prefix on Redis,
    and kombu's client prefixes only the commands that it knows."""
    queue = f"touch.{uuid4().hex[:8]}"
    assert oldest_message_at(queue) is None
    with app.connection_for_write() as own:  # the pool belongs to tests that close it, too
        app.send_task("scheduling.deliver", args=[[]], queue=queue, headers=publication_headers(), connection=own)
        app.send_task("scheduling.deliver", args=[[]], queue=queue, headers={"published_at": 0}, connection=own)
    oldest = oldest_message_at(queue)
    assert oldest is not None
    assert timedelta(seconds=1) < datetime.now(UTC) - oldest < timedelta(seconds=60)


def test_oldest_message_at_unreadable_item_is_none(valkey: Any) -> None:
    valkey.lpush("mq:touch.high", "not a message")
    valkey.lpush("mq:touch.low", json.dumps([1]))
    assert oldest_message_at("touch.high") is None
    assert oldest_message_at("touch.low") is None


@pytest.fixture
def rabbit(state_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A RabbitMQ that this process talks to."""
    with rabbitmq(state_folder("backlog")) as node:
        monkeypatch.setenv("CELERY_BROKER_URL", node.url)  # which Celery reads before its configuration
        monkeypatch.setitem(app.conf, "broker_transport_options", {"confirm_publish": True})
        yield node.url


@pytest.mark.rabbitmq
@pytest.mark.skipif(bool(missing_for_rabbitmq()), reason=f"missing service: {missing_for_rabbitmq()}")
@pytest.mark.django_db(transaction=True)
def test_rescue_does_not_wait_for_empty_rabbitmq_queue(matrix: Any, record_event: Any, rabbit: str) -> None:
    """It shows no waiting message, only how many there are."""
    assert oldest_message_at("touch.normal") is None
    with Connection(rabbit, transport_options={"confirm_publish": True}) as own:
        Queue("touch.normal", channel=own.default_channel).declare()
        assert oldest_message_at("touch.normal") is None
        own.Producer().publish([], exchange="", routing_key="touch.normal")
    assert oldest_message_at("touch.normal") == AGE_UNKNOWN

    matrix.node()
    record_event()
    for minutes, state in ((1, "queued"), (3, "scheduled")):
        ago = now() - timedelta(minutes=minutes)
        Touch.objects.update(state="queued", hints=1, due_at=ago, queued_at=ago, lease_until=ago)
        assert dispatcher.rescue_lost_work() == (int(state == "scheduled"), 0)
        assert Touch.objects.get().state == state
