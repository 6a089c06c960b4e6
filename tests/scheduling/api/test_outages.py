"""202 means stored. A request that was not stored fails quickly and may be repeated."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import requests
from django.db import connection, transaction
from django.test import RequestFactory

from scheduling.api.auth import THREADS, ApiKeyAuth, in_database_thread
from scheduling.models import Customer, Event
from scheduling.operations.commands import create_api_key
from tests.scheduling.api.serving import Client, cloud_event
from tests.support.second_connection import run_concurrently
from tests.support.waiting import WAIT_LIMIT, eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]

WRITERS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%scheduling_customer%'
"""


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def blocked_writers():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")  # a transaction sees the same activity for ever
        cursor.execute(WRITERS)
        return [row[0] for row in cursor.fetchall()]


def kill(pid):
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])


def test_killed_transaction_is_answered_with_503(api, executor):
    Customer.objects.create(user_id="ann")
    with transaction.atomic():
        Customer.objects.select_for_update().get(user_id="ann")
        answer = executor.submit(api.event, cloud_event())
        first = eventually(blocked_writers)[0]
        assert not answer.done()
        kill(first)
        # It is tried once more on a new connection.
        second = eventually(lambda: [pid for pid in blocked_writers() if pid != first])[0]
        assert not answer.done()
        kill(second)
        assert answer.result().status_code == 503
    assert answer.result().headers["Retry-After"]
    assert not Event.objects.exists()


def test_connection_lost_once_is_retried(api, executor):
    Customer.objects.create(user_id="ann")
    with transaction.atomic():
        Customer.objects.select_for_update().get(user_id="ann")
        answer = executor.submit(api.event, cloud_event())
        kill(eventually(blocked_writers)[0])
    assert answer.result().status_code == 202
    assert Event.objects.count() == 1


def test_database_outage_is_answered_with_503_soon(server_behind_gate, gate, key):
    shop = Client(server_behind_gate, key)
    assert shop.event(cloud_event("before")).status_code == 202

    unread = Client(server_behind_gate, create_api_key("never used", ["events"]))
    gate.shut()
    assert unread.event(cloud_event()).status_code == 503  # the key cannot be checked
    calls = [("POST", "/events", cloud_event("during")), ("GET", "/touches", None), ("PUT", "/customers/ann", {})]
    rounds = [[shop(*call) for _ in range(3)] for call in calls]
    answers = [answer for each in rounds for answer in each]
    ready = requests.get(f"{server_behind_gate}/health/ready", timeout=WAIT_LIMIT)
    live = requests.get(f"{server_behind_gate}/health/live", timeout=WAIT_LIMIT)

    # No request waited for the database; an event would have been refused as slow after ten seconds.
    assert all("cannot be reached" in answer.json()["detail"] for answer in answers)
    quickest = [min(answer.elapsed for answer in each) for each in rounds]  # the others tell about the machine
    assert max(quickest) < timedelta(seconds=10)
    assert [answer.status_code for answer in answers] == [503] * 9
    assert all(answer.headers["Content-Type"] == "application/problem+json" for answer in answers)
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
    assert (ready.status_code, ready.json()["database"]["status"]) == (503, "down")
    assert live.status_code == 200

    gate.open()
    assert shop.event(cloud_event("after")).status_code == 202
    assert sorted(Event.objects.values_list("event_id", flat=True)) == ["after", "before"]


def test_slow_list_is_cancelled_with_503(api):
    """Who asks for what is not there, among tens of millions, would hold a thread for minutes at each poll."""
    paths = ["/touches", "/failed-tasks", "/rpa/jobs", "/rpa/shops"]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE scheduling_touch, scheduling_failedtask, rpa_tasks_job, rpa_tasks_shop")
        answers = run_concurrently(len(paths), lambda number: api.get(paths[number]))
    assert [answer.status_code for answer in answers] == [503] * len(paths)
    for answer in answers:
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert int(answer.headers["Retry-After"]) > 0
        assert "takes too long" in answer.json()["detail"]
    assert [api.get(path).status_code for path in paths] == [200] * len(paths)


def test_intake_does_not_wait_for_readers(transactional_db, key, valkey):
    """Events need a thread for the key and for the rate, nothing else."""
    let_go = threading.Event()

    async def store_events():
        readers = [asyncio.ensure_future(in_database_thread(let_go.wait, WAIT_LIMIT)) for _ in range(2 * THREADS)]
        request = RequestFactory().post("/api/v1/events", headers={"authorization": f"Bearer {key}"})
        try:
            admitted = await asyncio.wait_for(ApiKeyAuth("events")(request), WAIT_LIMIT / 2)
            assert not any(each.done() for each in readers)
        finally:
            let_go.set()
            await asyncio.gather(*readers)
        return admitted

    assert asyncio.run(store_events()).name == "shop"


def test_redis_outage_is_reported_as_degraded(server_without_redis, transactional_db):
    answer = requests.get(f"{server_without_redis}/health/ready", timeout=WAIT_LIMIT)
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert [answer.json()[part]["status"] for part in ("database", "redis", "broker")] == ["ok", "down", "down"]
