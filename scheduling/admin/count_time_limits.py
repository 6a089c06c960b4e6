"""Limit the time of counts, so that pages load under overload."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from django.conf import settings
from django.db import OperationalError

from scheduling import replica, sql

T = TypeVar("T")


def count_within(count: Callable[[], T], time_limit: float | None = None) -> T | None:
    """Return what `count` reads, or None if a statement exceeds the time limit.

    `time_limit` is in seconds; by default `TIMEOUTS.count`. A failure of the read replica passes through.
    """
    try:
        with sql.limit_statement_time(settings.TIMEOUTS.count if time_limit is None else time_limit):
            return count()
    except OperationalError as error:
        if replica.is_replica_failure(error):
            raise
        return None


class PageTimeLimit:
    """A time limit that all counts of one page share."""

    ENOUGH = 0.05  #: seconds; with less left, a count is skipped

    def __init__(self, seconds: float) -> None:
        self._ends_at = monotonic() + seconds

    def __call__(self, count: Callable[[], T]) -> T | None:
        left = min(settings.TIMEOUTS.count, self._ends_at - monotonic())
        return count_within(count, left) if left > self.ENOUGH else None
