"""An event is stored once, its touches are planned once, and touches that it makes obsolete are cancelled."""

import threading
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import now

from scheduling import dispatch
from scheduling.batching import BackgroundBatcher
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.ledger.touches import touch_ledger
from scheduling.models import Complaint, Customer, CustomerChange, DelayRule, Event, EventType, Touch
from scheduling.models.touch import WAITING
from scheduling.planning import ingest
from scheduling.planning.ingest import EarlyDispatch, NewEvent, Receipt, record_and_publish, record_events
from tests.scheduling.core.conftest import deliver_when_due, pass_time, rows
from tests.support.claims import claim_touches
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def new(type="material.downloaded", user="ann", id="", **changes):
    return NewEvent(source="shop", event_id=id or str(new_id()), type=type, user_id=user, **changes)


def states(*receipts):
    """Whether handed over or not, it waits."""
    found = rows([task_id for each in receipts for task_id in each.task_ids])
    return [("waiting" if row.state in WAITING else row.state, row.reason) for row in found]


# --- once ------------------------------------------------------------------------------------------------------------


def test_duplicate_in_batch_gets_touches_of_the_first(matrix):
    """The id counts within its source."""
    matrix.node()
    other_source = NewEvent(source="other shop", event_id="e1", type="material.downloaded", user_id="ann")

    first, second, other, elsewhere = record_events([new(id="e1"), new("type.2", id="e1"), new(id="e2"), other_source])

    assert [each.duplicate for each in (first, second, other, elsewhere)] == [False, True, False, False]
    assert (second.id, second.task_ids) == (first.id, first.task_ids)
    assert len(first.task_ids) == 1
    assert Event.objects.get(pk=first.id).type == "material.downloaded"
    assert Touch.objects.count() == Event.objects.count() == 3


@pytest.mark.parametrize("changes", [{"on_repeat": "restart", "trigger": "t" * 120}, {"cancel_on": ["t" * 120]}])
def test_touch_that_an_event_with_a_long_type_cancels_is_stored(matrix, changes):
    """The later, earlier event was refused with status 500, for good."""
    node, long_type, at = matrix.node(**changes), "t" * 120, now()
    record_events([new(long_type, occurred_at=at)])

    (late,) = record_events([new(node.trigger, occurred_at=at - HOUR)])

    ((state, reason),) = states(late)
    assert state == "cancelled"
    assert len(reason) == 64


def test_later_duplicate_plans_and_cancels_nothing(matrix):
    matrix.node(cancel_on=["order.paid"])
    paid = new("order.paid")
    record_events([paid])
    (first,) = record_events([new(id="e1")])

    (again,) = record_events([new(id="e1", user="somebody else")])
    record_events([paid])

    assert again == Receipt(first.id, True, first.task_ids)
    assert states(first) == [("waiting", "")]


def test_duplicate_receipt_omits_retried_touches(matrix):
    matrix.node()
    (first,) = record_events([new(id="e1")])
    (old,) = rows(first.task_ids)
    fields = {name: getattr(old, name) for name in ("event_id", "node_id", "customer_id", "due_at", "planned_at")}
    Touch.objects.create(**fields, node_version=1, expires_at=old.expires_at, retry_of=old.pk)

    (again,) = record_events([new(id="e1")])

    assert again.task_ids == first.task_ids


def test_concurrent_same_event_is_planned_once(matrix, race):
    matrix.node()

    receipts = race(32, lambda number: record_events([new(id="e1", user="ann")])[0])

    assert sum(not receipt.duplicate for receipt in receipts) == 1
    assert len({(receipt.id, receipt.task_ids) for receipt in receipts}) == 1
    assert len(receipts[0].task_ids) == Touch.objects.count() == Event.objects.count() == 1


# --- all or nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["insert_events", "update_customers"])
def test_failed_batch_stores_nothing(matrix, monkeypatch, step):
    """I1: the touches come in one transaction with their events."""
    matrix.node()
    whole = getattr(ingest._EventBatch, step)

    def fail_after(batch):
        whole(batch)
        raise RuntimeError(step)

    monkeypatch.setattr(ingest._EventBatch, step, fail_after)
    with pytest.raises(RuntimeError):
        record_events([new(), new(user="bob"), new("unheard.of")])

    assert not any(model.objects.exists() for model in (Event, Touch, Customer, EventType))


def test_event_types_are_added_up_to_a_limit(matrix, monkeypatch):
    """An event of a type that no node waits for is stored."""
    (receipt,) = record_events([new("coupon.used", data={"n": 1}, chat_id="c1")])
    event = Event.objects.get(pk=receipt.id)
    assert (event.user_id, event.chat_id, event.data, receipt.task_ids) == ("ann", "c1", {"n": 1}, ())
    assert set(EventType.objects.values_list("key", flat=True)) == {"coupon.used"}
    monkeypatch.setattr(ingest, "MAX_EVENT_TYPES", 1)

    with pytest.raises(InvalidInput, match=r"unheard\.of") as refused:
        record_events([new("coupon.used"), new("unheard.of")])

    assert refused.value.errors[0].field == "type"
    assert Event.objects.count() == 1
    record_events([new("coupon.used")])


def test_event_without_time_uses_database_clock(matrix):
    matrix.node(delay=HOUR)
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        (before,) = cursor.fetchone()
        record_events([new()])
        cursor.execute("SELECT statement_timestamp()")
        (after,) = cursor.fetchone()

    event, touch = Event.objects.get(), Touch.objects.get()
    assert before <= event.occurred_at <= after
    assert touch.due_at == event.occurred_at + HOUR


def test_touch_stores_event_node_and_expiry(matrix):
    """Its delay counts from the time of the event."""
    node = matrix.node(delay=HOUR, expires_after=DAY, priority=0)
    happened_at = now() - 10 * MINUTE
    (receipt,) = record_events([new(chat_id="c1", occurred_at=happened_at)])
    (touch,) = rows(receipt.task_ids)
    assert (touch.event_id, touch.node_id, touch.node_version) == (receipt.id, node.pk, node.version)
    assert (touch.chat_id, touch.priority, touch.root_id) == ("c1", 0, touch.pk)
    assert touch.due_at == touch.planned_at == happened_at + HOUR
    assert touch.expires_at == touch.due_at + DAY


# --- wake-ups --------------------------------------------------------------------------------------------------------


@pytest.fixture
def publish(monkeypatch):
    """Let something else take the wake-ups than the thread that publishes them."""
    return lambda act: monkeypatch.setattr(ingest.background_publisher, "submit", act)


def test_wakeup_is_published_after_the_commit(matrix, second_connection, publish):
    """I1: the row is visible to all connections before any message about it."""
    matrix.node("soon", delay=timedelta(seconds=25))
    matrix.node("later", delay=timedelta(seconds=35))
    announced = []

    def publish_recorded(wakeups):
        seen = second_connection(lambda: dict(Touch.objects.values_list("pk", "state")))
        announced.extend((wakeup.task_id, connection.in_atomic_block, seen[wakeup.task_id]) for wakeup in wakeups)

    publish(publish_recorded)
    (receipt,) = record_and_publish([new()])

    by_node = {row.node.key: row for row in rows(receipt.task_ids)}
    assert announced == [(by_node["soon"].pk, False, "queued")]
    assert by_node["later"].state == "scheduled"
    assert by_node["soon"].lease_until == by_node["soon"].due_at + timedelta(seconds=10)


def test_intake_dispatches_a_bounded_number_ahead(matrix, settings, monkeypatch, publish):
    """A hundred thousand events with a delay of 20 s became as many messages in the memory of workers."""
    monkeypatch.setattr(ingest, "early_dispatch", EarlyDispatch())
    settings.AFTERTOUCH_DISPATCH_WINDOW = 5
    matrix.node("soon", delay=timedelta(seconds=25))
    matrix.node("high", delay=timedelta(seconds=25), priority=0)
    matrix.node("due", delay=timedelta(0))
    published = []

    publish(published.extend)
    receipts = record_and_publish([new() for _ in range(8)])

    found = rows([task_id for receipt in receipts for task_id in receipt.task_ids])
    counts = Counter((row.node.key, row.state) for row in found)
    assert counts == {
        ("soon", "queued"): 5, ("soon", "scheduled"): 3, ("high", "queued"): 5, ("high", "scheduled"): 3,
        ("due", "queued"): 8,
    }  # fmt: skip
    assert {each.task_id for each in published} == {row.pk for row in found if row.state == "queued"}
    assert len(touch_ledger.dispatch_due(horizon=settings.AFTERTOUCH_HORIZON)) == 6, "the pass dispatches the others"


def test_early_dispatch_has_room_again_when_touches_fall_due(settings):
    settings.AFTERTOUCH_DISPATCH_WINDOW = 2
    early, at = EarlyDispatch(), datetime(2026, 1, 1, tzinfo=UTC)

    assert [early.admit(1, at + timedelta(seconds=each), at=at) for each in (2, 1, 3, 0, 31)] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert early.admit(2, at + timedelta(seconds=3), at=at), "a priority has places of its own"
    for second in (1, 2):  # the earliest has its place back first, in whatever order they came
        later = at + timedelta(seconds=second)
        assert [early.admit(1, later + timedelta(seconds=each), at=later) for each in (2, 3)] == [True, False]


def test_wakeup_is_not_published_without_a_commit(matrix, publish):
    matrix.node(delay=timedelta(0))
    announced = []
    publish(announced.append)
    with transaction.atomic():
        record_and_publish([new()])
        assert announced == []
        transaction.set_rollback(True)
    assert announced == []


def test_error_after_the_commit_looks_like_no_failed_commit(matrix, publish):
    matrix.node(delay=timedelta(0))

    def fail(wakeups):
        raise RuntimeError("no thread can start")

    publish(fail)
    (receipt,) = record_and_publish([new()])

    assert states(receipt) == [("waiting", "")]


def test_wakeup_is_published_by_a_background_thread(matrix, monkeypatch):
    """I1: a thread of its own hands the wake-ups to the broker, and a broker that fails costs only the wake-up."""
    matrix.node(delay=timedelta(0))
    published_by = []
    both = threading.Event()

    def fail(wakeups, nodes):
        published_by.append(threading.current_thread().name)
        if len(published_by) == 2:
            both.set()
        raise OSError("the broker is away")

    monkeypatch.setattr(dispatch, "publish_touches", fail)
    monkeypatch.setattr(ingest, "background_publisher", BackgroundBatcher(dispatch.publish_wakeups, name="wakeups"))
    record_and_publish([new()])
    while not published_by:
        both.wait(0.01)
    record_and_publish([new()])

    assert both.wait(WAIT_LIMIT), "the thread stopped after a failure"
    assert set(published_by) == {"wakeups"}


# --- cancel_on -------------------------------------------------------------------------------------------------------


@pytest.fixture
def download(matrix, record_event):
    """A download whose touch a payment cancels."""
    matrix.node(cancel_on=["order.paid"])
    matrix.node("survey", trigger="material.downloaded")
    return lambda **changes: record_event(**changes)


def guide(*receipts):
    touches = Touch.objects.filter(event_id__in=[each.id for each in receipts], node__key="guide")
    own = [states(Receipt(row.event_id, False, (row.pk,)))[0] for row in touches]
    return sorted(own)


CALLED_OFF = [("cancelled", "event:order.paid")]


def test_cancel_event_cancels_waiting_touch(download, record_event):
    first = download()
    others = download(user="bob")

    record_event("order.paid")

    assert guide(first) == CALLED_OFF
    assert guide(others) == [("waiting", "")]
    survey = Touch.objects.get(event_id=first.id, node__key="survey")
    assert survey.state in WAITING, "another node does not care"


def test_events_cancel_by_their_times_in_any_order(download, record_event):
    receipt = download(occurred_at=now())
    record_event("order.paid", occurred_at=now() - HOUR)
    assert guide(receipt) == [("waiting", "")]
    before, after = download(occurred_at=now() - 2 * HOUR), download(occurred_at=now() - MINUTE)
    assert guide(before) == CALLED_OFF
    assert guide(after) == [("waiting", "")]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_cancel_order_within_a_batch_does_not_matter(matrix, order):
    matrix.node(cancel_on=["order.paid"])
    moments = [new(occurred_at=now() - HOUR), new("order.paid", occurred_at=now() - MINUTE)]
    receipts = record_events([moments[place] for place in order])
    assert guide(*receipts) == CALLED_OFF


def test_cancel_event_keeps_touch_being_sent(download, record_event):
    download(occurred_at=now() - DAY)
    Touch.objects.update(due_at=now() - HOUR)
    task_id = Touch.objects.get(node__key="guide").pk
    claim_touches([task_id])
    Touch.objects.filter(pk=task_id).update(sending_at=now())
    record_event("order.paid")
    assert rows([task_id])[0].state == "running"


def test_node_cancelled_by_own_trigger_keeps_latest(matrix, record_event):
    matrix.node(cancel_on=["material.downloaded"])
    first, second = record_event(), record_event()
    assert [state for state, _ in states(first, second)] == ["cancelled", "waiting"]


# --- on_repeat -------------------------------------------------------------------------------------------------------


def record_all(batched, *events):
    return record_events(events) if batched else [record_events([each])[0] for each in events]


@pytest.mark.parametrize("batched", [True, False])
def test_on_repeat_keep_returns_the_waiting_touch(matrix, batched):
    matrix.node(on_repeat="keep")
    first, second, other = record_all(batched, new(), new(), new(user="bob"))
    assert second.task_ids == first.task_ids
    assert not second.duplicate
    assert other.task_ids != first.task_ids
    assert Touch.objects.count() == 2


@pytest.mark.parametrize("batched", [True, False])
def test_on_repeat_after_cancel_plans_a_new_touch(matrix, batched):
    matrix.node(on_repeat="keep", cancel_on=["order.paid"])
    then = now() - HOUR
    first, _, third = record_all(
        batched,
        new(occurred_at=then),
        new("order.paid", occurred_at=then + MINUTE),
        new(occurred_at=then + 2 * MINUTE),
    )
    assert guide(first) == CALLED_OFF
    assert guide(third) == [("waiting", "")]


@pytest.mark.parametrize("batched", [True, False])
def test_on_repeat_restart_keeps_the_touch_of_the_latest_event(matrix, batched):
    """An event that arrives late replaced the touch of a later one, so the message came too early."""
    matrix.node(on_repeat="restart", delay=HOUR)
    at = now()
    first, second, late = record_all(
        batched, new(occurred_at=at - MINUTE), new(occurred_at=at), new(occurred_at=at - 2 * MINUTE)
    )
    assert states(second) == [("waiting", "")]
    assert states(first, late) == [("cancelled", "restarted:material.downloaded")] * 2


def test_on_repeat_restart_of_a_batch_is_one_statement(matrix):
    """Each planned touch was a statement of its own, under the locks of all customers of the batch."""
    matrix.node(on_repeat="restart", delay=HOUR)
    users = [f"u{number}" for number in range(9)]
    first = record_events([new(user=user) for user in users])
    with CaptureQueriesContext(connection) as statements:
        second = record_events([new(user=user) for user in [*users, "another"]])

    assert sum("'cancelled'" in each["sql"] for each in statements) == 1
    assert states(*first) == [("cancelled", "restarted:material.downloaded")] * 9
    assert states(*second) == [("waiting", "")] * 10


@pytest.mark.parametrize("how", ["keep", "restart"])
def test_on_repeat_after_end_plans_a_new_touch(matrix, record_event, how):
    matrix.node(on_repeat=how, guard_dedupe="ignore")
    first = record_event()
    deliver_when_due(*first.task_ids)

    second = record_event()

    assert [state for state, _ in states(first, second)] == ["delivered", "waiting"]


# --- customer attributes in an event ----------------------------------------------------------------------------------


def test_conversation_time_never_goes_back(matrix, record_event):
    latest = now() - MINUTE
    record_event("conversation.started", occurred_at=latest)
    record_event("conversation.started", occurred_at=latest - HOUR)
    assert Customer.objects.get().conversation_at == latest


def test_complaint_of_an_opted_out_customer_shows_the_former_state(matrix, record_event):
    """The history, which the customer may get as an export, showed that marketing had been allowed until then."""
    Customer.objects.create(user_id="ann", opted_out=True, opted_out_at=now())
    record_event("complaint.received")
    assert CustomerChange.objects.get().before == {"opted_out": True}


def test_delay_uses_activity_before_the_event(matrix, record_event):
    matrix.node(dynamic=True)
    DelayRule.objects.create(pk=1, by_level={"vip": 3600, "normal": 7200})
    Customer.objects.create(user_id="ann", level="vip")

    first, second = record_event(), record_event()
    waits = [row.due_at - row.event.occurred_at for row in rows([*first.task_ids, *second.task_ids])]

    assert waits == [timedelta(seconds=3600), timedelta(seconds=2160)]


def test_delay_in_batch_uses_earlier_events(matrix):
    """An event that arrives late takes no activity back."""
    matrix.node(dynamic=True)
    DelayRule.objects.create(pk=1, by_level={"vip": 3600})
    Customer.objects.create(user_id="ann", level="vip")
    then = now()

    receipts = record_events([
        new(occurred_at=then), new("x", occurred_at=then - 60 * DAY), new(occurred_at=then + MINUTE), new(user="bob")
    ])  # fmt: skip

    waits = [row.due_at - row.event.occurred_at for each in receipts for row in rows(each.task_ids)]
    assert waits == [timedelta(seconds=3600), timedelta(seconds=2160), DAY]


def test_activity_grows_in_steps_of_a_minute(matrix, record_event):
    then = now() - HOUR
    for seconds, noted in [(0, 0), (30, 0), (61, 61), (-600, 61)]:
        record_event("x", occurred_at=then + timedelta(seconds=seconds))
        assert Customer.objects.get().last_active_at == then + timedelta(seconds=noted)


def test_duplicate_event_is_no_activity(matrix):
    """An unknown customer is inserted with the activity of its events before a duplicate among them is found."""
    then = now() - HOUR
    record_events([new(id="e1"), new("x", id="e2")])

    record_events([
        new(id="e1", user="bob", occurred_at=then + MINUTE),
        new(id="e2", user="carl", occurred_at=then + MINUTE),
        new("conversation.started", user="carl", occurred_at=then),
    ])  # fmt: skip

    found = Customer.objects.in_bulk(["bob", "carl"], field_name="user_id")
    assert (found["bob"].last_active_at, found["bob"].conversation_at) == (None, None)
    assert (found["carl"].last_active_at, found["carl"].conversation_at) == (then, then)


def test_system_events_are_no_activity(matrix, record_event):
    EventType.objects.create(key="parcel.lost", is_activity=False)
    for type in ("parcel.lost", "customer.inactive", "session.silent"):
        record_event(type)
        assert Customer.objects.get().last_active_at is None, type
    assert not EventType.objects.filter(is_activity=True).exists(), "ops see what is known about them"


# --- complaints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def delivered_touches(matrix, record_event):
    """Two touches that Ann got, two hours and one hour ago, and one that she did not get."""
    matrix.node("first", trigger="a")
    matrix.node("second", trigger="b")
    matrix.node("third", trigger="c")
    first, second, third = (record_event(type).task_ids[0] for type in "abc")
    deliver_when_due(first)
    pass_time(hours=1)
    deliver_when_due(second)
    pass_time(hours=1)
    return [first, second, third]


def test_complaint_opts_out_of_marketing(delivered_touches, record_event):
    """The time is that of the first one."""
    record_event("complaint.received")
    ann = Customer.objects.get()
    assert ann.opted_out
    assert ann.opted_out_at is not None
    (row,) = deliver_when_due(delivered_touches[2])
    assert (row.state, row.reason) == ("suppressed", "opted_out")
    record_event("complaint.received")
    assert Customer.objects.get().opted_out_at == ann.opted_out_at


def test_complaint_is_assigned_to_the_named_or_latest_touch(delivered_touches, record_event):
    first, second, third = delivered_touches
    complaints = [
        ({"event_id": "c1"}, second),
        ({"event_id": "c1", "data": {"task_id": str(first)}}, second),  # a duplicate counts once
        ({"occurred_at": now() - 90 * MINUTE}, first),
        ({"occurred_at": now() - 3 * HOUR}, None),
        ({"data": {"task_id": str(first)}}, first),
        ({"data": {"task_id": "no id at all"}}, second),
        ({"data": {"task_id": str(third)}}, None),  # she never got that one
        ({"user": "bob", "data": {"task_id": str(first)}}, None),  # that was somebody else's
    ]
    for complaint, touch in complaints:
        record_event("complaint.received", **complaint)
        assert Complaint.objects.order_by("-pk")[0].touch_id == touch, complaint
    assert Complaint.objects.count() == len(complaints) - 1
