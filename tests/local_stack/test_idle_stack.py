"""An idle stack does little work and logs nothing."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery.beat import ScheduleEntry
from celery.schedules import maybe_schedule
from django_celery_beat.models import IntervalSchedule, PeriodicTask
from redis.exceptions import ResponseError

from config.celery.application import app
from config.celery.beat_scheduler import LeaderScheduler, TickBacklog
from config.celery.schedule import PASSES, SCHEDULE
from config.local.processes import wait_until
from config.settings.logging import WithoutPasses
from rpa_tasks.tasks import publish_for_shops
from scheduling import metrics
from scheduling.tasks import deliver, dispatch_due
from tests.support.waiting import WAIT_LIMIT

LONG_AGO = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def scheduler(transactional_db: None, valkey: redis.Redis) -> Iterator[LeaderScheduler]:
    made = LeaderScheduler(app=app)
    # The lock of the test before goes with its backend, some time after its connection was closed.
    assert wait_until(lambda: bool(made._holds_lock()), WAIT_LIMIT)
    yield made
    made.close()


def test_beat_sleeps_until_next_entry_is_due(scheduler: LeaderScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's own wakes 10 ms early and turns without a pause."""
    scheduler._passes = {"often": ScheduleEntry("often", dispatch_due.name, schedule=maybe_schedule(0.04), app=app)}
    sent: list[str] = []
    monkeypatch.setattr(scheduler, "apply_async", lambda entry, **_: sent.append(entry.task) or SimpleNamespace(id="1"))
    ticks = 0
    while len(sent) < 10:
        pause = scheduler.tick()
        time.sleep(max(0.0, pause))
        ticks += 1
    assert ticks < 5 * len(sent)


def test_passes_come_from_code_and_never_from_rows(scheduler: LeaderScheduler) -> None:
    interval = IntervalSchedule.objects.create(every=1, period=IntervalSchedule.DAYS)
    PeriodicTask.objects.create(name="dispatch due touches", task=publish_for_shops.name, interval=interval)
    scheduler.tick()
    assert {entry.task for entry in scheduler.schedule.values()} == PASSES
    assert PeriodicTask.objects.count() == 1


def tasks_in(valkey: redis.Redis) -> list[str]:
    waiting = [*valkey.lrange("mq:ticks", 0, -1), *valkey.lrange("mq:long", 0, -1)]
    return [json.loads(raw)["headers"]["task"] for raw in waiting if raw != b"waits"]


def make_passes_due(scheduler: LeaderScheduler) -> None:
    for each in scheduler._passes.values():
        each.last_run_at = LONG_AGO


def tick_until_nothing_is_due(scheduler: LeaderScheduler) -> None:
    assert wait_until(lambda: scheduler.tick() > 0, 60, pause=0), "beat always finds something due"


def test_beat_with_full_backlog_publishes_no_passes(
    scheduler: LeaderScheduler, valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps what has expired until a worker looks at it. What ops have scheduled goes out all the same."""
    make_passes_due(scheduler)
    interval, _ = IntervalSchedule.objects.get_or_create(every=1, period=IntervalSchedule.HOURS)
    PeriodicTask.objects.create(name="ours", task=publish_for_shops.name, interval=interval, start_time=LONG_AGO)
    valkey.rpush("mq:ticks", *["waits"] * (TickBacklog.MOST + 1))
    alive: list[str] = []
    monkeypatch.setattr(metrics, "set_gauge", lambda gauge, node, value: alive.append(node))
    tick_until_nothing_is_due(scheduler)
    of_ticks = {each["task"] for each in SCHEDULE.values() if each["options"]["queue"] == "ticks"}
    assert set(tasks_in(valkey)) == PASSES - of_ticks
    assert alive, "whatever it publishes, it ticks"


def test_beat_with_drained_backlog_publishes_passes_again(
    scheduler: LeaderScheduler, valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TickBacklog, "ASK_EVERY", -1.0)
    valkey.rpush("mq:ticks", *["waits"] * (TickBacklog.MOST + 1))
    assert scheduler._backlogs["ticks"].is_full(scheduler.producer)
    valkey.delete("mq:ticks")
    make_passes_due(scheduler)
    tick_until_nothing_is_due(scheduler)
    assert set(tasks_in(valkey)) == PASSES


def test_failed_backlog_check_is_rate_limited(scheduler: LeaderScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TickBacklog, "ASK_EVERY", 3600.0)
    asked: list[str] = []

    def refuse(queue: str) -> int:
        asked.append(queue)
        raise ResponseError("NOPERM")

    producer = SimpleNamespace(channel=SimpleNamespace(client=SimpleNamespace(llen=refuse)))
    assert [scheduler._backlogs["ticks"].is_full(producer) for _ in range(100)] == [False] * 100
    assert asked == ["ticks"]
    assert not scheduler._backlogs["ticks"].is_full(SimpleNamespace(channel=object())), "RabbitMQ is not asked"


def make_log_record(logger: str, level: int = logging.INFO, **context: Any) -> logging.LogRecord:
    return logging.LogRecord(logger, level, "", 0, "Task %(name)s[%(id)s] …", (context,), None)


def test_log_filter_drops_passes_but_keeps_their_errors() -> None:
    shown = WithoutPasses().filter
    assert not shown(make_log_record("celery.app.trace", name=dispatch_due.name, id="1"))
    assert shown(make_log_record("celery.app.trace", logging.ERROR, name=dispatch_due.name, id="1"))
    assert shown(make_log_record("celery.app.trace", name=deliver.name, id="1"))
    assert shown(logging.LogRecord("celery.worker.strategy", logging.INFO, "", 0, "%s", ("a line",), None))


def test_task_events_are_sent_for_work_but_not_for_passes() -> None:
    app.loader.import_default_modules()
    silent = {name for name, task in app.tasks.items() if not task.send_events}
    assert silent == PASSES
    assert not silent & {deliver.name, publish_for_shops.name}
