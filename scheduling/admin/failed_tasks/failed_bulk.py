"""Apply an action to many failed tasks: up to `AT_ONCE` in the request, more as a bulk action."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from scheduling.admin.base import build_user_actor
from scheduling.admin.count_time_limits import count_within
from scheduling.admin.failed_tasks.actions import (
    FAILED_TASK_ACTIONS,
    HANDLE,
    FailedTaskAction,
    PaceForm,
    ReasonForm,
    offer_retry_undo,
)
from scheduling.admin.failed_tasks.bulk_action import list_refusal_reasons, read_page_time, submit_bulk_action
from scheduling.models import FailedTask
from scheduling.operations import failed_tasks
from scheduling.operations.undo import UNDO_WINDOW

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
        given = request.POST if "confirmed" in request.POST else None
        if request.POST.get("select_across") == "1" and (count is None or count > AT_ONCE):
            return _act_on_all_matching(tasks_admin, request, name, rows, count, given, asked_at)
        form = ReasonForm(given)
        if form.is_valid():
            _act_on_chosen(request, verb, rows, form)
            return None
        return _render_confirmation(
            tasks_admin, request, name, rows, form, asked_at, facts=[_describe_task_count(min(count or 0, MOST_CHOSEN))]
        )

    act.__name__ = f"bulk_{name}"
    return act


def _act_on_all_matching(
    tasks_admin: Any, request: HttpRequest, name: str, rows: QuerySet[FailedTask], count: int | None, given: Any,
    asked_at: datetime,
) -> HttpResponse | None:  # fmt: skip
    refused = list_refusal_reasons(name, request.GET, asked_at)
    if refused:
        for line in refused:
            messages.error(request, line)
        return None
    form = PaceForm.for_action(FAILED_TASK_ACTIONS[name].action, given)
    if form.is_valid():
        return submit_bulk_action(request, name, request.GET, form, asked_at)
    facts = (
        [_describe_task_count(count)] if count is not None else [_("Applies to too many failed tasks to count now.")]
    )
    facts.append(_("Workers run the bulk action. A page shows its progress and can stop it."))
    return _render_confirmation(tasks_admin, request, name, rows, form, asked_at, facts=facts)


def _describe_task_count(count: int) -> str:
    words = ngettext("Applies to %(count)s failed task.", "Applies to %(count)s failed tasks.", count)
    return words % {"count": count}


def _render_confirmation(
    tasks_admin: Any, request: HttpRequest, name: str, rows: QuerySet[FailedTask], form: ReasonForm,
    asked_at: datetime, *, facts: list[str],
) -> HttpResponse:  # fmt: skip
    origins = count_within(lambda: list(rows.order_by().values_list("origin", flat=True).distinct()))
    verb = FAILED_TASK_ACTIONS[name].for_origins(*(origins or ()))
    hidden = [
        ("action", f"bulk_{name}"), ("confirmed", "1"), ("asked_at", asked_at.isoformat()),
        ("select_across", request.POST.get("select_across", "0")), ("index", "0"),
    ]  # fmt: skip
    hidden += [(ACTION_CHECKBOX_NAME, pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)]
    return tasks_admin.page(  # type: ignore[no-any-return]
        request, "ops/confirm.html", verb.title, form=form, text=verb.explains, button=verb.title, facts=facts,
        danger=verb.action.as_new, hidden=hidden, back=request.get_full_path(),
    )  # fmt: skip


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
