"""Pages of failed tasks: list, groups by cause, and details with actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.contrib import admin
from django.db.models import Count, Max, Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path, reverse
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.text import Truncator
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import ChoicesDropdownFilter

from scheduling.admin.base import Confirmation, ReadOnlyAdmin, ops_action, ops_display, row_action
from scheduling.admin.failed_tasks.actions import FAILED_TASK_ACTIONS, HANDLE, act_page
from scheduling.admin.failed_tasks.bulk_action import make_list_action
from scheduling.admin.failed_tasks.difference import render_difference
from scheduling.admin.failed_tasks.edit_page import confirm_edit, may_edit
from scheduling.admin.failed_tasks.notes import AssigneeFilter, assign_task, build_notes, comment_task, format_user
from scheduling.admin.failed_tasks.trend import draw_trends
from scheduling.admin.labels import translate_reason
from scheduling.admin.list_export import ListExportMixin
from scheduling.admin.list_filters import ColumnFilter, ReasonFilter
from scheduling.admin.retirement import CappedPaginator
from scheduling.admin.shown_values import format_instant
from scheduling.admin.touches.touch import SpanFilter
from scheduling.error_lines import find_error_line, has_more_lines
from scheduling.ids import reveal_odd_characters
from scheduling.models import ChannelConfig, FailedTask
from scheduling.operations.bulk_actions import filter_failed_state
from scheduling.operations.failed_tasks import find_origin
from scheduling.operations.queries import filter_failed_by_shown_term
from scheduling.redaction import redact, redact_json, redact_text

#: A run may have done half of its work before it failed.
CLASSES_OF_JOBS = {"failed": _("The run failed"), "unknown": _("May have had its effect")}
CLASSES = {
    "failed": _("Certainly not delivered"), "unknown": _("May have been delivered"), "unreadable": _("Unreadable"),
}  # fmt: skip


def translate_failure_class(origin: str, failure: str) -> str:
    """Return the label of a failure class; jobs have their own labels."""
    words = CLASSES_OF_JOBS.get(failure) if origin == FailedTask.Origin.RPA_JOB else None
    return str(words or CLASSES.get(failure) or failure)


class OpenFilter(admin.SimpleListFilter):
    """Show open tasks by default: they wait for an operator."""

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
        return queryset.filter(filter_failed_state(self.value() or ""))


class ClassFilter(admin.SimpleListFilter):
    title = _("class")
    parameter_name = "failure"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(CLASSES.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[FailedTask]) -> QuerySet[FailedTask]:
        return queryset.filter(failure=self.value()) if self.value() else queryset


class ChannelFilter(ColumnFilter):
    title = _("channel")
    parameter_name = "channel"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(key, key) for key in ChannelConfig.objects.values_list("key", flat=True)]


class CauseFilter(ReasonFilter):
    """Offer the reasons of the latest open tasks."""

    def list_latest_rows(self, model: type[Model]) -> QuerySet[Any]:
        return super().list_latest_rows(model).filter(state="open").order_by("-failed_at")


OPEN = FailedTask.State.OPEN
GROUPED = 20_000  #: failed tasks that are grouped by cause

TONES = {
    "open": "danger", "retried": "info", "resolved_delivered": "success", "resolved_not_delivered": "warning",
    "ignored": "default", "archived": "default",
}  # fmt: skip


def _describe_stored_attempt(stored: dict[str, Any]) -> dict[str, Any]:
    """Add labels to a stored attempt, and mask its values."""
    shown = redact(stored)
    return {
        **shown,
        **_split_detail(str(shown.get("detail", ""))),
        "at": format_instant(parse_datetime(str(stored.get("started_at", "")))),
        "words": translate_reason(str(stored.get("reason", ""))),
    }


def _split_detail(detail: str) -> dict[str, Any]:
    """Return the error line, and the whole detail for the fold below it."""
    return {"detail": detail, "error_line": find_error_line(detail), "has_more": has_more_lines(detail)}


def find_task_with_link(origin: str, task_id: Any) -> dict[str, Any] | None:
    """Return a task from its app's ledger and the address of its page; None if it does not exist."""
    known = find_origin(origin)
    task = known.ledger._default_manager.filter(pk=task_id).first() if known and task_id else None
    if task is None:
        return None
    opts = task._meta
    return {"task": task, "link": reverse(f"admin:{opts.app_label}_{opts.model_name}_change", args=[task.pk])}


def render_origin_panel(request: HttpRequest, row: FailedTask) -> str:
    """Return the HTML that the origin's app adds to the page."""
    origin = find_origin(row.origin)
    return origin.panel(request, row) if origin and origin.panel else ""


def _group_by_cause(chosen: QuerySet[Any]) -> Iterable[Mapping[str, Any]]:
    """Return the causes of these failed tasks, the most frequent first."""
    facts = {name: Max(name) for name in ("reason", "channel", "detail", "failure", "origin")}
    rows = FailedTask.objects.filter(pk__in=chosen).values("fingerprint")
    return rows.annotate(count=Count("pk"), last_at=Max("failed_at"), **facts).order_by("-count")[:100]


@admin.register(FailedTask)
class FailedTaskAdmin(ListExportMixin, ReadOnlyAdmin):
    list_display = (
        "failed",
        "state_label",
        "class_label",
        "why",
        "channel",
        "node_key",
        "user_key",
        "assigned_to",
        "origin",
    )
    list_select_related = ("assignee",)
    list_filter = (
        OpenFilter, ("origin", ChoicesDropdownFilter), CauseFilter, ChannelFilter, ClassFilter,
        AssigneeFilter, ("failed_at", SpanFilter),
    )  # fmt: skip
    linked_lookups = ("fingerprint",)
    ordering = ("-pk",)  # ids grow with time, so the newest come first by the primary key
    show_full_result_count = False
    paginator = CappedPaginator
    search_fields = ("task_id",)
    search_help_text = _("Task, event, trace, user, shop or chat id in full, or words of the detail")
    actions = ()
    actions_list = ("groups",)
    actions_detail = ("edit", "assign", "comment")
    export_columns = (
        (_("task id"), lambda row: row.task_id), (_("origin"), lambda row: row.get_origin_display()),
        (_("state"), lambda row: row.get_state_display()),
        (_("class"), lambda row: translate_failure_class(row.origin, row.failure)),
        (_("reason"), lambda row: translate_reason(row.reason)), (_("detail"), lambda row: redact_text(row.detail)),
        (_("channel"), lambda row: row.channel), (_("node"), lambda row: row.payload.get("node")),
        (_("task type"), lambda row: row.payload.get("task_type")),
        (_("user id"), lambda row: row.payload.get("user_id")),
        (_("shop"), lambda row: row.payload.get("shop_id")), (_("failed at"), lambda row: row.failed_at),
        (_("acted at"), lambda row: row.acted_at), (_("actor"), lambda row: row.actor_name),
        (_("assignee"), lambda row: format_user(row.assignee)),
        (_("reason of the action"), lambda row: row.action_reason),
        (_("published again as"), lambda row: row.retried_as), (_("delivery key"), lambda row: row.root_id),
        (_("fingerprint"), lambda row: row.fingerprint),
    )  # fmt: skip

    def has_export_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(HANDLE)

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.act_view)
        return [path("<uuid:pk>/act/<str:verb>/", view, name="scheduling_failedtask_act"), *super().get_urls()]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[FailedTask], search_term: str
    ) -> tuple[QuerySet[FailedTask], bool]:
        return queryset.filter(filter_failed_by_shown_term(search_term)), False

    def get_actions(self, request: HttpRequest) -> Any:
        if not request.user.has_perm(HANDLE):
            return {}
        return {
            f"bulk_{name}": (make_list_action(name), f"bulk_{name}", verb.title)
            for name, verb in FAILED_TASK_ACTIONS.items()
        }

    def act_view(self, request: HttpRequest, pk: Any, verb: str) -> HttpResponse:
        return act_page(self, request, self.get_row_or_404(request, pk), verb)

    @row_action(permission=HANDLE)
    def edit(self, request: HttpRequest, row: FailedTask) -> Confirmation:
        return confirm_edit(request, row)

    @row_action(permission=HANDLE, methods=["POST"])
    def assign(self, request: HttpRequest, row: FailedTask) -> HttpResponse:
        assign_task(request, row)
        return redirect(self.url("change", row.pk))

    @row_action(permission=HANDLE, methods=["POST"])
    def comment(self, request: HttpRequest, row: FailedTask) -> HttpResponse:
        comment_task(request, row)
        return redirect(f"{self.url('change', row.pk)}#comments")

    @ops_display(description=_("failed at"), ordering="failed_at")
    def failed(self, row: FailedTask) -> str:
        return format_instant(row.failed_at)

    @ops_display(description=_("state"), label=TONES)
    def state_label(self, row: FailedTask) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @ops_display(description=_("class"))
    def class_label(self, row: FailedTask) -> str:
        return translate_failure_class(row.origin, row.failure)

    @ops_display(description=_("reason"), ordering="reason")
    def why(self, row: FailedTask) -> str:
        detail = Truncator(find_error_line(redact_text(row.detail))).chars(81)
        return format_html('{}<br><span class="at-quiet">{}</span>', translate_reason(row.reason), detail)

    @ops_display(description=_("node or task type"))
    def node_key(self, row: FailedTask) -> str:
        return str(row.payload.get("node") or row.payload.get("task_type") or "–")

    @ops_display(description=_("customer or shop"))
    def user_key(self, row: FailedTask) -> str:
        return reveal_odd_characters(str(row.payload.get("user_id") or row.payload.get("shop_id") or "–"))

    @ops_display(description=_("assignee"))
    def assigned_to(self, row: FailedTask) -> str:
        return format_user(row.assignee)

    @ops_action(description=_("Group by cause"), icon="stacks", permissions=["view"])
    def groups(self, request: HttpRequest) -> HttpResponse:
        """Group the latest failed tasks by cause, so that one fix leads to one action.

        Reads `GROUPED` tasks: a cause that is not among them hardly occurs any more.
        """
        state = request.GET.get("state") or OPEN
        latest = FailedTask.objects.filter(state=state).order_by("-failed_at" if state == OPEN else "-pk").values("pk")
        found = list(_group_by_cause(latest[:GROUPED]))
        trends = draw_trends([group["fingerprint"] for group in found])
        listed = [
            {
                **group,
                "words": translate_reason(group["reason"]),
                "detail": find_error_line(redact_text(group["detail"])),
                "trend": trends.get(group["fingerprint"]),
                "class": translate_failure_class(group["origin"], group["failure"]),
                "link": f"{self.url('changelist')}?{urlencode({'state': state, 'fingerprint': group['fingerprint']})}",
            }
            for group in found
        ]
        return self.page(
            request,
            "ops/failed_groups.html",
            gettext("Failed tasks by cause"),
            groups=listed,
            most=GROUPED if latest[GROUPED : GROUPED + 1].exists() else 0,
            states=[(value, label, value == state) for value, label in FailedTask.State.choices],
            back=self.url("changelist"),
        )

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        row = self.get_row_or_404(request, object_id)
        links = self.action_links(request, row)
        verbs = [
            {
                "verb": verb.for_origins(row.origin),
                "link": reverse("admin:scheduling_failedtask_act", args=[row.pk, name]),
            }
            for name, verb in FAILED_TASK_ACTIONS.items()
            if request.user.has_perm(HANDLE) and verb.applies_to(row)
        ]
        return self.page(
            request,
            "ops/failed_task.html",
            translate_reason(row.reason) or gettext("Failed task"),
            original=row,
            row=row,
            tone=TONES[row.state],
            words=translate_reason(row.reason),
            **_split_detail(redact_text(row.detail)),
            class_label=translate_failure_class(row.origin, row.failure),
            verbs=verbs,
            edit_link=links.get("edit", "") if may_edit(request, row) else "",
            difference=render_difference(row),
            **build_notes(request, row, links),
            attempts=[_describe_stored_attempt(each) for each in row.attempts],
            payload=redact_json(row.payload),
            task=find_task_with_link(row.origin, row.task_id),
            again=find_task_with_link(row.origin, row.retried_as),
            panel=render_origin_panel(request, row),
            same=FailedTask.objects.filter(fingerprint=row.fingerprint, state="open").exclude(pk=row.pk)[:101].count(),
            same_link=f"{self.url('changelist')}?{urlencode({'fingerprint': row.fingerprint})}",
        )
