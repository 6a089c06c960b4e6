"""An event may call a touch off at any moment, also while a worker has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from scheduling.channels.base import Delivered, Transient
from scheduling.delivery import pipeline
from scheduling.models import Touch
from tests.scheduling.core.conftest import WAIT_LIMIT, deliver, deliver_when_due, fall_due
from tests.scheduling.core.fake_channels import FakeChannelState

pytestmark = pytest.mark.django_db(transaction=True)


def fail_during_send(task_id: UUID, fake_channel: FakeChannelState, meanwhile: Callable[[], Any]) -> Any:
    """A worker has it while that happens, and then it waits to be sent again."""
    fake_channel.blocks = True
    fake_channel.play = lambda message: Transient("http_503")
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    assert fake_channel.on_stage.wait(WAIT_LIMIT)
    happened = meanwhile()
    fake_channel.release_calls.set()
    deliver([])
    assert Touch.objects.get(pk=task_id).state == "scheduled"
    return happened


def test_cancel_event_during_send_stops_the_retry(
    matrix: Any, create_fake_channel: Any, record_event: Any, fake_channel: FakeChannelState
) -> None:
    """It could not be cancelled then, because a worker had it. It was not delivered, so its retry must not be."""
    matrix.node(channel=create_fake_channel(), cancel_on=["order.paid"])
    (task_id,) = record_event().task_ids
    fail_during_send(task_id, fake_channel, lambda: record_event(type="order.paid"))

    fake_channel.play = lambda message: Delivered("too late")
    (row,) = deliver_when_due(task_id)
    assert (row.state, row.reason) == ("cancelled", "event:order.paid")
    assert len(fake_channel.received) == 1
    assert row.reserved_at is None


def test_restart_event_during_send_stops_the_retry(
    matrix: Any, create_fake_channel: Any, record_event: Any, fake_channel: FakeChannelState
) -> None:
    """`restart`: the one that a worker had is not sent again beside the one that was planned in its place."""
    matrix.node(channel=create_fake_channel(), on_repeat="restart", guard_dedupe="ignore")
    (first,) = record_event().task_ids
    (second,) = fail_during_send(first, fake_channel, record_event).task_ids

    fake_channel.play = lambda message: Delivered("heard")
    old, new = deliver_when_due(first, second)
    assert (old.state, old.reason) == ("cancelled", "restarted:material.downloaded")
    assert (new.state, len(fake_channel.received)) == ("delivered", 2)


def test_earlier_or_other_event_does_not_stop_retry(
    matrix: Any, create_fake_channel: Any, record_event: Any, fake_channel: FakeChannelState
) -> None:
    matrix.node(channel=create_fake_channel(), cancel_on=["order.paid"])
    record_event(type="order.paid")
    fake_channel.play = lambda message: Transient("http_503")
    (task_id,) = record_event().task_ids
    record_event(type="order.paid", user="somebody-else")
    deliver_when_due(task_id)
    fake_channel.play = lambda message: Delivered("heard")
    assert deliver_when_due(task_id)[0].state == "delivered"
