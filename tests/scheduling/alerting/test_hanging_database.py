"""A PostgreSQL that accepts TCP connections and never responds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connections

from scheduling.models import Alert, AlertReceiver
from scheduling.monitoring.alerting.notifier import AlertThread
from tests.scheduling.alerting.conftest import Robot
from tests.scheduling.api.serving import WAIT_LIMIT
from tests.scheduling.hanging_database import HangingDatabase, proxy_database

TOLD, OVER = "【告警】PostgreSQL 没有及时响应", "【已恢复】PostgreSQL 没有及时响应"


@pytest.fixture
def gate(transactional_db: None) -> Iterator[HangingDatabase]:
    with proxy_database() as made:
        yield made


@pytest.fixture
def run_alert_pass(gate: HangingDatabase) -> Iterator[Callable[[float], bool]]:
    """The alert_thread's, one by one, in a thread of his own that waits so many seconds for the database."""
    alert_thread = AlertThread()
    alert_thread._leads.set()

    def one(seconds: float) -> bool:
        alert_thread._time_limit.seconds = seconds
        return thread.submit(alert_thread._run_pass).result(WAIT_LIMIT)

    with ThreadPoolExecutor(1) as thread:
        yield one
        gate.end()
        thread.submit(lambda: connections["default"].close()).result(WAIT_LIMIT)


def test_hanging_database_is_reported_and_resolved(
    robot: Robot,
    create_alert_receiver: Callable[..., AlertReceiver],
    gate: HangingDatabase,
    run_alert_pass: Callable[[float], bool],
) -> None:
    create_alert_receiver(limits={"database": 0}, holds_for=timedelta(0))
    run_alert_pass(WAIT_LIMIT)
    assert robot.taken == []
    gate.hangs()
    for _ in range(3):  # a query without a response, then connections without a greeting
        run_alert_pass(1)
    assert [each.splitlines()[0] for each in robot.taken] == [TOLD]
    gate.answers()
    run_alert_pass(WAIT_LIMIT)
    assert [each.splitlines()[0] for each in robot.taken] == [TOLD, OVER]
    assert not Alert.objects.exists()
