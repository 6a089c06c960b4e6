"""Read for pages: counts within a time limit, and statements on the replica."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import TypeVar

from django.conf import settings
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.template.response import SimpleTemplateResponse

from scheduling import replica, sql
from scheduling.monitoring.duration_text import describe_duration
from scheduling.web.middleware import SAFE_METHODS, read_own_position

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


def read_for_page(request: HttpRequest, build: Callable[[], T]) -> T:
    """Return `build()` with its reads on the replica. `build` also renders what it reads; it may run twice.

    Requests that may change rows use the primary. The page shows the age of data older than `SHOWN_AGE`.
    """
    if request.method not in SAFE_METHODS:
        return build()

    def build_with_age(age: float) -> T:
        shown = describe_duration(timedelta(seconds=round(age))) if age > replica.SHOWN_AGE else ""
        request.data_age = shown  # type: ignore[attr-defined]
        return build()

    return replica.read_from_replica(build_with_age, after=read_own_position(request))


def render_from_replica(request: HttpRequest, build: Callable[[], HttpResponse]) -> HttpResponse:
    """Return a rendered page. Templates of lists run their queries while they are rendered."""

    def build_rendered() -> HttpResponse:
        page = build()
        return page.render() if isinstance(page, SimpleTemplateResponse) else page

    return read_for_page(request, build_rendered)
