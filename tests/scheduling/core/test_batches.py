"""I12: a batch is bounded in time and in bytes, and what it leaves is delivered by the next one at once."""

import random
import time
import tracemalloc
from contextlib import suppress

import pytest
from django.db import connection, transaction

from config.local.processes import wait_until
from scheduling import sql
from scheduling.delivery import due_batch, pipeline
from scheduling.delivery.due_batch import ANNOUNCE_STATEMENT, load_announced
from scheduling.ledger.touches import touch_ledger
from scheduling.models import FailedTask
from tests.scheduling.core.conftest import deliver, fall_due, rows
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def published(monkeypatch):
    """What was announced, in place of the broker."""
    found = []
    monkeypatch.setattr(pipeline, "publish_touches", lambda wakeups, channels: found.append(list(wakeups)))
    return found


def deliver_all(ids, published):
    """Deliver, and follow each message about the rest as a worker would. Returns how many each batch left."""
    left = []
    while ids:
        published.clear()
        deliver(ids)
        ids = [wakeup.task_id for wakeups in published for wakeup in wakeups]
        left.append(len(ids))
    return left


@pytest.mark.parametrize("text", ["compressible", "random"])
def test_load_announced_stops_at_the_byte_limit(matrix, record_event, text):
    """The data of what is left does not reach this process, also where PostgreSQL keeps it compressed."""
    matrix.node(guard_dedupe="ignore")
    data = {"text": "x" * 100_000 if text == "compressible" else bytes(range(32, 122)).decode() * 1_100}
    ids = [record_event(user=f"user-{number}", data=data).task_ids[0] for number in range(20)]
    fall_due()

    tracemalloc.start()
    found = load_announced(ids, most_bytes=350_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    read = [row for row in found.values() if row.readable]
    assert sum(len(row.event.data["text"]) for row in read) <= 500_000
    assert len(read) >= 2
    assert set(found) == set(ids)
    assert peak < 5_000_000


@pytest.mark.usefixtures("fresh_tables")
def test_load_announced_does_not_read_left_data(matrix, record_event):
    """Where PostgreSQL keeps it compressed, its size is estimated from what is stored."""
    matrix.node(guard_dedupe="ignore")
    dice = random.Random(3)
    text = " ".join(dice.choice(["order", "paid", "late", "shop"]) + str(dice.randrange(99)) for _ in range(20_000))
    ids = [record_event(user=f"user-{number}", data={"text": text}).task_ids[0] for number in range(20)]
    fall_due()
    with connection.cursor() as cursor:
        cursor.execute("SELECT min(pg_column_compression(data)), min(pg_column_size(data)) FROM scheduling_event")
        compression, size = cursor.fetchone()
        assert compression
        assert 40_000 < size < len(text) / 2, "a read of 20 of them costs 200 blocks and more"
    with transaction.atomic(), connection.cursor() as cursor:
        statement = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + ANNOUNCE_STATEMENT.replace("%(ids)b", "%(ids)s")
        cursor.execute(statement, {"ids": ids, "most_bytes": 1})
        (plan,) = cursor.fetchone()[0]
    blocks = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
    assert blocks < 20 * 5


def test_load_announced_takes_one_oversized_event_of_the_highest_priority(matrix, record_event):
    matrix.node("low", trigger="a", priority=2)
    matrix.node("high", trigger="b", priority=0)
    low = [record_event("a", f"user-{number}").task_ids[0] for number in range(3)]
    (high,) = record_event("b", "user-9").task_ids
    fall_due()
    found = load_announced([*low, high], most_bytes=1)
    assert [task_id for task_id, row in found.items() if row.readable] == [high]


def test_deliver_splits_at_the_byte_limit(shop, published, monkeypatch):
    monkeypatch.setattr(due_batch, "MOST_BYTES", 35_000)
    shop.node()
    ids = [shop.record_event(user=f"user-{number}", data={"text": "x" * 10_000}).task_ids[0] for number in range(10)]
    fall_due()

    assert deliver_all(ids, published) == [6, 2, 0]

    assert {row.state for row in rows(ids)} == {"delivered"}


def test_deliver_stops_at_the_judging_time_limit(shop, published, monkeypatch):
    """What is left is not claimed, its customers' locks are released, and its message goes out at once."""
    monkeypatch.setattr(pipeline, "LONGEST_JUDGING", 0.3)
    render = pipeline.render_message

    def slow(*arguments):
        time.sleep(0.1)
        return render(*arguments)

    monkeypatch.setattr(pipeline, "render_message", slow)
    shop.node()
    ids = shop.plan(12)
    fall_due()

    deliver(ids)

    states = [row.state for row in rows(ids)]
    assert 1 <= states.count("delivered") <= 4
    left = [row for row in rows(ids) if row.state != "delivered"]
    assert {(row.state, row.lease_no, len(row.verdicts)) for row in left} <= {("queued", 0, 0), ("scheduled", 0, 0)}
    assert {wakeup.task_id for wakeups in published for wakeup in wakeups} == {row.pk for row in left}
    deliver_all([row.pk for row in left], published)
    assert {row.state for row in rows(ids)} == {"delivered"}


def test_deliver_halves_batch_after_idle_timeout(shop, second_connection, monkeypatch):
    """25P03: what was done between two statements took too long for so many; it is no outage."""
    shop.node()
    ids = shop.plan(4)
    fall_due()
    write, sizes = touch_ledger.write_decisions, []

    def gone(pid):
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [pid])
            return bool(cursor.fetchone() == (0,))

    def too_slow_for_many(decisions, **conditions):
        sizes.append(sum(map(len, decisions.values())))
        if sizes[-1] > 1:
            pid = connection.connection.info.backend_pid
            with connection.cursor() as cursor:
                cursor.execute("SET idle_in_transaction_session_timeout = 1")
            assert wait_until(lambda: second_connection(lambda: gone(pid)), WAIT_LIMIT)
        return write(decisions, **conditions)

    def deliver_or_reconnect():
        with suppress(sql.UNAVAILABLE_ERRORS):  # a closed connection need not give its reason
            deliver(ids)
            return True
        connection.close()
        return False

    monkeypatch.setattr(touch_ledger, "write_decisions", too_slow_for_many)
    assert wait_until(deliver_or_reconnect, WAIT_LIMIT)  # as Celery does

    assert sorted(set(sizes)) == [1, 2, 4]
    assert {row.state for row in rows(ids)} == {"delivered"}
    assert not FailedTask.objects.exists()


@pytest.fixture
def edits(monkeypatch, second_connection):
    """Each is committed by another connection between a batch's judgement and its write."""
    waiting = []
    write = touch_ledger.write_decisions

    def edited_first(*settlements, **conditions):
        if waiting:
            second_connection(waiting.pop(0))
        return write(*settlements, **conditions)

    monkeypatch.setattr(touch_ledger, "write_decisions", edited_first)
    return waiting


def test_deliver_leaves_touch_whose_node_is_on_again(shop, edits, published):
    """An undo of the switch would not see an end that is written after it. Others of the batch are settled."""
    node = shop.node()
    shop.node("other", trigger="other")
    (task_id,), (other,) = shop.record_event().task_ids, shop.record_event("other", "bob").task_ids
    fall_due()
    node.enabled = False
    node.save()

    def switch_on():
        node.enabled = True
        node.save()

    edits.append(switch_on)
    deliver([task_id, other])
    left, settled = rows([task_id, other])
    assert (left.state, left.lease_no, left.verdicts, settled.state) == ("queued", 0, [], "delivered")
    assert [[wakeup.task_id for wakeup in wakeups] for wakeups in published] == [[task_id]]
    deliver([task_id])
    assert rows([task_id])[0].state == "delivered"
