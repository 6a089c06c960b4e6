"""Ends of touches are events for the nodes that follow them, each once."""

from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest
from django.db import transaction

from config.local.processes import wait_until
from scheduling import sql
from scheduling.customers import erasure
from scheduling.ids import new_id
from scheduling.ledger import ends, locks
from scheduling.ledger.touches import touch_ledger
from scheduling.models import Customer, EndMark, Event, Node, Touch
from scheduling.operations import commands
from scheduling.operations.failed_tasks import Actor
from scheduling.planning import own_events
from scheduling.policy.matrix import LARGEST_ORIGIN
from tests.scheduling.core.conftest import deliver_when_due, held_by_second_connection, pass_time
from tests.scheduling.core.programs import is_connected, program
from tests.support.waiting import WAIT_LIMIT, eventually

pytestmark = pytest.mark.django_db(transaction=True)
FREE = {"guard_cap": "ignore", "guard_dedupe": "ignore"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """The passes read up to now."""
    monkeypatch.setattr(ends, "WRITE_LAG", timedelta(0))


@pytest.fixture
def journey(matrix):
    """Node `guide`, and `reminder` two days after its delivery."""
    matrix.node("guide", **FREE)
    matrix.node("reminder", "touch.delivered", from_nodes=["guide"], delay=timedelta(days=2), **FREE)
    own_events.record_ends()
    return matrix


def record_all():
    """Run passes until they have read everything that ended before."""
    newest = Touch.objects.order_by("settled_at").exclude(settled_at=None).values_list("settled_at", flat=True).last()

    def done():
        own_events.record_ends()
        mark = EndMark.objects.first()
        return mark is None or newest is None or mark.settled_at >= newest

    eventually(done)


def find(node):
    return list(Touch.objects.filter(node__key=node).order_by("created_at"))


def test_delivered_touch_plans_follow_up(journey, record_event):
    receipt = record_event(chat_id="c1", data={"order_no": "A1"})
    (guide,) = deliver_when_due(*receipt.task_ids)
    record_all()

    event = Event.objects.get(type="touch.delivered")
    assert (event.source, event.event_id) == ("aftertouch", f"touch.delivered:{guide.pk}")
    assert (event.user_id, event.chat_id, event.occurred_at) == ("ann", "c1", guide.settled_at)
    assert event.trace == receipt.id
    cause = Event.objects.get(pk=receipt.id)
    assert event.data == {
        "task_id": str(guide.pk), "delivery_key": str(guide.pk), "node": "guide", "stage": "presale", "channel": "log",
        "reason": "", "depth": 1, "origin": {"order_no": "A1"}, "origin_type": "material.downloaded",
        "origin_at": cause.occurred_at.isoformat(),
    }  # fmt: skip
    (reminder,) = find("reminder")
    assert guide.settled_at
    assert reminder.due_at == guide.settled_at + timedelta(days=2)
    record_all()
    assert len(find("reminder")) == 1


def test_end_of_other_node_and_other_state_plan_nothing(journey, record_event):
    journey.node("other", "order.paid", **FREE)
    deliver_when_due(*record_event("order.paid").task_ids)
    touch_ledger.cancel(record_event().task_ids, reason="by:ann")
    record_all()
    assert not Event.objects.filter(type__startswith="touch.").exists()


@pytest.mark.parametrize("node", [["guide"], {"key": "guide"}, 1, None])
def test_foreign_event_that_names_no_node_plans_nothing(journey, record_event, node):
    """A list was answered with status 500."""
    assert record_event("touch.delivered", data={"node": node}).task_ids == ()


def test_end_is_no_activity_of_the_customer(journey, record_event):
    ids = record_event().task_ids
    pass_time(days=2)
    before = Customer.objects.get().last_active_at
    deliver_when_due(*ids)
    record_all()
    assert Event.objects.filter(type="touch.delivered").exists()
    assert Customer.objects.get().last_active_at == before


@pytest.mark.parametrize("end", ["cancelled", "suppressed"])
def test_end_that_was_taken_back_plans_nothing(journey, record_event, end):
    """The touch is planned again, so its fallback would be a second message. It is planned after the next end."""
    journey.node("fallback", f"touch.{end}", from_nodes=["guide"], **FREE)

    def end_touch(task_id):
        if end == "cancelled":
            commands.cancel_one_touch(task_id, actor="ann")
        else:
            edit_node("guide", enabled=False)
            assert deliver_when_due(task_id)[0].state == "suppressed"

    (task_id,) = record_event().task_ids
    end_touch(task_id)
    with transaction.atomic():
        commands.plan_touch_again(str(task_id), Actor("ann"))
    record_all()
    assert not find("fallback")
    (again,) = Touch.objects.filter(retry_of=task_id)
    end_touch(again.pk)
    record_all()
    assert len(find("fallback")) == 1


def edit_node(key, **changes):
    Node.objects.filter(key=key).update(**changes)
    Node.objects.get(key=key).save()


@pytest.mark.parametrize("when", ["before the pass", "after the pass"])
def test_reply_cancels_follow_up(journey, record_event, when):
    """No reply in two days: the next message. A reply: nothing."""
    edit_node("reminder", cancel_on=["touch.replied"])
    deliver_when_due(*record_event().task_ids)
    deliver_when_due(*record_event(user="bob").task_ids)
    if when == "after the pass":
        record_all()
    record_event("touch.replied", data={"node": "guide"})
    record_all()
    ends_of = {each.customer.user_id: (each.state, each.reason) for each in find("reminder")}
    assert ends_of == {"ann": ("cancelled", "event:touch.replied"), "bob": ("scheduled", "")}


def test_texts_and_conditions_read_first_event(journey, record_event):
    """Also in the third message of a journey."""
    rows = {"all": [{"field": "event.data.origin.total", "op": "gte", "value": 500}]}
    template = journey.template("third", body="{{ event.data.origin.order_no }} {{ event.data.depth }}")
    journey.node("last", "touch.delivered", from_nodes=["reminder"], template=template, when=rows, **FREE)
    deliver_when_due(*record_event(data={"order_no": "A1", "total": 800}).task_ids)
    deliver_when_due(*record_event(user="bob", data={"order_no": "A2", "total": 300}).task_ids)
    record_all()
    deliver_when_due(*(each.pk for each in find("reminder")))
    record_all()
    (last,) = deliver_when_due(*(each.pk for each in find("last")))
    assert last.attempts[0].body == "A1 2"


def test_large_data_is_not_passed_on(journey, record_event):
    deliver_when_due(*record_event(data={"text": "x" * LARGEST_ORIGIN}).task_ids)
    deliver_when_due(*record_event(user="bob", data={"text": "x" * LARGEST_ORIGIN * 6}).task_ids)
    record_all()
    assert [each.data["origin"] for each in Event.objects.filter(type="touch.delivered")] == [{}, {}]


def test_depth_limit_suppresses_touch_and_ends_journey(journey, record_event, settings):
    settings.AFTERTOUCH_JOURNEY_DEPTH = 1
    journey.node("last", "touch.delivered", from_nodes=["reminder"], **FREE)
    journey.node("never", "touch.suppressed", from_nodes=["last"], **FREE)
    deliver_when_due(*record_event().task_ids)
    record_all()
    deliver_when_due(*(each.pk for each in find("reminder")))
    record_all()
    (last,) = deliver_when_due(*(each.pk for each in find("last")))
    assert (last.state, last.reason) == ("suppressed", "depth")
    assert (last.verdicts[-1].observed, last.verdicts[-1].limit) == ("2", "1")
    record_all()
    assert find("never") == []


def test_message_published_again_is_recorded_once_per_state(journey, record_event):
    journey.node("sorry", "touch.cancelled", from_nodes=["guide"], **FREE)
    (first,) = record_event().task_ids
    touch_ledger.cancel([first], reason="by:ann")
    row = Touch.objects.get(pk=first)
    again = new_id()
    Touch.objects.create(
        task_id=again, root_id=first, retry_of=first, due_at=row.due_at, planned_at=row.due_at, event_id=row.event_id,
        node_id=row.node_id, node_version=1, customer_id=row.customer_id, expires_at=row.expires_at,
    )  # fmt: skip
    touch_ledger.cancel([again], reason="by:ann")
    record_all()
    assert Event.objects.get(type="touch.cancelled").event_id == f"touch.cancelled:{first}"
    assert len(find("sorry")) == 1


def test_end_cancels_touches_of_other_nodes(matrix, record_event):
    """`cancel_on` names an end: all nodes' ends in this state count."""
    matrix.node("guide", delay=timedelta(days=1), cancel_on=["touch.delivered"])
    matrix.node("other", "order.paid", **FREE)
    own_events.record_ends()
    (waiting,) = record_event().task_ids
    deliver_when_due(*record_event("order.paid").task_ids)
    record_all()
    assert Touch.objects.get(pk=waiting).reason == "event:touch.delivered"


def test_node_that_starts_to_follow_sees_later_ends(matrix, record_event):
    matrix.node("guide", **FREE)
    deliver_when_due(*record_event().task_ids)
    record_all()
    assert not EndMark.objects.exists()
    pass_time(minutes=1)
    node = matrix.node("reminder", "touch.delivered", from_nodes=["guide"], **FREE)
    record_all()
    deliver_when_due(*record_event(user="bob").task_ids)
    record_all()
    assert [each.customer.user_id for each in find("reminder")] == ["bob"]
    node.enabled = False
    node.save()
    own_events.record_ends()
    assert not EndMark.objects.exists()


def test_first_pass_follows_ends_since_publication(matrix, record_event):
    """The worker of the passes may be down when the node is published."""
    matrix.node("guide", **FREE)
    matrix.node("reminder", "touch.delivered", from_nodes=["guide"], **FREE)
    deliver_when_due(*record_event().task_ids)
    eventually(lambda: own_events.record_ends() or find("reminder"))
    assert len(find("reminder")) == 1


def test_erasure_reaches_recorded_ends_and_prevents_others(journey, record_event):
    deliver_when_due(*record_event(data={"phone": "138"}).task_ids)
    record_all()
    deliver_when_due(*record_event(user="bob", data={"phone": "139"}).task_ids)
    for user in ("ann", "bob"):
        erasure.request_erasure(user, actor="ops")
    record_all()
    erasure.continue_erasures()
    event = Event.objects.get(type="touch.delivered")
    assert (event.data, event.event_id) == ({}, f"erased:{event.pk}")
    (reminder,) = find("reminder")
    assert (reminder.state, reminder.reason) == ("cancelled", "by:erasure")
    assert not Customer.objects.filter(user_id__in=["ann", "bob"]).exists()


def test_held_customer_delays_only_that_pass(journey, record_event, settings):
    settings.TIMEOUTS = replace(settings.TIMEOUTS, event_lock=0.05)
    deliver_when_due(*record_event().task_ids)
    with held_by_second_connection(lambda: locks.lock_customers_by_user_id(["ann"]), commit=False):
        for _ in range(3):
            assert own_events.record_ends() == 0
    record_all()
    assert len(find("reminder")) == 1


def test_concurrent_passes_record_each_end_once(journey, record_event, race, monkeypatch):
    monkeypatch.setattr(own_events, "BATCH", 3)
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(20)]
    deliver_when_due(*ids)
    eventually(lambda: race(4, lambda _: own_events.record_ends()) and len(find("reminder")) >= 20)
    record_all()
    assert sorted(each.customer.user_id for each in find("reminder")) == sorted(f"user-{n}" for n in range(20))
    assert Event.objects.filter(type="touch.delivered").count() == 20


DYING = """
import django
django.setup()
from datetime import timedelta
from django.db import connection
from scheduling import sql
from scheduling.ledger import ends
from scheduling.operations import commands
from scheduling.operations.failed_tasks import Actor
from scheduling.planning import own_events
connection.settings_dict["OPTIONS"]["application_name"] = "dying"
ends.WRITE_LAG = timedelta(0)
really = own_events.record_and_publish
def record_and_wait(*given, **named):
    really(*given, **named)
    sql.rows("SELECT pg_sleep(600)", {})
own_events.record_and_publish = record_and_wait
while True:
    own_events.record_ends()
"""


@pytest.mark.processes
def test_pass_killed_after_ingestion_records_once(journey, record_event, second_connection):
    deliver_when_due(*record_event().task_ids)
    with program(DYING) as dying:
        assert wait_until(lambda: is_connected("dying", "Timeout"), WAIT_LIMIT)
        dying.kill()
    sql.rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dying'", {})
    assert wait_until(lambda: not second_connection(lambda: is_connected("dying")), WAIT_LIMIT)
    assert find("reminder") == []
    record_all()
    assert len(find("reminder")) == 1
    assert Event.objects.filter(type="touch.delivered").count() == 1


def test_ids_of_ends_are_those_of_delivery_keys(journey, record_event):
    """A mark that was lost, as with the clock, records nothing twice."""
    deliver_when_due(*record_event().task_ids)
    record_all()
    EndMark.objects.update(settled_at=Touch.objects.earliest("created_at").created_at, task_id=UUID(int=0))
    record_all()
    assert Event.objects.filter(type="touch.delivered").count() == 1
    assert len(find("reminder")) == 1
