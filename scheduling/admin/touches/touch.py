from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.timezone import now
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import ChoicesDropdownFilter, RelatedDropdownFilter
from unfold.decorators import action, display

from scheduling.admin.base import BigTable, ReadOnlyAdmin
from scheduling.admin.csv_export import Exported
from scheduling.admin.labels import reason, spoken
from scheduling.admin.saved_filters import WithSavedFilters
from scheduling.admin.touches.calling_off import call_off_page
from scheduling.admin.touches.spans import SpanFilter
from scheduling.admin.touches.timeline import clock, timeline
from scheduling.admin.touches.touch_filters import ReasonFilter, StandsFilter, in_order, search
from scheduling.errors import AftertouchError
from scheduling.models import WAITING, FailedTask, Touch
from scheduling.operations import commands

STATE_TONES = {
    "scheduled": "info", "queued": "info", "running": "info", "delivered": "success", "suppressed": "warning",
    "cancelled": "default", "failed": "danger", "unknown": "danger",
}  # fmt: skip


@admin.register(Touch)
class TouchAdmin(WithSavedFilters, Exported, BigTable, ReadOnlyAdmin):
    list_display = ("due", "state_label", "why", "node", "who", "chat_id", "event_type", "short_id")
    list_display_links = ("due", "short_id")
    list_filter = (
        StandsFilter, ("state", ChoicesDropdownFilter), ReasonFilter, ("node", RelatedDropdownFilter),
        ("node__channel", RelatedDropdownFilter), ("priority", ChoicesDropdownFilter), ("due_at", SpanFilter),
        ("settled_at", SpanFilter),
    )  # fmt: skip
    list_select_related = ("node", "customer", "event")
    ordering = ("-task_id",)  # ids grow with time, so the newest come first by the primary key
    search_fields = ("task_id",)
    search_help_text = _("Task, user, event or chat id in full, or words of a text that was sent lately")
    list_disable_select_all = True
    actions = ("cancel_selected",)
    actions_detail = ("cancel",)
    list_after_template = "ops/touches_below.html"
    export_related = ("node__channel", "customer", "event", "template")
    export_columns = (
        (_("task id"), lambda row: row.pk), (_("state"), lambda row: row.get_state_display()),
        (_("reason"), lambda row: reason(row.reason)), (_("due at"), lambda row: row.due_at),
        (_("settled at"), lambda row: row.settled_at), (_("node"), lambda row: row.node.key),
        (_("channel"), lambda row: row.node.channel.key), (_("user id"), lambda row: row.customer.user_id),
        (_("customer"), lambda row: row.customer.name), (_("chat id"), lambda row: row.chat_id),
        (_("event type"), lambda row: row.event.type), (_("source"), lambda row: row.event.source),
        (_("event id"), lambda row: row.event.event_id), (_("attempts"), lambda row: row.attempt),
        (_("template"), lambda row: row.template.key if row.template else ""),
        (_("template version"), lambda row: row.template_version), (_("delivery key"), lambda row: row.root_id),
    )  # fmt: skip

    def has_export_permission(self, request: HttpRequest) -> bool:
        return self.has_change_permission(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """To call one off; nothing else about it can be changed."""
        return bool(request.user.has_perm("scheduling.change_touch"))

    def may_share(self, request: HttpRequest) -> bool:
        return self.has_change_permission(request)

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.call_off_view)
        return [path("call-off/", view, name="scheduling_touch_call_off"), *super().get_urls()]

    def call_off_view(self, request: HttpRequest) -> HttpResponse:
        return call_off_page(self, request)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        link = f"{self.url('call_off')}?{request.GET.urlencode()}" if self.has_change_permission(request) else ""
        return super().changelist_view(request, {"call_off_link": link, **(extra_context or {})})

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Touch], search_term: str
    ) -> tuple[QuerySet[Touch], bool]:
        return search(queryset, search_term.strip()), False

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return in_order(request.GET) or tuple(super().get_ordering(request))

    @display(description=_("due at"), ordering="due_at")  # type: ignore[untyped-decorator]
    def due(self, row: Touch) -> str:
        return format_html('<span class="at-nowrap">{}</span>', clock(row.due_at))

    @display(description=_("state"), label=STATE_TONES)  # type: ignore[untyped-decorator]
    def state_label(self, row: Touch) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @display(description=_("reason"))  # type: ignore[untyped-decorator]
    def why(self, row: Touch) -> str:
        if row.parked:
            return reason("paused")
        if row.state == "scheduled" and not row.reason:
            wait = row.due_at - now()
            return gettext("in %(span)s") % {"span": spoken(wait)} if wait.total_seconds() > 0 else gettext("due")
        return reason(row.reason)

    @display(description=_("customer"))  # type: ignore[untyped-decorator]
    def who(self, row: Touch) -> str:
        link = reverse("admin:scheduling_customer_change", args=[row.customer_id])
        return format_html('<a class="at-link" href="{}">{}</a>', link, row.customer)

    @display(description=_("event"))  # type: ignore[untyped-decorator]
    def event_type(self, row: Touch) -> str:
        return row.event.type

    @display(description=_("task id"))  # type: ignore[untyped-decorator]
    def short_id(self, row: Touch) -> str:
        return format_html('<span class="at-nowrap at-mono" title="{}">…{}</span>', row.pk, str(row.pk)[-8:])

    @admin.action(description=_("Call off the waiting ones"), permissions=["change"])
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Touch]) -> None:
        done = 0
        waiting = list(queryset.filter(state__in=WAITING).values_list("pk", flat=True)[:1000])
        for task_id in waiting:
            try:
                commands.cancel_touch(task_id, actor=request.user.get_username())
                done += 1
            except AftertouchError:
                continue
        words = ngettext("%(count)s touch was called off.", "%(count)s touches were called off.", done)
        messages.success(request, words % {"count": done})
        if left := queryset.count() - done if len(waiting) < 1000 else 0:
            messages.info(request, gettext("%(count)s had begun or ended already.") % {"count": left})

    @action(description=_("Call off"), icon="cancel", url_path="cancel", permissions=["change"])  # type: ignore[untyped-decorator]
    def cancel(self, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.found(request, object_id)
        back = self.url("change", row.pk)
        if request.method != "POST":
            text = gettext("It will not be sent. This cannot be undone.")
            title = gettext("Call off this touch?")
            return self.page(
                request, "ops/confirm.html", title, text=text, button=gettext("Call off"), back=back, danger=True
            )
        try:
            commands.cancel_touch(row.pk, actor=request.user.get_username())
            messages.success(request, gettext("It was called off."))
        except AftertouchError:
            messages.error(request, gettext("It had begun or ended already."))
        return redirect(back)

    def get_actions_detail(self, request: HttpRequest, object_id: Any) -> Any:
        row = self.get_object(request, str(object_id))
        return super().get_actions_detail(request, object_id) if row and _may_be_cancelled(row) else []

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        row = self.found(request, object_id)
        return self.page(
            request,
            "ops/touch.html",
            gettext("Touch"),
            original=row,
            touch=row,
            subtitle=None,
            moments=timeline(row),
            tone=STATE_TONES[row.state],
            channel=row.node.channel,
            failed=FailedTask.objects.filter(task_id=row.pk).first(),
            may_cancel=_may_be_cancelled(row) and self.has_change_permission(request, row),
            cancel_link=reverse("admin:scheduling_touch_cancel", args=[row.pk]),
        )


def _may_be_cancelled(row: Touch) -> bool:
    return row.state in WAITING or (row.state == "running" and row.sending_at is None)
