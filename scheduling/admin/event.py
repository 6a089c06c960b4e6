from __future__ import annotations

import json
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter, RangeDateTimeFilter
from unfold.decorators import action, display

from scheduling.admin.base import BigTable, ReadOnlyAdmin, as_uuid
from scheduling.admin.foresee import foresee_page
from scheduling.admin.wording import reason
from scheduling.models import Event, EventType


class TypeFilter(DropdownFilter):  # type: ignore[misc]
    title = _("type")
    parameter_name = "type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(row.key, str(row)) for row in EventType.objects.all()[:200]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Event]) -> QuerySet[Event]:
        return queryset.filter(type=self.value()) if self.value() else queryset


@admin.register(Event)
class EventAdmin(BigTable, ReadOnlyAdmin):
    list_display = ("occurred_at", "type", "who", "chat_id", "source", "event_id")
    list_filter = (TypeFilter, ("occurred_at", RangeDateTimeFilter))
    list_select_related = ("customer",)
    ordering = ("-pk",)
    search_fields = ("event_id",)
    search_help_text = _("Event id, user id or chat id, in full")
    fields = readonly_fields = (
        "type", "who", "chat_id", "occurred_at", "received_at", "source", "event_id", "shown_data", "touches_of",
    )  # fmt: skip
    actions_list = ("open_foresee",)

    def get_urls(self) -> list[URLPattern]:
        page = self.admin_site.admin_view(lambda request: foresee_page(self, request))
        return [path("foresee/", page, name="scheduling_event_foresee"), *super().get_urls()]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Event], search_term: str
    ) -> tuple[QuerySet[Event], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        if uuid := as_uuid(term):
            return queryset.filter(Q(pk=uuid) | Q(event_id=term)), False
        return queryset.filter(Q(event_id=term) | Q(customer__user_id=term) | Q(chat_id=term)), False

    @display(description=_("customer"))  # type: ignore[untyped-decorator]
    def who(self, row: Event) -> str:
        link = reverse("admin:scheduling_customer_change", args=[row.customer_id])
        return format_html('<a class="at-link" href="{}">{}</a>', link, row.customer)

    @display(description=_("data"))  # type: ignore[untyped-decorator]
    def shown_data(self, row: Event) -> str:
        return format_html('<pre class="at-code">{}</pre>', json.dumps(row.data, ensure_ascii=False, indent=2))

    @display(description=_("touches"))  # type: ignore[untyped-decorator]
    def touches_of(self, row: Event) -> str:
        lines = [
            (
                reverse("admin:scheduling_touch_change", args=[touch.pk]),
                touch.node.key,
                touch.get_state_display(),
                reason(touch.reason),
            )
            for touch in row.touches.select_related("node").order_by("due_at")
        ]
        html = '<div><a class="at-link" href="{}">{}</a> · {} <span class="at-quiet">{}</span></div>'
        return format_html_join("", html, lines) or mark_safe("–")

    @action(description=_("What would happen?"), icon="psychology_alt", url_path="what-if")  # type: ignore[untyped-decorator]
    def open_foresee(self, request: HttpRequest) -> HttpResponse:
        return redirect("admin:scheduling_event_foresee")
