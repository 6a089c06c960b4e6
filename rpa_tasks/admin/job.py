"""Admin pages of jobs: list, filters, live cells, cancellation and retry."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import (
    AutocompleteSelectFilter,
    ChoicesDropdownFilter,
    DropdownFilter,
    RangeDateTimeFilter,
)
from unfold.decorators import action, display

from rpa_tasks.admin import live, run_job
from rpa_tasks.admin.evidence import evidence_response
from rpa_tasks.admin.job_page import job_page, short_reason
from rpa_tasks.admin.labels import REASONS, STATE_TONES
from rpa_tasks.jobs import publish
from rpa_tasks.models import Flow, Job, Platform, Shop
from scheduling.admin.base import BigTable, ReadOnlyAdmin, parse_uuid
from scheduling.admin.csv_export import CsvExportMixin
from scheduling.admin.labels import translate_reason
from scheduling.admin.list_filters import ReasonFilter
from scheduling.admin.touches.timeline import format_instant
from scheduling.errors import AftertouchError


class DueFilter(DropdownFilter):  # type: ignore[misc]
    """Filter of jobs that could start if a slot were free."""

    title = _("current status")
    parameter_name = "status"

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
        """Filter by the ids of the platform's shops, which use an index."""
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


class JobReasonFilter(ReasonFilter):
    reasons = REASONS


UNFINISHED = ("scheduled", "queued", "running")
CANCELLED_AT_ONCE = 500


@admin.register(Job)
class JobAdmin(CsvExportMixin, BigTable, ReadOnlyAdmin):
    list_display = (
        "made",
        "state_tag",
        "progress_bar",
        "shop_link",
        "flow_name",
        "urgency",
        "asked",
        "node",
        "short_id",
    )
    list_display_links = ("made", "short_id")
    list_filter = (
        DueFilter, ("state", ChoicesDropdownFilter), PlatformFilter, ("shop", AutocompleteSelectFilter), TaskTypeFilter,
        JobReasonFilter, ("priority", ChoicesDropdownFilter), ("created_at", RangeDateTimeFilter),
    )  # fmt: skip
    list_select_related = ("shop__platform__breaker", "shop__lane", "flow")
    ordering = ("-task_id",)  # ids grow with time, so the primary key sorts the newest first
    search_fields = ("task_id",)
    search_help_text = _("Task id, shop id or dedupe key, in full")
    list_disable_select_all = True
    actions = ("cancel_selected",)
    actions_detail = ("cancel", "again")
    export_related = ("shop__platform", "flow")
    export_columns = (
        (_("task id"), lambda row: row.pk), (_("state"), lambda row: row.get_state_display()),
        (_("reason"), lambda row: translate_reason(row.reason)), (_("platform"), lambda row: row.shop.platform.key),
        (_("shop id"), lambda row: row.shop.shop_id), (_("shop"), lambda row: row.shop.name),
        (_("task type"), lambda row: row.flow.task_type), (_("priority"), lambda row: row.get_priority_display()),
        (_("requests"), lambda row: row.requests), (_("dedupe key"), lambda row: row.dedupe_key),
        (_("published at"), lambda row: row.created_at), (_("due at"), lambda row: row.due_at),
        (_("settled at"), lambda row: row.settled_at), (_("attempts"), lambda row: row.attempt),
        (_("node"), lambda row: row.node), (_("delivery key"), lambda row: row.root_id),
    )  # fmt: skip

    def has_export_permission(self, request: HttpRequest) -> bool:
        return self.has_run_permission(request)

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        return [
            path("live/", view(self.live_view), name="rpa_tasks_job_live"),
            path("<uuid:pk>/evidence/<int:piece>/", view(self.evidence_view), name="rpa_tasks_job_evidence"),
            *super().get_urls(),
        ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        """Load rows without payload and result, which may be as long as a page. The job's own page loads them."""
        return super().get_queryset(request).defer("payload", "result")  # type: ignore[no-any-return]

    def has_run_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.has_perm("rpa_tasks.run_job"))

    def has_cancel_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.has_perm("rpa_tasks.cancel_job"))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        """Find complete ids and keys only."""
        term = search_term.strip()
        if not term:
            return queryset, False
        if uuid := parse_uuid(term):
            return queryset.filter(Q(pk=uuid) | Q(root_id=uuid) | Q(touch_key=uuid)), False
        return queryset.filter(Q(shop__shop_id=term) | Q(dedupe_key=term)), False

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        return job_page(self, request, self.get_row_or_404(request, object_id))

    def evidence_view(self, request: HttpRequest, pk: UUID, piece: int) -> HttpResponse:
        return evidence_response(request, pk, piece)

    # --- the list -----------------------------------------------------------------------------------------------

    def live_view(self, request: HttpRequest) -> HttpResponse:
        wanted = [uuid for each in live.requested_rows(request) if (uuid := parse_uuid(each))]
        rows = self.get_queryset(request).filter(pk__in=wanted if self.has_view_permission(request) else ())
        rows = rows.select_related(*self.list_select_related)
        return live.cells_response(each for row in rows for each in (self.state_tag(row), self.progress_bar(row)))

    @display(description=_("published at"), ordering="task_id")  # type: ignore[untyped-decorator]
    def made(self, row: Job) -> str:
        return format_html('<span class="at-nowrap">{}</span>', format_instant(row.created_at))

    @display(description=_("state"))  # type: ignore[untyped-decorator]
    def state_tag(self, row: Job) -> str:
        return _live_cell(row, "state", live.render_tag(row.get_state_display(), STATE_TONES[row.state]))

    @display(description=_("progress or reason"))  # type: ignore[untyped-decorator]
    def progress_bar(self, row: Job) -> str:
        running = row.state == "running" and not row.cancel_requested_at
        return _live_cell(row, "progress", live.render_progress(row) if running else short_reason(row))

    @display(description=_("shop"))  # type: ignore[untyped-decorator]
    def shop_link(self, row: Job) -> str:
        link = reverse("admin:rpa_tasks_shop_change", args=[row.shop_id])
        return format_html(
            '<a class="at-link" href="{}">{}</a><br><span class="at-quiet">{}</span>', link, row.shop, row.shop.platform
        )

    @display(description=_("task type"))  # type: ignore[untyped-decorator]
    def flow_name(self, row: Job) -> str:
        return row.flow.task_type

    @display(description=_("priority"), ordering="priority")  # type: ignore[untyped-decorator]
    def urgency(self, row: Job) -> str:
        return row.get_priority_display()

    @display(description=_("requests"))  # type: ignore[untyped-decorator]
    def asked(self, row: Job) -> str:
        return f"×{row.requests}" if row.requests > 1 else "1"

    @display(description=_("task id"))  # type: ignore[untyped-decorator]
    def short_id(self, row: Job) -> str:
        return format_html('<span class="at-nowrap at-mono" title="{}">…{}</span>', row.pk, str(row.pk)[-8:])

    # --- actions --------------------------------------------------------------------------------------------------

    @admin.action(description=_("Cancel the selected ones"), permissions=["cancel"])
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        chosen = queryset.filter(state__in=UNFINISHED).values_list("pk", flat=True)[:CANCELLED_AT_ONCE]
        outcomes = [self._cancel(request, pk) for pk in chosen]
        done = len(outcomes) - outcomes.count("")
        words = ngettext("%(count)s job was cancelled.", "%(count)s jobs were cancelled.", done)
        (messages.success if done else messages.info)(request, words % {"count": done})
        if running := outcomes.count("cancel_requested"):
            words = ngettext("%(count)s of them is running and ends within seconds.",
                             "%(count)s of them are running and end within seconds.", running)  # fmt: skip
            messages.info(request, words % {"count": running})

    @action(description=_("Cancel"), icon="cancel", url_path="cancel", permissions=["cancel"])  # type: ignore[untyped-decorator]
    def cancel(self, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.get_row_or_404(request, object_id)
        text = gettext("A waiting job does not start. A running command gets a stop signal and is killed 15 "
                "seconds later; completed work stays.")  # fmt: skip

        def act() -> None:
            outcome = self._cancel(request, row.pk)
            words = {"cancelled": gettext("The job was cancelled."),
                     "cancel_requested": gettext("The stop was requested. The job ends within seconds.")}  # fmt: skip
            if outcome:
                messages.success(request, words[outcome])
            else:
                messages.error(request, gettext("The job has already ended."))

        return self.confirm(
            request, gettext("Cancel this job?"), act, text=text, button=gettext("Cancel the job"),
            back=self.url("change", row.pk), danger=True, original=row,
        )  # fmt: skip

    def _cancel(self, request: HttpRequest, pk: UUID) -> str:
        try:
            return publish.request_cancel(pk, by=request.user.get_username())
        except AftertouchError:
            return ""

    @action(description=_("Run again"), icon="replay", url_path="again", permissions=["run"])  # type: ignore[untyped-decorator]
    def again(self, request: HttpRequest, object_id: str) -> HttpResponse:
        return run_job.run_again_page(self, request, self.get_row_or_404(request, object_id))

    def get_actions_detail(self, request: HttpRequest, object_id: Any) -> Any:
        """Hide the buttons, which the job's page shows in context."""
        return []


def _live_cell(row: Job, name: str, content: Any) -> str:
    address = reverse("admin:rpa_tasks_job_live")
    return live.render_live_cell(address, row.pk, name, content, again=row.state in UNFINISHED)
