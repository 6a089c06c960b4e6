"""Read the periodic tasks that operators store. A row that beat cannot use is refused with the reason.

django-celery-beat reads all rows at once: one that raises, such as a solar schedule or 31 February, would end beat.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from importlib import resources
from itertools import product, takewhile
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery, current_app
from celery.schedules import crontab, schedstate
from celery.schedules import schedule as interval
from django.core.exceptions import ValidationError
from django_celery_beat.clockedschedule import clocked
from django_celery_beat.models import CrontabSchedule, PeriodicTask
from django_celery_beat.schedulers import ModelEntry
from django_celery_beat.tzcrontab import TzAwareCrontab
from kombu.utils.json import loads

from scheduling.error_text import ErrorText as _
from scheduling.strict_text import InvalidText, read_json

SHORTEST = timedelta(seconds=1)  #: interval
MOST_DAYS = 40 * 366  #: between two rounds; 29 February on a Sunday comes every 28 years, and later around 2100
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
        super().__init__(
            rule._orig_minute, rule._orig_hour, rule._orig_day_of_week, rule._orig_day_of_month,
            rule._orig_month_of_year, tz=rule.tz,
        )  # fmt: skip

    def next_due(self, after: datetime) -> datetime:
        """Return the first instant after `after` at which a round falls due."""
        return next(self._list_rounds(after))

    def latest_due(self, after: datetime, now: datetime) -> datetime | None:
        """Return the last instant after `after`, up to `now`, at which a round fell due."""
        for span in SPANS:
            rounds = takewhile(lambda at: at <= now, self._list_rounds(max(after, now - span)))
            if found := list(rounds):
                return found[-1]
            if now - span <= after:
                break
        return None

    def _list_rounds(self, after: datetime) -> Iterator[datetime]:
        """Yield the rounds after an instant in order. Raises `ValueError` if none falls due in the next decades."""
        first = after.astimezone(self.tz).date()
        list_rounds = self._list_minutes if len(self.hour) == 24 else self._list_wall_times
        for day in (first + timedelta(days=number) for number in range(MOST_DAYS)):
            if (
                day.month in self.month_of_year and day.day in self.day_of_month
                and day.isoweekday() % 7 in self.day_of_week
            ):  # fmt: skip
                yield from list_rounds(day, after)
        raise ValueError(_("it never falls due"))

    def _list_wall_times(self, day: date, after: datetime) -> list[datetime]:
        times = (time(hour, minute) for hour, minute in product(self.hour, self.minute))
        return sorted({at for each in times if (at := self._convert(day, each)) > after})

    def _list_minutes(self, day: date, after: datetime) -> Iterator[datetime]:
        """Yield the minutes of a local day in real time."""
        at = max(self._convert(day, time(0)), after.replace(second=0, microsecond=0) + timedelta(minutes=1))
        end = self._convert(day + timedelta(days=1), time(0))
        while at < end:
            if at.astimezone(self.tz).minute in self.minute:
                yield at
            at += timedelta(minutes=1)

    def _convert(self, day: date, wall: time) -> datetime:
        return datetime.combine(day, wall, self.tz).astimezone(UTC)

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
            # An edit starts anew: a round that fell due before it was not asked for. One at the start is.
            start = model.start_time and model.start_time - timedelta(microseconds=1)
            self.last_run_at = max(filter(None, (model.last_run_at, model.date_changed, start)))

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


def read_call(row: PeriodicTask, app: Celery) -> tuple[list[Any], dict[str, Any]]:
    """Return the args and kwargs of the task, which must take them.

    Raises:
        UnusableRow: there is no such task, or it does not take them.
    """
    if row.task not in app.tasks:
        raise UnusableRow(_("There is no task %(task)s.", task=row.task))
    values = []
    for name, empty in (("args", "[]"), ("kwargs", "{}"), ("headers", "{}")):
        text = getattr(row, name) or empty
        try:
            values.append(value := read_json(text))
            # Kombu's reader makes other objects of `__type__`.
            is_plain = value == loads(text)  # type: ignore[no-untyped-call]
        except (InvalidText, ValueError, TypeError):
            is_plain = False
        if not is_plain or not isinstance(value, type(read_json(empty))):
            raise UnusableRow(_("%(field)s is not valid JSON of its kind.", field=name))
    args, kwargs, _headers = values
    task = app.tasks[row.task]
    if (check := getattr(task, "__header__", None)) and task.typing:  # None of a task without a function
        try:
            check(*args, **kwargs)
        except TypeError as error:
            raise UnusableRow(_("The task does not take its arguments: %(error)s", error=error)) from error
    return args, kwargs


def check_row(row: PeriodicTask, app: Celery) -> None:
    """Check what beat would fail on, or repeat without end.

    Raises:
        UnusableRow: beat cannot use the row.
    """
    if row.solar_id:
        raise UnusableRow(_("Solar schedules are not supported. Choose a crontab."))
    read_call(row, app)
    try:
        if row.scheduler is None:
            raise UnusableRow(_("It has no schedule."))
        schedule = row.schedule
        if isinstance(schedule, crontab):
            if isinstance(schedule.tz, UnknownZone):
                raise UnusableRow(_("There is no time zone %(name)s.", name=schedule.tz))
            RoundCrontab(schedule).next_due(datetime.now(UTC))
        elif isinstance(schedule, interval):
            datetime.now(UTC) + schedule.run_every  # overflows
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise UnusableRow(_("Its schedule is invalid: %(error)s", error=error)) from error
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
