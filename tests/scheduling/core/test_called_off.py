"""An event may call a touch off at any moment, also while a worker has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from scheduling.channels.base import Delivered, Transient
from scheduling.delivery import pipeline
from scheduling.models import Touch
from tests.scheduling.core.conftest import PATIENCE, deliver, deliver_at_last, fall_due
from tests.scheduling.core.puppets import Theatre

pytestmark = pytest.mark.django_db(transaction=True)


def send_in_vain(task_id: UUID, theatre: Theatre, meanwhile: Callable[[], Any]) -> Any:
    """A worker has it while that happens, and then it waits to be sent again."""
    theatre.blocks = True
    theatre.play = lambda message: Transient("http_503")
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    assert theatre.on_stage.wait(PATIENCE)
    happened = meanwhile()
    theatre.let_go.set()
    deliver([])
    assert Touch.objects.get(pk=task_id).state == "scheduled"
    return happened


def test_an_event_that_calls_a_touch_off_while_it_is_being_sent_is_not_forgotten(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre
) -> None:
    """It could not be cancelled then, because a worker had it. It was not delivered, so its retry must not be."""
    matrix.node(channel=puppet(), cancel_on=["order.paid"])
    (task_id,) = happen().task_ids
    send_in_vain(task_id, theatre, lambda: happen(type="order.paid"))

    theatre.play = lambda message: Delivered("too late")
    (row,) = deliver_at_last(task_id)
    assert (row.state, row.reason) == ("cancelled", "event:order.paid")
    assert len(theatre.heard) == 1
    assert row.reserved_at is None


def test_an_event_that_begins_anew_while_a_touch_is_being_sent_is_not_forgotten(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre
) -> None:
    """`restart`: the one that a worker had is not sent again beside the one that was planned in its place."""
    matrix.node(channel=puppet(), on_repeat="restart", guard_dedupe="ignore")
    (first,) = happen().task_ids
    (second,) = send_in_vain(first, theatre, happen).task_ids

    theatre.play = lambda message: Delivered("heard")
    old, new = deliver_at_last(first, second)
    assert (old.state, old.reason) == ("cancelled", "restarted:material.downloaded")
    assert (new.state, len(theatre.heard)) == ("delivered", 2)


def test_what_happened_before_a_touch_was_planned_or_to_others_does_not_call_its_retry_off(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre
) -> None:
    matrix.node(channel=puppet(), cancel_on=["order.paid"])
    happen(type="order.paid")
    theatre.play = lambda message: Transient("http_503")
    (task_id,) = happen().task_ids
    happen(type="order.paid", user="somebody-else")
    deliver_at_last(task_id)
    theatre.play = lambda message: Delivered("heard")
    assert deliver_at_last(task_id)[0].state == "delivered"
