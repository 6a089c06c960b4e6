"""The wanted numbers from real servers: load, backlog, unavailable sources."""

import json
from datetime import timedelta

import pytest
from django.utils.timezone import now

from rpa_tasks.models import ExecutionNode
from scheduling.db_timeouts import Deadline
from scheduling.ids import new_id
from scheduling.models import Touch
from scheduling.monitoring import wanted_numbers
from scheduling.monitoring.queues import (
    WORKER_REPORTS,
    WorkerReport,
    count_unacked_messages,
    list_worker_reports,
    send_worker_report,
)
from scheduling.monitoring.wanted_numbers import Scale
from tests.scheduling.metrics.test_collectors import read_cluster_metrics
from tests.support.tables import each_row

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


def test_source_without_answer_hides_only_its_number(settings):
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=now(), slots=5, queues=["high"])
    names = ("aftertouch_workers_wanted", "aftertouch_execution_nodes_wanted", "aftertouch_watchers_wanted")
    found = read_cluster_metrics()
    assert [found.get(name) for name in names] == [1, 1, 1]
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    scaling = wanted_numbers.read_scaling(Deadline(60.0))
    assert (scaling["workers"], scaling["execution_nodes"]) == (Scale(None, None), Scale(1, 1))
    found = read_cluster_metrics()
    assert [found.get(name) for name in names[:2]] == [None, 1]


@pytest.fixture
def due_touches(matrix, record_event):
    """Copy a planned touch `count` times, due some seconds ago."""
    matrix.node("guide", delay=timedelta(days=1))
    record_event()
    row = Touch.objects.values().get()

    def copy(count, *, seconds, **changes):
        given = {**row, "due_at": now() - timedelta(seconds=seconds)} | changes
        given.pop("task_id")
        Touch.objects.bulk_create(Touch(task_id=(one := new_id()), **{**given, "retry_of": one}) for _ in range(count))

    return copy


@each_row("busy, wanted", [(0.35, 1), (0.7, 2), (1.0, 3)])
def test_busy_processes_want_more_workers(busy, wanted):
    send_worker_report(WorkerReport("core@a", processes=2, busy=busy, queues=["touch.high"]))
    send_worker_report(WorkerReport("core@b", processes=6, busy=busy, queues=["touch.high"]))
    send_worker_report(WorkerReport("ticks@a", processes=1, busy=1.0, queues=["ticks"]))
    assert wanted_numbers.measure_workers(Deadline(60.0)) == (2, wanted)


def test_due_touches_that_nothing_has_started_want_more_workers(due_touches, monkeypatch):
    monkeypatch.setattr(wanted_numbers, "SPEED", 0.1)
    lease = now() + timedelta(seconds=30)
    due_touches(9, seconds=2)
    due_touches(3, seconds=5, state="queued", lease_until=lease)
    due_touches(1, seconds=5, priority=0)
    due_touches(30, seconds=900, priority=2)
    due_touches(2, seconds=900, paused_by="all")
    due_touches(2, seconds=900, state="running", lease_until=lease)
    due_touches(2, seconds=900, state="delivered", settled_at=now() - timedelta(seconds=60))
    due_touches(2, seconds=-60)
    assert wanted_numbers.measure_workers(Deadline(60.0)) == (0, 7), "12/30 + 1/5 + 30/300 a second at 0.1 a worker"
    send_worker_report(WorkerReport("core@a", processes=2, busy=0.6, queues=["touch.high"]))
    assert wanted_numbers.measure_workers(Deadline(60.0)) == (1, 7)
    send_worker_report(WorkerReport("core@a", processes=2, busy=0.4, queues=["touch.high"]))
    assert wanted_numbers.measure_workers(Deadline(60.0)) == (1, 1), "idle ones would not do it either"


def test_report_of_a_worker_expires(valkey):
    send_worker_report(WorkerReport("core@a", processes=2, busy=1.0, queues=["touch.high"]))
    ((key, text),) = valkey.hgetall(WORKER_REPORTS).items()
    stored = json.loads(text)
    valkey.hset(WORKER_REPORTS, key, json.dumps({**stored, "at": stored["at"] - 20}))
    assert list_worker_reports() == []
    send_worker_report(WorkerReport("core@b", processes=1, busy=0.5, queues=["touch.high"]))
    assert [json.loads(text)["name"] for text in valkey.hvals(WORKER_REPORTS)] == ["core@b"]


def test_workers_of_one_name_report_for_themselves():
    """Without -n two workers on one machine have the same name."""
    for name, queue, count in (("celery@a", "touch.high", 3), ("celery@a", "high", 2), ("celery@b", "touch.high", 1)):
        send_worker_report(WorkerReport(name, 2, 0.0, [queue], unacked={queue: count}))
    assert count_unacked_messages() == {"touch.high": 4, "high": 2}
