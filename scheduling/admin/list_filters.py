"""Filters that several lists share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from scheduling.admin.labels import REASONS, translate_reason


class ColumnFilter(DropdownFilter):  # type: ignore[misc]
    """Filter by one value of the column `parameter_name`."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(**{self.parameter_name: self.value()}) if self.value() else queryset


class ReasonFilter(ColumnFilter):
    """Offer the reasons of a table, and the one selected by a link."""

    title = _("reason")
    parameter_name = "reason"
    reasons: ClassVar[Mapping[str, str | Promise]] = REASONS

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        chosen = request.GET.get("reason", "")
        linked = [(chosen, translate_reason(chosen))] if chosen and chosen not in self.reasons else []
        return [*self.reasons.items(), *linked]
