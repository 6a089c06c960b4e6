"""Compute the days and months in which a vendor counts messages, in the server's time zone (`TIME_ZONE`)."""

from __future__ import annotations

from datetime import date, datetime, timedelta

from django.utils.timezone import get_default_timezone

LONGEST_PLAN = timedelta(days=100)  #: no slot is planned further ahead
SKEW = timedelta(hours=1)  #: most that the clocks of this node and of Redis may differ


def list_period_starts(period: str, now: datetime, longest: timedelta) -> list[datetime]:
    """Return the starts of the periods ("day" or "month") from now until `longest` later, and the end of the last."""
    latest = now + min(longest, LONGEST_PLAN) + SKEW
    day = (now - SKEW).astimezone(get_default_timezone()).date()
    found = [_start_of(day if period == "day" else day.replace(day=1))]
    while found[-1] <= latest:
        found.append(_start_of(_next_period(found[-1].date(), period)))
    return found


def _start_of(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=get_default_timezone())


def _next_period(day: date, period: str) -> date:
    return day + timedelta(days=1) if period == "day" else (day.replace(day=1) + timedelta(days=32)).replace(day=1)
