"""Pages of events."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import RangeDateTimeFilter

from scheduling.admin.base import BigTable, ReadOnlyAdmin, ops_action, ops_display
from scheduling.admin.labels import translate_reason
from scheduling.admin.lists import ColumnFilter
from scheduling.admin.matrix.preview import preview_page
from scheduling.admin.touches.touch import FOUND, LOOKED_AT, SpanFilter
from scheduling.ids import first_id_at
from scheduling.models import Customer, Event, EventType
from scheduling.operations import queries
from scheduling.redaction import redact_json


class ReceivedFilter(SpanFilter):
    """Filter by time of receipt through ids, which grow with time. No index covers that time."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Event]) -> QuerySet[Event]:
        ends = {"gte": self._instant("from"), "lt": self._instant("to")}
        return queryset.filter(**{f"pk__{end}": first_id_at(at) for end, at in ends.items() if at})


class TypeFilter(ColumnFilter):
    title = _("type")
    parameter_name = "type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(row.key, str(row)) for row in EventType.objects.all()[:200]]


def _find_events_of_customer(term: str) -> QuerySet[Any]:
    customer = Customer.objects.filter(user_id=term).values("pk")
    return Event.objects.filter(customer__in=customer).order_by("-pk").values_list("pk", flat=True)[:FOUND]


def _find_events_of_chat(term: str) -> QuerySet[Any]:
    """Search a chat's events among the latest `SEARCHED_TOUCHES` only, because no index covers the chat."""
    first = Event.objects.order_by("-pk").values_list("pk", flat=True)[LOOKED_AT : LOOKED_AT + 1].first()
    latest = Event.objects.filter(pk__gt=first) if first else Event.objects.all()
    return latest.filter(chat_id=term).order_by("-pk").values_list("pk", flat=True)[:FOUND]


@admin.register(Event)
class EventAdmin(BigTable, ReadOnlyAdmin):
    list_display = ("occurred_at", "type", "who", "chat_id", "source", "event_id")
    list_filter = (TypeFilter, ("occurred_at", RangeDateTimeFilter), ("received_at", ReceivedFilter))
    list_select_related = ("customer",)
    ordering = ("-pk",)
    search_fields = ("event_id",)
    search_help_text = _("Event id, user id or chat id (of the latest events), in full")
    fields = readonly_fields = (
        "type", "who", "chat_id", "occurred_at", "received_at", "source", "event_id", "shown_data", "touches_of",
    )  # fmt: skip
    actions_list = ("preview",)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Event], search_term: str
    ) -> tuple[QuerySet[Event], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        found = {*queries.find_events_by_term(term), *_find_events_of_customer(term), *_find_events_of_chat(term)}
        return queryset.filter(pk__in=found), False

    @ops_display(description=_("customer"))
    def who(self, row: Event) -> str:
        link = reverse("admin:scheduling_customer_change", args=[row.customer_id])
        return format_html('<a class="at-link" href="{}">{}</a>', link, row.customer)

    @ops_display(description=_("data"))
    def shown_data(self, row: Event) -> str:
        return format_html('<pre class="at-code">{}</pre>', redact_json(row.data))

    @ops_display(description=_("touches"))
    def touches_of(self, row: Event) -> str:
        lines = [
            (
                reverse("admin:scheduling_touch_change", args=[touch.pk]),
                touch.node.key,
                touch.get_state_display(),
                translate_reason(touch.reason),
            )
            for touch in row.touches.select_related("node").order_by("due_at")
        ]
        html = '<div><a class="at-link" href="{}">{}</a> · {} <span class="at-quiet">{}</span></div>'
        return format_html_join("", html, lines) or mark_safe("–")

    @ops_action(description=_("Send preview"), icon="psychology_alt", permissions=["view"])
    def preview(self, request: HttpRequest) -> HttpResponse:
        return preview_page(self, request)
