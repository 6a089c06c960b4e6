"""Scheduled jobs: from a row that ops edit, through beat and the broker, to one job a shop."""

import json
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth import get_user_model
from django.db import OperationalError, connection, transaction
from django.test import Client as Browser
from django.utils.timezone import now
from django_celery_beat.models import (
    ClockedSchedule,
    CrontabSchedule,
    IntervalSchedule,
    PeriodicTask,
    PeriodicTasks,
    SolarSchedule,
)
from structlog.testing import capture_logs

from config.celery.application import app
from config.celery.beat_scheduler import LeaderScheduler
from config.celery.schedule import PASSES
from config.local.processes import wait_until
from rpa_tasks.jobs import schedules
from rpa_tasks.jobs.publish import PublishRequest, publish_job
from rpa_tasks.jobs.schedules import RoundCounts
from rpa_tasks.models import Job, Shop
from rpa_tasks.tasks import publish_for_shops
from scheduling import sql
from scheduling.app_integrations import ScheduledRound
from scheduling.errors import InvalidInput
from scheduling.models import FailedTask
from tests.scheduling.core.programs import is_connected, program, waits_for_a_lock
from tests.support.integrations import replace_sockets
from tests.support.second_connection import act_on_second_connection, run_concurrently
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
plain = pytest.mark.django_db()  #: for a test that commits nothing

TASK = publish_for_shops.name
ORDER = {"platform": "pdd", "task_type": "sync_order"}
MINUTE = timedelta(minutes=1)
DUE_AT = datetime(2026, 3, 1, 10, tzinfo=UTC)
#: Publishes a shop at a time.
BEAT = f"""
import datetime, django
django.setup()
from django.db import connection
from rpa_tasks.jobs import schedules
connection.settings_dict["OPTIONS"]["application_name"] = "rounds"
schedules.wakeup_publisher.submit = lambda created: None
schedules.sql.limit_lock_waits = lambda seconds: None
schedules.MOST_SHOPS = 1
schedules.publish_round(1, {DUE_AT!r}, [], {ORDER!r})
"""


def publish(**changes):
    """Publish a round that falls due now."""
    return schedules.publish_round(1, sql.now(), [], ORDER | changes)


def invalid_fields(**changes):
    with pytest.raises(InvalidInput) as error:
        publish(**changes)
    return [each.field for each in error.value.errors]


@plain
def test_schedule_publishes_job_for_each_active_shop(market, sent_wakeups):
    market.shop("gone", retired_at=now())
    market.sync.payload_schema = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    market.sync.save()
    assert invalid_fields(payload={"n": "1"}) == ["payload.n"]
    assert invalid_fields() == ["payload"]
    told = publish(priority="low", payload={"n": 1}, due_seconds=3_600)
    assert told == RoundCounts(published=2)
    assert {(job.shop.shop_id, job.priority, job.source) for job in Job.objects.all()} == {
        ("s1", 2, "schedule"), ("s2", 2, "schedule"),
    }  # fmt: skip
    for job in Job.objects.all():
        assert job.payload == {"n": 1}
        assert timedelta(minutes=59) < job.deadline - job.created_at <= timedelta(minutes=60)


@plain
def test_schedule_leaves_waiting_job_unchanged(market, sent_wakeups):
    publish_job(
        PublishRequest(platform="pdd", shop_id="s1", task_type="sync_order", payload={"n": 1}, delay=MINUTE, priority=2)
    )
    before = Job.objects.values("due_at", "payload", "priority", "planned_at", "state").get()
    told = publish(payload={"n": 2}, priority="high")
    assert told == RoundCounts(published=1, waiting=1)
    assert (
        Job.objects.filter(shop=market.s1).values("due_at", "payload", "priority", "planned_at", "state").get()
        == before
    )
    assert Job.objects.get(shop=market.s1).requests == 2
    assert publish() == RoundCounts(waiting=2)


@plain
def test_schedule_without_dedupe_keeps_each_payload(market, sent_wakeups):
    """Two schedules of one flow; the same payload is still not published twice."""
    market.sync.dedupe_by = "none"
    market.sync.save()
    assert publish(payload={"n": 1}) == RoundCounts(published=2)
    assert publish(payload={"n": 2}) == RoundCounts(published=2)
    assert publish(payload={"n": 1}) == RoundCounts(waiting=2)
    assert publish(payload={"n": 3}, shops=["s2"]) == RoundCounts(published=1)
    assert sorted(job.payload["n"] for job in Job.objects.all()) == [1, 1, 2, 2, 3]


@plain
def test_schedule_publishes_behind_running_job(market, sent_wakeups):
    publish()
    Job.objects.filter(shop=market.s1).update(state="running", fresh=False, lease_until=now() + MINUTE)
    assert publish() == RoundCounts(published=1, waiting=1)


@plain
def test_schedule_skips_shop_with_full_backlog(market, sent_wakeups):
    Shop.objects.filter(pk=market.s1.pk).update(backlog_limit=1)
    publish_job(PublishRequest(platform="pdd", shop_id="s1", task_type="sync_order", dedupe_key="k", delay=MINUTE))
    assert publish() == RoundCounts(published=1, refused=1)


@plain
def test_schedule_fills_platform_backlog_to_its_limit(market, sent_wakeups):
    market.pdd.backlog_limit = 3
    market.pdd.save()
    for number in range(4):
        market.shop(f"n{number}")
    publish_job(PublishRequest(platform="pdd", shop_id="s1", task_type="sync_order", dedupe_key="k", delay=MINUTE))
    assert publish() == RoundCounts(published=2, refused=4)
    assert publish() == RoundCounts(waiting=2, refused=4)


@plain
def test_round_stores_same_row_as_publish_job(market, sent_wakeups, monkeypatch):
    """Two statements insert jobs; they must not drift apart."""
    for delay in (0, 120):
        Job.objects.all().delete()
        publish_job(
            PublishRequest(
                platform="pdd", shop_id="s1", task_type="sync_order", payload={"n": 1}, source="schedule",
                delay=timedelta(seconds=delay),
            )
        )  # fmt: skip
        monkeypatch.setattr(schedules, "spread_delay", lambda *_, delay=delay: timedelta(seconds=delay))
        publish(shops=["s2"], payload={"n": 1})
        one, other = Job.objects.order_by("pk").values()
        differing = {name for name in one if one[name] != other[name]}
        assert differing == {"task_id", "root_id", "shop_id", "created_at", "due_at", "planned_at"}
        for row in (one, other):
            assert row["root_id"] == row["task_id"]
            assert row["due_at"] - row["created_at"] == timedelta(seconds=delay)


def test_round_wakes_only_for_due_jobs(market, sent_wakeups, monkeypatch):
    monkeypatch.setattr(schedules, "spread_delay", lambda _, shop_id, *__: MINUTE * 10 * (shop_id == "s2"))
    publish(priority="high")
    assert [(wakeup.owner, wakeup.priority) for wakeup in sent_wakeups] == [(market.s1.pk, 0)]


def test_concurrent_rounds_publish_each_shop_once(market, sent_wakeups):
    """Two beats at the same moment, and a person who publishes into the middle of it."""
    Shop.objects.bulk_create(Shop(platform=market.pdd, shop_id=f"n{number}") for number in range(98))

    def act(number):
        try:
            if number == 0:
                publish_job(PublishRequest(platform="pdd", shop_id="n50", task_type="sync_order", delay=MINUTE))
                return RoundCounts()
            return publish()
        finally:
            connection.close()

    told = run_concurrently(8, act)
    assert Job.objects.count() == 100
    assert sum(each.published for each in told) in (99, 100)
    assert all(each.published + each.waiting == 100 and not each.refused for each in told[1:])


@plain
def test_schedule_spreads_shops_with_constant_delay(market, sent_wakeups):
    Shop.objects.bulk_create(Shop(platform=market.pdd, shop_id=f"n{number}") for number in range(58))
    assert publish(spread_seconds=600).published == 60
    due = {job.shop.shop_id: (job.due_at - job.created_at) for job in Job.objects.select_related("shop")}
    assert all(timedelta(0) <= delay < timedelta(seconds=600) for delay in due.values())
    quarters = [sum(delay // timedelta(seconds=150) == quarter for delay in due.values()) for quarter in range(4)]
    assert min(quarters) >= 5, quarters
    for shop_id, delay in due.items():
        assert abs(delay - schedules.spread_delay("pdd", shop_id, "sync_order", 600)) < timedelta(milliseconds=1)
    assert schedules.spread_delay("pdd", "s1", "sync_order", 600) == timedelta(seconds=283.19), "it never changes"
    assert schedules.spread_delay("pdd", "s1", "batch_reply", 600) != timedelta(seconds=283.19)


@plain
@each_row(
    "changes, field",
    [
        ({"platform": "temu"}, "platform"),
        ({"platform": None}, "platform"),
        ({"task_type": "bake"}, "task_type"),
        ({"task_type": 7}, "task_type"),
        ({"platform": "pdd\0"}, "platform"),
        ({"task_type": "\ud800"}, "task_type"),
        ({"shops": ["s1", "s\0"]}, "shops"),
        ({"shops": ["s1", "s9"]}, "shops"),
        ({"shops": []}, "shops"),
        ({"shops": "s1"}, "shops"),
        ({"shops": [1]}, "shops"),
        ({"shops": ["s1", "s1"]}, "shops"),
        ({"priority": "urgent"}, "priority"),
        ({"priority": 1}, "priority"),
        ({"priority": ["high"]}, "priority"),
        ({"payload": "x"}, "payload"),
        ({"due_seconds": 1}, "due_seconds"),
        ({"spread_seconds": -1}, "spread_seconds"),
        ({"spread_seconds": "600"}, "spread_seconds"),
        ({"spread_seconds": float("nan")}, "spread_seconds"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_schedule_with_invalid_order_publishes_nothing(market, changes, field):
    assert invalid_fields(**changes) == [field]
    assert not Job.objects.exists()


# --- beat -------------------------------------------------------------------------------------------------------------


def every_ten_minutes(**kwargs):
    interval, _ = IntervalSchedule.objects.get_or_create(every=10, period="minutes")
    return PeriodicTask.objects.create(
        name="sync",
        task=TASK,
        interval=interval,
        kwargs=json.dumps(kwargs),
        start_time=datetime(2026, 3, 1, tzinfo=UTC),
    )


@pytest.fixture
def rounds(monkeypatch):
    """The due times of the rounds that beat has published."""
    found, publish_round = [], schedules.publish_round

    def note(schedule_id, due_at, *given):
        counts = publish_round(schedule_id, due_at, *given)
        found.append(due_at)
        return counts

    rounds = ScheduledRound(schedules.check_arguments, note)
    replace_sockets(monkeypatch, scheduled_rounds={"rpa_tasks.publish_for_shops": rounds})
    return found


def end_jobs():
    Job.objects.update(state="succeeded", fresh=False, settled_at=now(), lease_until=None)


def tick_until_idle():
    with leading_beat() as scheduler:
        for _ in range(60):
            if scheduler.tick() > 0.5:
                break


def read_messages(valkey):
    return [raw for queue in ("ticks", "long") for raw in valkey.lrange(f"mq:{queue}", 0, -1)]


@contextmanager
def leading_beat():
    scheduler = LeaderScheduler(app=app)
    try:
        # The lock of the beat before goes with its backend, some time after its connection was closed.
        assert wait_until(lambda: bool(scheduler._holds_lock()), WAIT_LIMIT)
        yield scheduler
    finally:
        scheduler.close()


def test_due_periodic_task_publishes_round(market, valkey, sent_wakeups):
    row = every_ten_minutes(**ORDER, shops="all", priority="normal", spread_seconds=600)
    tick_until_idle()
    assert {job.shop.shop_id for job in Job.objects.all()} == {"s1", "s2"}
    assert not [raw for raw in read_messages(valkey) if b"publish_for_shops" in raw], "no message that may be lost"
    row.refresh_from_db()
    assert row.last_run_at is not None
    end_jobs()

    tick_until_idle()
    assert Job.objects.count() == 2  # ten minutes have not passed

    PeriodicTask.objects.filter(pk=row.pk).update(last_run_at=now() - timedelta(minutes=10))
    PeriodicTasks.update_changed()
    tick_until_idle()
    assert Job.objects.count() == 4


def test_invalid_periodic_task_becomes_failed_task(market, valkey, sent_wakeups):
    every_ten_minutes(platform="temu", task_type="sync_order")
    tick_until_idle()
    row = FailedTask.objects.get()
    assert (row.origin, row.reason, row.state) == ("message", "task_error", "open")
    assert TASK in str(row.payload)
    assert "platform: " in row.detail
    assert not Job.objects.exists()


# --- each round once --------------------------------------------------------------------------------------------------


@plain
@each_row("has_window", [False, True])
def test_repeated_round_publishes_no_job_twice(market, sent_wakeups, has_window):
    market.sync.dedupe_window = timedelta(hours=1) if has_window else None
    market.sync.dedupe_rerun = "always"
    market.sync.save()
    for _ in range(2):
        schedules.publish_round(1, DUE_AT, [], ORDER)
        end_jobs()
        assert Job.objects.count() == 2
    schedules.publish_round(2, DUE_AT, [], ORDER)
    end_jobs()
    schedules.publish_round(1, DUE_AT + MINUTE, [], ORDER)
    assert Job.objects.count() == 6


def test_round_of_killed_beat_is_completed_without_repeats(market, sent_wakeups):
    """A real process, killed between two statements; the job of the first one has ended by then."""
    with transaction.atomic():
        # A job of the second shop that is not committed yet: the insert waits for it.
        publish_job(PublishRequest(platform="pdd", shop_id="s2", task_type="sync_order"))
        with program(BEAT) as beat:
            assert wait_until(lambda: act_on_second_connection(lambda: waits_for_a_lock("rounds")), WAIT_LIMIT)
            beat.kill()
        first = act_on_second_connection(lambda: list(Job.objects.values_list("shop_id", flat=True)))
        transaction.set_rollback(True)
    assert wait_until(lambda: not is_connected("rounds"), WAIT_LIMIT)
    assert first == [market.s1.pk]
    end_jobs()

    assert schedules.publish_round(1, DUE_AT, [], ORDER).published == 1
    assert sorted(Job.objects.values_list("shop_id", flat=True)) == [market.s1.pk, market.s2.pk]


def test_beat_killed_before_save_publishes_each_round_once(market, valkey, sent_wakeups, rounds):
    """A round of an interval, and one of a fixed time that is published once."""
    every_ten_minutes(**ORDER)
    market.flow("refresh")
    clocked = ClockedSchedule.objects.create(clocked_time=now() - MINUTE)
    order = json.dumps(ORDER | {"task_type": "refresh"})
    PeriodicTask.objects.create(name="once", task=TASK, clocked=clocked, one_off=True, kwargs=order)
    PeriodicTask.objects.filter(name="sync").update(last_run_at=now() - timedelta(minutes=15))
    stored = ("name", "last_run_at", "total_run_count", "date_changed", "enabled")
    before = {row.pop("name"): row for row in PeriodicTask.objects.values(*stored)}
    tick_until_idle()
    end_jobs()
    for name, row in before.items():  # as the next leader would read them
        PeriodicTask.objects.filter(name=name).update(**row)
    PeriodicTasks.update_changed()
    tick_until_idle()
    assert before["sync"]["last_run_at"] + timedelta(minutes=10) in rounds
    assert sorted(rounds[:2]) == sorted(rounds[2:])
    assert Job.objects.count() == 4


def fail_with(error, times, monkeypatch):
    """Let the rounds of the first schedule fail. Return their due times, which grow."""
    tries, publish_round = [], schedules.publish_round

    def fail(schedule_id, due_at, *given):
        if PeriodicTask.objects.get(pk=schedule_id).name != "sync":
            return publish_round(schedule_id, due_at, *given)
        tries.append(due_at)
        if len(tries) <= times:
            raise error
        return publish_round(schedule_id, due_at, *given)

    rounds = ScheduledRound(schedules.check_arguments, fail)
    replace_sockets(monkeypatch, scheduled_rounds={"rpa_tasks.publish_for_shops": rounds})
    monkeypatch.setattr(LeaderScheduler, "RETRY_SECONDS", 0.1)
    return tries


def exceed_statement_timeout():
    with pytest.raises(OperationalError) as caught, sql.limit_statement_time(0.001):
        sql.rows("SELECT pg_sleep(60)", {})
    return caught.value


def test_round_sent_by_hand_is_not_tried_again(market, sent_wakeups, monkeypatch):
    """Jobs that ended since the lost answer would run a second time."""
    tries, publish_round = [], schedules.publish_round

    def lose_answer(*given):
        tries.append(publish_round(*given))
        raise OperationalError("the connection was lost")

    monkeypatch.setattr(schedules, "publish_round", lose_answer)
    assert publish_for_shops.apply(kwargs=ORDER).state == "FAILURE"
    assert [each.published for each in tries] == [Shop.objects.count()]
    assert FailedTask.objects.get().reason == "task_error"


def test_round_that_fails_stops_no_other_and_is_published_later(market, valkey, sent_wakeups, monkeypatch):
    """An outage of PostgreSQL lasts as long as it does. The round is published late, under its due time."""
    row, before = every_ten_minutes(**ORDER), now() - timedelta(minutes=15)
    other = PeriodicTask.objects.create(name="other", task=TASK, interval=row.interval, kwargs=json.dumps(ORDER))
    PeriodicTask.objects.update(last_run_at=before)
    tries = fail_with(OperationalError("the server is starting up"), LeaderScheduler.TRIES * 2, monkeypatch)
    with leading_beat() as beat:
        for entry in beat._passes.values():
            entry.last_run_at -= timedelta(hours=1)
        assert wait_until(lambda: beat.tick() >= 0 and len(tries) >= 3, WAIT_LIMIT, pause=0)
        other.refresh_from_db()
        assert other.last_run_at > before
        assert {json.loads(raw)["headers"]["task"] for raw in read_messages(valkey)} >= PASSES
        end_jobs()
        assert wait_until(lambda: beat.tick() >= 0 and len(tries) > LeaderScheduler.TRIES * 2, WAIT_LIMIT, pause=0)
    assert set(tries) == {before + timedelta(minutes=10)}
    assert (Job.objects.count(), FailedTask.objects.count()) == (4, 0)
    row.refresh_from_db()
    assert row.last_run_at > before


def test_passes_go_before_the_next_round_after_a_long_one(market, valkey, sent_wakeups, monkeypatch):
    """The rounds of fifty schedules held back dispatch and rescue for as long as they took together."""
    row = every_ten_minutes(**ORDER)
    PeriodicTask.objects.create(name="other", task=TASK, interval=row.interval, kwargs=json.dumps(ORDER))
    PeriodicTask.objects.update(last_run_at=now() - timedelta(minutes=15))
    monkeypatch.setattr(LeaderScheduler, "LONG_ROUND", -1.0)
    applied = []
    apply_entry = LeaderScheduler.apply_entry

    def note(self, entry, producer=None):
        applied.append(entry.name)
        if entry.name in ("sync", "other"):
            for each in self._passes.values():  # they fall due during the round
                each.last_run_at -= timedelta(hours=1)
        apply_entry(self, entry, producer=producer)

    monkeypatch.setattr(LeaderScheduler, "apply_entry", note)
    with leading_beat() as beat:
        assert wait_until(lambda: beat.tick() >= 0 and {"sync", "other"} <= set(applied), WAIT_LIMIT, pause=0)
        first, second = sorted(map(applied.index, ("sync", "other")))
        assert set(beat._passes) <= set(applied[first:second])


@pytest.mark.parametrize("is_timeout", [False, True])
def test_round_with_repeated_errors_becomes_failed_task(market, valkey, sent_wakeups, monkeypatch, is_timeout):
    row = every_ten_minutes(**ORDER)
    tries = fail_with(exceed_statement_timeout() if is_timeout else RuntimeError("odd"), 99, monkeypatch)
    with leading_beat() as beat:
        assert wait_until(lambda: beat.tick() >= 0 and FailedTask.objects.exists(), WAIT_LIMIT, pause=0)
    assert len(tries) == LeaderScheduler.TRIES
    assert is_timeout or FailedTask.objects.get().detail == "RuntimeError: odd"
    row.refresh_from_db()
    assert row.last_run_at  # the next round is due in its time


def test_last_run_of_schedule_is_saved_at_once(market, valkey, sent_wakeups, rounds):
    """A beat that starts again would publish the row a second time."""
    row = every_ten_minutes(**ORDER)
    before = now() - timedelta(minutes=15)
    PeriodicTask.objects.filter(pk=row.pk).update(last_run_at=before)
    with leading_beat() as scheduler:
        scheduler._last_sync = time.monotonic()  # beat has just saved what it knows
        assert wait_until(lambda: scheduler.tick() >= 0 and bool(rounds), WAIT_LIMIT, pause=0)
        row.refresh_from_db()  # before the end, which saves everything
    assert row.last_run_at > before


def test_round_that_fell_due_while_beat_was_down_is_published_once_and_late(market, valkey, sent_wakeups, rounds):
    """The latest of them, however long beat was down, by the clock of its zone."""
    row = PeriodicTask.objects.create(
        name="daily", task=TASK, kwargs=json.dumps(ORDER), total_run_count=3,
        crontab=CrontabSchedule.objects.create(minute="0", hour="8", timezone="Asia/Shanghai"),
    )  # fmt: skip
    PeriodicTask.objects.update(last_run_at=now() - timedelta(days=3, hours=1), date_changed=now() - timedelta(days=9))
    tick_until_idle()
    tick_until_idle()
    assert rounds == [now().replace(hour=0, minute=0, second=0, microsecond=0)]
    row.refresh_from_db()
    assert row.total_run_count == 4


def test_edited_schedule_publishes_no_round_from_before_the_edit(market, valkey, rounds):
    PeriodicTask.objects.create(
        name="daily", task=TASK, kwargs=json.dumps(ORDER), total_run_count=3, last_run_at=now() - timedelta(days=3),
        crontab=CrontabSchedule.objects.create(minute="0", hour="0", timezone="UTC"),
    )  # fmt: skip
    tick_until_idle()
    assert not rounds


def test_unusable_rows_stop_neither_passes_nor_other_schedules(market, valkey, sent_wakeups, monkeypatch, rounds):
    """Beat ended at each start, and no touch was dispatched any more."""
    monkeypatch.setattr(LeaderScheduler, "ASK_EVERY", 0.0)
    every_ten_minutes(**ORDER)
    hourly = {"interval": IntervalSchedule.objects.create(every=1, period="hours")}
    rows = [
        {"solar": SolarSchedule.objects.create(event="solar_noon", latitude=31.2, longitude=121.5)},
        {"crontab": CrontabSchedule.objects.create(day_of_month="31", month_of_year="2")},
        {"crontab": CrontabSchedule.objects.create(hour="9")},
        {"interval": IntervalSchedule.objects.create(every=0, period="seconds")},
        {"clocked": ClockedSchedule.objects.create(clocked_time=now() - timedelta(days=9999))},
        {**hourly, "task": "shop.unknown"},
        {**hourly, "args": "no JSON"},
    ]
    PeriodicTask.objects.bulk_create(
        PeriodicTask(**{"name": f"bad {number}", "task": TASK, **row}) for number, row in enumerate(rows)
    )
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_celery_beat_crontabschedule SET timezone = 'Mars/Olympus' WHERE hour = '9'")
    with capture_logs() as logs, leading_beat() as beat:
        for entry in beat._passes.values():
            entry.last_run_at -= timedelta(hours=1)
        for _ in range(60):
            beat.tick()
        PeriodicTasks.update_changed()
        for _ in range(5):
            beat.tick()
    sent = {json.loads(raw)["headers"]["task"] for raw in read_messages(valkey)}
    assert sent >= PASSES
    assert len(rounds) == 1
    skipped = [each["schedule"] for each in logs if each["event"] == "schedule_skipped"]
    assert sorted(skipped) == [f"bad {number}" for number in range(len(rows))]
    assert PeriodicTask.objects.filter(name__startswith="bad", enabled=True).count() == len(rows)


@pytest.mark.parametrize("action", ["enable_tasks", "edit"])
def test_reenabled_fixed_time_publishes_second_round(market, valkey, sent_wakeups, action, rounds):
    """Its clock time stays the same. The action on the list updates the row without dating it."""
    clocked = ClockedSchedule.objects.create(clocked_time=now() - MINUTE)
    row = PeriodicTask.objects.create(name="once", task=TASK, clocked=clocked, one_off=True, kwargs=json.dumps(ORDER))
    PeriodicTask.objects.update(date_changed=clocked.clocked_time - MINUTE)
    tick_until_idle()
    tick_until_idle()  # a beat that finds a fixed time that has run disables it
    row.refresh_from_db()
    assert not row.enabled
    assert rounds == [clocked.clocked_time]
    end_jobs()

    if action == "edit":
        row.enabled = True
        row.save()
    else:
        PeriodicTask.objects.filter(pk=row.pk).update(enabled=True)
        PeriodicTasks.update_changed()
    tick_until_idle()

    assert rounds[1] > rounds[0]
    assert Job.objects.count() == 4


def test_passes_of_beat_have_no_expiry(market, valkey):
    """Celery compares it with the worker's clock: one that is seconds ahead would drop every pass."""
    scheduler = LeaderScheduler(app=app)
    try:
        for entry in (each for each in scheduler.schedule.values() if each.task in PASSES):
            scheduler.apply_entry(entry, producer=scheduler.producer)
    finally:
        scheduler.close()
    messages = [json.loads(raw)["headers"] for raw in read_messages(valkey)]
    assert {each["task"] for each in messages} == PASSES
    assert {each["expires"] for each in messages} == {None}


# --- the admin --------------------------------------------------------------------------------------------------------


def save_in_admin(**changes):
    browser = Browser()
    browser.force_login(get_user_model().objects.create_superuser("ann"))
    interval, _ = IntervalSchedule.objects.get_or_create(every=10, period="minutes")
    form = {
        "name": "sync", "regtask": TASK, "task": "", "enabled": "on", "interval": interval.pk, "args": "[]",
        "kwargs": json.dumps(ORDER), "headers": "{}", "priority": "",
    }  # fmt: skip
    return browser.post("/admin/django_celery_beat/periodictask/add/", form | changes, HTTP_ACCEPT_LANGUAGE="en")


@plain
def test_admin_saves_valid_periodic_task(market):
    answer = save_in_admin()
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    assert PeriodicTask.objects.get(name="sync").task == TASK


@plain
@each_row(
    "changes, field, said",
    [
        ({"kwargs": '{"platform": "temu", "task_type": "sync_order"}'}, "kwargs", "there is no platform “temu”"),
        ({"kwargs": '{"platform": "pdd", "task_type": "sync_order", "shops": ["s9"]}'}, "kwargs", "no shop “s9”"),
        ({"kwargs": "[1]"}, "kwargs", "must be a mapping"),
        ({"args": '["pdd"]'}, "args", "name every argument"),
        ({"kwargs": "{"}, "kwargs", "JSON"),
    ],
)
def test_admin_refuses_invalid_periodic_task(market, changes, field, said):
    answer = save_in_admin(**changes)
    assert answer.status_code == 200
    assert said in str(answer.context["adminform"].form.errors[field])
    assert not PeriodicTask.objects.filter(name="sync").exists()


def test_leader_connection_sets_tcp_timeouts(market, valkey):
    """By PostgreSQL, which would wait for two hours unless the session sets a limit."""
    scheduler = LeaderScheduler(app=app)
    try:
        scheduler.tick()
        assert scheduler._lock_connection is not None
        asked = [
            scheduler._lock_connection.execute(f"SHOW {name}").fetchone()
            for name in ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
        ]
    finally:
        scheduler.close()
    assert asked == [("5",), ("5",), ("3",), ("20000",)]
