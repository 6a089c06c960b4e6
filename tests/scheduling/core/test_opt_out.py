"""An opt-out outlives what the customer does afterwards."""

from __future__ import annotations

import pytest

from scheduling.models import Customer, Touch
from scheduling.operations import commands
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("type", ["material.downloaded", "order.paid", "conversation.started", "customer.inactive"])
def test_event_after_opt_out_does_not_undo_it(matrix: MatrixBuilder, record_event: RecordEvent, type: str) -> None:
    matrix.node("guide", trigger=type)
    commands.update_customer("ann", {"opted_out": True})
    since = Customer.objects.get().opted_out_at
    receipt = record_event(type, "ann")
    customer = Customer.objects.get()
    assert (customer.opted_out, customer.opted_out_at) == (True, since)
    deliver(receipt.task_ids)
    touch = Touch.objects.get(pk__in=receipt.task_ids)
    assert (touch.state, touch.reason) == ("suppressed", "opted_out")


def test_customer_update_does_not_undo_opt_out(db: None) -> None:
    commands.update_customer("ann", {"opted_out": True})
    commands.update_customer("ann", {"name": "Ann", "level": "vip"})
    assert Customer.objects.get().opted_out


def test_opt_out_by_complaint_survives_next_event(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    record_event("complaint.received", "ann")
    assert Customer.objects.get().opted_out
    record_event("order.paid", "ann")
    assert Customer.objects.get().opted_out
