"""Start, show and stop bulk actions, and act on selected failed tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from math import ceil
from typing import Any, ClassVar
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.http import urlencode
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from unfold.widgets import UnfoldAdminDecimalFieldWidget, UnfoldAdminTextInputWidget

from scheduling import sql
from scheduling.admin.base import (
    Confirmation,
    ReadOnlyAdmin,
    RowPage,
    build_user_actor,
    ops_display,
    row_action,
    table_page,
)
from scheduling.admin.labels import translate_error
from scheduling.admin.page_reads import count_within
from scheduling.admin.undo import create_undo_link
from scheduling.errors import AftertouchError, Conflict, InvalidInput, NotFound
from scheduling.models import BulkAction, FailedTask
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations import bulk_actions
from scheduling.operations.bulk_actions import FAILED_TASK_ACTIONS, FASTEST, HANDLE, SLOWEST, RowAction, row_actions
from scheduling.operations.undo import UNDO_WINDOW

TONES = {"running": "warning", "done": "success", "cancelled": "default", "failed": "danger"}
#: Parameters that affect only how a list is displayed.
DISPLAY_PARAMETERS = frozenset({"o", "p", "all", "e", "_facets"})


class ReasonForm(forms.Form):
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=500,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Stored with your name for later review."),
    )


class PaceForm(ReasonForm):
    """Ask for a reason and a rate per second."""

    per_second = forms.FloatField(
        label=gettext_lazy("Retries per second"), min_value=SLOWEST, max_value=FASTEST,
        widget=UnfoldAdminDecimalFieldWidget, help_text=gettext_lazy("Choose a rate that the receiver can handle."),
    )  # fmt: skip

    @classmethod
    def for_action(cls, action: RowAction, given: Any) -> PaceForm:
        """Build the form with the action's default rate."""
        form = cls(given, initial={"per_second": action.per_second})
        if not action.publishes:
            form.fields["per_second"].help_text = ""
        return form


def offer_retry_undo(request: HttpRequest, action: RowAction, retried: Mapping[UUID, Any], label: str = "") -> str:
    """Return the address that takes these retries back; "" for other actions. `retried` holds the new task ids."""
    if not action.publishes:
        return ""
    ids = {str(failed_id): str(task_id) for failed_id, task_id in retried.items()}
    return create_undo_link(request, "failed_task.retry", list(ids), label=label, retried=ids, as_new=action.as_new)


class MatchingRowsMixin:
    """Add actions on all rows that match the filter of a list, with links below it."""

    matching_actions: ClassVar[Mapping[str, RowAction]]
    matching_forms: ClassVar[Mapping[str, type[PaceForm]]] = {}  #: of actions that take parameters
    matching_time = "created_at"  #: column; the page of an action leaves out rows that came after it was shown
    list_after_template = "ops/matching_below.html"
    list_disable_select_all = True

    def changelist_view(self: Any, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        links = [
            (f"{self.url('matching', name)}?{request.GET.urlencode()}", action.title)
            for name, action in self.matching_actions.items()
            if request.user.has_perm(action.permission)
        ]
        context = {"matching_links": links, **(extra_context or {})}
        return super().changelist_view(request, context)  # type: ignore[misc,no-any-return]

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Act on the ticked rows only: with this field Django acts on all, also those that came after the page."""
        sent = request.POST.copy()
        sent.pop("select_across", None)
        request.POST = sent  # type: ignore[assignment]
        return super().response_action(request, queryset)  # type: ignore[misc,no-any-return]

    @table_page("matching/<str:name>/")
    def matching(self: Any, request: HttpRequest, name: str) -> HttpResponse:
        """Confirm an action on the rows that the list would show, if it showed those of the time of this page.

        The action is started as a bulk action. Fields of the form beside reason and rate are its parameters.
        """
        action = self.matching_actions.get(name)
        if action is None:
            raise Http404
        if not request.user.has_perm(action.permission):
            raise PermissionDenied
        request.acts_on_matches = True  # type: ignore[attr-defined]
        page_time = read_page_time(request)
        try:
            listed = self.get_changelist_instance(request).queryset
        except IncorrectLookupParameters:
            return redirect(self.url("changelist"))
        rows = listed.filter(**{f"{self.matching_time}__lte": page_time})
        action = word_for(action, rows)
        form = self.matching_forms.get(name, PaceForm).for_action(action, request.POST or None)

        def act() -> HttpResponse:
            shown = {key: str(value) for key, value in request.GET.items() if value and key not in DISPLAY_PARAMETERS}
            try:
                row = bulk_actions.start_bulk_action(
                    name, rows, build_user_actor(request, form.cleaned_data["reason"]), chosen=shown,
                    per_second=form.cleaned_data["per_second"], after=UNDO_WINDOW,
                    given={key: value for key, value in form.cleaned_data.items() if key not in PaceForm.base_fields},
                )  # fmt: skip
            except InvalidInput as error:  # of the list, whose filter is no field of this form
                raise AftertouchError(error.errors[0].message) from None
            link = create_undo_link(request, "bulk.start", [row.pk], label=str(action.title))
            text = _("%(what)s: the first batch starts in ten seconds.")
            messages.success(request, text % {"what": action.title}, extra_tags=link)
            return redirect("admin:scheduling_bulkaction_change", row.pk)

        facts, problem = [], ""
        if not form.is_valid():  # otherwise the start finds the rows, and reports the same problems
            try:
                count = bulk_actions.count_rows(action, rows)
                facts = [
                    action.applies % {"count": count},
                    _("Workers run the bulk action. A page shows its progress and can stop it."),
                ]
                problem = "" if count else _("No row matches.")
            except InvalidInput as error:
                problem = translate_error(error.errors[0].message)
        return self.confirm(  # type: ignore[no-any-return]
            request,
            Confirmation(
                title=str(action.title), text=str(action.explains), warning=str(action.warning), danger=action.danger,
                facts=facts, problem=problem, form=form, act=act, hidden=[("asked_at", page_time.isoformat())],
                back=f"{self.url('changelist')}?{request.GET.urlencode()}",
            ),
        )  # fmt: skip


def word_for(action: RowAction, rows: QuerySet[Any]) -> RowAction:
    """Return the action with the texts for what these failed tasks come from."""
    if action.of_job is None:
        return action
    origins = count_within(
        lambda: list(action.allowed_rows(rows).order_by().values_list("origin", flat=True).distinct())
    )
    return action.for_origins(*(origins or ()))


def read_page_time(request: HttpRequest) -> datetime:
    """Return when the submitted page was shown; now if unknown. Both by PostgreSQL's clock, as rows have it.

    A request has one such time: the page counts the rows that its form then means.
    """
    if not hasattr(request, "page_time"):
        try:
            asked_at = parse_datetime(request.POST.get("asked_at", ""))
        except ValueError:
            asked_at = None
        at = sql.now()
        request.page_time = min(asked_at, at) if asked_at and asked_at.tzinfo else at  # type: ignore[attr-defined]
    return request.page_time  # type: ignore[attr-defined,no-any-return]


@admin.register(BulkAction)
class BulkActionAdmin(RowPage, ReadOnlyAdmin):
    list_display = ("what", "shown_state", "progress", "begun_at", "actor_name", "reason")
    list_filter = ("state",)
    list_filter_submit = False
    ordering = ("-pk",)
    actions_detail = ("cancel",)

    @ops_display(description=gettext_lazy("action"))
    def what(self, row: BulkAction) -> str:
        action = row_actions().get(row.action)
        return f"{action.title} · {capfirst(action.model._meta.verbose_name_plural)}" if action else row.action

    @ops_display(description=gettext_lazy("state"), label=TONES)
    def shown_state(self, row: BulkAction) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @ops_display(description=gettext_lazy("progress"))
    def progress(self, row: BulkAction) -> str:
        return _("%(done)s of %(total)s") % {"done": row.processed, "total": row.total}

    def show_row(self, request: HttpRequest, row: BulkAction) -> HttpResponse:
        running = row.state == BulkAction.State.RUNNING
        left = ""
        if running and row.processed:
            # At least one second: the page would name a shorter time “at once”.
            left = describe_duration(timedelta(seconds=ceil(max(row.total - row.processed, 1) / row.per_second)))
        list_link = ""  # an API key has other names for filters, and an action that is gone has no list
        action = row_actions().get(row.action)
        if action is not None and row.actor_id:
            name = f"admin:{action.model._meta.app_label}_{action.model._meta.model_name}_changelist"
            list_link = f"{reverse(name)}?{urlencode(row.filter)}"
        return self.page(
            request,
            "ops/bulk_action.html",
            self.what(row),
            original=row,
            row=row,
            tone=TONES[row.state],
            running=running,
            percent=100 * row.processed // row.total if row.total else 100,
            progress=self.progress(row),
            left=left,
            pace=f"{row.per_second:g}",
            chosen=sorted(row.filter.items()),
            given=sorted(row.given.items()),
            list_link=list_link,
            links=self.action_links(request, row) if _may_stop(request, row) else {},
            back=self.url("changelist"),
        )

    @row_action(permission="view", allowed=lambda row: row.state == BulkAction.State.RUNNING, methods=["POST"])
    def cancel(self, request: HttpRequest, row: BulkAction) -> HttpResponse:
        if not _may_stop(request, row):
            raise PermissionDenied
        try:
            bulk_actions.cancel_bulk_action(row.pk, build_user_actor(request))
            messages.success(request, _("The bulk action was stopped. Completed changes stay."))
        except AftertouchError as error:
            messages.error(request, translate_error(str(error)))
        return redirect(self.url("change", row.pk))


def _may_stop(request: HttpRequest, row: BulkAction) -> bool:
    """Return whether the user may apply the action to one row, and so stop the bulk action."""
    action = row_actions().get(row.action)
    return action is not None and request.user.has_perm(action.permission)


MOST_CHOSEN = 200  #: rows that can be selected one by one
PER_SECOND = 20  #: rate of publishing selected rows


def make_list_action(name: str) -> Callable[[Any, HttpRequest, QuerySet[FailedTask]], HttpResponse]:
    """Return a list action: ask for a reason, then apply it to the selected tasks."""
    action = FAILED_TASK_ACTIONS[name]

    def act(tasks_admin: Any, request: HttpRequest, queryset: QuerySet[FailedTask]) -> HttpResponse:
        if not request.user.has_perm(HANDLE):
            raise PermissionDenied
        worded = word_for(action, queryset)
        form = ReasonForm(request.POST if "confirmed" in request.POST else None)
        rows = action.allowed_rows(queryset)
        chosen = list(rows.order_by("failed_at").values_list("pk", flat=True)[:MOST_CHOSEN])
        return tasks_admin.confirm(  # type: ignore[no-any-return]
            request,
            Confirmation(
                title=str(worded.title), text=str(worded.explains), danger=worded.danger, form=form,
                hidden=[
                    ("action", f"bulk_{name}"), ("confirmed", "1"), ("index", "0"),
                    *((ACTION_CHECKBOX_NAME, pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)),
                ],
                facts=[action.applies % {"count": len(chosen)}], back=request.get_full_path(),
                act=lambda: _act_on_chosen(request, action, chosen, form),
            ),
        )  # fmt: skip

    act.__name__ = f"bulk_{name}"
    return act


def _act_on_chosen(request: HttpRequest, action: RowAction, failed_ids: Sequence[UUID], form: ReasonForm) -> None:
    """Act on each task in a separate transaction. What is published keeps its rate; a conflict uses no share of it."""
    actor, start = build_user_actor(request, form.cleaned_data["reason"]), sql.now() + UNDO_WINDOW
    returned: dict[UUID, Any] = {}
    for failed_id in failed_ids:
        due_at = start + timedelta(seconds=len(returned) / PER_SECOND)
        with suppress(Conflict, NotFound):  # another user acted first, or the task cannot be handled so
            returned[failed_id] = action.act(failed_id, actor, due_at)
    words = ngettext("%(what)s: %(count)s failed task.", "%(what)s: %(count)s failed tasks.", len(returned))
    link = offer_retry_undo(request, action, returned)
    messages.success(request, words % {"what": action.title, "count": len(returned)}, extra_tags=link)
    if conflicts := len(failed_ids) - len(returned):
        words = ngettext(
            "%(count)s failed task was skipped: another user acted first, or the task cannot be published again.",
            "%(count)s failed tasks were skipped: another user acted first, or the tasks cannot be published again.",
            conflicts,
        )
        messages.warning(request, words % {"count": conflicts})
