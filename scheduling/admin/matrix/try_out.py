"""Trying a template out: what it would say, and one real message through a channel, marked as a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from scheduling.admin.form_fields import DataField, SuggestingInput
from scheduling.admin.labels import complaint, reason
from scheduling.admin.matrix.community import written
from scheduling.channels.base import Delivered, Message, Outcome, Unknown
from scheduling.channels.once import send_once
from scheduling.configuration import snapshot
from scheduling.delivery import routing
from scheduling.ids import new_id
from scheduling.models import ChannelConfig, Community, Customer, Template
from scheduling.models.encrypted import Unreadable
from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec
from scheduling.rendering import CannotRender, render

SAMPLE_USER = "sample"
SUGGESTED = 500  #: chats, of those that can be typed


def sample_customer(user_id: str) -> CustomerSpec:
    """The customer, or an invented one."""
    row = Customer.objects.filter(user_id=user_id).first() if user_id else None
    if row is None:
        return CustomerSpec(0, user_id or SAMPLE_USER, name=user_id or _("Zhang San"), level="normal")
    return row.spec()


def sample_event(user_id: str, chat_id: str, data: Mapping[str, Any]) -> EventSpec:
    return EventSpec(new_id(), "admin", "sample", "sample", now(), user_id, chat_id, data)


def preview(request: HttpRequest, subject: str, body: str) -> HttpResponse:
    try:
        data = DataField().clean(request.POST.get("data", ""))
    except ValidationError as error:
        return JsonResponse({"body": "", "subject": "", "problem": " ".join(error.messages)})
    who = sample_customer(request.POST.get("user_id", "").strip())
    text = TextSpec("", subject, body)
    event = sample_event(who.user_id, request.POST.get("chat_id", "").strip(), data)
    try:
        subject, body, _locale = render(TemplateSpec(0, "preview", 0, "", "", (text,)), who, event)
    except CannotRender as error:
        return JsonResponse({"body": "", "subject": "", "problem": complaint(str(error))})
    return JsonResponse({"body": body, "subject": subject, "problem": ""})


def known_communities() -> list[tuple[str, str]]:
    return list(written().values_list("chat_id", "name")[:SUGGESTED])


class TestForm(forms.Form):
    channel = forms.ModelChoiceField(
        ChannelConfig.objects.filter(retired_at=None), label=gettext_lazy("channel"), widget=UnfoldAdminSelectWidget
    )
    community = forms.ModelChoiceField(
        Community.objects.filter(retired_at=None),
        label=gettext_lazy("chat id"),
        required=False,
        to_field_name="chat_id",
        widget=SuggestingInput(known_communities),
        help_text=gettext_lazy("For robots of group chats and webhooks."),
    )
    user_id = forms.CharField(
        label=gettext_lazy("user id"),
        required=False,
        max_length=200,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("For channels that send to a customer's own address, like mail."),
    )
    event_data = DataField(label=gettext_lazy("event data (JSON)"))


def test_page(templates_admin: Any, request: HttpRequest, template: Template) -> HttpResponse:
    form = TestForm(request.POST or None)
    outcome: Outcome | str | None = None
    body = ""
    if request.method == "POST" and form.is_valid():
        outcome, body = _send(template, form.cleaned_data)
        sent = isinstance(outcome, Delivered)
        words = "delivered" if sent else str(getattr(outcome, "reason", outcome))
        templates_admin.log_change(request, template, f"Test through {form.cleaned_data['channel']}: {words}")
    return templates_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/send_test.html",
        _("Send a test of “%(what)s”") % {"what": template},
        form=form,
        result=told(outcome) if outcome is not None else None,
        body=body,
        back=templates_admin.url("change", template.pk),
        original=template,
    )


def told(outcome: Outcome | str) -> dict[str, Any]:
    if isinstance(outcome, str):
        return {"kind": "error", "title": _("Not sent"), "text": outcome}
    if isinstance(outcome, Delivered):
        return {"kind": "success", "title": _("Delivered"), "text": outcome.reply, "status": outcome.status}
    title = _("Unknown: it may have been delivered") if isinstance(outcome, Unknown) else _("Not delivered")
    text = " – ".join(part for part in (reason(outcome.reason), outcome.detail) if part)
    return {"kind": "error", "title": title, "text": text, "status": getattr(outcome, "status", None)}


def _send(template: Template, wanted: Mapping[str, Any]) -> tuple[Outcome | str, str]:
    """Once, outside of the ledger and its guards. A text instead of an outcome: why nothing was sent."""
    config = snapshot.current()
    spec = config.channels[wanted["channel"].pk]
    community = wanted["community"]
    who = sample_customer(wanted["user_id"].strip())
    chat_id = community.chat_id if community else ""
    communities = {community.chat_id: community.targets} if community else {}
    try:
        channel = routing.channel_of(spec)
        target = routing.target_for(spec, channel, who, chat_id, communities)
        event = sample_event(who.user_id, chat_id, wanted["event_data"])
        subject, body, locale = render(snapshot.template_spec(template), who, event)
    except routing.NoTarget as error:
        return f"{reason(error.reason)}: {error}", ""
    except Unreadable as error:
        return f"{_('Secrets unreadable here')}: {error}", ""
    except CannotRender as error:
        return _("The text cannot be rendered: %(problem)s") % {"problem": complaint(str(error))}, ""
    mark = _("[Test]")
    task_id = new_id()
    message = Message(
        task_id=task_id, delivery_key=task_id, user_id=who.user_id, chat_id=chat_id, node="test",
        content_type=template.content_type, category=template.category, subject=f"{mark} {subject}".strip(),
        body=f"{mark} {body}", locale=locale, target=target,
        event={"source": event.source, "id": event.event_id, "type": event.type, "time": event.occurred_at},
    )  # fmt: skip
    return send_once(channel, message, spec.timeout), message.body
