"""Rounds of crontabs over changes of clocks and outages, and rows that beat cannot use."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from celery import current_app
from django.db import connection
from django.utils.timezone import now
from django.utils.translation import override
from django_celery_beat.models import ClockedSchedule, CrontabSchedule, IntervalSchedule, PeriodicTask
from django_celery_beat.tzcrontab import TzAwareCrontab

from scheduling.operations.periodic_rows import RoundCrontab, RowEntry, UnusableRow, check_row, find_problem
from tests.support.tables import each_row

NEW_YORK, SHANGHAI, BERLIN = ZoneInfo("America/New_York"), ZoneInfo("Asia/Shanghai"), ZoneInfo("Europe/Berlin")


def crontab(line, zone=NEW_YORK):
    minute, hour, day, month, weekday = line.split()
    return RoundCrontab(TzAwareCrontab(minute, hour, weekday, day, month, tz=zone))


def rounds(rule, after, until):
    found, at = [], after
    while (at := rule.next_due(at)) <= until:
        found.append(at.astimezone(rule.tz).strftime("%d %H:%M%z"))
    return found


@each_row(
    "line, expected",
    [
        ("30 1 * * *", ["31 01:30-0400", "01 01:30-0400", "02 01:30-0500"]),  # 01:30 occurs twice on 1 November
        ("0 2 * * *", ["31 02:00-0400", "01 02:00-0500", "02 02:00-0500"]),
        ("0 12 * * sun", ["01 12:00-0500"]),
    ],
)
def test_round_in_a_repeated_hour_falls_due_once(line, expected):
    begins_at = datetime(2026, 10, 31, tzinfo=NEW_YORK)
    assert rounds(crontab(line), begins_at, begins_at + timedelta(days=3)) == expected


def test_hourly_rounds_follow_real_time_when_clocks_change():
    for day in (datetime(2026, 11, 1, tzinfo=NEW_YORK), datetime(2026, 3, 8, tzinfo=NEW_YORK)):
        rule, at, found = crontab("15 * * * *"), day.astimezone(UTC), []
        for _ in range(6):
            at = rule.next_due(at)
            found.append(at)
        assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(hours=1)}


@each_row(
    "line, expected",
    [
        ("0 * * * 1-5", ["2026-03-30 00:00", "2026-10-26 00:00"]),
        ("30 * * * sun", ["2026-03-29 00:30", "2026-10-25 00:30"]),
        ("* * 1 4 *", ["2026-04-01 00:00", "2027-04-01 00:00"]),
    ],
)
def test_hourly_rounds_of_days_keep_to_their_days_when_clocks_change(line, expected):
    rule = crontab(line, BERLIN)  # the clock changes on 29 March and 25 October
    fridays = [datetime(2026, 3, 27, 23, 30, tzinfo=BERLIN), datetime(2026, 10, 23, 23, 30, tzinfo=BERLIN)]
    assert [f"{rule.next_due(at).astimezone(BERLIN):%Y-%m-%d %H:%M}" for at in fridays] == expected


def test_round_in_a_skipped_hour_falls_due_later():
    begins_at = datetime(2026, 3, 7, 12, tzinfo=NEW_YORK)  # at 02:00 on 8 March the clock goes to 03:00
    assert rounds(crontab("30 2 * * *"), begins_at, begins_at + timedelta(days=2)) == ["08 03:30-0400", "09 02:30-0400"]
    assert rounds(crontab("30 2,3 * * *"), begins_at, begins_at + timedelta(days=1)) == ["08 03:30-0400"]
    each = rounds(crontab("*/20 2 * * *"), begins_at, begins_at + timedelta(days=1))
    assert each == ["08 03:00-0400", "08 03:20-0400", "08 03:40-0400"]


@each_row(
    "line, down_for, latest",
    [
        ("0 9 * * *", timedelta(days=3), "2026-06-10 09:00"),
        ("*/5 * * * *", timedelta(days=3), "2026-06-10 12:00"),
        ("0 9 1 * *", timedelta(days=60), "2026-06-01 09:00"),
        ("0 9 1 1 *", timedelta(days=500), "2026-01-01 09:00"),
        ("0 9 * * *", timedelta(hours=1), None),
        ("0 12 * * *", timedelta(hours=1), "2026-06-10 12:00"),
    ],
)
def test_latest_of_the_missed_rounds_is_due(line, down_for, latest):
    at = datetime(2026, 6, 10, 12, tzinfo=SHANGHAI)
    found = crontab(line, SHANGHAI).latest_due(at - down_for, at)
    assert (found and found.astimezone(SHANGHAI).strftime("%Y-%m-%d %H:%M")) == latest


# --- rows -------------------------------------------------------------------------------------------------------------


def build_row(**changes):
    given = {"name": "sync", "task": "scheduling.dispatch_due", "interval": IntervalSchedule(every=1, period="hours")}
    return PeriodicTask(**given | changes)


UNUSABLE = [
    ({"interval": None, "solar_id": 1}, "Solar"),
    ({"interval": None}, "no schedule"),
    ({"interval": IntervalSchedule(every=0, period="hours")}, "shorter than a second"),
    ({"interval": IntervalSchedule(every=5, period="microseconds")}, "shorter than a second"),
    ({"interval": IntervalSchedule(every=1, period="fortnights")}, "invalid"),
    ({"interval": None, "crontab": CrontabSchedule(day_of_month="31", month_of_year="2")}, "invalid"),
    ({"interval": None, "crontab": CrontabSchedule(minute="61")}, "invalid"),
    ({"interval": None, "clocked": ClockedSchedule(clocked_time=datetime(1, 1, 1, tzinfo=UTC))}, "one-off"),
    ({"args": "{"}, "args"),
    ({"kwargs": "[1]"}, "kwargs"),
    ({"kwargs": "NaN"}, "kwargs"),
    ({"headers": "x"}, "headers"),
    ({"headers": '{"a": {"__type__": "datetime", "__value__": "bad"}}'}, "headers"),
    ({"kwargs": '{"price": {"__type__": "decimal", "__value__": "1.50"}}'}, "kwargs"),
    ({"interval": IntervalSchedule(every=500_000_000, period="days")}, "invalid"),
    ({"kwargs": '{"price": {"__type__": "unknown", "__value__": "1.50"}}'}, "kwargs"),
    ({"task": "shop.unknown"}, "no task shop.unknown"),
    ({"args": "[1, 2, 3, 4]"}, "does not take its arguments"),
]


def test_rows_that_beat_cannot_use_are_refused_with_the_reason():
    find_problem(build_row())  # imports the tasks
    for changes, reason in UNUSABLE:
        with override("en"), pytest.raises(UnusableRow, match=reason):
            check_row(build_row(**changes), current_app)


def test_row_with_a_long_past_time_is_usable():
    clocked = ClockedSchedule(clocked_time=datetime(1990, 1, 1, tzinfo=UTC))
    assert find_problem(build_row(interval=None, clocked=clocked, one_off=True, enabled=True)) == ""


def test_round_at_the_start_time_falls_due():
    start = datetime(2026, 6, 1, 9, tzinfo=SHANGHAI)
    row = build_row(
        interval=None, start_time=start, date_changed=start - timedelta(days=9),
        crontab=CrontabSchedule(minute="0", hour="9", timezone=SHANGHAI),
    )  # fmt: skip
    entry = RowEntry(row, current_app)
    assert entry.schedule.next_due(entry.last_run_at) == start


@pytest.mark.django_db
def test_row_with_an_unknown_time_zone_is_refused():
    stored = CrontabSchedule.objects.create(hour="9", timezone="Asia/Shanghai")
    row = PeriodicTask.objects.create(name="sync", task="scheduling.dispatch_due", crontab=stored, date_changed=now())
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_celery_beat_crontabschedule SET timezone = 'Mars/Olympus'")
    row = PeriodicTask.objects.get(pk=row.pk)
    assert "Mars/Olympus" in find_problem(row)
    row.enabled = False
    assert find_problem(row) == ""
