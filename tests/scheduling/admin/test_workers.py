"""The page of queues and workers: broker, reports, wanted numbers, and its notes while a source does not answer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import redis
from celery import current_app
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from rpa_tasks.models import ExecutionNode
from scheduling.admin.system import workers as page
from scheduling.monitoring.queues import WorkerReport, send_worker_report
from scheduling.redis_client import RedisError
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db

TOUCH_QUEUES = ["touch.high", "touch.normal"]


PAGE = "admin:scheduling_touch_workers"


def test_queues_show_waiting_messages_age_and_consumers(viewer: Client, valkey: redis.Redis) -> None:
    with current_app.connection_for_write() as connection:
        before = (now() - timedelta(minutes=5)).timestamp()
        for queue in ("touch.high", "touch.low", "touch.low"):
            connection.SimpleQueue(queue).put({}, headers={"published_at": before})
    for name in ("core@a", "core@b"):
        send_worker_report(WorkerReport(name, 2, 0.5, TOUCH_QUEUES, running=1))
    found = {each["name"]: each for each in read_context(viewer, reverse(PAGE))["queues"]}
    assert list(found)[:5] == ["touch.high", "touch.normal", "touch.low", "ticks", "long"]
    high, low = found["touch.high"], found["touch.low"]
    assert (high["length"], high["consumers"], high["is_unattended"], high["unacked"]) == (1, 2, False, 0)
    assert (low["length"], low["consumers"], low["is_unattended"]) == (2, 0, True)
    assert low["oldest"].startswith("5 minutes")
    assert viewer.get(low["link"]).status_code == 200


def test_workers_show_host_queues_processes_and_last_report(viewer: Client, valkey: redis.Redis) -> None:
    send_worker_report(WorkerReport("core@host1", 4, 0.5, TOUCH_QUEUES, running=3))
    send_worker_report(WorkerReport("execution@host1", 5, 0.5, ["high"], running=1))  # its node is shown instead
    gone = now() - timedelta(minutes=9)
    ExecutionNode.objects.create(name="n1", seen_at=gone, started_at=gone, slots=5, queues=["high", "n.n1.high"])
    core, node = read_context(viewer, reverse(PAGE))["workers"]
    assert (core["name"], core["host"], core["queues"]) == ("core", "host1", TOUCH_QUEUES)
    assert (core["processes"], core["running"], core["is_late"]) == (4, 3, False)
    assert (node["host"], node["queues"], node["processes"], node["running"]) == ("n1", ["high"], 5, 0)
    assert (node["seen"], node["is_late"]) == ("9 minutes ago", True)


def test_wanted_numbers_are_those_of_scaling(viewer: Client, valkey: redis.Redis) -> None:
    send_worker_report(WorkerReport("core@a", 2, 1.0, TOUCH_QUEUES))
    found = {str(each["kind"]): each for each in read_context(viewer, reverse(PAGE))["wanted"]}
    assert list(found) == ["Core workers", "Execution nodes", "Watchers"]
    assert (found["Core workers"]["running"], found["Core workers"]["wanted"]) == (1, 2)
    assert found["Core workers"]["is_short"]


def test_page_without_broker_and_redis_shows_notes(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RedisError("away")

    monkeypatch.setattr(page, "list_worker_reports", refuse)
    monkeypatch.setattr("scheduling.broker_health.connect_broker", refuse)
    text = viewer.get(reverse(PAGE)).content.decode()
    assert "The broker does not respond." in text
    assert "A source of reports does not answer." in text
