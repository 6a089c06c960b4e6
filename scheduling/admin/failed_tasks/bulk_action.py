"""Start, show and stop bulk actions: up to `AT_ONCE` failed tasks in the request, more in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from math import ceil
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.http import urlencode
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from scheduling.admin.base import ReadOnlyAdmin, RowPage, build_user_actor, ops_display, row_action
from scheduling.admin.failed_tasks.actions import (
    FAILED_TASK_ACTIONS,
    HANDLE,
    FailedTaskAction,
    PaceForm,
    ReasonForm,
    offer_retry_undo,
)
from scheduling.admin.labels import translate_error
from scheduling.admin.page_reads import count_within
from scheduling.admin.undo import create_undo_link
from scheduling.errors import AftertouchError, Conflict, InvalidInput
from scheduling.models import BulkAction, FailedTask
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations import bulk_actions, failed_tasks
from scheduling.operations.bulk_actions import find_row_action, get_list, matching_rows, read_filter
from scheduling.operations.undo import UNDO_WINDOW

TONES = {"running": "warning", "done": "success", "cancelled": "default", "failed": "danger"}


def matching_rows_page(
    listed: Any, request: HttpRequest, action: str, form: PaceForm, *, address: Mapping[str, Any],
    describe_count: Callable[[int | None], str], hidden: Sequence[tuple[str, str]] = (), **context: Any,
) -> HttpResponse:  # fmt: skip
    """Confirm an action on all rows of the list that match its filter, and start it as a bulk action.

    `address` are the parameters of the filter. Fields of the form beside reason and rate are parameters of the action.
    The page returns to the list if the action cannot start or apply to the filter.
    """
    back = f"{listed.url('changelist')}?{request.GET.urlencode()}"
    asked_at = read_page_time(request)
    try:
        chosen = read_filter(address)
        row_action = bulk_actions.check_action(action, chosen, asked_at)
        if request.method == "POST" and form.is_valid():
            row = bulk_actions.start_bulk_action(
                action, chosen, build_user_actor(request, form.cleaned_data["reason"]),
                per_second=form.cleaned_data["per_second"], as_of=asked_at, after=UNDO_WINDOW,
                given={name: value for name, value in form.cleaned_data.items() if name not in PaceForm.base_fields},
            )  # fmt: skip
            title = get_action_title(action)
            link = create_undo_link(request, "bulk.start", [row.pk], label=title)
            text = _("%(what)s: the first batch starts in ten seconds.")
            messages.success(request, text % {"what": title}, extra_tags=link)
            return redirect("admin:scheduling_bulkaction_change", row.pk)
    except InvalidInput as error:
        for each in error.errors:
            messages.error(request, f"{each.field}: {translate_error(each.message)}")
        return redirect(back)
    except Conflict as error:
        messages.error(request, translate_error(str(error)))
        return redirect(back)
    count = count_within(matching_rows(row_action, chosen, asked_at).order_by().count)
    facts = [describe_count(count), _("Workers run the bulk action. A page shows its progress and can stop it.")]
    return listed.page(  # type: ignore[no-any-return]
        request, "ops/confirm.html", form=form, back=back, facts=facts,
        hidden=[("asked_at", asked_at.isoformat()), *hidden], problem="" if count != 0 else _("No row matches."),
        **context,
    )  # fmt: skip


def read_page_time(request: HttpRequest) -> datetime:
    """Return when the submitted page was shown; now if unknown."""
    try:
        asked_at = parse_datetime(request.POST.get("asked_at", ""))
    except ValueError:
        asked_at = None
    return min(asked_at, now()) if asked_at and asked_at.tzinfo else now()


def get_action_title(action: str) -> str:
    verb, applied = FAILED_TASK_ACTIONS.get(action), find_row_action(action)
    return str(verb.title if verb else applied.title if applied else action)


@admin.register(BulkAction)
class BulkActionAdmin(RowPage, ReadOnlyAdmin):
    list_display = ("what", "shown_state", "progress", "begun_at", "actor_name", "reason")
    list_filter = ("state",)
    list_filter_submit = False
    ordering = ("-pk",)
    actions_detail = ("cancel",)

    @ops_display(description=gettext_lazy("action"))
    def what(self, row: BulkAction) -> str:
        applied = find_row_action(row.action)
        return f"{get_action_title(row.action)} · {get_list(applied.over).label if applied else ''}"

    @ops_display(description=gettext_lazy("state"), label=TONES)
    def shown_state(self, row: BulkAction) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @ops_display(description=gettext_lazy("progress"))
    def progress(self, row: BulkAction) -> str:
        if row.total is None:
            return str(row.looked_at)
        return _("%(done)s of %(total)s") % {"done": row.looked_at, "total": row.total}

    def show_row(self, request: HttpRequest, row: BulkAction) -> HttpResponse:
        running = row.state == BulkAction.State.RUNNING
        percent = min(100 * row.looked_at // row.total, 100) if row.total else 0
        if row.state == BulkAction.State.DONE:  # may be a jump: rows that other users acted on are skipped
            percent = 100
        left = ""
        if running and row.total and row.looked_at:
            # At least one second: the page would name a shorter time “at once”.
            seconds = ceil(max(row.total - row.looked_at, 1) / row.per_second)
            left = describe_duration(timedelta(seconds=seconds))
        list_link = ""  # an unknown action has no list
        applied = find_row_action(row.action)
        if applied is not None:
            listed = get_list(applied.over)
            query = {listed.page_names.get(name, name): value for name, value in row.filter.items()}
            list_link = f"{reverse(listed.changelist)}?{urlencode(query)}"
        return self.page(
            request,
            "ops/bulk_action.html",
            self.what(row),
            original=row,
            row=row,
            tone=TONES[row.state],
            running=running,
            percent=percent,
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
    applied = find_row_action(row.action)
    return applied is not None and request.user.has_perm(applied.permission)


AT_ONCE = 50  #: one page of the list; workers process more
MOST_CHOSEN = 200  #: rows that can be selected one by one
PER_SECOND = 20  #: rate of publishing the rows of one page


def make_list_action(name: str) -> Callable[[Any, HttpRequest, QuerySet[FailedTask]], HttpResponse | None]:
    """Return a list action: ask for a reason, then apply it.

    "All that match" means tasks that had failed when the page was shown.
    """
    verb = FAILED_TASK_ACTIONS[name]

    def act(tasks_admin: Any, request: HttpRequest, queryset: QuerySet[FailedTask]) -> HttpResponse | None:
        if not request.user.has_perm(HANDLE):
            raise PermissionDenied
        asked_at = read_page_time(request)
        rows = verb.action.allowed_rows(queryset.filter(failed_at__lte=asked_at))
        count = count_within(rows.order_by().count)
        origins = count_within(lambda: list(rows.order_by().values_list("origin", flat=True).distinct()))
        of_origins = verb.for_origins(*(origins or ()))
        given = request.POST if "confirmed" in request.POST else None
        hidden = [
            ("action", f"bulk_{name}"), ("confirmed", "1"),
            ("select_across", request.POST.get("select_across", "0")), ("index", "0"),
            *((ACTION_CHECKBOX_NAME, pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)),
        ]  # fmt: skip
        texts = {
            "title": of_origins.title, "text": of_origins.explains, "button": of_origins.title,
            "danger": verb.action.as_new,
        }  # fmt: skip
        if request.POST.get("select_across") == "1" and (count is None or count > AT_ONCE):
            return matching_rows_page(
                tasks_admin, request, name, PaceForm.for_action(verb.action, given), address=request.GET,
                describe_count=_describe_count, hidden=hidden, **texts,
            )  # fmt: skip
        form = ReasonForm(given)
        if form.is_valid():
            _act_on_chosen(request, verb, rows, form)
            return None
        return tasks_admin.page(  # type: ignore[no-any-return]
            request, "ops/confirm.html", form=form, facts=[_describe_count(min(count or 0, MOST_CHOSEN))],
            hidden=[("asked_at", asked_at.isoformat()), *hidden], back=request.get_full_path(), **texts,
        )  # fmt: skip

    act.__name__ = f"bulk_{name}"
    return act


def _describe_count(count: int | None) -> str:
    if count is None:
        return _("Applies to too many failed tasks to count now.")
    return ngettext("Applies to %(count)s failed task.", "Applies to %(count)s failed tasks.", count) % {"count": count}


def _act_on_chosen(request: HttpRequest, verb: FailedTaskAction, rows: QuerySet[FailedTask], form: ReasonForm) -> None:
    failed_ids = list(rows.order_by("failed_at").values_list("pk", flat=True)[:MOST_CHOSEN])
    actor = build_user_actor(request, form.cleaned_data["reason"])
    if verb.action.publishes:
        tally = failed_tasks.retry_all(
            failed_ids, actor, as_new=verb.action.as_new, per_second=PER_SECOND, after=UNDO_WINDOW
        )
    else:
        tally = failed_tasks.apply_to_each(failed_ids, lambda failed_id, done: verb.action.act(failed_id, actor))
    words = ngettext("%(what)s: %(count)s failed task.", "%(what)s: %(count)s failed tasks.", tally.done)
    link = offer_retry_undo(request, verb.action, tally.returned)
    messages.success(request, words % {"what": verb.title, "count": tally.done}, extra_tags=link)
    if tally.conflicts:
        words = ngettext(
            "%(count)s failed task was skipped: another user acted first, or the task cannot be published again.",
            "%(count)s failed tasks were skipped: another user acted first, or the tasks cannot be published again.",
            tally.conflicts,
        )
        messages.warning(request, words % {"count": tally.conflicts})
