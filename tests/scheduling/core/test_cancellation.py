"""An event can cancel a touch at any moment, also while a worker has it."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import now

from scheduling.channels.base import Delivered, Transient
from scheduling.delivery import pipeline
from scheduling.ids import new_id
from scheduling.ledger import locks
from scheduling.models import Customer, Event, Touch
from scheduling.planning.ingest import NewEvent, record_events
from tests.scheduling.core.conftest import deliver, deliver_when_due, fall_due, make_quiet_now
from tests.support.second_connection import act_on_second_connection, await_lock_waits
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def fail_during_send(task_id, shop, meanwhile):
    """A worker has it while that happens, and then it waits to be sent again."""
    shop.fake_channel.blocks = True
    shop.answer(Transient("http_503"))
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    assert shop.fake_channel.on_stage.wait(WAIT_LIMIT)
    happened = meanwhile()
    shop.fake_channel.release_calls.set()
    deliver([])
    assert Touch.objects.get(pk=task_id).state == "scheduled"
    return happened


def test_restart_event_during_send_stops_the_retry(shop):
    """`restart`: the one that a worker had is not sent again beside the one that was planned in its place."""
    shop.node(channel=shop.create_channel(), on_repeat="restart", guard_dedupe="ignore")
    (first,) = shop.record_event().task_ids
    (second,) = fail_during_send(first, shop, shop.record_event).task_ids

    shop.answer(Delivered("heard"))
    old, new = deliver_when_due(first, second)
    assert (old.state, old.reason) == ("cancelled", "restarted:material.downloaded")
    assert (new.state, len(shop.fake_channel.received)) == ("delivered", 2)


def test_cancel_event_during_send_stops_the_retry_and_no_later_touch(shop):
    """It could not be cancelled then, because a worker had it. It was not delivered, so its retry must not be.

    `keep`: the customer got nothing, because the touch that was kept was cancelled at its retry.
    """
    shop.node(channel=shop.create_channel(), cancel_on=["order.paid"], on_repeat="keep", guard_dedupe="ignore")
    (first,) = shop.record_event().task_ids
    fail_during_send(first, shop, lambda: shop.record_event(type="order.paid"))
    (second,) = shop.record_event().task_ids

    shop.answer(Delivered("heard"))
    old, new = deliver_when_due(first, second)
    assert (old.state, old.reason, old.reserved_at) == ("cancelled", "event:order.paid", None)
    assert new.state == "delivered"
    assert [message.task_id for message in shop.fake_channel.received] == [first, second]


def test_touches_to_be_cancelled_are_found_by_one_query(shop):
    """A pause releases the touches of many customers, whose next events come in one batch."""
    shop.node(channel=shop.create_channel(), cancel_on=["order.paid"], on_repeat="keep", guard_dedupe="ignore")
    users = [f"user-{number}" for number in range(4)]
    shop.answer(Transient("http_503"))
    deliver_when_due(*(shop.record_event(user=user).task_ids[0] for user in users))

    def count_queries(*users):
        with CaptureQueriesContext(connection) as queries:
            record_events([NewEvent("shop", str(new_id()), "material.downloaded", user) for user in users])
        assert Touch.objects.count() == 4, "the one of each customer that waits is kept"
        return len(queries)

    count_queries(users[0])  # reads the configuration
    assert count_queries(*users[1:]) == count_queries(users[0])


def test_late_event_during_send_restarts_nothing(shop):
    """Its time is before that of the touch that a worker has, so it replaces neither that touch nor its retry."""
    shop.node(channel=shop.create_channel(), on_repeat="restart", guard_dedupe="ignore")
    (first,) = shop.record_event(occurred_at=now()).task_ids
    earlier = now() - timedelta(minutes=1)
    (late,) = fail_during_send(first, shop, lambda: shop.record_event(occurred_at=earlier)).task_ids

    shop.answer(Delivered("heard"))
    retried, cancelled = deliver_when_due(first, late)
    assert (retried.state, cancelled.state) == ("delivered", "cancelled")
    assert cancelled.reason == "restarted:material.downloaded"


def test_earlier_or_other_event_does_not_stop_retry(shop):
    shop.node(channel=shop.create_channel(), cancel_on=["order.paid"])
    shop.record_event(type="order.paid")
    shop.answer(Transient("http_503"))
    (task_id,) = shop.record_event().task_ids
    shop.record_event(type="order.paid", user="somebody-else")
    deliver_when_due(task_id)
    shop.answer(Delivered("heard"))
    assert deliver_when_due(task_id)[0].state == "delivered"


def test_held_touch_outlives_an_earlier_event_of_its_batch(matrix):
    """The two happened at once. The one that cancels came first, so it cancels nothing, also after a wait."""
    matrix.node(cancel_on=["order.paid"])
    rule, at = make_quiet_now(), now()
    batch = [NewEvent("shop", kind, kind, "ann", occurred_at=at) for kind in ("order.paid", "material.downloaded")]
    _, downloaded = record_events(batch)
    (held,) = deliver_when_due(*downloaded.task_ids)
    assert (held.state, held.reason) == ("scheduled", "quiet_hours")
    rule.delete()

    (row,) = deliver_when_due(held.pk)
    assert (row.state, row.reason) == ("delivered", "")


def test_event_that_waited_for_its_customer_is_received_after_the_touch(shop):
    """Events and touches are dated in the order in which their transactions have the customer."""
    shop.node(cancel_on=["order.paid"])
    ann = Customer.objects.create(user_id="ann")

    def record_paid():
        record_events([NewEvent("shop", "1", "order.paid", "ann")], lock_wait=WAIT_LIMIT)

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            locks.lock_remaining([ann.pk])
            paid = pool.submit(act_on_second_connection, record_paid)
            await_lock_waits()
            (task_id,) = shop.record_event().task_ids
        paid.result(WAIT_LIMIT)
    assert Event.objects.get(type="order.paid").received_at > Touch.objects.get(pk=task_id).created_at
