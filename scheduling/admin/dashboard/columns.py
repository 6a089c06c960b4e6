"""What one column of a chart stands for: an hour of the last 24, or a day of the last seven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.http import HttpRequest
from django.utils.timezone import localtime, now

from scheduling.admin.patience import Patience
from scheduling.monitoring.past import HOUR, Past

PERIODS = (1, 7)  #: days

T = TypeVar("T", bound="Counter[Any]")


@dataclass(frozen=True, slots=True)
class Span:
    """Some hours that follow each other, until `until`."""

    label: str
    hours: list[datetime]
    until: datetime


def days_asked(request: HttpRequest) -> int:
    return next((each for each in PERIODS if str(each) == request.GET.get("days")), PERIODS[0])


def spans(days: int) -> list[Span]:
    return list(_days(days) if days > 1 else _hours())


def reach(spans: list[Span], span: Span | None) -> tuple[datetime, datetime]:
    """Of this column; of all of them where it is None."""
    first, last = (span, span) if span else (spans[0], spans[-1])
    return first.hours[0], last.until


def tallies(past: Past[T], spans: list[Span], patience: Patience) -> list[T | None]:
    """By column. None where there is too much to count now."""
    found = past.hours([hour for span in spans for hour in span.hours], now(), patience)
    return [_sum([found[hour] for hour in span.hours]) for span in spans]


def _sum(parts: list[T | None]) -> T | None:
    whole: Any = Counter()
    for part in parts:
        if part is None:
            return None
        whole += part
    return whole  # type: ignore[no-any-return]


def _hours() -> Iterator[Span]:
    """The present one and the 23 before."""
    present = localtime().replace(minute=0, second=0, microsecond=0)
    for back in range(23, -1, -1):
        hour = present - HOUR * back
        yield Span(f"{localtime(hour):%m-%d %H:%M}", [hour], hour + HOUR)


def _days(count: int) -> Iterator[Span]:
    """Today and those before, by the house's calendar."""
    present = localtime().replace(minute=0, second=0, microsecond=0)
    for back in range(count - 1, -1, -1):
        begins = (localtime() - timedelta(days=back)).replace(hour=0, minute=0, second=0, microsecond=0)
        ends = min(begins + timedelta(days=1), present + HOUR)
        yield Span(f"{begins:%m-%d}", [begins + HOUR * number for number in range((ends - begins) // HOUR)], ends)
