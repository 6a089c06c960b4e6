"""Spans of time in lists and in the links that lead there."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.timezone import is_naive, localtime, make_aware
from unfold.contrib.filters.admin import RangeDateTimeFilter
from unfold.utils import parse_datetime_str


class SpanFilter(RangeDateTimeFilter):  # type: ignore[misc]
    """From the first instant on, and before the second: spans that follow each other share nothing. By the house's
    clock. Either end may be open, and where a time is missing the day begins."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        ends = {"gte": self._instant("from"), "lt": self._instant("to")}
        return queryset.filter(**{f"{self.field_path}__{end}": at for end, at in ends.items() if at})

    def _instant(self, end: str) -> datetime | None:
        day, time = (str(self.used_parameters.get(f"{self.field_path}_{end}_{part}") or "") for part in (0, 1))
        at = parse_datetime_str(f"{day} {time or '00:00'}") if day else None
        return make_aware(at) if at and is_naive(at) else at


def span_link(name: str, field: str, since: datetime | None, until: datetime, **filters: str) -> str:
    """The list `name`, narrowed to a span of `field` and by other parameters of its address."""
    span = {
        f"{field}_{end}_{part}": f"{localtime(at):{form}}"
        for end, at in (("from", since), ("to", until))
        if at is not None
        for part, form in ((0, "%Y-%m-%d"), (1, "%H:%M:%S"))
    }
    return f"{reverse(f'admin:{name}_changelist')}?{urlencode({**filters, **span})}"
