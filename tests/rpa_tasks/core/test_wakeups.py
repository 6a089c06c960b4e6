"""How many wake-ups are published: as many as nodes have room for, on a real broker."""

import json
from datetime import timedelta

import pytest
from celery import current_app
from django.utils.timezone import now

from rpa_tasks.jobs import dispatch, wakeups
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.models import ExecutionNode, Job
from scheduling.ledger.transitions import Settlement, WakeUp

QUEUE = "p.crowded.normal"
pytestmark = pytest.mark.django_db


class Queue:
    def __init__(self, client, key):
        self.client, self.key = client, key

    def __len__(self):
        return int(self.client.llen(self.key))


@pytest.fixture
def queue():
    with current_app.connection_for_read() as connection:
        channel = connection.default_channel
        queue = Queue(channel.client, QUEUE)
        queue.client.delete(queue.key)
        yield queue
        queue.client.delete(queue.key)


@pytest.fixture
def node(market):
    market.platform("crowded", dedicated_queue=True)
    market.flow(platform="crowded")
    return market.node("n1", QUEUE, slots=3)


def publish(market, count, *, first=0, **changes):
    published = []
    for number in range(first, first + count):
        shop = market.shop(f"s{number}", "crowded")
        receipt = market.publish(f"s{number}", platform="crowded", **changes)
        published.append(WakeUp(receipt.task_id, now(), 1, shop.pk))
    return published


def test_publish_wakeups_fills_idle_slots(market, queue, node):
    for batch in range(5):
        wakeups.publish_wakeups(publish(market, 4, first=batch * 4))

    assert len(queue) == 3


def test_publish_wakeups_prefers_the_job_that_is_due_first(market, queue, node):
    """A statement returns its rows in any order. With one slot the job of now waited for the next pass."""
    later = publish(market, 3, delay=timedelta(seconds=25))
    later = [each._replace(due_at=now() + timedelta(seconds=25)) for each in later]
    wakeups.publish_wakeups(later + publish(market, 3, first=3))

    assert [json.loads(queue.client.rpop(queue.key))["headers"]["eta"] for _ in range(len(queue))] == [None] * 3


def test_publish_wakeups_sends_nothing_until_busy_slots_are_free(market, queue, node):
    publish(market, 3)
    claims = [market.pick(QUEUE, node="n1").claim for _ in range(3)]
    wakeups.publish_wakeups(publish(market, 5, first=3))
    wakeups.publish_wakeups(publish(market, 5, first=8, delay=timedelta(seconds=20)))
    assert len(queue) == 0

    for claim in claims:
        job_ledger.settle(claim, Settlement("succeeded"))
    wakeups.publish_wakeups(publish(market, 5, first=13))
    assert len(queue) == 3


def test_wake_queues_without_capacity_sends_one_message(market, queue, node):
    """The count of slots may be wrong: a run of a killed worker holds its slot until its lease is over."""
    publish(market, 6)
    for _ in range(3):
        assert market.pick(QUEUE, node="n1")

    assert [dispatch.wake_queues(), dispatch.wake_queues(), len(queue)] == [{QUEUE: 1}, {}, 1]


def test_publish_wakeups_to_unserved_queue_is_limited(market, queue, node, monkeypatch):
    ExecutionNode.objects.update(queues=["high"])
    monkeypatch.setattr(wakeups, "UNKNOWN_CAPACITY", 5)
    for batch in range(2):
        wakeups.publish_wakeups(publish(market, 4, first=batch * 4))

    assert len(queue) == 5


def test_publish_wakeups_ignores_slots_of_silent_node(market, queue, node):
    market.node("n2", QUEUE, seen_at=now() - timedelta(minutes=5))
    wakeups.publish_wakeups(publish(market, 10))

    assert len(queue) == 3
    assert Job.objects.count() == 10
