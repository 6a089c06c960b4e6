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
from django.utils.dateparse import parse_datetime
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from scheduling.admin.base import actor_of
from scheduling.admin.failed_tasks.actions import VERBS, PaceForm, ReasonForm, Verb
from scheduling.admin.failed_tasks.bulk_action import begin, refusal
from scheduling.admin.patience import patiently
from scheduling.models import FailedTask
from scheduling.operations import failed_tasks
from scheduling.operations.failed_tasks import Tally

AT_ONCE = 50  #: one page of the list; workers process more
MOST_CHOSEN = 200  #: rows that can be selected one by one
PER_SECOND = 20  #: rate of publishing the rows of one page


def bulk(name: str) -> Callable[[Any, HttpRequest, QuerySet[FailedTask]], HttpResponse | None]:
    """Return a list action: ask for a reason, then apply it.

    "All that match" means tasks that had failed when the page was shown.
    """
    verb = VERBS[name]

    def act(tasks_admin: Any, request: HttpRequest, queryset: QuerySet[FailedTask]) -> HttpResponse | None:
        if not tasks_admin.has_act_permission(request):
            raise PermissionDenied
        asked_at = instant_of(request)
        rows = verb.deed.fitting(queryset.filter(failed_at__lte=asked_at))
        count = patiently(rows.order_by().count)
        given = request.POST if "confirmed" in request.POST else None
        if request.POST.get("select_across") == "1" and (count is None or count > AT_ONCE):
            return _all_that_match(tasks_admin, request, name, rows, count, given, asked_at)
        form = ReasonForm(given)
        if form.is_valid():
            _act_on_all(request, verb, rows, form)
            return None
        return _ask(tasks_admin, request, name, rows, form, asked_at, facts=[_applies_to(min(count or 0, MOST_CHOSEN))])

    act.__name__ = f"bulk_{name}"
    return act


def instant_of(request: HttpRequest) -> datetime:
    """Return when the submitted page was shown; now if unknown."""
    try:
        asked_at = parse_datetime(request.POST.get("asked_at", ""))
    except ValueError:
        asked_at = None
    return min(asked_at, now()) if asked_at and asked_at.tzinfo else now()


def _all_that_match(
    tasks_admin: Any, request: HttpRequest, name: str, rows: QuerySet[FailedTask], count: int | None, given: Any,
    asked_at: datetime,
) -> HttpResponse | None:  # fmt: skip
    refused = refusal(name, request.GET, asked_at)
    if refused:
        for line in refused:
            messages.error(request, line)
        return None
    form = PaceForm.of(VERBS[name].deed, given)
    if form.is_valid():
        return begin(request, name, request.GET, form, asked_at)
    facts = [_applies_to(count)] if count is not None else [_("Applies to too many failed tasks to count now.")]
    facts.append(_("Workers run the bulk action. A page shows its progress and can stop it."))
    return _ask(tasks_admin, request, name, rows, form, asked_at, facts=facts)


def _applies_to(count: int) -> str:
    words = ngettext("Applies to %(count)s failed task.", "Applies to %(count)s failed tasks.", count)
    return words % {"count": count}


def _ask(
    tasks_admin: Any, request: HttpRequest, name: str, rows: QuerySet[FailedTask], form: ReasonForm,
    asked_at: datetime, *, facts: list[str],
) -> HttpResponse:  # fmt: skip
    origins = patiently(lambda: list(rows.order_by().values_list("origin", flat=True).distinct()))
    verb = VERBS[name].about(*(origins or ()))
    hidden = [
        ("action", f"bulk_{name}"), ("confirmed", "1"), ("asked_at", asked_at.isoformat()),
        ("select_across", request.POST.get("select_across", "0")), ("index", "0"),
    ]  # fmt: skip
    hidden += [(ACTION_CHECKBOX_NAME, pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)]
    return tasks_admin.page(  # type: ignore[no-any-return]
        request, "ops/confirm.html", verb.title, form=form, text=verb.explains, button=verb.title, facts=facts,
        danger=verb.deed.as_new, hidden=hidden, back=request.get_full_path(),
    )  # fmt: skip


def _act_on_all(request: HttpRequest, verb: Verb, rows: QuerySet[FailedTask], form: ReasonForm) -> None:
    failed_ids = list(rows.order_by("failed_at").values_list("pk", flat=True)[:MOST_CHOSEN])
    actor = actor_of(request, form.cleaned_data["reason"])
    if verb.deed.publishes:
        tally = failed_tasks.retry_all(failed_ids, actor, as_new=verb.deed.as_new, per_second=PER_SECOND)
    else:
        tally = failed_tasks.do_all(failed_ids, lambda failed_id, done: verb.deed.act(failed_id, actor))
    words = ngettext("%(what)s: %(count)s failed task.", "%(what)s: %(count)s failed tasks.", tally.done)
    messages.success(request, words % {"what": verb.title, "count": tally.done})
    tell_conflicts(request, tally)


def tell_conflicts(request: HttpRequest, tally: Tally) -> None:
    """Warn about rows that were skipped: another user acted on them, or their state does not allow it."""
    if tally.conflicts:
        words = ngettext(
            "%(count)s failed task was skipped: another user acted first, or the task cannot be published again.",
            "%(count)s failed tasks were skipped: another user acted first, or the tasks cannot be published again.",
            tally.conflicts,
        )
        messages.warning(request, words % {"count": tally.conflicts})
