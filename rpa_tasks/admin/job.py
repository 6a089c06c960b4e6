"""Admin pages of jobs: list, filters, live cells, cancellation and retry, and the page of one job with its evidence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import now
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import AutocompleteSelectFilter, DropdownFilter
from unfold.widgets import UnfoldAdminSelectWidget

from rpa_tasks.admin import labels, run_job
from rpa_tasks.admin.labels import STATE_TONES, LiveTable
from rpa_tasks.api.jobs import serve_evidence
from rpa_tasks.jobs import publish
from rpa_tasks.jobs.dead_letters import digest_jobs
from rpa_tasks.jobs.nodes import waits_for_drained_node
from rpa_tasks.jobs.queries import (
    JOB_ACTIONS,
    UNFINISHED,
    filter_job_status,
    filter_jobs,
    filter_jobs_by_key,
    filter_jobs_by_words,
)
from rpa_tasks.jobs.shops import is_login_check
from rpa_tasks.models import (
    CANCEL_JOBS,
    RUN_JOBS,
    TAKE_OVER_SHOPS,
    Evidence,
    ExecutionNode,
    Flow,
    Job,
    LoginState,
    Platform,
    Run,
    Shop,
)
from scheduling.admin.base import (
    BigTable,
    Confirmation,
    ReadOnlyAdmin,
    RowPage,
    ops_action,
    ops_display,
    row_action,
    table_page,
)
from scheduling.admin.failed_tasks.bulk_action import MatchingRowsMixin, PaceForm, read_page_time
from scheduling.admin.failed_tasks.failed_task import render_difference
from scheduling.admin.labels import translate_reason
from scheduling.admin.lists import AlwaysOffered, ChoicesFilter, ListExportMixin, ReasonFilter, SpanFilter
from scheduling.admin.shown_values import format_instant, insert_values, render_tag
from scheduling.admin.undo import create_undo_link
from scheduling.error_text import find_error_line, has_more_lines
from scheduling.errors import AftertouchError
from scheduling.models import WAITING, FailedTask, Pause, Priority
from scheduling.monitoring.duration_text import describe_duration
from scheduling.redaction import redact_json, redact_text


def closed_gate_reason(shop: Shop, *, is_check: bool = False) -> str:
    """Return why no job of this shop may start, or "". The job that checks its login needs no login."""
    if shop.retired_at or shop.platform.retired_at:
        return translate_reason("retired")
    if shop.paused:
        return gettext("The shop is paused")
    if shop.platform.paused:
        return gettext("The platform is paused")
    if shop.login_state == LoginState.NEEDED and not is_check:
        return translate_reason("login_needed")
    if until := breaker_blocks_until(shop.platform):
        words = gettext("The platform blocks runs; next attempt at %(time)s")
        return insert_values(words, time=format_instant(until))
    return ""


def breaker_blocks_until(platform: Platform) -> datetime | None:
    """Return until when the breaker is open; None if a job or a trial may start."""
    until: datetime | None = platform.breaker.open_until
    return until if until and until > now() else None


def explain_waiting(job: Job) -> tuple[str, str]:
    """Return why the job waits, and a related link or "". It comes with shop, platform, breaker and lane."""
    link = reverse("admin:rpa_tasks_shop_change", args=[job.shop_id])
    if Pause.objects.filter(scope="all").exists():
        return translate_reason("paused"), reverse("admin:scheduling_pause_changelist")
    if gate := closed_gate_reason(job.shop, is_check=is_login_check(job)):
        return gate, link
    if job.due_at > now():
        again = gettext("starts in %(span)s") if not job.reason else gettext("retried in %(span)s")
        return again % {"span": describe_duration(job.due_at - now())}, ""
    held_until = job.shop.lane.held_until
    if held_until and held_until > now():
        return gettext("An operator has taken over the shop"), link
    running = job.shop.lane.task_id
    if running:
        return gettext("Another job of the shop is running"), reverse("admin:rpa_tasks_job_change", args=[running])
    if waits_for_drained_node(job):
        home = job.shop.lane.home
        return gettext("Its node %(node)s is drained") % {"node": home}, reverse(
            "admin:rpa_tasks_executionnode_change", args=[home]
        )
    return gettext("Waits for a free node"), reverse("admin:rpa_tasks_executionnode_changelist")


def short_reason(job: Any) -> str:
    """Return the reason for a list, without further queries."""
    if job.state in ("scheduled", "queued"):
        if gate := closed_gate_reason(job.shop, is_check=is_login_check(job)):
            return gate
        words = translate_reason(job.reason) if job.reason else ""
        if job.due_at > now():
            wait = gettext("in %(span)s") % {"span": describe_duration(job.due_at - now())}
            return f"{words}, {wait}" if words else wait
        return words or gettext("due")
    if job.state == "running" and job.cancel_requested_at:
        return gettext("is being ended")
    return translate_reason(job.reason)


#: Tone and icon of each outcome of a run.
OUTCOMES = {
    "succeeded": ("good", "check_circle"), "transient": ("wait", "replay"), "held": ("wait", "hourglass_top"),
    "session": ("wait", "lock_person"), "platform": ("wait", "shield"), "cancelled": ("plain", "cancel"),
    "business": ("bad", "error"), "unknown": ("bad", "help"),
}  # fmt: skip


def tell_runs(job: Job, *, with_evidence: bool) -> list[dict[str, Any]]:
    """Return what the pages show of each run: its facts, its output, and the links of its evidence."""
    pieces = defaultdict(list)
    if with_evidence:
        for row in Evidence.objects.filter(run__job=job).defer("content").order_by("run_id", "-kind"):
            link = reverse("admin:rpa_tasks_job_evidence", args=[job.pk, row.pk])
            pieces[row.run_id].append({"row": row, "link": link, "is_picture": row.kind == Evidence.Kind.SCREENSHOT})
    told = []
    for run in job.runs.all():
        tone, icon = OUTCOMES[run.outcome]
        output = redact_text(run.detail)
        told.append({
            "run": run, "facts": _run_facts(run), "pieces": pieces[run.pk], "tone": tone, "icon": icon,
            "output": output, "error_line": find_error_line(output), "has_more": has_more_lines(output),
        })  # fmt: skip
    return told


def _run_facts(run: Run) -> list[tuple[str, str]]:
    took = format_short_span(run.ended_at - run.started_at) if run.ended_at else ""
    facts = [
        (gettext("reason"), translate_reason(run.reason)),
        (gettext("node"), run.node),
        (gettext("took"), took),
        (gettext("wait for a browser"), format_short_span(run.pool_wait) if run.pool_wait is not None else ""),
        (gettext("exit code"), "" if run.exit_code is None else str(run.exit_code)),
        (gettext("lease number"), str(run.lease_no)),
    ]
    return [(label, value) for label, value in facts if value]


def format_short_span(span: timedelta) -> str:
    """Format a span: runs take minutes, waits take milliseconds."""
    seconds = span.total_seconds()
    if seconds < 1:
        return gettext("%(ms)s ms") % {"ms": round(seconds * 1000)}
    return gettext("%(seconds)s s") % {"seconds": f"{seconds:.1f}"} if seconds < 60 else describe_duration(span)


def evidence_panel(request: HttpRequest, row: FailedTask) -> str:
    if row.task_id is None or not request.user.has_perm("rpa_tasks.view_job"):
        return ""
    job = Job.objects.select_related("shop__platform", "flow").filter(pk=row.task_id).first()
    if job is None:
        return ""
    runs = tell_runs(job, with_evidence=request.user.has_perm("rpa_tasks.view_evidence"))
    last = runs[-1] if runs else None
    return render_to_string("rpa_tasks/failed_panel.html", {"job": job, "story": last}, request=request)


class DueFilter(DropdownFilter):  # type: ignore[misc]
    """Filter of jobs that could start if a slot were free, and of those whose due date has passed."""

    title = _("current status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("due", _("due")), ("late", _("late"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        status = self.value()
        return queryset.filter(filter_job_status(status, read_page_time(request))) if status else queryset


class ShopFilter(AlwaysOffered, AutocompleteSelectFilter):  # type: ignore[misc]
    pass


class PlatformFilter(DropdownFilter):  # type: ignore[misc]
    title = _("platform")
    parameter_name = "platform"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(row.key, str(row)) for row in Platform.objects.all()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        return queryset.filter(filter_jobs(platform=self.value() or ""))


class TaskTypeFilter(DropdownFilter):  # type: ignore[misc]
    title = _("task type")
    parameter_name = "task_type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(key, key) for key in Flow.objects.order_by("task_type").values_list("task_type", flat=True).distinct()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        return queryset.filter(filter_jobs(task_type=self.value() or ""))


CANCELLED_AT_ONCE = 500


def offer_cancel_undo(request: HttpRequest, digests: dict[str, str], task_ids: Sequence[UUID], label: str = "") -> str:
    """Return the address that publishes those of these cancelled jobs again that have a digest; "" without one."""
    kept = {str(task_id): digests[str(task_id)] for task_id in task_ids if str(task_id) in digests}
    return create_undo_link(request, "job.cancel", list(kept), label=label, digests=kept)


class PriorityForm(PaceForm):
    priority = forms.ChoiceField(
        label=_("Priority"), choices=[(each.name.lower(), each.label) for each in Priority],
        widget=UnfoldAdminSelectWidget,
    )  # fmt: skip
    field_order = ("priority",)


class NodeForm(PaceForm):
    node = forms.ModelChoiceField(
        label=_("Execution node"), queryset=ExecutionNode.objects.all(), widget=UnfoldAdminSelectWidget
    )
    field_order = ("node",)

    def clean_node(self) -> str:
        return str(self.cleaned_data["node"].name)


@admin.register(Job)
class JobAdmin(RowPage, LiveTable, MatchingRowsMixin, ListExportMixin, BigTable, ReadOnlyAdmin):
    list_display = (
        "made", "state_tag", "progress_bar", "shop_link", "flow_name", "priority", "asked", "node", "short_id",
    )  # fmt: skip
    live_columns = ("state_tag", "progress_bar")
    list_display_links = ("made", "short_id")
    list_filter = (
        DueFilter, ("state", ChoicesFilter), PlatformFilter, ("shop", ShopFilter), TaskTypeFilter,
        ReasonFilter, ("priority", ChoicesFilter), ("created_at", SpanFilter),
    )  # fmt: skip
    ordering = ("-task_id",)  # ids grow with time, so the primary key sorts the newest first
    search_fields = ("task_id",)
    search_help_text = _("Task id, shop id or dedupe key, in full")
    matching_actions = JOB_ACTIONS
    matching_forms: ClassVar[Any] = {"job.priority": PriorityForm, "job.move": NodeForm}
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
        (_("to be done by"), lambda row: row.deadline),
        (_("settled at"), lambda row: row.settled_at), (_("attempts"), lambda row: row.attempt),
        (_("node"), lambda row: row.node), (_("delivery key"), lambda row: row.root_id),
    )  # fmt: skip

    def has_export_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(RUN_JOBS)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(CANCEL_JOBS)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        """Load rows without payload and result, which may be as long as a page. The job's own page loads them."""
        rows: QuerySet[Job] = super().get_queryset(request).defer("payload", "result")
        return rows.select_related("shop__platform__breaker", "shop__lane", "flow")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        search = filter_jobs_by_words if run_job.may_edit_payload(request) else filter_jobs_by_key
        return queryset.filter(search(search_term)), False

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        shown = super().get_changelist_instance(request)
        if run_job.may_edit_payload(request):
            shown.search_help_text = _("Task id, shop id or dedupe key in full, or words of a recent payload")
        return shown

    def show_row(self, request: HttpRequest, job: Job) -> HttpResponse:
        """Show the whole page, or only its live part if an open page requests that."""
        failed = FailedTask.objects.filter(task_id=job.pk).first()
        edited_from = FailedTask.objects.filter(task_id=job.retry_of).first() if job.retry_of else None
        may_take_over = request.user.has_perms([TAKE_OVER_SHOPS, "rpa_tasks.view_shop"]) and (
            (job.state == "running" and job.flow.needs_browser)
            or (job.state in WAITING and job.shop.login_state == LoginState.NEEDED)
        )
        context = {
            "job": job,
            "original": job,
            "subtitle": None,
            "tone": STATE_TONES[job.state],
            "alive": self.is_alive(job),
            "bar": labels.render_progress(job) if job.state == "running" else "",
            "why": explain_waiting(job) if job.state in WAITING else (translate_reason(job.reason), ""),
            "runs": tell_runs(job, with_evidence=request.user.has_perm("rpa_tasks.view_evidence")),
            "payload": redact_json(job.payload),
            "result": redact_json(job.result) if job.result is not None else "",
            "failed": failed,
            "difference": render_difference(edited_from) + render_difference(failed),
            "again": Job.objects.filter(retry_of=job.pk).first(),
            "running_for": describe_duration(timedelta(seconds=int((now() - job.sending_at).total_seconds())))
            if job.state == "running" and job.sending_at
            else "",
            "take_over_link": reverse("admin:rpa_tasks_shop_take_over", args=[job.shop_id]) if may_take_over else "",
            "links": self.action_links(request, job),
        }
        if request.headers.get("X-Live"):
            return TemplateResponse(request, "rpa_tasks/job_body.html", context)
        return self.page(request, "rpa_tasks/job.html", f"{job.shop} · {job.flow.task_type}", **context)

    @table_page("<uuid:pk>/evidence/<int:piece>/", "rpa_tasks.view_evidence")
    def evidence(self, request: HttpRequest, pk: UUID, piece: int) -> HttpResponse:
        row = get_object_or_404(Evidence, pk=piece, run__job=pk)
        return serve_evidence(row, pk, "attachment" if "save" in request.GET else "inline")

    # --- the list -----------------------------------------------------------------------------------------------

    def is_alive(self, row: Job) -> bool:
        return row.state in UNFINISHED

    @ops_display(description=_("published at"), ordering="task_id")
    def made(self, row: Job) -> str:
        return format_html('<span class="at-nowrap">{}</span>', format_instant(row.created_at))

    @ops_display(description=_("state"))
    def state_tag(self, row: Job) -> SafeString:
        return self.live_cell(row, "state", render_tag(row.get_state_display(), STATE_TONES[row.state]))

    @ops_display(description=_("progress or reason"))
    def progress_bar(self, row: Job) -> SafeString:
        running = row.state == "running" and not row.cancel_requested_at
        return self.live_cell(row, "progress", labels.render_progress(row) if running else short_reason(row))

    @ops_display(description=_("shop"))
    def shop_link(self, row: Job) -> str:
        link = reverse("admin:rpa_tasks_shop_change", args=[row.shop_id])
        return format_html(
            '<a class="at-link" href="{}">{}</a><br><span class="at-quiet">{}</span>', link, row.shop, row.shop.platform
        )

    @ops_display(description=_("task type"))
    def flow_name(self, row: Job) -> str:
        return row.flow.task_type

    @ops_display(description=_("requests"))
    def asked(self, row: Job) -> str:
        return f"×{row.requests}" if row.requests > 1 else "1"

    @ops_display(description=_("task id"))
    def short_id(self, row: Job) -> str:
        return format_html('<span class="at-nowrap at-mono" title="{}">…{}</span>', row.pk, str(row.pk)[-8:])

    # --- actions --------------------------------------------------------------------------------------------------

    @ops_action(description=_("Cancel the selected ones"), permissions=["cancel"])
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        chosen = list(queryset.filter(state__in=UNFINISHED).values_list("pk", flat=True)[:CANCELLED_AT_ONCE])
        digests = digest_jobs(chosen)
        found: dict[UUID, str] = {}
        for pk in chosen:
            try:
                found[pk] = publish.request_cancel(pk, by=request.user.get_username())
            except AftertouchError:
                found[pk] = ""
        outcomes = list(found.values())
        done = len(outcomes) - outcomes.count("")
        words = ngettext("%(count)s job was cancelled.", "%(count)s jobs were cancelled.", done)
        link = offer_cancel_undo(request, digests, [pk for pk, outcome in found.items() if outcome == "cancelled"])
        (messages.success if done else messages.info)(request, words % {"count": done}, extra_tags=link)
        if running := outcomes.count("cancel_requested"):
            words = ngettext("%(count)s of them is running and ends within seconds.",
                             "%(count)s of them are running and end within seconds.", running)  # fmt: skip
            messages.info(request, words % {"count": running})

    @row_action(
        permission=CANCEL_JOBS,
        allowed=lambda row: row.state in UNFINISHED and not row.cancel_requested_at,
    )  # fmt: skip
    def cancel(self, request: HttpRequest, row: Job) -> Confirmation:
        def act() -> None:
            digests = digest_jobs([row.pk])
            outcome = publish.request_cancel(row.pk, by=request.user.get_username())
            words = {"cancelled": gettext("The job was cancelled."),
                     "cancel_requested": gettext("The stop was requested. The job ends within seconds.")}  # fmt: skip
            keys, label = [row.pk] if outcome == "cancelled" else [], gettext("job %(id)s") % {"id": row}
            link = offer_cancel_undo(request, digests, keys, label)
            messages.success(request, words[outcome], extra_tags=link)

        return Confirmation(
            title=gettext("Cancel this job?"), button=gettext("Cancel the job"), danger=True,
            text=str(JOB_ACTIONS["job.cancel"].explains), act=act, refused=gettext("The job has already ended."),
        )  # fmt: skip

    @row_action(permission=RUN_JOBS)
    def again(self, request: HttpRequest, row: Job) -> Confirmation:
        return run_job.confirm_run_again(self, request, row)
