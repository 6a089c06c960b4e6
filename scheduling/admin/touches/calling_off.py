"""Calling off all touches that wait and match: they are counted, a reason is asked for, and workers do it."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from scheduling.admin.failed_tasks.actions import PaceForm
from scheduling.admin.failed_tasks.bulk_action import begin, refusal
from scheduling.admin.failed_tasks.failed_bulk import instant_of
from scheduling.admin.patience import patiently
from scheduling.operations.deeds import DEEDS
from scheduling.operations.filters import chosen_by, matching

CALL_OFF = "call_off"


def call_off_page(touches_admin: Any, request: HttpRequest) -> HttpResponse:
    if not touches_admin.has_change_permission(request):
        raise PermissionDenied
    back = f"{touches_admin.url('changelist')}?{request.GET.urlencode()}"
    asked_at = instant_of(request)
    if refused := refusal(CALL_OFF, request.GET, asked_at):
        for line in refused:
            messages.error(request, line)
        return redirect(back)
    form = PaceForm.of(DEEDS[CALL_OFF], request.POST or None)
    if request.method == "POST" and form.is_valid():
        return begin(request, CALL_OFF, request.GET, form, asked_at)
    rows = matching(DEEDS[CALL_OFF], chosen_by(request.GET), asked_at)
    count = patiently(rows.order_by().count)
    return touches_admin.page(  # type: ignore[no-any-return]
        request, "ops/confirm.html", _("Call off all that wait and match"), form=form, button=_("Call off"), back=back,
        text=_("They will not be sent. This cannot be undone."), danger=True,
        facts=[_applies_to(count), _("Workers do it; a page shows how far they are, and can stop them.")],
        hidden=[("asked_at", asked_at.isoformat())], problem="" if count != 0 else _("None that waits matches."),
    )  # fmt: skip


def _applies_to(count: int | None) -> str:
    if count is None:
        return _("It applies to more touches than can be counted now.")
    return ngettext("It applies to %(count)s touch.", "It applies to %(count)s touches.", count) % {"count": count}
