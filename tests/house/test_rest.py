"""What a house does that has nothing to do: little, and without a word."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from config.beat import PASSES
from config.beat_leader import LeaderScheduler
from config.celery import app
from config.settings.logging import WithoutPasses
from rpa_tasks.tasks import publish_for_shops
from scheduling.tasks import deliver, hand_over


@pytest.fixture
def scheduler(transactional_db: None, valkey: Any) -> Iterator[LeaderScheduler]:
    made = LeaderScheduler(app=app)
    yield made
    made.close()


def test_beat_sleeps_until_the_next_is_due(scheduler: LeaderScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's own wakes 10 ms early and turns without a pause."""
    for each in PeriodicTask.objects.all():
        each.enabled = False
        each.save()
    often, _ = IntervalSchedule.objects.get_or_create(every=40_000, period=IntervalSchedule.MICROSECONDS)
    PeriodicTask.objects.create(name="often", task=hand_over.name, interval=often, queue="ticks")
    sent: list[str] = []
    monkeypatch.setattr(scheduler, "apply_async", lambda entry, **_: sent.append(entry.task) or SimpleNamespace(id="1"))
    ticks = 0
    while len(sent) < 10:
        pause = scheduler.tick()
        time.sleep(max(0.0, pause))
        ticks += 1
    assert ticks < 5 * len(sent)


def line(logger: str, level: int = logging.INFO, **context: Any) -> logging.LogRecord:
    return logging.LogRecord(logger, level, "", 0, "Task %(name)s[%(id)s] …", (context,), None)


def test_a_pass_fills_no_log_and_a_failed_one_does() -> None:
    shown = WithoutPasses().filter
    assert not shown(line("celery.app.trace", name=hand_over.name, id="1"))
    assert shown(line("celery.app.trace", logging.ERROR, name=hand_over.name, id="1"))
    assert shown(line("celery.app.trace", name=deliver.name, id="1"))
    assert shown(logging.LogRecord("celery.worker.strategy", logging.INFO, "", 0, "%s", ("a line",), None))


def test_flower_shows_work_and_no_passes() -> None:
    app.loader.import_default_modules()
    silent = {name for name, task in app.tasks.items() if not task.send_events}
    assert silent == PASSES
    assert not silent & {deliver.name, publish_for_shops.name}
