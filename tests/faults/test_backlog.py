"""What the rescue sees of a backlog, on a real broker."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from config.celery import app
from scheduling.broker import oldest_message_at, published_now

pytestmark = pytest.mark.faults


def test_the_rescue_sees_when_the_oldest_waiting_message_was_published(valkey: Any) -> None:
    """It prolongs the hints behind it, so that a backlog is never amplified. The key of a queue has a prefix on Redis,
    and kombu's client prefixes only the commands that it knows."""
    queue = f"touch.{uuid4().hex[:8]}"
    assert oldest_message_at(queue) is None
    with app.connection_for_write() as own:  # the pool belongs to tests that close it, too
        app.send_task("scheduling.deliver", args=[[]], queue=queue, headers=published_now(), connection=own)
        app.send_task("scheduling.deliver", args=[[]], queue=queue, headers={"published_at": 0}, connection=own)
    oldest = oldest_message_at(queue)
    assert oldest is not None
    assert timedelta(seconds=1) < datetime.now(UTC) - oldest < timedelta(seconds=60)


def test_an_unreadable_oldest_item_counts_as_no_backlog(valkey: Any) -> None:
    valkey.lpush("mq:touch.high", "not a message")
    valkey.lpush("mq:touch.low", json.dumps([1]))
    assert oldest_message_at("touch.high") is None
    assert oldest_message_at("touch.low") is None
