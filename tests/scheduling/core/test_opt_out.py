"""An opt-out outlives what the customer does afterwards."""

from __future__ import annotations

import pytest

from scheduling.models import Customer, Touch
from scheduling.operations import commands
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)
TRIGGERS = ("material.downloaded", "order.paid", "conversation.started", "customer.inactive")


def test_opt_out_is_undone_by_no_event_and_no_other_update(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    for trigger in TRIGGERS:
        matrix.node(trigger, trigger=trigger)
    commands.update_customer("ann", {"opted_out": True})
    since = Customer.objects.get().opted_out_at

    task_ids = [task_id for trigger in TRIGGERS for task_id in record_event(trigger, "ann").task_ids]
    commands.update_customer("ann", {"name": "Ann", "level": "vip"})

    customer = Customer.objects.get()
    assert (customer.opted_out, customer.opted_out_at) == (True, since)
    deliver(task_ids)
    assert [*Touch.objects.values_list("state", "reason")] == [("suppressed", "opted_out")] * len(TRIGGERS)


def test_opt_out_by_complaint_survives_next_event(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    record_event("complaint.received", "ann")
    assert Customer.objects.get().opted_out
    record_event("order.paid", "ann")
    assert Customer.objects.get().opted_out
