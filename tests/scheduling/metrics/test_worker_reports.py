"""A real worker reports how busy it is, and takes its report with it."""

import json
import os
from datetime import UTC, datetime, timedelta

import pytest
from kombu import Connection

from config.environment import environment
from config.local.processes import wait_until
from scheduling.monitoring.queues import WorkerReport, count_unacked_messages, list_worker_reports
from tests.faults.brokers import rabbitmq
from tests.faults.test_celery_guards import envelope
from tests.faults.workers import worker
from tests.scheduling.api.serving import database_url
from tests.scheduling.metrics.test_collectors import broker_is, read_cluster_metrics
from tests.support.waiting import WAIT_LIMIT

QUICK = "tests.faults.misbehaving_app"  #: reports every half second


@pytest.fixture
def worker_environment(tmp_path):
    return {
        **os.environ, "DATABASE_URL": database_url(), "REDIS_URL": environment().redis,
        "DJANGO_SETTINGS_MODULE": "config.settings.test", "AFTERTOUCH_STATE_DIR": str(tmp_path),
    }  # fmt: skip


def busy_share():
    return next((report.busy for report in list_worker_reports()), None)


def start_waiting(client, gate, count):
    for number in range(count):
        client.lpush("mq:touch.normal", envelope("bad.wait", str(gate), str(number)))


@pytest.mark.processes
@pytest.mark.django_db(transaction=True)
def test_worker_reports_its_load_until_it_stops(valkey, worker_environment, tmp_path):
    gate = tmp_path / "gate"
    words = ("-Q", "touch.high,touch.normal,touch.low", "-c", "4", "-n", "core@test")
    with worker(worker_environment, *words, app=QUICK) as program:
        program.await_ready()
        await_busy(program, 0.0)
        assert list_worker_reports() == [
            WorkerReport("core@test", processes=4, busy=0.0, queues=["touch.high", "touch.low", "touch.normal"])
        ]
        start_waiting(valkey, gate, 2)
        await_busy(program, 0.5)
        start_waiting(valkey, gate, 2)
        await_busy(program, 1.0)
        gate.touch()
        await_busy(program, 0.0)
        program.process.terminate()
        program.await_exit()
    assert list_worker_reports() == []


@pytest.mark.processes
@pytest.mark.django_db(transaction=True)
def test_workers_on_rabbitmq_report_what_they_did_not_acknowledge(valkey, worker_environment, tmp_path, monkeypatch):
    """Messages wait in the workers for their eta; a worker that stops gives them back."""
    (tmp_path / "broker").mkdir()
    with rabbitmq(tmp_path / "broker") as broker, Connection(broker.url) as connection:
        environment = {**worker_environment, "CELERY_BROKER_URL": broker.url, "AFTERTOUCH_RPA_SLOTS": "1"}
        core = ("-Q", "touch.low", "-c", "1", "-n", "core@test")
        execution = ("-Q", "high", "-c", "1", "-n", "execution@test")
        with (
            worker(environment, *core, log="core", app=QUICK) as first,
            worker(environment, *execution, log="execution", app=QUICK) as second,
        ):
            first.await_ready()
            second.await_ready()
            later = {"eta": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}
            for exchange, key in [("touch.low", "touch.low")] * 3 + [("tasks", "task.pdd.high")] * 2:
                sent = json.loads(envelope("rpa_tasks.run", **later))
                connection.Producer().publish([[], {}, {}], exchange=exchange, routing_key=key, headers=sent["headers"])
            expected = {"touch.low": 3, "high": 2}
            assert wait_until(lambda: count_unacked_messages() == expected, WAIT_LIMIT), f"{first.log}\n{second.log}"
            broker_is(broker.url, monkeypatch)
            found = read_cluster_metrics()
            assert found['aftertouch_queue_unacked{queue="touch.low"}'] == 3
            assert found['celery_queue_length{queue_name="touch.low"}'] == 0
            assert 'celery_queue_length{queue_name="touch.normal"}' not in found  # it is not declared
            assert not [name for name in found if name.startswith("aftertouch_queue_oldest")]
            for program in (first, second):
                program.process.terminate()
            for program in (first, second):
                program.await_exit()
        assert count_unacked_messages() == {}
        waiting = {name: connection.default_channel.queue_declare(name, passive=True)[1] for name in expected}
        assert waiting == expected


def await_busy(program, share):
    assert wait_until(lambda: busy_share() == share, WAIT_LIMIT), f"{list_worker_reports()}\n{program.log}"
