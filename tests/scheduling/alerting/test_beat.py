"""A real beat, a real worker that is really killed, a real robot."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection

from config.environment import environment
from config.local.processes import wait_until
from scheduling.models import AlertReceiver
from scheduling.monitoring.alerting import conditions
from tests.faults.workers import celery, worker
from tests.scheduling.alerting.conftest import Robot
from tests.scheduling.api.serving import Gate, database_url

WAIT_LIMIT = 180
UNATTENDED = "queue_unattended"
CORE = "ticks,long,touch.high,touch.normal,touch.low"
NOBODY, LOST = (
    "【告警】没有 worker 在消费 long、ticks、touch.high、touch.low、touch.normal",
    "【告警】PostgreSQL 没有及时响应",
)


@pytest.fixture
def worker_environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ, "DATABASE_URL": database_url(), "REDIS_URL": environment().redis,
        "DJANGO_SETTINGS_MODULE": "config.settings.test", "AFTERTOUCH_STATE_DIR": str(tmp_path),
        "AFTERTOUCH_ALLOWED_PRIVATE_HOSTS": "127.0.0.1", "AFTERTOUCH_ALERTS_EVERY": "PT1S",
    }  # fmt: skip


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Before PostgreSQL, for beat alone."""
    made = Gate(int(connection.settings_dict["PORT"]))
    yield made
    made.shut()


@pytest.mark.processes
@pytest.mark.django_db(transaction=True)
def test_beat_reports_killed_worker_and_lost_database(
    robot: Robot, create_alert_receiver: Callable[..., AlertReceiver], worker_environment: dict[str, str], gate: Gate
) -> None:
    through_the_gate = {**worker_environment, "DATABASE_URL": database_url(gate.port)}
    with (
        worker(worker_environment, "-Q", CORE, "-c", "1", "-n", "core@%h", log="core") as core,
        celery(through_the_gate, "beat", log="beat") as beat,
    ):
        core.await_ready()
        assert wait_until(all_are_consumed, WAIT_LIMIT), "a worker consumes all that has to be"
        create_alert_receiver(limits={"unattended": 0, "database": 0}, holds_for=timedelta(0))
        core.kill()
        assert wait_until(lambda: NOBODY in headlines(robot), WAIT_LIMIT), beat.log
        gate.shut()
        assert wait_until(lambda: last_of_database(robot) == LOST, WAIT_LIMIT), beat.log


def all_are_consumed() -> bool:
    """A worker that stalls may be silent for as long as it is asked."""
    return conditions.read_metrics(frozenset({UNATTENDED})).get(UNATTENDED) == []


def headlines(robot: Robot) -> list[str]:
    return [part.splitlines()[0] for told in list(robot.taken) for part in told.split("\n\n")]


def last_of_database(robot: Robot) -> str:
    """A stalled evaluation may have reported a lost database and its return before."""
    return next((each for each in reversed(headlines(robot)) if "PostgreSQL" in each), "")
