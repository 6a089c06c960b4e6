"""Limit the time of counts, so that pages load under overload."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from django.db import OperationalError

from scheduling import sql

T = TypeVar("T")

COUNT_TIMEOUT = "2s"


def count_within(count: Callable[[], T], time_limit: str = "") -> T | None:
    """Return what `count` reads, or None if a statement exceeds the time limit (2 s by default)."""
    try:
        with sql.limit_statement_time(time_limit or COUNT_TIMEOUT):
            return count()
    except OperationalError:
        return None


class PageTimeLimit:
    """A time limit that all counts of one page share."""

    ENOUGH = 0.05  #: seconds; with less left, a count is skipped
    EACH = 2.0  #: seconds; limit of one count

    def __init__(self, seconds: float) -> None:
        self._ends_at = monotonic() + seconds

    def __call__(self, count: Callable[[], T]) -> T | None:
        left = min(self.EACH, self._ends_at - monotonic())
        return count_within(count, f"{round(left * 1000)}ms") if left > self.ENOUGH else None
