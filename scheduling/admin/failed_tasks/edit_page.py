"""Page on which an operator edits the payload of a failed task and publishes it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from scheduling import sql
from scheduling.admin.base import Confirmation, build_user_actor
from scheduling.admin.failed_tasks.actions import ReasonForm, offer_retry_undo
from scheduling.admin.form_fields import DataField
from scheduling.admin.labels import translate_error
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.models import FailedTask
from scheduling.operations import failed_tasks
from scheduling.operations.bulk_actions import ROW_ACTIONS
from scheduling.operations.failed_tasks import MAX_SUBJECT
from scheduling.operations.undo import UNDO_WINDOW

CODE = {"rows": 14, "class": "at-mono", "spellcheck": "false"}


class TouchTextForm(ReasonForm):
    """Subject and body of the message."""

    field_order = ["subject", "body", "reason"]
    subject = forms.CharField(
        label=gettext_lazy("Subject"), max_length=MAX_SUBJECT, required=False, widget=UnfoldAdminTextInputWidget
    )
    body = forms.CharField(
        label=gettext_lazy("Message text"), strip=False, widget=UnfoldAdminTextareaWidget(attrs={"rows": 10}),
        help_text=gettext_lazy("Sent as written: variables of the template are not replaced."),
    )  # fmt: skip

    def read_payload(self) -> dict[str, Any]:
        # Browsers send line ends as CRLF; the template has LF.
        body = self.cleaned_data["body"].replace("\r\n", "\n")
        return {"subject": self.cleaned_data["subject"], "body": body}


class PayloadForm(ReasonForm):
    """Payload of the job, as JSON."""

    field_order = ["payload", "reason"]
    payload = DataField(label=gettext_lazy("Payload (JSON)"), widget=UnfoldAdminTextareaWidget(attrs=CODE))

    def read_payload(self) -> dict[str, Any]:
        return dict(self.cleaned_data["payload"])


def may_edit(request: HttpRequest, row: FailedTask) -> bool:
    """Return whether the user may edit this failed task, which needs the right to see and change its payload."""
    republisher = failed_tasks.find_republisher(row.origin)
    return (
        republisher is not None
        and row.state in failed_tasks.RETRYABLE
        and request.user.has_perm(republisher.edit_permission)
    )


def confirm_edit(request: HttpRequest, row: FailedTask) -> Confirmation:
    """Edit the payload, check it and publish the task again."""
    republisher = failed_tasks.find_republisher(row.origin)
    if republisher is None:
        raise Http404
    if not request.user.has_perm(republisher.edit_permission):
        raise PermissionDenied
    payload = republisher.read_payload(row)
    title = _("Edit and retry")
    if problem := _find_edit_problem(request, row, payload):
        return Confirmation(title=title, act=lambda: None, problem=problem)
    assert payload is not None
    of_touch = row.origin == FailedTask.Origin.TOUCH
    form = _build_form(request, payload, of_touch=of_touch)
    unknown = row.failure == "unknown"
    return Confirmation(
        title=title, form=form, text=_explain(of_touch), danger=unknown,
        warning=_("The first one may have had its effect. This one has it a second time.") if unknown else "",
        act=lambda: _retry_edited(request, row, form, as_new=unknown),
    )  # fmt: skip


def _find_edit_problem(request: HttpRequest, row: FailedTask, payload: Mapping[str, Any] | None) -> str:
    """Return why there is nothing to edit. A submitted form gets the conflict as its answer instead."""
    if payload is None:
        return _("The original has been deleted.")
    if request.method != "POST" and row.state not in failed_tasks.RETRYABLE:
        return _("It is %(state)s already.") % {"state": row.get_state_display()}
    return ""


def _build_form(request: HttpRequest, payload: Mapping[str, Any], *, of_touch: bool) -> TouchTextForm | PayloadForm:
    if of_touch:
        return TouchTextForm(request.POST or None, initial=dict(payload))
    text = json.dumps(payload, ensure_ascii=False, indent=2)
    return PayloadForm(request.POST or None, initial={"payload": text})


def _explain(of_touch: bool) -> str:
    if of_touch:
        return _(
            "Publishes the touch again with this text and a new delivery key. The guards are checked again. "
            "The address is read when it is sent: correct it at the customer or the community."
        )
    return _(
        "Publishes a new job with this payload and a new delivery key. The payload is checked against the flow. "
        "The difference stays at this failed task."
    )


def _retry_edited(request: HttpRequest, row: FailedTask, form: Any, *, as_new: bool) -> None:
    actor = build_user_actor(request, form.cleaned_data["reason"])
    try:
        new_id = failed_tasks.retry_failed_task(
            row.pk, actor, as_new=as_new, payload=form.read_payload(), due_at=sql.now() + UNDO_WINDOW
        )
    except InvalidInput as error:
        for each in error.errors:
            _add_error(form, each.field, translate_error(each.message))
    except AftertouchError as error:
        messages.error(request, translate_error(str(error)))
    else:
        link = offer_retry_undo(
            request, ROW_ACTIONS["again" if as_new else "retry"], {row.pk: new_id}, label=_("Edit and retry")
        )
        messages.success(request, _("The edited task was published again."), extra_tags=link)


def _add_error(form: Any, path: str, words: str) -> None:
    """Add an error of the payload to the field that has it."""
    name = path.removeprefix("payload.")
    if name in form.fields:
        form.add_error(name, words)
    elif "payload" in form.fields:
        form.add_error("payload", words if path == "payload" else f"{path}: {words}")
    else:
        form.add_error(None, f"{path}: {words}")
