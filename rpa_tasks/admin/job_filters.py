"""By what jobs are looked for."""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from rpa_tasks.admin.labels import REASONS
from rpa_tasks.models import Flow, Job, Platform, Shop
from scheduling.admin.labels import reason


class DueFilter(DropdownFilter):  # type: ignore[misc]
    """What could run if there were room."""

    title = _("how it stands")
    parameter_name = "stands"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("due", _("due"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        due = Q(state="scheduled", parked="", due_at__lte=Now()) | Q(state="queued")
        return queryset.filter(due) if self.value() == "due" else queryset


class PlatformFilter(DropdownFilter):  # type: ignore[misc]
    title = _("platform")
    parameter_name = "platform"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(str(row.pk), str(row)) for row in Platform.objects.all()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        """Through the ids of its shops, each of which an index finds."""
        if not (self.value() or "").isdecimal():
            return queryset
        return queryset.filter(
            shop_id__in=list(Shop.objects.filter(platform=self.value()).values_list("pk", flat=True))
        )


class TaskTypeFilter(DropdownFilter):  # type: ignore[misc]
    title = _("task type")
    parameter_name = "task_type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(key, key) for key in Flow.objects.order_by("task_type").values_list("task_type", flat=True).distinct()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        if not self.value():
            return queryset
        return queryset.filter(
            flow_id__in=list(Flow.objects.filter(task_type=self.value()).values_list("pk", flat=True))
        )


class ReasonFilter(DropdownFilter):  # type: ignore[misc]
    title = _("reason")
    parameter_name = "reason"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Those that can be named beforehand, and the one that was chosen by a link."""
        chosen = request.GET.get("reason", "")
        return list(REASONS.items()) + ([(chosen, reason(chosen))] if chosen and chosen not in REASONS else [])

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        return queryset.filter(reason=self.value()) if self.value() else queryset
