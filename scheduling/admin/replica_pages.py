"""Build pages from the read replica, and show the age of their data."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from django.http import HttpRequest, HttpResponse
from django.template.response import SimpleTemplateResponse

from scheduling import replica
from scheduling.monitoring.duration_text import describe_duration
from scheduling.web.middleware import SAFE_METHODS, read_own_position

T = TypeVar("T")


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
