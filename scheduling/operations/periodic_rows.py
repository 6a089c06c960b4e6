"""Read the periodic tasks that operators store. A row that beat cannot use is refused with the reason.

django-celery-beat reads all rows at once: one that raises, such as a solar schedule or 31 February, would end beat.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from functools import cache
from importlib import resources
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery, current_app
from celery.schedules import crontab, schedstate
from celery.schedules import schedule as interval
from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _
from django_celery_beat.clockedschedule import clocked
from django_celery_beat.models import CrontabSchedule, PeriodicTask
from django_celery_beat.schedulers import ModelEntry
from django_celery_beat.tzcrontab import TzAwareCrontab

from scheduling.strict_text import InvalidText, read_json

SHORTEST = timedelta(seconds=1)  #: interval
#: Spans in which the latest round that fell due is searched: few rounds lie in one, and none in the shorter ones.
SPANS = [timedelta(hours=1), timedelta(days=1), timedelta(days=8), timedelta(days=32), timedelta(days=400)]


class UnknownZone(ZoneInfo):
    """A stored time zone that this machine does not know. It keeps its name and counts as UTC."""


def allow_unknown_time_zones() -> None:
    """Read crontabs in a time zone that this machine does not know. One would make all rows unreadable."""
    field: Any = CrontabSchedule._meta.get_field("timezone")
    read_zone = field.from_db_value

    def read_any_zone(value: str, *args: Any) -> ZoneInfo:
        try:
            return read_zone(value, *args)  # type: ignore[no-any-return]
        except ValidationError:
            with resources.files("tzdata.zoneinfo").joinpath("UTC").open("rb") as utc:
                return UnknownZone.from_file(utc, key=value)

    field.from_db_value = read_any_zone


class UnusableRow(Exception):
    """Beat cannot use this row. The text gives the reason, translated."""


class RoundCrontab(TzAwareCrontab):  # type: ignore[misc]
    """A crontab in its time zone, whose rounds are neither lost nor repeated when clocks change.

    A wall time that the clock skips counts from the offset before the change, so it falls due later on that day. A wall
    time that occurs twice counts at its first occurrence. A crontab for each hour follows real time. Of the rounds that
    fell due while beat was down, the latest one is due at once.
    """

    def __init__(self, rule: TzAwareCrontab) -> None:
        fields = [
            rule._orig_minute, rule._orig_hour, rule._orig_day_of_week, rule._orig_day_of_month,
            rule._orig_month_of_year,
        ]  # fmt: skip
        super().__init__(*fields, tz=rule.tz)
        self._wall = TzAwareCrontab(*fields, tz=UTC)  # computes with wall times, as if they were UTC

    def next_due(self, after: datetime) -> datetime:
        """Return the first instant after `after` at which a round falls due."""
        local = after.astimezone(self.tz)
        zone = timezone(local.utcoffset() or timedelta(0)) if len(self.hour) == 24 else self.tz
        wall = local.replace(tzinfo=UTC, fold=0)
        while True:
            begins_at, delta, _now = self._wall.remaining_delta(wall)
            wall = begins_at + delta
            at: datetime = wall.replace(tzinfo=zone).astimezone(UTC)
            if at > after:
                return at

    def latest_due(self, after: datetime, now: datetime) -> datetime | None:
        """Return the last instant after `after`, up to `now`, at which a round fell due."""
        for span in SPANS:
            found, at = None, self.next_due(max(after, now - span))
            while at <= now:
                found, at = at, self.next_due(at)
            if found or now - span <= after:
                return found
        return None

    def is_due(self, last_run_at: datetime) -> schedstate:
        now = datetime.now(UTC)
        at = self.next_due(last_run_at)
        due = at <= now
        return schedstate(due, ((self.next_due(now) if due else at) - now).total_seconds())


class RowEntry(ModelEntry):  # type: ignore[misc]
    """A row as an entry of beat.

    Raises:
        UnusableRow: beat cannot use the row.
    """

    schedule: Any

    def __init__(self, model: PeriodicTask, app: Celery | None = None) -> None:
        check_row(model, app or current_app)
        super().__init__(model, app=app)
        if isinstance(self.schedule, crontab):
            self.schedule = RoundCrontab(self.schedule)
            # An edit starts anew: a round that fell due before it was not asked for.
            self.last_run_at = max(filter(None, (model.last_run_at, model.date_changed, model.start_time)))

    def save(self) -> None:
        """Store the run alone. The library stores the whole row, and with it what an operator has edited since."""
        PeriodicTask.objects.filter(pk=self.model.pk).update(
            last_run_at=self.model.last_run_at, total_run_count=self.model.total_run_count
        )

    def due_instant(self) -> datetime:
        """Return when it fell due: the same time on every beat that has read the same row.

        A fixed time keeps its due time when an operator enables it again. Beat disables the row after its bulk publish,
        which sets the row's date. A row changed after its time is therefore due at that change.
        """
        if isinstance(self.schedule, clocked):
            return max(self.schedule.clocked_time, self.model.date_changed)  # type: ignore[no-any-return]
        if isinstance(self.schedule, RoundCrontab):
            now = datetime.now(UTC)
            return self.schedule.latest_due(self.last_run_at, now) or now
        return self.last_run_at + self.schedule.run_every  # type: ignore[no-any-return]


def check_row(row: PeriodicTask, app: Celery) -> None:
    """Check what beat would fail on, or repeat without end.

    Raises:
        UnusableRow: beat cannot use the row.
    """
    if row.solar_id:
        raise UnusableRow(_("Solar schedules are not supported. Choose a crontab."))
    if row.task not in app.tasks:
        raise UnusableRow(_("There is no task %(task)s.") % {"task": row.task})
    for name, kind in (("args", list), ("kwargs", dict), ("headers", dict)):
        try:
            value = read_json(getattr(row, name) or "[]") if kind is list else read_json(getattr(row, name) or "{}")
        except InvalidText:
            value = None
        if not isinstance(value, kind):
            raise UnusableRow(_("%(field)s is not valid JSON of its kind.") % {"field": name})
    try:
        if row.scheduler is None:
            raise UnusableRow(_("It has no schedule."))
        schedule = row.schedule
        if isinstance(schedule, crontab):
            if isinstance(schedule.tz, UnknownZone):
                raise UnusableRow(_("There is no time zone %(name)s.") % {"name": schedule.tz})
            RoundCrontab(schedule).next_due(datetime.now(UTC))
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise UnusableRow(_("Its schedule is invalid: %(error)s") % {"error": error}) from error
    if type(schedule) is interval and schedule.run_every < SHORTEST:
        raise UnusableRow(_("Its interval is shorter than a second."))
    if isinstance(schedule, clocked) and not row.one_off:
        raise UnusableRow(_("A fixed time needs “one-off”. It would run without end."))


def find_problem(row: PeriodicTask) -> str:
    """Return why beat skips an enabled row, or ""."""
    _import_tasks()
    try:
        check_row(row, current_app)
    except UnusableRow as error:
        return str(error) if row.enabled else ""
    return ""


@cache
def _import_tasks() -> None:
    """Beat and workers import all tasks at their start, a web process does not."""
    current_app.loader.import_default_modules()
