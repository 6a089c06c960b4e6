"""A real worker reports how busy it is, and takes its report with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis

from config.environment import environment
from config.local.processes import wait_until
from scheduling.db_timeouts import Deadline
from scheduling.monitoring.wanted_numbers import measure_workers
from scheduling.monitoring.worker_reports import WorkerReport, list_worker_reports
from tests.faults.test_celery_guards import envelope
from tests.faults.workers import Program, worker
from tests.scheduling.api.serving import database_url

WAIT_LIMIT = 120


@pytest.fixture
def worker_environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ, "DATABASE_URL": database_url(), "REDIS_URL": environment().redis,
        "DJANGO_SETTINGS_MODULE": "config.settings.test", "AFTERTOUCH_STATE_DIR": str(tmp_path),
    }  # fmt: skip


def busy_share() -> float | None:
    return next((report.busy for report in list_worker_reports()), None)


def start_waiting(client: redis.Redis, gate: Path, count: int) -> None:
    for number in range(count):
        client.lpush("mq:touch.normal", envelope("bad.wait", str(gate), str(number)))


@pytest.mark.processes
@pytest.mark.django_db(transaction=True)
def test_worker_reports_its_load_until_it_stops(
    valkey: redis.Redis, worker_environment: dict[str, str], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    words = ("-Q", "touch.high,touch.normal,touch.low", "-c", "4", "-n", "core@test")
    with worker(worker_environment, *words, app="tests.faults.misbehaving_app") as program:
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
def test_worker_of_ticks_alone_counts_for_no_need(valkey: redis.Redis, worker_environment: dict[str, str]) -> None:
    with (
        worker(worker_environment, "-Q", "ticks", "-c", "1", "-n", "ticks@test", log="ticks") as ticks,
        worker(worker_environment, "-Q", "touch.low", "-c", "1", "-n", "low@test", log="low") as low,
    ):
        ticks.await_ready()
        low.await_ready()
        assert wait_until(lambda: len(list_worker_reports()) == 2, WAIT_LIMIT), f"{ticks.log}\n{low.log}"
        running, _need = measure_workers(Deadline(WAIT_LIMIT))
        assert running == 1


def await_busy(program: Program, share: float) -> None:
    assert wait_until(lambda: busy_share() == share, WAIT_LIMIT), f"{list_worker_reports()}\n{program.log}"
