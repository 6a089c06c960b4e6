"""Retry failed tasks of one cause carefully: a sample of `FEW` first, then the rest.

No state is stored. The sample is the latest tasks of the cause that were published again, by any user. All users thus
see the same page, also after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from scheduling.admin.base import build_user_actor
from scheduling.admin.failed_tasks.actions import PaceForm
from scheduling.admin.failed_tasks.bulk_action import read_page_time, submit_bulk_action
from scheduling.admin.failed_tasks.failed_bulk import AT_ONCE, warn_about_conflicts
from scheduling.admin.labels import translate_reason
from scheduling.models import FailedTask
from scheduling.operations import failed_tasks
from scheduling.operations.failed_tasks import BulkResult
from scheduling.redaction import redact_text

FEW = 5
MOST_COUNTED = 10_000  #: waiting tasks; the page reloads by itself
DONE_WELL = ("delivered", "succeeded")
TONES = {"failed": "danger", "unknown": "danger", "suppressed": "warning", "cancelled": "warning"}


@dataclass(frozen=True, slots=True)
class RetriedTask:
    """A failed task that was published again, and the state of its new task."""

    row: FailedTask
    state: str
    words: str
    link: str

    @property
    def tone(self) -> str:
        return "success" if self.state in DONE_WELL else TONES.get(self.state, "info")


def find_task(origin: str, task_id: Any) -> Any:
    """Return the task with this id from its app's ledger; None if it does not exist."""
    label = settings.LEDGERS.get(origin)
    return apps.get_model(label)._default_manager.filter(pk=task_id).first() if label and task_id else None


def get_task_link(task: Any) -> str:
    opts = task._meta
    return reverse(f"admin:{opts.app_label}_{opts.model_name}_change", args=[task.pk])


def retry_sample_page(tasks_admin: Any, request: HttpRequest, fingerprint: str) -> HttpResponse:
    """Show the results of the sample. After confirmation, publish the sample or the rest."""
    if not tasks_admin.has_act_permission(request):
        raise PermissionDenied
    group = FailedTask.objects.filter(fingerprint=fingerprint).exclude(origin=FailedTask.Origin.MESSAGE)
    example = next(iter(group.order_by()[:1]), None)  # ordering by time would sort the whole group
    if example is None:
        raise Http404
    asked_at = read_page_time(request)
    waiting = group.filter(state=FailedTask.State.OPEN, failed_at__lte=asked_at).order_by("failed_at")
    tried = _list_retried_tasks(group)
    form = PaceForm(request.POST or None, initial=_keep_typed_values(request, tried))
    if request.method == "POST" and form.is_valid():
        if "rest" in request.POST and waiting[: AT_ONCE + 1].count() > AT_ONCE:
            return submit_bulk_action(request, "retry", {"fingerprint": fingerprint, "state": "open"}, form, asked_at)
        _publish_waiting(request, waiting, form, all_of_them="rest" in request.POST)
        return redirect(f"{request.path}?{urlencode({'per_second': form.cleaned_data['per_second']})}")
    count = waiting.order_by()[: MOST_COUNTED + 1].count()
    return tasks_admin.page(  # type: ignore[no-any-return]
        request, "ops/retry_sample.html", _("Retry in steps"), form=form, example=example,
        words=translate_reason(example.reason), detail=redact_text(example.detail), tried=tried, few=FEW,
        waiting=min(count, MOST_COUNTED),
        more=count > MOST_COUNTED, most=AT_ONCE, advice=_advise_next_step(tried), asked_at=asked_at.isoformat(),
        all_well=_all_succeeded(tried), back=reverse("admin:scheduling_failedtask_groups"),
        list_link=f"{tasks_admin.url('changelist')}?{urlencode({'fingerprint': fingerprint})}",
    )  # fmt: skip


def _keep_typed_values(request: HttpRequest, tried: Sequence[RetriedTask]) -> dict[str, Any]:
    """Return what the user typed in the last step: the pace, and the reason that the tasks of that step have."""
    typed = {name: request.GET[name] for name in ("per_second",) if name in request.GET}
    mine = [each.row for each in tried if each.row.actor_id == request.user.pk]
    return {**typed, "reason": mine[0].action_reason} if mine and "per_second" in typed else typed


def _list_retried_tasks(group: QuerySet[FailedTask]) -> list[RetriedTask]:
    rows = group.filter(state=FailedTask.State.RETRIED).order_by("-acted_at")[:FEW]
    return [_describe_retried_task(row) for row in rows]


def _describe_retried_task(row: FailedTask) -> RetriedTask:
    task = find_task(row.origin, row.retried_as)
    if task is None:
        return RetriedTask(row, "", _("no longer exists"), "")
    return RetriedTask(row, task.state, task.get_state_display(), get_task_link(task))


def _all_succeeded(tried: Sequence[RetriedTask]) -> bool:
    return bool(tried) and all(each.state in DONE_WELL for each in tried)


def _advise_next_step(tried: Sequence[RetriedTask]) -> tuple[str, str]:
    """Return a tone and a sentence: what the sample implies for the rest."""
    if not tried:
        return "", _("No retry yet. Start with a few and check the results.")
    if _all_succeeded(tried):
        return "good", _("The latest retries all succeeded. You can retry the rest.")
    if any(each.tone in ("danger", "warning") for each in tried):
        return "bad", _("Some of the latest retries failed. The cause probably persists.")
    return "wait", _("The latest retries are still running. This page refreshes automatically.")


def _publish_waiting(request: HttpRequest, waiting: QuerySet[FailedTask], form: PaceForm, *, all_of_them: bool) -> None:
    failed_ids = list(waiting.values_list("pk", flat=True)[:AT_ONCE])
    actor, pace = build_user_actor(request, form.cleaned_data["reason"]), form.cleaned_data["per_second"]
    if all_of_them:
        tally = failed_tasks.retry_all(failed_ids, actor, per_second=pace)
    else:
        tally = failed_tasks.retry_sample(failed_ids, actor, count=FEW)
    _report_published(request, tally)


def _report_published(request: HttpRequest, tally: BulkResult) -> None:
    words = ngettext("%(count)s was published again.", "%(count)s were published again.", tally.done)
    (messages.success if tally.done else messages.warning)(request, words % {"count": tally.done})
    warn_about_conflicts(request, tally)
