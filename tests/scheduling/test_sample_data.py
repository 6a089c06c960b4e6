"""Sample data goes through the intake and is removed without a trace; other rows stay."""

from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.utils.timezone import now

from scheduling.models import (
    ChannelConfig,
    Customer,
    CustomerChange,
    CustomerProfile,
    Event,
    FailedTask,
    FailedTaskComment,
    Node,
    Touch,
)
from scheduling.operations import sample_data
from tests.scheduling.core.conftest import deliver
from tests.support.claims import claim_touches

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = (Customer, CustomerProfile, CustomerChange, Event, Touch, FailedTask, FailedTaskComment)


def run(*words):
    out = StringIO()
    call_command("sample_data", *words, stdout=out)
    return out.getvalue()


def count_rows():
    return {model.__name__: model._default_manager.count() for model in ROWS}


def test_sample_data_is_loaded_once_and_removed_exactly(matrix, record_event):
    matrix.node(delay=timedelta(0))
    matrix.node("later", trigger="service.completed", delay=timedelta(days=2))
    matrix.node("broken", trigger="order.paid", template=matrix.template("b", body="{{ event.data.none }}"))
    deliver(record_event("order.paid", "ann").task_ids)
    Customer.objects.create(user_id="sample-99")
    before = count_rows()
    assert before["FailedTask"] == 1
    assert "Planned touches: " in run("load")
    loaded = count_rows()
    assert loaded["Touch"] > before["Touch"] + 10
    assert run("load") == "Planned touches: 0\n"
    assert count_rows() == loaded
    deliver(list(Touch.objects.filter(customer__user_id__startswith="sample-").values_list("pk", flat=True)))
    task = FailedTask.objects.latest("pk")
    FailedTaskComment.objects.create(failed_task=task, author_name="ops", text="note")
    assert set(Touch.objects.values_list("state", flat=True)) >= {"failed", "delivered", "scheduled"}
    assert "customers: 12" in run("remove")
    assert count_rows() == before
    assert run("remove") == "Removed customers: 0, events: 0, touches: 0\n"


def test_removal_while_a_sample_is_being_sent_changes_nothing(matrix):
    matrix.node(delay=timedelta(0))
    run("load")
    before = count_rows()
    sample = Touch.objects.filter(customer__user_id__startswith="sample-")[0].pk
    Touch.objects.filter(pk=sample).update(state="queued", due_at=now(), lease_until=now() + timedelta(minutes=1))
    (claim,) = claim_touches([sample])
    with pytest.raises(CommandError, match="1 sample touches are being sent"):
        run("remove")
    assert count_rows() == before
    assert Touch.objects.get(pk=claim.task_id).state == "running"


def test_samples_are_refused_while_nodes_reach_receivers(matrix):
    matrix.node(delay=timedelta(hours=1))
    hook = ChannelConfig.objects.create(key="hook", kind="webhook", config={"url": "https://example.com/in"})
    Node.objects.update(channel=hook)
    with pytest.raises(CommandError, match="Node guide is enabled"):
        run("load")
    assert Event.objects.count() == 0
    run("load", "--send")
    assert Event.objects.count() > 0


def test_customer_with_id_of_a_sample_is_never_touched(matrix):
    Customer.objects.create(user_id=sample_data.USER_IDS[0])
    with pytest.raises(CommandError, match="sample-01 exists"):
        run("load")
    run("remove")
    assert Customer.objects.filter(user_id="sample-01").exists()
