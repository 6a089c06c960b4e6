"""Pages of complaints, and complaint rates by node, template version and community."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import RelatedDropdownFilter

from scheduling.admin.base import BigTable, ReadOnlyAdmin, ops_action, ops_display
from scheduling.admin.count_time_limits import count_within
from scheduling.admin.replica_pages import read_for_page
from scheduling.models import Complaint
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations import queries

PERIODS = (7, 30, 90)  #: days
USUAL = 30


@admin.register(Complaint)
class ComplaintAdmin(BigTable, ReadOnlyAdmin):
    list_display = ("complained_at", "who", "about", "node")
    list_select_related = ("customer", "touch__node")
    ordering = ("-pk",)
    list_filter = (("touch__node", RelatedDropdownFilter),)
    fields = readonly_fields = ("complained_at", "who", "about", "node")
    actions_list = ("rates",)

    @ops_display(description=_("customer"))
    def who(self, row: Complaint) -> str:
        link = reverse("admin:scheduling_customer_change", args=[row.customer_id])
        return format_html('<a class="at-link" href="{}">{}</a>', link, row.customer)

    @ops_display(description=_("touch"))
    def about(self, row: Complaint) -> str:
        if row.touch is None:
            return "–"
        link = reverse("admin:scheduling_touch_change", args=[row.touch.pk])
        return format_html('<a class="at-link" href="{}">…{}</a>', link, str(row.touch.pk)[-8:])

    @ops_display(description=_("node"))
    def node(self, row: Complaint) -> str:
        return row.touch.node.key if row.touch else "–"

    @ops_action(description=_("Complaint rates"), icon="percent", permissions=["view"])
    def rates(self, request: HttpRequest) -> HttpResponse:
        """Show complaint rates. A separate page, because it reads all delivered touches of the period."""
        days = next((each for each in PERIODS if str(each) == request.GET.get("days")), USUAL)
        since = now() - timedelta(days=days)
        found = read_for_page(
            request,
            lambda: count_within(lambda: queries.complaint_rates(since), settings.TIMEOUTS.complaint_rates),
        )
        return self.page(
            request,
            "ops/complaint_rates.html",
            gettext("Complaint rates"),
            tables=_build_rate_tables(found) if found else None,
            most=queries.MOST_RATES,
            periods=[(each, describe_duration(timedelta(days=each)), each == days) for each in PERIODS],
            back=self.url("changelist"),
        )


def _build_rate_tables(found: queries.ComplaintRates) -> list[dict[str, Any]]:
    groups = [
        (gettext("By node"), gettext("node"), found.by_node),
        (gettext("By template version"), gettext("template"), found.by_template),
        (gettext("By community"), gettext("community"), found.by_community),
    ]
    return [
        {"title": title, "noun": noun, "rows": [_describe_complaint_rate(each) for each in rates]}
        for title, noun, rates in groups
    ]


def _describe_complaint_rate(each: queries.ComplaintRate) -> dict[str, Any]:
    name = each.key if each.version is None else f"{each.key} (v{each.version})"
    return {"name": name, "delivered": each.delivered, "complaints": each.complaints, "percent": 100 * each.rate}
