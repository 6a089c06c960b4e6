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
from django.utils.translation import gettext_noop, ngettext

from scheduling.admin.base import build_user_actor
from scheduling.admin.labels import register_labels, translate_error
from scheduling.errors import AftertouchError
from scheduling.operations import undo

REFUSALS = (
    (r"the time to undo is over, or the act was undone already",
     gettext_noop("The time to undo is over, or it was undone already.")),
    (r"an event of the customer has arrived since", gettext_noop("an event of the customer has arrived since")),
    (r"an earlier attempt of the touch may have had its effect",
     gettext_noop("an earlier attempt of the touch may have had its effect")),
    (r"There is no touch (?P<touch>\S+) that ended without being sent\.",
     gettext_noop("The touch no longer stands as cancelled: %(touch)s.")),
    (r"the retry has started already", gettext_noop("the retry has started already")),
    (r"another user acted on the failed task since", gettext_noop("another user acted on the failed task since")),
    (r"the bulk action has started already; stop it on its page",
     gettext_noop("the bulk action has started already; stop it on its page")),
    (r"the pause has ended already", gettext_noop("The pause had already ended.")),
    (r"the configuration changed since the publication",
     gettext_noop("the configuration changed since the publication")),
    (r"the node changed since it was switched off", gettext_noop("the node changed since it was switched off")),
    (r"touches that stay suppressed: (?P<count>\d+)", gettext_noop("touches that stay suppressed: %(count)s")),
    (r"touches that a worker holds may stay suppressed",
     gettext_noop("touches that a worker holds may stay suppressed")),
    (r"There is no job (?P<job>\S+) that was cancelled before it ran\.",
     gettext_noop("The job no longer stands as cancelled: %(job)s.")),
    (r"another job of the same key was published since",
     gettext_noop("another job of the same key was published since")),
)  # fmt: skip
register_labels({}, {}, REFUSALS)


def create_undo_link(request: HttpRequest, act: str, keys: Sequence[object], *, label: str = "", **given: Any) -> str:
    """Return the address that takes the act back; "" if there is none.

    That is so if no row or more than `undo.MOST_ROWS` changed, or the user may not take it back.
    """
    if not 0 < len(keys) <= undo.MOST_ROWS or not request.user.has_perm(undo.find_reversal(act).permission):
        return ""
    return build_undo_link(undo.offer_undo(request.user, act, keys, label=label, given=given))  # type: ignore[arg-type]


def build_undo_link(act_id: UUID | None) -> str:
    return reverse("admin:undo_act", args=[act_id]) if act_id else ""


def answer_undo(request: HttpRequest, act_id: UUID) -> HttpResponse:
    """Take the act back and return to the page of the button."""
    if request.method != "POST":
        raise PermissionDenied
    try:
        undone = undo.undo_act(act_id, build_user_actor(request))
    except AftertouchError as error:
        for line in str(error).splitlines():
            messages.error(request, _("Not undone: %(why)s") % {"why": translate_error(line)})
    else:
        messages.success(request, _describe_undone(undone))
        for line in undone.refusals:
            messages.warning(request, _("Not undone for all: %(why)s") % {"why": translate_error(line)})
    back = request.META.get("HTTP_REFERER", "")
    is_ours = url_has_allowed_host_and_scheme(back, {request.get_host()}, require_https=request.is_secure())
    return redirect(back if is_ours else "admin:index")


def _describe_undone(undone: undo.Undone) -> str:
    if undone.label:
        return _("Undone: %(what)s.") % {"what": undone.label}
    words = ngettext("Undone for %(count)s row.", "Undone for %(count)s rows.", undone.rows)
    return words % {"count": undone.rows}
