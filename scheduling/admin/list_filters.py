"""Filters that several lists share."""

from __future__ import annotations

from collections import Counter
from operator import itemgetter
from typing import Any

from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from scheduling.admin.count_time_limits import count_within
from scheduling.admin.labels import translate_reason

LOOKED_AT = 10_000  #: latest rows whose reasons are offered; an address may name any other
MOST_OFFERED = 50


class ColumnFilter(DropdownFilter):  # type: ignore[misc]
    """Filter by one value of the column `parameter_name`."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(**{self.parameter_name: self.value()}) if self.value() else queryset


class ReasonFilter(ColumnFilter):
    """Offer the reasons of the latest rows of the list, and the one selected by a link."""

    title = _("reason")
    parameter_name = "reason"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        rows = self.list_latest_rows(model_admin.model).values_list("reason", flat=True)
        found = count_within(lambda: set(rows[:LOOKED_AT])) or set()
        offered = {*sorted(found - {""})[:MOST_OFFERED], request.GET.get("reason", "")} - {""}
        words = {code: translate_reason(code) for code in offered}
        shared = {label for label, count in Counter(words.values()).items() if count > 1}
        named = [(code, f"{label} ({code})" if label in shared else label) for code, label in words.items()]
        return sorted(named, key=itemgetter(1))

    def list_latest_rows(self, model: type[Model]) -> QuerySet[Any]:
        return model._default_manager.order_by("-pk")
