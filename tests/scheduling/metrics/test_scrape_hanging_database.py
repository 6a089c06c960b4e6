"""A scrape while PostgreSQL accepts TCP but does not respond: it ends, with the series of other sources."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from django.db import OperationalError, connection, connections
from django.test import Client

from rpa_tasks.models import Platform
from scheduling.db_timeouts import Deadline
from scheduling.monitoring import collectors, queues
from tests.scheduling.api.serving import Gate
from tests.scheduling.metrics.test_collectors import read_cluster_metrics
from tests.support.waiting import WAIT_LIMIT

OF_THE_DATABASE = {
    "aftertouch_touches", "aftertouch_touches_oldest_overdue_seconds", "aftertouch_failed_tasks_open",
    "aftertouch_pauses", "aftertouch_rollouts", "aftertouch_rpa_jobs_waiting", "aftertouch_rpa_browsers",
}  # fmt: skip


@pytest.fixture
def gate(transactional_db, valkey, monkeypatch):
    """Stands before every connection that a thread opens."""
    connection.ensure_connection()
    made = Gate(int(connection.settings_dict["PORT"]))
    monkeypatch.setitem(connection.settings_dict, "PORT", str(made.port))
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "connect_timeout", 2)
    yield made
    made.shut()


@pytest.fixture
def run_in_thread(gate):
    """In a thread, whose connections are its own."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda work: thread.submit(work).result(WAIT_LIMIT)
        gate.shut()
        thread.submit(lambda: connections["default"].close()).result(WAIT_LIMIT)


def test_hanging_database_connection_is_tried_once(gate, run_in_thread):
    gate.hang()
    found = read_cluster_metrics(run_in_thread(lambda: Client().get("/metrics").content))
    assert gate.taken == 1, "each wait for a connection takes two seconds of the ten that Prometheus has"
    assert found['celery_queue_length{queue_name="touch.high"}'] == 0
    assert found["aftertouch_watchers"] == 0
    assert any(name.startswith("python_info") for name in found)
    assert not OF_THE_DATABASE & {name.partition("{")[0] for name in found}


def test_database_hanging_during_scrape_is_skipped(gate, run_in_thread, settings):
    assert "aftertouch_touches_oldest_overdue_seconds" in read_cluster_metrics(
        run_in_thread(collectors.export_cluster_metrics)
    )
    gate.hang()
    settings.TIMEOUTS = replace(settings.TIMEOUTS, metrics=1.0)
    found = read_cluster_metrics(run_in_thread(collectors.export_cluster_metrics))
    assert found['celery_queue_length{queue_name="touch.high"}'] == 0
    assert not OF_THE_DATABASE & {name.partition("{")[0] for name in found}
    gate.go_on()
    settings.TIMEOUTS = replace(settings.TIMEOUTS, metrics=WAIT_LIMIT)
    assert "aftertouch_rollouts_oldest_judged_seconds" in read_cluster_metrics(
        run_in_thread(collectors.export_cluster_metrics)
    ), "asked on a new connection"


@pytest.mark.django_db
def test_slow_statement_does_not_affect_others():
    deadline = Deadline(WAIT_LIMIT)
    with pytest.raises(OperationalError), deadline.limit_queries(0.1):
        collectors.sql.rows("SELECT pg_sleep(60)", {})
    with deadline.limit_queries(20.0):
        assert collectors.sql.rows("SELECT 1", {}) == [(1,)]


@pytest.mark.django_db
def test_queue_names_survive_database_outage(valkey, monkeypatch):
    Platform.objects.create(key="own", dedicated_queue=True)
    assert read_cluster_metrics()['celery_queue_length{queue_name="p.own.high"}'] == 0

    def away(*_):
        raise OperationalError("the database is away")

    monkeypatch.setattr(collectors.sql, "rows", away)
    assert read_cluster_metrics()['celery_queue_length{queue_name="p.own.high"}'] == 0
    reading = queues.read_broker()
    assert reading is not None
    assert "p.own.high" in {each.name for each in reading.queues}
