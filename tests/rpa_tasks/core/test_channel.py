"""Touches that become jobs, where storing a job takes its time."""

import asyncio
import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction

from config.local.processes import wait_until
from rpa_tasks.channel import THREADS, Rpa
from rpa_tasks.models import Job
from scheduling.channels.base import Delivered, Message, Unknown
from scheduling.ids import new_id
from tests.support.second_connection import count_lock_waits
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
MANY = 40  # more than a loop's own threads


@pytest.fixture
def job_table_lock():
    """Storing a job blocks until this is set."""
    opens, holds = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {Job._meta.db_table} IN EXCLUSIVE MODE")
            holds.set()
            opens.wait(WAIT_LIMIT)
        connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    assert holds.wait(WAIT_LIMIT)
    yield opens
    opens.set()
    holder.join(WAIT_LIMIT)


def message(number, **changes):
    key = new_id()
    return Message(
        task_id=key, delivery_key=key, user_id=f"user-{number}", chat_id="", node="n", content_type="guide",
        category="service", subject="", body="hi", locale="en", event={},
    )._replace(**changes)  # fmt: skip


def test_send_limits_threads_while_jobs_cannot_be_stored(market, job_table_lock):
    """They filled the loop's own threads, in which everything that is sent was marked, and every thread that stored
    one had a connection of its own."""
    market.flow()
    market.shop()
    channel = Rpa({"platform": "pdd", "task_type": "sync_order", "shop_id": "s1"}, timedelta(seconds=WAIT_LIMIT))

    async def story():
        sending = [asyncio.create_task(channel.send(message(number))) for number in range(MANY)]
        try:
            async with asyncio.timeout(WAIT_LIMIT):
                while await asyncio.to_thread(count_lock_waits) < THREADS:
                    await asyncio.sleep(0.05)
        finally:
            job_table_lock.set()
        return await asyncio.gather(*sending)

    outcomes = asyncio.run(story())

    assert {type(each) for each in outcomes} == {Delivered}
    assert Rpa.at_once == THREADS, "what is over waits in its lane, not behind a thread"


def test_thread_waits_for_a_lock_no_longer_than_its_attempt(market, job_table_lock):
    """Four threads that waited on held every later touch, also those whose jobs were free."""
    market.flow()
    market.shop()
    channel = Rpa({"platform": "pdd", "task_type": "sync_order", "shop_id": "s1"}, timedelta(seconds=0.5))
    assert isinstance(asyncio.run(channel.send(message(1))), Unknown)
    assert wait_until(lambda: count_lock_waits() == 0, 5)


def test_payload_is_filled_in_one_pass(market):
    """A text of a customer that looks like a placeholder stays as it is."""
    market.flow()
    market.shop()
    payload = {"to": ["{user_id}"], "text": "{subject}: {body}", "key": "{delivery_key}", "count": 1, "other": "{x}"}
    config = {"platform": "pdd", "task_type": "sync_order", "shop_id": "s1", "payload": payload}
    sent = message(1, subject="{body}", body="{delivery_key}")
    asyncio.run(Rpa(config, timedelta(seconds=WAIT_LIMIT)).send(sent))
    assert Job.objects.get().payload == {
        "to": ["user-1"], "text": "{body}: {delivery_key}", "key": str(sent.delivery_key), "count": 1, "other": "{x}",
    }  # fmt: skip
