"""Preview what an event would send now. Stores and sends nothing."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminTextInputWidget

from scheduling.admin.form_fields import DataField, make_event_type_input
from scheduling.admin.labels import translate_error
from scheduling.admin.touches.timeline import format_instant, list_verdict_facts
from scheduling.ids import new_id
from scheduling.models import Node
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations.preview import PreviewedTouch, preview_event
from scheduling.planning.ingest import NewEvent
from scheduling.redaction import redact_text


class EventForm(forms.Form):
    type = forms.CharField(label=gettext_lazy("event type"), max_length=120, widget=make_event_type_input())
    user_id = forms.CharField(label=gettext_lazy("user id"), max_length=200, widget=UnfoldAdminTextInputWidget)
    chat_id = forms.CharField(
        label=gettext_lazy("chat id"), max_length=200, required=False, widget=UnfoldAdminTextInputWidget
    )
    event_data = DataField(label=gettext_lazy("event data (JSON)"))


def preview_page(events_admin: Any, request: HttpRequest) -> HttpResponse:
    if not request.user.has_perms(["scheduling.view_event", "scheduling.view_node"]):
        raise PermissionDenied
    form = EventForm(request.GET if "type" in request.GET else None)
    outcomes: list[dict[str, Any]] | None = None
    if form.is_bound and form.is_valid():
        given = form.cleaned_data
        event = NewEvent(
            "admin", str(new_id()), given["type"].strip(), given["user_id"].strip(), given["chat_id"].strip(),
            data=given["event_data"],
        )  # fmt: skip
        outcomes = [_describe_preview(each) for each in preview_event(event)]
    return events_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/event_preview.html",
        _("Send preview"),
        form=form,
        outcomes=outcomes,
        switched_off=_list_disabled_nodes(form.cleaned_data["type"].strip()) if outcomes is not None else [],
    )


def _describe_preview(each: PreviewedTouch) -> dict[str, Any]:
    titles = {"send": _("Would be sent"), "hold": _("Would wait"), "suppress": _("Would not be sent")}
    tones = {"send": "good", "hold": "wait", "suppress": "bad"}
    decision = each.verdict.decision
    if each.problem:
        titles, tones = {decision: _("Would fail")}, {decision: "bad"}
    return {
        "node": each.node.key,
        "node_link": reverse("admin:scheduling_node_change", args=[each.node.id]),
        "title": titles[decision],
        "tone": tones[decision],
        "due": format_instant(each.due_at),
        "wait": describe_duration(each.due_at - now()) if each.due_at > now() else _("at once"),
        "channel": each.node.channel.key,
        "template": each.template.key,
        "facts": list_verdict_facts(each.verdict),
        "subject": redact_text(each.subject),
        "body": redact_text(each.body),
        "problem": translate_error(each.problem),
    }


def _list_disabled_nodes(event_type: str) -> list[Node]:
    """Return disabled nodes with this trigger. They often explain why nothing is sent."""
    return list(Node.objects.filter(trigger=event_type, enabled=False, retired_at=None))
