"""A standby beat waits for the lock and publishes nothing."""

from datetime import timedelta

import pytest
from django.db import connection
from django_celery_beat.models import PeriodicTasks

from config.celery import app
from config.celery.beat_scheduler import LeaderScheduler
from config.local.processes import wait_until
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def await_lead(beat):
    """The lock of another beat goes with its backend, some time after its connection was closed."""
    assert wait_until(lambda: bool(beat._holds_lock()), WAIT_LIMIT)


def make_passes_due(*beats):
    for beat in beats:
        for each in beat._passes.values():
            each.last_run_at -= timedelta(hours=1)
        PeriodicTasks.update_changed()  # so that it computes again when its entries fall due


def tick(beat, valkey, *, times):
    """Let it tick and return how many messages it published."""
    before = valkey.llen("mq:ticks")
    for _ in range(times):
        beat.tick()
    return int(valkey.llen("mq:ticks") - before)


@pytest.fixture
def beats(monkeypatch, valkey):
    """Two beats: the first one leads, and in both the passes are due."""
    monkeypatch.setattr(LeaderScheduler, "ASK_EVERY", 0.0)
    leader, standby = LeaderScheduler(app=app), LeaderScheduler(app=app)
    try:
        await_lead(leader)
        make_passes_due(leader, standby)
        yield leader, standby
    finally:
        leader.close()
        standby.close()


def test_tick_of_standby_publishes_only_after_leader_is_gone(beats, valkey):
    leader, standby = beats
    assert tick(leader, valkey, times=20) > 0
    assert tick(standby, valkey, times=20) == 0
    assert standby.tick() == LeaderScheduler.STANDBY_SECONDS
    leader.close()
    await_lead(standby)
    assert tick(standby, valkey, times=20) > 0


def test_tick_of_leader_without_lock_publishes_nothing(beats, valkey, monkeypatch):
    """PostgreSQL ended its session, and another beat leads since."""
    monkeypatch.setattr(LeaderScheduler, "SURE_FOR", -1.0)  # each tick asks
    former, successor = beats
    assert tick(former, valkey, times=20) > 0
    assert former._lock_connection is not None
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [former._lock_connection.info.backend_pid])
    await_lead(successor)
    make_passes_due(former)
    assert tick(former, valkey, times=5) == 0
    assert tick(successor, valkey, times=20) > 0
