"""The same work once more, as a new job."""

from __future__ import annotations

import json
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminSelectWidget

from rpa_tasks.admin.fields import JsonField
from rpa_tasks.jobs.publish import OWN_KEYS, Receipt, Refused, Request, publish
from rpa_tasks.models import Job
from scheduling.admin.labels import complaint
from scheduling.errors import InvalidInput
from scheduling.models import Priority
from scheduling.redaction import masked


class OrderForm(forms.Form):
    """How urgent, and with what. The payload is for those who may edit one."""

    priority = forms.TypedChoiceField(
        label=gettext_lazy("Priority"), choices=Priority.choices, coerce=int, initial=Priority.NORMAL,
        widget=UnfoldAdminSelectWidget,
    )  # fmt: skip
    payload = JsonField(
        label=gettext_lazy("Payload (JSON)"), help_text=gettext_lazy("What the flow is told; empty: nothing.")
    )

    def __init__(self, *args: Any, edits_payload: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not edits_payload:
            del self.fields["payload"]


def may_edit_payload(request: HttpRequest) -> bool:
    return bool(request.user.has_perm("rpa_tasks.change_job"))


def source_of(request: HttpRequest) -> str:
    return f"admin: {request.user.get_username()}"


def run_again_page(jobs_admin: Any, request: HttpRequest, row: Job) -> HttpResponse:
    initial = {"priority": row.priority, "payload": row.payload}
    form = OrderForm(request.POST or None, initial=initial, edits_payload=may_edit_payload(request))
    if request.method == "POST" and form.is_valid():
        try:
            receipt = publish(_request(request, row, form.cleaned_data))
        except (InvalidInput, Refused) as error:
            form.add_error(None, " ".join(told(error)))
        else:
            tell(request, receipt)
            return redirect(jobs_admin.url("change", receipt.task_id))
    text = _("A new job for the same shop and task type. While one of its kind waits already, it merges into that one.")
    return jobs_admin.page(  # type: ignore[no-any-return]
        request, "ops/confirm.html", _("Run again"), form=form, text=text, button=_("Run again"), original=row,
        facts=[f"{row.shop} · {row.flow.task_type}", *_shown_payload(form, row)], warning=_caution(row),
        back=jobs_admin.url("change", row.pk),
    )  # fmt: skip


def _request(request: HttpRequest, row: Job, given: dict[str, Any]) -> Request:
    return Request(
        platform=row.shop.platform.key, shop_id=row.shop.shop_id, task_type=row.flow.task_type,
        payload=given.get("payload", row.payload), priority=given["priority"],
        dedupe_key=None if not row.dedupe_key or row.dedupe_key.startswith(OWN_KEYS) else row.dedupe_key,
        source=source_of(request), keeps_payload="payload" not in given,
    )  # fmt: skip


def _shown_payload(form: OrderForm, row: Job) -> list[str]:
    return [] if "payload" in form.fields else [json.dumps(masked(row.payload), ensure_ascii=False)]


def _caution(row: Job) -> str:
    if row.state in ("failed", "unknown"):
        return _("Its failed task stays open: “Retry” there runs it again as well and settles it, with the same key.")
    if not row.flow.idempotent:
        return _("This flow is not marked as idempotent: what the first run did may be done a second time.")
    return ""


def told(error: InvalidInput | Refused) -> list[str]:
    """Why it was refused, in sentences for the person who asked."""
    if isinstance(error, Refused):
        words = _("%(scope)s: %(limit)s jobs wait already, no more are taken.")
        return [words % {"scope": error.scope, "limit": error.limit}]
    return [f"{each.field}: {complaint(each.message)}" for each in error.errors]


def tell(request: HttpRequest, receipt: Receipt) -> None:
    if receipt.duplicate:
        messages.info(request, _("One of its kind was waiting already and now stands for this request as well."))
    else:
        messages.success(request, _("It was published."))
