"""Let a user take back an act within ten seconds: its message carries a button (see `scheduling.operations.undo`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from scheduling.admin.base import build_user_actor
from scheduling.admin.labels import translate_error, translate_errors
from scheduling.errors import AftertouchError
from scheduling.operations import undo


def create_undo_link(request: HttpRequest, act: str, keys: Sequence[object], *, label: str = "", **given: Any) -> str:
    """Return the address that takes the act back; "" if there is none.

    That is so if no row or more than `undo.MOST_ROWS` changed, or the user may not take it back.
    """
    if not 0 < len(keys) <= undo.MOST_ROWS or not request.user.has_perm(undo.find_reversal(act).permission):
        return ""
    offer = undo.offer_undo(request.user, act, keys, label=label, given=given)  # type: ignore[arg-type]
    return reverse("admin:undo_act", args=[offer])


def answer_undo(request: HttpRequest, act_id: UUID) -> HttpResponse:
    """Take the act back and return to the page of the button."""
    if request.method != "POST":
        raise PermissionDenied
    try:
        undone = undo.undo_act(act_id, build_user_actor(request))
    except AftertouchError as error:
        for line in translate_errors(error):
            messages.error(request, _("Not undone: %(why)s") % {"why": line})
    else:
        words = ngettext("Undone for %(count)s row.", "Undone for %(count)s rows.", undone.rows)
        if undone.label:
            words = _("Undone: %(what)s.")
        messages.success(request, words % {"what": undone.label, "count": undone.rows})
        for line in undone.refusals:
            messages.warning(request, _("Not undone for all: %(why)s") % {"why": translate_error(line)})
    back = request.META.get("HTTP_REFERER", "")
    is_ours = url_has_allowed_host_and_scheme(back, {request.get_host()}, require_https=request.is_secure())
    return redirect(back if is_ours else "admin:index")
