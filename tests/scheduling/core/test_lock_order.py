"""Customers by id, then communities, then touches: every writer keeps this order, so none deadlocks."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils.timezone import now

from scheduling import dispatch
from scheduling.configuration import snapshot
from scheduling.delivery import pipeline
from scheduling.errors import AftertouchError
from scheduling.ids import new_id
from scheduling.ledger import locks
from scheduling.ledger.touches import touch_ledger
from scheduling.models import Community, Customer, FailedTask, HarassmentRule, Node, Touch
from scheduling.models.touch import WAITING
from scheduling.operations import bulk_actions, commands
from scheduling.operations.failed_tasks import Actor
from scheduling.planning import own_events
from scheduling.planning.ingest import NewEvent, record_events
from scheduling.planning.rescheduling import move_waiting
from tests.scheduling.core.conftest import LATER, fall_due
from tests.support.second_connection import act_and_close, act_behind_locks, await_lock_waits
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
USERS = [f"user-{number}" for number in range(10)]
CHATS = ["", "c1", "c2", "c3"]
TYPES = ["download", "download", "download", "order.paid", "complaint.received", "conversation.started", "silent"]
BATCHES = 12
SEED = 20_260_303


def test_random_writers_never_deadlock_or_lose_touches(matrix, monkeypatch):
    """I6, I9: events, deliveries, cancellations of one and of many, complaints, edits of customers, rescues, scans."""
    matrix.node("guide", trigger="download", cancel_on=["order.paid"], guard_dedupe="ignore", priority=1)
    matrix.node("offer", trigger="download", on_repeat="restart", guard_dedupe="ignore", priority=2)
    matrix.node("ask", trigger="download", on_repeat="keep", over_cap="defer", priority=0)
    matrix.node("nudge", trigger="silent", guard_cap="count_only")
    HarassmentRule.objects.create(kind="cap", scope="community", limit=20, window=timedelta(hours=1))
    errors = []
    receipts = []
    done = threading.Event()

    def store_events(dice):
        events = [
            NewEvent(
                source="shop", event_id=str(new_id()), type=dice.choice(TYPES), user_id=dice.choice(USERS),
                chat_id=dice.choice(CHATS), occurred_at=now() - timedelta(seconds=dice.randrange(60)),
            )
            for _ in range(dice.randint(1, 12))
        ]  # fmt: skip
        receipts.extend(record_events(events))

    def store_single_events(dice):
        waiting = list(Touch.objects.filter(state__in=WAITING).values_list("pk", flat=True)[:200])
        pipeline.deliver_touches(dice.sample(waiting, min(len(waiting), 30)))

    def interfere(dice):
        commands.update_customer(dice.choice(USERS), {"level": dice.choice(["vip", "normal"]), "opted_out": False})
        for task_id in dice.sample(list(Touch.objects.values_list("pk", flat=True)), 1):
            commands.cancel_one_touch(task_id, actor="ann")

    def cancel_in_bulk(_):
        """Of one community, so that the others have something to deliver."""
        rows = Touch.objects.filter(chat_id=CHATS[1])
        bulk_actions.run_batch(bulk_actions.start_bulk_action("cancel", rows, Actor("bob")).pk, LATER)

    def move_waiting_touches(dice):
        dispatch.dispatch_due_touches()
        dispatch.rescue_lost_work()
        own_events.scan_inactive_customers()

    def act(number, work, rounds):
        dice = random.Random(SEED + number)
        try:
            while rounds is None or rounds > 0:
                if rounds is None and done.is_set():
                    break
                with suppress(AftertouchError, ValueError):  # there was nothing to cancel
                    work(dice)
                if rounds is None:
                    done.wait(0.005)
                else:
                    rounds -= 1
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    monkeypatch.setattr(dispatch, "publish_touches", lambda wakeups, channels: 0)
    with ThreadPoolExecutor(9) as pool:
        intakes = [pool.submit(act, number, store_events, BATCHES) for number in range(4)]
        for number, work in enumerate(
            (store_single_events, store_single_events, interfere, cancel_in_bulk, move_waiting_touches)
        ):
            pool.submit(act, 100 + number, work, None)
        try:
            for each in intakes:
                each.result(300)
        finally:
            done.set()

    assert errors == [], f"seed {SEED}"
    assert len(receipts) >= 4 * BATCHES
    named = {task_id for receipt in receipts for task_id in receipt.task_ids}
    assert named == set(Touch.objects.values_list("pk", flat=True)), "every touch is in a receipt, and the other way"
    _drain()
    assert set(Touch.objects.values_list("state", flat=True)) <= {"delivered", "suppressed", "cancelled"}
    assert not FailedTask.objects.exists()
    assert not Touch.objects.filter(paused_by__gt="").exists()
    for customer in Customer.objects.all():
        capped = customer.touches.filter(state="delivered").exclude(node__guard_cap="count_only")
        assert capped.count() <= 3, f"{customer} was told more than three times (seed {SEED})"


def _drain():
    """What is held is woken until nothing is held by what has not ended."""
    ends_at = time.monotonic() + 180
    Touch.objects.filter(node__key="ask").exclude(state__in=("delivered", "suppressed", "cancelled")).update(
        expires_at=now()  # a deferred one would wait for a day
    )
    while waiting := list(Touch.objects.filter(state__in=WAITING).values_list("pk", flat=True)):
        assert time.monotonic() < ends_at, f"{len(waiting)} never end"
        fall_due()
        pipeline.deliver_touches(waiting)


def test_delivery_waits_for_intake_and_sees_its_result(matrix, record_event):
    """I6: the guard reads history and customer after the lock, so it sees a conversation that started before."""
    matrix.node()
    (task_id,) = record_event(occurred_at=now() - timedelta(hours=1)).task_ids
    fall_due()
    act_behind_locks(lambda: record_event("conversation.started"), lambda: pipeline.deliver_touches([task_id]))

    row = Touch.objects.get()
    assert (row.state, row.reason) == ("suppressed", "conversation")


def test_delivery_locks_community_that_erasure_deletes(matrix, record_event):
    """The row of a chat without a name exists for its lock. A delivery that waits for it needs another row then."""
    matrix.node()
    ended = record_event(user="ann", chat_id="c1")
    (waiting,) = record_event(user="bob", chat_id="c1").task_ids
    locks.lock_communities([waiting])

    def delete():
        assert locks.delete_personal_chats([ended.id]) == 1

    def lock_again():
        with transaction.atomic():
            locks.lock_communities([waiting])
            return Community.objects.filter(chat_id="c1").exists()

    assert act_behind_locks(delete, lock_again) == [True]


def test_move_waiting_and_event_cancel_do_not_deadlock(matrix, record_event):
    """A batch of events calls touches off kind by kind; a move in between held one of them and wanted another."""
    matrix.node(delay=timedelta(hours=1))
    first, second = sorted(record_event().task_ids[0] for _ in range(2))
    Node.objects.update(delay=timedelta(hours=3))
    config = snapshot.load_snapshot(())

    _cancel_by_events_during(second, first, lambda: move_waiting(list(config.nodes.values()), config.delay_rules))

    assert set(Touch.objects.values_list("state", flat=True)) == {"cancelled"}


def test_bulk_cancel_and_event_cancel_do_not_deadlock(matrix, record_event):
    """A batch takes touch after touch in one transaction: it held the first and wanted the second."""
    matrix.node(delay=timedelta(hours=1))
    first, second, third = sorted(record_event().task_ids[0] for _ in range(3))
    row = bulk_actions.start_bulk_action("cancel", Touch.objects.all(), Actor("ann"))

    _cancel_by_events_during(second, first, lambda: bulk_actions.run_batch(row.pk, LATER))

    ends = Touch.objects.order_by("pk").values_list("pk", "state", "reason")
    assert list(ends) == [
        (first, "cancelled", "event:b"), (second, "cancelled", "event:a"), (third, "cancelled", "by:ann")
    ]  # fmt: skip
    row.refresh_from_db()
    assert (row.state, row.done, row.skipped) == ("done", 1, 2)


def _cancel_by_events_during(first, then, act):
    """Do it while a batch of events holds the customer: when `act` waits it has called the one off, and goes on to the
    other."""
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            list(Customer.objects.select_for_update(no_key=True))
            touch_ledger.cancel([first], reason="event:a")
            acting = pool.submit(act_and_close, act)
            await_lock_waits()
            touch_ledger.cancel([then], reason="event:b")
        acting.result(WAIT_LIMIT)
