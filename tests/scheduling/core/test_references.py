"""Triggers and locks hold the references of events and touches, without foreign key constraints."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from django.db import IntegrityError, NotSupportedError, connection, transaction

from scheduling import sql
from scheduling.ids import new_id
from scheduling.models import Community, Customer, Event, Node, Touch
from scheduling.planning.ingest import NewEvent, record_events
from tests.scheduling.core.conftest import held_by_second_connection
from tests.support.second_connection import act_and_close, await_lock_waits
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

committed = pytest.mark.django_db(transaction=True)
REFERRED = {"scheduling_customer": Customer, "scheduling_event": Event, "scheduling_node": Node}
SEED = 20_261_123
DELETE_CUSTOMER = "DELETE FROM scheduling_customer WHERE user_id = 'ann'"
DELETE_NODE = "DELETE FROM scheduling_node WHERE key = 'guide'"


def download(user="ann", **changes):
    event = NewEvent(source="shop", event_id=str(new_id()), type="material.downloaded", user_id=user, **changes)
    return record_events([event])[0]


def run(statement):
    def act():
        with connection.cursor() as cursor:
            cursor.execute(statement)

    return act


@contextmanager
def in_thread(act):
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(act_and_close, act)


def count_orphans():
    ((events, touches, others),) = sql.rows(
        """
        SELECT (SELECT count(*) FROM scheduling_event AS e LEFT JOIN scheduling_customer AS c ON c.id = e.customer_id
                WHERE c.id IS NULL),
               (SELECT count(*) FROM scheduling_touch AS t LEFT JOIN scheduling_event AS e ON e.id = t.event_id
                LEFT JOIN scheduling_node AS n ON n.id = t.node_id WHERE e.id IS NULL OR n.id IS NULL),
               (SELECT count(*) FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id
                WHERE e.customer_id <> t.customer_id)
        """,
        {},
    )
    return {"events": events, "touches": touches, "touches of another customer": others}


NONE = {"events": 0, "touches": 0, "touches of another customer": 0}


@pytest.mark.django_db
@each_row("table", REFERRED)
def test_row_is_deleted_only_after_what_refers_to_it(matrix, table):
    matrix.node()
    download()
    with pytest.raises(IntegrityError, match=f"{table} .* is referenced by"), transaction.atomic():
        run(f"DELETE FROM {table}")()
    assert REFERRED[table].objects.count() == 1

    Touch.objects.all().delete()
    if table == "scheduling_customer":
        Event.objects.all().delete()
    run(f"DELETE FROM {table}")()
    assert not REFERRED[table].objects.exists()


@committed
def test_deletion_with_old_snapshot_is_refused(matrix):
    """It would not see the touches of a writer that it waited for."""
    matrix.node()
    with transaction.atomic():
        run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")()
        with pytest.raises(NotSupportedError, match="READ COMMITTED only"), transaction.atomic():
            run(DELETE_NODE)()
    assert Node.objects.exists()


@committed
@pytest.mark.parametrize("statement", [DELETE_CUSTOMER, DELETE_NODE])
def test_deletion_waits_for_planning_and_is_refused_if_it_commits(matrix, statement):
    matrix.node()
    Customer.objects.create(user_id="ann")
    with held_by_second_connection(download, commit=True) as stored, in_thread(run(statement)) as deletion:
        await_lock_waits()
        stored.set()
        with pytest.raises(IntegrityError):
            deletion.result(WAIT_LIMIT)
    assert Touch.objects.count() == 1
    assert count_orphans() == NONE
    sql.execute("DELETE FROM scheduling_touch", {})
    sql.execute("DELETE FROM scheduling_event", {})

    with held_by_second_connection(download, commit=False) as failed, in_thread(run(statement)) as deletion:
        await_lock_waits()
        failed.set()
        deletion.result(WAIT_LIMIT)
    assert Customer.objects.count() + Node.objects.count() == 1


@committed
@pytest.mark.parametrize("commit", [True, False])
def test_event_during_a_deletion_is_stored(matrix, commit):
    matrix.node()
    old = Customer.objects.create(user_id="ann")
    for statement, planned in ((DELETE_CUSTOMER, 1), (DELETE_NODE, 0 if commit else 1)):
        sql.execute("DELETE FROM scheduling_touch", {})
        with held_by_second_connection(run(statement), commit=commit) as deleted, in_thread(download) as event:
            await_lock_waits()
            deleted.set()
            receipt = event.result(WAIT_LIMIT)
        assert len(receipt.task_ids) == Touch.objects.count() == planned
        assert count_orphans() == NONE
    assert (Customer.objects.get() == old) is not commit
    assert Event.objects.count() == 2


@committed
def test_random_deletions_leave_no_orphans(matrix, race):
    """Events of few customers and nodes, erased customers, retired history, deleted nodes and communities."""
    users = [f"user-{number}" for number in range(4)]

    def erase(user):
        with transaction.atomic():
            ids = list(Customer.objects.select_for_update().filter(user_id=user).values_list("pk", flat=True))
            for table, column in (("touch", "customer_id"), ("event", "customer_id"), ("customer", "id")):
                sql.execute(f"DELETE FROM scheduling_{table} WHERE {column} = ANY(%(ids)b::bigint[])", {"ids": ids})

    def act(number):
        dice = random.Random(SEED + number)
        refused = 0
        for _ in range(40):
            if number < 4:
                record_events([
                    NewEvent("shop", str(new_id()), "material.downloaded", dice.choice(users), dice.choice(["", "c1"]))
                    for _ in range(dice.randint(1, 8))
                ])  # fmt: skip
                continue
            try:
                deed = dice.randrange(5)
                if deed == 0:
                    erase(dice.choice(users))
                elif deed == 1:
                    run(f"DELETE FROM scheduling_event WHERE user_id = '{dice.choice(users)}'")()
                elif deed == 2:
                    run(f"DELETE FROM scheduling_customer WHERE user_id = '{dice.choice(users)}'")()
                elif deed == 3:
                    run("DELETE FROM scheduling_node WHERE key <> 'guide'")()
                    Community.objects.filter(chat_id="c1").delete()
                else:
                    Community.objects.get_or_create(chat_id="c1")
                    with suppress(IntegrityError):
                        matrix.node(f"extra-{number}")
            except IntegrityError:
                refused += 1
        return refused

    matrix.node()
    refused = sum(race(7, act))

    assert count_orphans() == NONE, f"seed {SEED}"
    assert Touch.objects.exists()
    assert refused, "some deletions met references"
