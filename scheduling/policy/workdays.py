"""Know working days: weekdays without public holidays, plus the weekend days worked instead (调休), plus own days."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from functools import cache, lru_cache
from typing import Any


@cache
def _load_holidays(country: str) -> Any:
    """Return the public holidays of a country. The import takes 0.4 s, so it waits for the first question."""
    from holidays import country_holidays

    return country_holidays(country)


def is_country(country: str) -> bool:
    """Return whether the holidays of this country are known."""
    from holidays import list_supported_countries

    return country in list_supported_countries()


@lru_cache(maxsize=4096)
def is_official_working_day(day: date, country: str) -> bool:
    """Return whether people work on this day. Without a country every weekday is a working day.

    China announces 调休 days each November. Until the library has them, its weekends are free.
    """
    return bool(_load_holidays(country).is_working_day(day)) if country else day.weekday() < 5


@lru_cache(maxsize=4096)
def is_holiday(day: date, country: str) -> bool:
    """Return whether this is a public holiday, a weekday that is free because of one, or a weekend day between two."""
    if not country:
        return False
    return _is_free_for_holiday(day, country) or (
        not is_official_working_day(day, country)
        and all(_is_free_for_holiday(day + timedelta(days=step), country) for step in (-1, 1))
    )


def _is_free_for_holiday(day: date, country: str) -> bool:
    return day in _load_holidays(country) or (day.weekday() < 5 and not is_official_working_day(day, country))


def is_working_day(day: date, country: str, own: Mapping[date, bool]) -> bool:
    """Return whether people work on this day. A day of `own` has precedence."""
    found = own.get(day)
    return is_official_working_day(day, country) if found is None else found
