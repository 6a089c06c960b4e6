"""Series from the database and the broker."""

import json
import time
from datetime import timedelta

import pytest
from celery import current_app
from django.db import connection
from django.utils.timezone import now
from kombu import Connection
from kombu.exceptions import OperationalError

from config.celery.application import app
from scheduling import broker_health
from scheduling.ids import new_id
from scheduling.ledger.touches import touch_ledger
from scheduling.models import CustomerErasure, EndMark, FailedTask, Pause, Touch
from scheduling.monitoring import collectors


def read_cluster_metrics(text=None):
    """By series."""
    lines = (collectors.export_cluster_metrics() if text is None else text).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def broker_is(url, monkeypatch):
    monkeypatch.setattr(app, "connection_for_write", lambda **options: Connection(url, **options))


@pytest.fixture
def planned(matrix, record_event):
    matrix.node(delay=timedelta(days=1))
    matrix.node("soon", delay=timedelta(minutes=10))
    for number in range(3):
        record_event(user=f"u{number}")


@pytest.mark.django_db
def test_unread_ends_and_rest_are_reported(matrix, record_event):
    """A reader that an open transaction stopped kept all partitions, and no figure showed it."""
    at = now() - timedelta(seconds=400)
    EndMark.objects.create(reader="webhooks", settled_at=at, task_id=new_id(), ceiling=at)
    matrix.node(delay=timedelta(days=1))
    touch_ledger.cancel(record_event().task_ids, reason="test")
    Touch.objects.update(settled_at=now() - timedelta(days=4000))

    found = read_cluster_metrics()

    assert found['aftertouch_ends_unread_seconds{reader="webhooks"}'] == pytest.approx(400, abs=200)
    assert found["aftertouch_touches_rest"] == 1


def test_touches_are_counted_by_state_and_due(planned):
    ids = list(Touch.objects.order_by("pk").filter(node__key="guide").values_list("pk", flat=True))
    Touch.objects.filter(pk=ids[0]).update(due_at=now() - timedelta(seconds=90))
    Touch.objects.filter(pk=ids[1]).update(
        state="queued", lease_until=now() + timedelta(seconds=10), due_at=now() - timedelta(seconds=300)
    )
    Touch.objects.filter(pk=ids[2]).update(paused_by="all")
    FailedTask.objects.create(origin="touch", failure="failed", reason="x", failed_at=now() - timedelta(hours=2))
    FailedTask.objects.create(origin="touch", failure="failed", reason="x", state="ignored")
    Pause.objects.create(scope="channel:log", paused_at=now() - timedelta(hours=1))
    Pause.objects.create(scope="channel:other")
    CustomerErasure.objects.create(digest="a", requested_at=now() - timedelta(hours=2))
    CustomerErasure.objects.create(digest="b", requested_at=now() - timedelta(hours=9), state="done")
    found = read_cluster_metrics()
    assert found["aftertouch_erasures_oldest_age_seconds"] == pytest.approx(7200, abs=300)
    assert found['aftertouch_pauses{scope="channel"}'] == 2
    assert found['aftertouch_pauses_oldest_age_seconds{scope="channel"}'] == pytest.approx(3600, abs=300)
    assert found['aftertouch_touches{due="overdue",state="scheduled"}'] == 1
    assert found['aftertouch_touches{due="hour",state="scheduled"}'] == 3
    assert found['aftertouch_touches{due="later",state="scheduled"}'] == 0
    assert found['aftertouch_touches{due="overdue",state="queued"}'] == 1
    assert found['aftertouch_touches{due="",state="paused"}'] == 1
    assert found["aftertouch_touches_oldest_overdue_seconds"] == pytest.approx(300, abs=150)
    assert found['aftertouch_failed_tasks_open{origin="touch"}'] == 1
    assert found['aftertouch_failed_tasks_oldest_age_seconds{origin="touch"}'] == pytest.approx(7200, abs=300)
    assert found['aftertouch_failed_tasks_open{origin="message"}'] == 0


@pytest.mark.usefixtures("fresh_tables")
@pytest.mark.django_db
def test_cluster_metrics_scan_no_whole_table():
    """With sequential scans made dear, none is left: every statement has an index that serves it."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        for statement in (collectors._WAITING, collectors._LEASED, collectors._FAILED):
            cursor.execute("EXPLAIN " + statement, {"most": 10})
            plan = "\n".join(row[0] for row in cursor.fetchall())
            assert "Seq Scan" not in plan
            assert "Index" in plan


@pytest.mark.django_db
def test_broker_outage_hides_only_its_series(client, monkeypatch):
    broker_is("redis://127.0.0.1:1/0", monkeypatch)
    found = read_cluster_metrics(client.get("/metrics").content)
    assert "aftertouch_touches_oldest_overdue_seconds" in found
    assert not [name for name in found if name.startswith("celery_queue_length")]


def message(queue, published_at):
    return json.dumps(
        {
            "body": "[]",
            "headers": {"published_at": published_at},
            "properties": {"delivery_tag": "1", "delivery_info": {"routing_key": queue}},
        }
    )


@pytest.mark.django_db
def test_queue_metrics_give_length_age_and_unacked(valkey):
    for age in (600, 5):
        valkey.lpush("mq:touch.low", message("touch.low", time.time() - age))
    for number in range(4):
        queue = "touch.high" if number else "ticks"
        valkey.hset("mq:unacked", str(number), json.dumps([{"body": "x" * 5000}, queue, queue]))
    found = read_cluster_metrics()
    assert found['celery_queue_length{queue_name="touch.low"}'] == 2
    assert found['celery_queue_length{queue_name="touch.high"}'] == 0
    assert found['aftertouch_queue_oldest_age_seconds{queue="touch.low"}'] == pytest.approx(600, abs=300)
    assert found['aftertouch_queue_oldest_age_seconds{queue="touch.high"}'] == 0
    assert found['aftertouch_queue_unacked{queue="touch.high"}'] == 3
    assert found['aftertouch_queue_unacked{queue="ticks"}'] == 1
    assert found['aftertouch_queue_unacked{queue="touch.low"}'] == 0


def test_refused_connection_to_the_broker_is_tried_again_at_once(monkeypatch):
    """Kombu would wait for two seconds, longer than a probe of Kubernetes."""
    broker_is("redis://127.0.0.1:1/0", monkeypatch)
    monkeypatch.setattr("kombu.utils.functional.sleep", lambda seconds: pytest.fail(f"a pause of {seconds} s"))
    with pytest.raises(OperationalError), broker_health.connect_broker(1.0):
        pass


@pytest.mark.django_db
def test_unacked_message_of_kombu_is_counted(valkey):
    with current_app.connection_for_write() as broker:
        current_app.send_task("scheduling.dispatch_due", queue="touch.low", connection=broker)
        queue = broker.SimpleQueue("touch.low")
        taken = queue.get(timeout=10)
        found = read_cluster_metrics()
        taken.ack()
        queue.close()
    assert found['aftertouch_queue_unacked{queue="touch.low"}'] == 1
    assert found['celery_queue_length{queue_name="touch.low"}'] == 0
