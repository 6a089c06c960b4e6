"""A crontab in the words of whoever reads it."""

from __future__ import annotations

from cron_descriptor import (  # type: ignore[import-untyped]
    ExpressionDescriptor,
    FormatException,
    MissingFieldException,
    Options,
    WrongArgumentException,
)
from django.utils.dates import MONTHS, WEEKDAYS
from django.utils.translation import get_language, override
from django_celery_beat.models import CrontabSchedule, cronexp

LOCALES = {"zh-hans": "zh_CN"}


def in_words(row: CrontabSchedule) -> str:
    """`*/5 9-18 * * 1-5` → every five minutes between nine and seven, Monday to Friday, and the time zone."""
    parts = (row.minute, row.hour, row.day_of_month, row.month_of_year, row.day_of_week)
    line = " ".join(cronexp(each) for each in parts)
    options = Options()
    options.locale_code = LOCALES.get(get_language() or "", "en_US")
    options.use_24hour_time_format = True
    try:
        said = ExpressionDescriptor(line, options).get_description()
    except (FormatException, MissingFieldException, WrongArgumentException):
        said = line
    return f"{_with_names_of_days(said)} ({row.timezone})"


def _with_names_of_days(said: str) -> str:
    """The library takes the names of days and months from the system's language, and its commas from English."""
    names = [*WEEKDAYS.values(), *MONTHS.values()]
    with override("en"):
        english = [str(name) for name in names]
    for before, name in zip(english, names, strict=True):
        said = said.replace(before, str(name))
    return said.replace(", ", "，").replace(" 到 ", "到") if get_language() in LOCALES else said
