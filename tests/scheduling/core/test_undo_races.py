"""Two undos of one act at once, and an undo beside the work that it takes back: one of them has its effect."""

from datetime import timedelta
from uuid import UUID

import pytest
from django.contrib.auth.models import Permission, User

from config.local.processes import wait_until
from scheduling import sql
from scheduling.delivery import pipeline
from scheduling.errors import AftertouchError
from scheduling.ledger import locks
from scheduling.models import AuditEntry, BulkAction, FailedTask, Node, Pause, Touch
from scheduling.operations import bulk_actions, commands, failed_tasks, undo
from scheduling.operations.failed_tasks import Actor
from tests.scheduling.core.conftest import LATER, deliver, held_by_second_connection
from tests.support.second_connection import act_on_second_connection, count_lock_waits
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def ann(db):
    user = User.objects.create_user("ann")
    user.user_permissions.set(Permission.objects.filter(content_type__app_label="scheduling"))
    return Actor("ann", user, "r")


@pytest.fixture
def touch(matrix, record_event, create_fake_channel):
    matrix.node(channel=create_fake_channel())
    (task_id,) = record_event().task_ids
    assert isinstance(task_id, UUID)
    return task_id


def attempt(act):
    """Return "done", or why it was refused."""
    try:
        act()
    except AftertouchError as error:
        return str(error)
    return "done"


def offer(actor, act, key, **given):
    assert actor.user
    return undo.offer_undo(actor.user, act, [key], given=given)


def test_of_concurrent_undos_of_a_cancel_one_plans_the_touch(touch, ann, race):
    commands.cancel_one_touch(touch, actor="ann")
    act_id = offer(ann, "touch.cancel", touch)
    undone = race(4, lambda _: attempt(lambda: undo.undo_act(act_id, ann)))
    assert sorted(undone) == [*[undo.EXPIRED] * 3, "done"]
    assert Touch.objects.filter(retry_of=touch).count() == 1
    assert AuditEntry.objects.filter(action="undone").count() == 1


def test_of_two_operators_who_end_a_pause_one_wins(ann, race):
    pause = commands.pause_scope("all", user=ann.user, actor="ann")
    act_id = offer(ann, "pause", "all", pause=pause.pk)
    acts = (lambda: undo.undo_act(act_id, ann), lambda: commands.resume_scope("all", actor="bob"))
    told = race(2, lambda number: attempt(acts[number]))
    assert told.count("done") == 1
    assert not Pause.objects.exists()
    assert AuditEntry.objects.filter(action="resumed").count() == 1


def test_undo_beside_an_event_of_the_customer_waits_and_refuses(touch, record_event, ann, race):
    """The event's transaction has the customer's lock first, so the undo reads the event."""
    commands.cancel_one_touch(touch, actor="ann")
    act_id = offer(ann, "touch.cancel", touch)
    with held_by_second_connection(lambda: record_event("order.paid"), commit=True) as finish:
        told = race(2, lambda number: finish.set() if number else attempt(lambda: undo.undo_act(act_id, ann)))
    assert told[0] == commands.FOLLOWED
    assert not Touch.objects.filter(retry_of=touch).exists()


def test_undone_switch_off_waits_for_a_worker_that_suppresses(touch, ann, race):
    """The end of the touch is not committed when the undo starts to plan touches again."""
    node = Node.objects.get()
    since = sql.now()
    node.enabled = False
    node.save()
    act_id = offer(ann, "node.off", node.pk, version=node.version, since=since.isoformat())
    with held_by_second_connection(lambda: pipeline.deliver_touches([touch]), commit=True) as finish:
        told = race(2, lambda number: finish.set() if number else attempt(lambda: undo.undo_act(act_id, ann)))
    assert told[0] == "done"
    assert Touch.objects.get(pk=touch).reason == "node_disabled"
    assert Touch.objects.get(retry_of=touch).state == "scheduled"


@pytest.fixture
def switched_off(touch, record_event, ann):
    """A node with due touches that was switched off and on again. Return the second part of the undo."""
    node = Node.objects.get()
    for number in range(20):
        record_event(user=f"user-{number}")
    since = sql.now()
    for enabled in (False, True):
        node.enabled = enabled
        node.save()
    return lambda: commands.plan_suppressed_again(str(node.pk), ann, version=1, since=since.isoformat())


def suppress(touch):
    """As a worker does that has read the node as off."""
    locks.lock_customers_of_touches([touch])
    sql.execute(
        "UPDATE scheduling_touch SET state = 'suppressed', reason = 'node_disabled', settled_at = now(),"
        " lease_until = NULL, queued_at = NULL WHERE task_id = %(id)s", {"id": touch},
    )  # fmt: skip


def waits_or_polls():
    asks = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE %(text)s"
    return count_lock_waits() > 0 or bool(sql.rows(asks, {"text": "%pg_locks%"}))


def test_undone_switch_off_locks_no_touches_while_it_waits(switched_off, race):
    last = Touch.objects.order_by("pk")[20].pk
    free = "SELECT task_id FROM scheduling_touch WHERE state <> 'suppressed' FOR UPDATE SKIP LOCKED"

    def act(number):
        if number:
            return switched_off()
        try:
            assert wait_until(lambda: act_on_second_connection(waits_or_polls), WAIT_LIMIT)
            return len(act_on_second_connection(lambda: sql.rows(free, {})))
        finally:
            finish.set()

    with held_by_second_connection(lambda: suppress(last), commit=True) as finish:
        told = race(2, act)
    assert told == [20, []]
    assert Touch.objects.get(retry_of=last).state == "scheduled"


def test_undone_switch_off_waits_a_limited_time(touch, switched_off, monkeypatch, race):
    """The touch that a stuck worker holds stays suppressed, and the undo reports it."""
    monkeypatch.setattr(commands, "DELIVERY_WAIT", timedelta(milliseconds=50))
    with held_by_second_connection(lambda: suppress(touch), commit=True):
        (told,) = race(1, lambda _number: switched_off())
    assert told == [commands.STILL_HELD]
    assert not Touch.objects.filter(retry_of=touch).exists()


@pytest.fixture
def retried(matrix, record_event, ann):
    """A failed task that was published again as a touch that is due."""
    matrix.node(template=matrix.template("broken", body="{{ event.data.order_no }}"))
    (task_id,) = record_event().task_ids
    deliver([task_id])
    row = FailedTask.objects.get(task_id=task_id)
    new_id = failed_tasks.retry_failed_task(row.pk, ann)
    return row, new_id, offer(ann, "failed_task.retry", row.pk, retried={str(row.pk): str(new_id)}, as_new=False)


def test_retry_is_either_undone_or_delivered(retried, ann, race):
    row, new_id, act_id = retried
    acts = (lambda: undo.undo_act(act_id, ann), lambda: deliver([new_id]))
    told = race(2, lambda number: attempt(acts[number]))[0]
    row.refresh_from_db()
    if told == "done":
        assert (row.state, Touch.objects.filter(pk=new_id).exists()) == ("open", False)
    else:
        assert told == "the retry has started already"
        assert (row.state, Touch.objects.get(pk=new_id).state) == ("retried", "failed")


def test_undo_of_a_retry_that_a_worker_holds_is_refused_at_once(retried, ann):
    _row, new_id, act_id = retried
    lock = "SELECT FROM scheduling_touch WHERE task_id = %(id)s FOR UPDATE"
    with held_by_second_connection(lambda: sql.rows(lock, {"id": new_id}), commit=True):
        assert attempt(lambda: undo.undo_act(act_id, ann)) == "the retry has started already"
    assert attempt(lambda: undo.undo_act(act_id, ann)) == "done"


def test_start_of_a_bulk_action_is_either_undone_or_started(touch, ann, race):
    row = bulk_actions.start_bulk_action("cancel", Touch.objects.all(), ann)
    act_id = offer(ann, "bulk.start", row.pk)
    acts = (lambda: undo.undo_act(act_id, ann), lambda: bulk_actions.run_batch(row.pk, LATER))
    told = race(2, lambda number: attempt(acts[number]))[0]
    state, cancelled = BulkAction.objects.get().state, Touch.objects.get(pk=touch).state == "cancelled"
    assert (told == "done", state, cancelled) in ((True, "cancelled", False), (False, "done", True))


def test_killed_undo_leaves_act_and_offer(touch, ann):
    """A process that dies before the commit has changed nothing; its user may try again."""
    commands.cancel_one_touch(touch, actor="ann")
    act_id = offer(ann, "touch.cancel", touch)
    with held_by_second_connection(lambda: undo.undo_act(act_id, ann), commit=False):
        pass
    assert not Touch.objects.filter(retry_of=touch).exists()
    assert attempt(lambda: undo.undo_act(act_id, ann)) == "done"


def test_repeated_pause_beside_its_undo_stays(ann, race):
    pause = commands.pause_scope("all", user=ann.user, actor="ann")
    act_id = offer(ann, "pause", "all", pause=pause.pk)
    acts = (lambda: undo.undo_act(act_id, ann), lambda: commands.pause_scope("all", actor="bob"))
    told = race(2, lambda number: attempt(acts[number]))
    assert told[0] in ("done", undo.EXPIRED)
    assert told[1] == "done"
    assert Pause.objects.filter(scope="all").exists()


def test_undo_takes_rows_back_in_the_order_of_their_lock(ann, monkeypatch):
    """One order for all transactions prevents a deadlock. A row that is deleted comes last."""
    taken = []
    reversal = undo.Reversal(
        "x", "scheduling.change_touch", lambda key, actor: taken.append(key), lambda keys: ["b", "a"]
    )
    monkeypatch.setattr(undo, "find_reversal", lambda act: reversal)
    assert ann.user
    undo.undo_act(undo.offer_undo(ann.user, "x", ["c", "a", "b"]), ann)
    assert taken == ["b", "a", "c"]
