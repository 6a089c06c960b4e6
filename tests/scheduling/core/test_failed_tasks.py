"""What a person does about what failed: each action once, with their name, and never a second message by accident."""

from datetime import timedelta

import pytest
import time_machine
from django.utils.timezone import now

from scheduling import dispatch
from scheduling.channels.base import Delivered, Unknown
from scheduling.errors import Conflict
from scheduling.ledger import failures
from scheduling.models import Event, FailedTask, HarassmentRule, Node, Pause
from scheduling.operations import failed_tasks
from scheduling.operations.failed_tasks import Actor
from tests.scheduling.core.conftest import deliver_when_due, make_quiet_now, rows

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)
ANN = Actor("ann", reason="the shop asked for it")


@pytest.fixture
def create_failed_task(matrix, hook, record_event, receiver):
    """Let the delivery of a touch fail with this answer: for certain by 422, with an unknown outcome by no response."""
    hook.idempotent = False
    hook.save()
    matrix.node(channel=hook, expires_after=timedelta(hours=1))

    def create_failed_task(answer=422, user="ann"):
        receiver.script = [answer]
        (row,) = deliver_when_due(*record_event(user=user).task_ids)
        return FailedTask.objects.get(task_id=row.pk)

    return create_failed_task


def test_failed_task_stores_original_and_cause(create_failed_task):
    row = create_failed_task()
    assert (row.state, row.failure, row.reason, row.detail) == ("open", "failed", "http_422", "as told")
    assert (row.payload["node"], row.payload["user_id"], row.channel) == ("guide", "ann", "hook")
    assert row.payload["event"]["data"] == Event.objects.get().data
    assert [attempt["status"] for attempt in row.attempts] == [422]


def test_fingerprint_is_equal_for_the_same_failure(create_failed_task):
    assert (
        create_failed_task().fingerprint
        == create_failed_task(user="bob").fingerprint
        != create_failed_task(404, user="cid").fingerprint
    )


def test_retry_is_a_new_touch_with_the_same_key(create_failed_task, receiver):
    row = create_failed_task()

    task_id = failed_tasks.retry_failed_task(row.pk, ANN)
    assert dispatch.dispatch_due_touches() == 1
    (again,) = deliver_when_due(task_id)

    row.refresh_from_db()
    assert (again.state, again.retry_of, again.root_id) == ("delivered", row.task_id, row.root_id)
    assert (row.state, row.retried_as) == ("retried", task_id)
    assert receiver.keys == [str(row.task_id)] * 2
    assert [call.json["data"]["task_id"] for call in receiver.calls] == [str(row.task_id), str(task_id)]


@pytest.mark.parametrize(("ahead", "as_new"), [(HOUR, False), (-HOUR, True)])
def test_retry_is_due_now_by_database_clock(create_failed_task, as_new, ahead):
    """By the clock of a node that is ahead it would wait, and its slot would count for longer."""
    row, before = create_failed_task(), now()
    with time_machine.travel(now() + ahead, tick=True):
        task_id = failed_tasks.retry_failed_task(row.pk, ANN, as_new=as_new)

    (again,) = rows([task_id])
    row.refresh_from_db()
    assert before <= again.due_at == again.planned_at <= now()
    assert again.expires_at == again.due_at + HOUR
    assert before <= row.acted_at <= now()
    assert not as_new or before <= again.reserved_at <= now()


@pytest.mark.parametrize("by", ["pause", "quiet_hours"])
def test_deferred_retry_as_new_is_not_deduped_against_the_first(shop, by):
    """It lost the slot that the operator had confirmed when it was deferred, and ended as a repetition."""
    shop.node(channel=shop.create_channel(idempotent=False))
    shop.answer(Unknown("timeout"))
    deliver_when_due(*shop.record_event().task_ids)
    shop.answer(Delivered())
    stop = Pause.objects.create(scope="all") if by == "pause" else make_quiet_now()
    task_id = failed_tasks.retry_failed_task(FailedTask.objects.get().pk, ANN, as_new=True)
    (held,) = deliver_when_due(task_id)
    assert held.state == "scheduled"
    stop.delete()
    dispatch.resume_unpaused()

    (again,) = deliver_when_due(task_id)

    assert (again.state, again.reason) == ("delivered", "")


def test_retry_is_judged_again(create_failed_task, record_event):
    HarassmentRule.objects.filter(kind="cap").update(limit=1)
    row = create_failed_task()
    other = record_event()
    deliver_when_due(*other.task_ids)
    (again,) = deliver_when_due(failed_tasks.retry_failed_task(row.pk, ANN))
    assert (again.state, again.reason) == ("suppressed", "dedupe")


def test_retry_after_an_event_that_cancels_sends_nothing(create_failed_task, record_event, receiver):
    """The customer paid while the touch was a failed task. Its retry still reminded of the order."""
    Node.objects.update(cancel_on=["order.paid"])
    failed = create_failed_task()
    record_event("order.paid")

    (row,) = deliver_when_due(failed_tasks.retry_failed_task(failed.pk, ANN))

    assert (row.state, row.reason) == ("cancelled", "event:order.paid")
    assert len(receiver.calls) == 1


def test_retry_of_unknown_takes_over_the_slot(create_failed_task):
    HarassmentRule.objects.filter(kind="cap").update(limit=1)
    row = create_failed_task("hang_up")
    (old,) = rows([row.task_id])

    task_id = failed_tasks.retry_failed_task(row.pk, ANN)

    (before, again) = rows([row.task_id, task_id])
    assert (before.reserved_at, again.reserved_at) == (None, old.reserved_at)
    assert deliver_when_due(task_id)[0].state == "delivered"


@pytest.mark.parametrize("delivered", [True, False])
def test_resolve_unknown_keeps_or_frees_the_slot(create_failed_task, record_event, delivered):
    HarassmentRule.objects.filter(kind="cap").update(limit=1)
    row = create_failed_task("hang_up")
    failed_tasks.resolve_failed_task(row.pk, ANN, delivered=delivered)
    row.refresh_from_db()
    assert row.state == ("resolved_delivered" if delivered else "resolved_not_delivered")
    assert deliver_when_due(*record_event().task_ids)[0].state == ("suppressed" if delivered else "delivered")


def test_unreadable_message_is_archived_not_retried():
    failures.record_unreadable_message("not_json", b"\xff\x00", queue="touch.high")
    row = FailedTask.objects.get()
    with pytest.raises(Conflict, match="ignore or archive"):
        failed_tasks.retry_failed_task(row.pk, ANN)
    row.refresh_from_db()
    assert (row.state, row.retried_as) == ("open", None)
    failed_tasks.archive_failed_task(row.pk, ANN)
