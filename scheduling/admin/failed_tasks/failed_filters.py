"""By what failed tasks are looked for, and what their classes are called."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from scheduling.admin.labels import reason
from scheduling.models import ChannelConfig, FailedTask
from scheduling.operations.filters import state_of_failed

LOOKED_AT = 10_000  #: open ones, for the reasons that they have

#: A run may have done half of its work before it failed.
CLASSES_OF_JOBS = {"failed": _("The run failed"), "unknown": _("May have had its effect")}
CLASSES = {
    "failed": _("Certainly not delivered"), "unknown": _("May have been delivered"), "unreadable": _("Unreadable"),
}  # fmt: skip


def class_of(origin: str, failure: str) -> str:
    words = CLASSES_OF_JOBS.get(failure) if origin == FailedTask.Origin.RPA_JOB else None
    return str(words or CLASSES.get(failure) or failure)


class OpenFilter(admin.SimpleListFilter):
    """Open ones first: they are what waits for a person."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [*FailedTask.State.choices, ("all", _("All"))]

    def choices(self, changelist: Any) -> Any:
        _all, *others = super().choices(changelist)
        if self.value() is None:
            others[0] = {**others[0], "selected": True}
        return others

    def queryset(self, request: HttpRequest, queryset: QuerySet[FailedTask]) -> QuerySet[FailedTask]:
        return queryset.filter(state_of_failed(self.value() or ""))


class ClassFilter(admin.SimpleListFilter):
    title = _("class")
    parameter_name = "failure"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(CLASSES.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[FailedTask]) -> QuerySet[FailedTask]:
        return queryset.filter(failure=self.value()) if self.value() else queryset


class ChannelFilter(DropdownFilter):  # type: ignore[misc]
    title = _("channel")
    parameter_name = "channel"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(key, key) for key in ChannelConfig.objects.values_list("key", flat=True)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[FailedTask]) -> QuerySet[FailedTask]:
        return queryset.filter(channel=self.value()) if self.value() else queryset


class CauseFilter(DropdownFilter):  # type: ignore[misc]
    """The reasons that the latest open ones have now."""

    title = _("reason")
    parameter_name = "reason"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        latest = FailedTask.objects.filter(state="open").order_by("-failed_at").values_list("reason", flat=True)
        return [(code, reason(code)) for code in sorted(set(latest[:LOOKED_AT]))[:50]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[FailedTask]) -> QuerySet[FailedTask]:
        return queryset.filter(reason=self.value()) if self.value() else queryset
