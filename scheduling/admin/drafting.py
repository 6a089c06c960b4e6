"""Put the edit of a form into the user's draft instead of the live configuration."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.dataclasses import UnfoldAction
from unfold.enums import ActionVariant

from scheduling.admin.labels import translate_errors
from scheduling.configuration.file.apply import InvalidConfiguration
from scheduling.errors import Conflict
from scheduling.experiments import drafts

BUTTON = "_try_draft"  #: name of the button beside “Save”


class DraftableAdmin:
    """Offer “Try on the last 7 days” on the forms of rows that a draft can hold.

    The form is checked and saved as usual, in a transaction that is rolled back.
    """

    def may_try_draft(self: Any, request: HttpRequest) -> bool:
        return request.user.has_perm("scheduling.add_configdraft") and drafts.is_draftable(self.model)

    def get_actions_submit_line(self: Any, request: HttpRequest, object_id: Any) -> list[UnfoldAction]:
        found: list[UnfoldAction] = super().get_actions_submit_line(request, object_id)  # type: ignore[misc]
        if not self.may_try_draft(request):
            return found  # before a query for the row
        row = self.get_object(request, str(object_id)) if object_id else None
        if not (self.has_change_permission(request, row) if object_id else self.has_add_permission(request)):
            return found
        button = UnfoldAction(
            action_name=BUTTON, method=lambda *_: None, description=gettext_lazy("Try on the last 7 days"), path="",
            attrs={"name": BUTTON}, icon="psychology_alt", variant=ActionVariant.DEFAULT,
        )  # fmt: skip
        return [*found, button]

    def changeform_view(
        self: Any, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        def show() -> HttpResponse:
            context = {**(extra_context or {})}
            if not object_id:  # Unfold lists the buttons for existing rows only
                context["actions_submit_line"] = self.get_actions_submit_line(request, None)
            answer: HttpResponse = super(DraftableAdmin, self).changeform_view(  # type: ignore[misc]
                request, object_id, form_url, context
            )
            return answer

        if request.method != "POST" or BUTTON not in request.POST:
            return show()
        if not self.may_try_draft(request):
            raise PermissionDenied
        return _try_edit(request, show)

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> HttpResponse:
        if BUTTON in request.POST:
            return redirect("admin:scheduling_configdraft_mine")
        answer: HttpResponse = super().response_add(request, obj, post_url_continue)  # type: ignore[misc]
        return answer

    def response_change(self, request: HttpRequest, obj: Any) -> HttpResponse:
        if BUTTON in request.POST:
            return redirect("admin:scheduling_configdraft_mine")
        answer: HttpResponse = super().response_change(request, obj)  # type: ignore[misc]
        return answer


def _try_edit(request: HttpRequest, show: Any) -> HttpResponse:
    """Save the form into the draft. An invalid form is shown with its errors."""
    answers: list[HttpResponse] = []

    def save() -> bool:
        answers.append(show())
        return answers[-1].status_code == 302

    try:
        is_kept = drafts.capture_edit(request.user, save)
    except (Conflict, InvalidConfiguration) as error:
        for line in translate_errors(error):
            messages.error(request, line)
        return redirect(request.get_full_path())
    if is_kept:
        messages.success(request, _("The edit is in your draft. The live configuration has not changed."))
    elif answers[-1].status_code == 302:
        messages.info(request, _("The form changes nothing that a draft can hold."))
        return redirect(request.get_full_path())
    return answers[-1]
