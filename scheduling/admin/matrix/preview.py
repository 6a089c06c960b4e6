"""Preview what an event would send now, and move waiting touches after an edit of a node."""

from __future__ import annotations

from typing import Any

import structlog
from django import forms
from django.contrib import messages
from django.db import Error, transaction
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.timezone import now
from django.utils.translation import gettext, gettext_lazy, ngettext
from django.utils.translation import gettext as _
from unfold.widgets import UnfoldAdminTextInputWidget

from scheduling.admin.form_fields import DataField, NamesField, make_event_type_input
from scheduling.admin.labels import translate_error
from scheduling.admin.page_reads import count_within
from scheduling.admin.shown_values import format_instant
from scheduling.admin.touches.timeline import list_verdict_facts
from scheduling.configuration import snapshot
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.models import AtDay, Event, Node
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations.preview import PreviewedTouch, imagine_customer, preview_event
from scheduling.planning.ingest import NewEvent
from scheduling.planning.rescheduling import MOST_LEFT, PAGE_TIME_LIMIT, MoveCounts, move_waiting
from scheduling.redaction import redact_text
from scheduling.templating import read_locale

log = structlog.get_logger(__name__)


class EventForm(forms.Form):
    type = forms.CharField(label=gettext_lazy("event type"), max_length=120, widget=make_event_type_input())
    user_id = forms.CharField(label=gettext_lazy("user id"), max_length=200, widget=UnfoldAdminTextInputWidget)
    chat_id = forms.CharField(
        label=gettext_lazy("chat id"), max_length=200, required=False, widget=UnfoldAdminTextInputWidget
    )
    event_data = DataField(label=gettext_lazy("event data (JSON)"))
    level = forms.CharField(
        label=gettext_lazy("level"), required=False, widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("What if the customer had these values? Empty fields keep the stored ones."),
    )  # fmt: skip
    tags = NamesField(
        label=gettext_lazy("tags"), widget=UnfoldAdminTextInputWidget, help_text=gettext_lazy("Separated by commas.")
    )
    attributes = DataField(label=gettext_lazy("attributes (JSON)"))

    def clean(self) -> dict[str, Any]:
        """Add `customer`: the stored one with the given values."""
        given: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return given
        try:
            given["customer"] = imagine_customer(
                given["user_id"], level=given["level"], tags=given["tags"], attributes=given["attributes"]
            )
        except InvalidInput as error:
            for each in error.errors:
                self.add_error(each.field.partition(".")[0], translate_error(str(each)))
        return given


#: What makes the time of a touch.
STEPS = {
    "delay": gettext_lazy("the delay ends"),
    "at": gettext_lazy("time of day"),
    "not_before": gettext_lazy("not before"),
    "send_window": gettext_lazy("the next send window opens"),
    "spread": gettext_lazy("this customer's part of the minutes after that"),
}


def preview_page(events_admin: Any, request: HttpRequest) -> HttpResponse:
    form = EventForm(request.GET if "type" in request.GET else None)
    outcomes: list[dict[str, Any]] | None = None
    switched_off: list[Node] = []
    if form.is_bound and form.is_valid():
        given = form.cleaned_data
        event = NewEvent(
            "admin", str(new_id()), given["type"], given["user_id"], given["chat_id"], data=given["event_data"]
        )
        outcomes = [_describe_preview(each) for each in preview_event(event, customer=given["customer"])]
        # Disabled nodes with this trigger often explain why nothing is sent.
        switched_off = list(Node.objects.filter(trigger=given["type"], enabled=False, retired_at=None))
    return events_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/event_preview.html",
        _("Send preview"),
        form=form,
        outcomes=outcomes,
        switched_off=switched_off,
    )


SEARCHED_EVENTS = 10_000  #: latest events among which the preview of a node looks for one with its trigger


def preview_node(request: HttpRequest, row: Node) -> HttpResponse:
    """Return what a node would send to a customer now, as HTML without a frame.

    The customer is the one of `user_id`, by default that of the latest event with the node's trigger.
    """
    user_id = request.GET.get("user_id", "").strip()
    past = count_within(lambda: _find_latest_event(row.trigger, user_id))
    user_id = user_id or (past.user_id if past else "")
    event = None
    if user_id:
        chat_id, data = (past.chat_id, past.data) if past else ("", {})
        event = NewEvent("admin", str(new_id()), row.trigger, user_id, chat_id, data=data)
    found = preview_event(event, node_id=row.pk) if event else []
    context = {"event": event, "outcomes": [_describe_preview(each) for each in found], "past": past, "node": row}
    return TemplateResponse(request, "ops/node_preview_result.html", context)


def _find_latest_event(trigger: str, user_id: str) -> Event | None:
    if user_id:
        return Event.objects.filter(customer__user_id=user_id, type=trigger).order_by("-occurred_at").first()
    latest = Event.objects.order_by("-pk").values("pk")[:SEARCHED_EVENTS]
    return Event.objects.filter(pk__in=latest, type=trigger).order_by("-pk").first()


def _describe_preview(each: PreviewedTouch) -> dict[str, Any]:
    titles = {"send": _("Would be sent"), "hold": _("Would wait"), "suppress": _("Would not be sent")}
    tones = {"send": "good", "hold": "wait", "suppress": "bad"}
    decision = each.verdict.decision
    if not each.planned:
        titles = {decision: _("No touch is planned")}
    if each.problem:
        titles, tones = {decision: _("Would fail")}, {decision: "bad"}
    timing = each.node.timing
    steps = []
    for step, at in each.steps:
        setting = ""  # of the node: what causes the step
        if timing and step == "at":
            setting = str(AtDay(timing.day).label)
        elif timing and step == "send_window":
            setting = "; ".join(window.text for window in timing.windows)
        label = f"{STEPS[step]} ({setting})" if setting else str(STEPS[step])
        steps.append(format_html("{}: {}", label, format_instant(at)))
    language = ""
    if each.locale:
        words = _("Language: %(locale)s")
        if each.customer_locale and read_locale(each.locale) != read_locale(each.customer_locale):
            words = _("Language: %(locale)s (the customer has %(wanted)s)")
        language = words % {"locale": each.locale, "wanted": each.customer_locale}
    return {
        "node": each.node.key,
        "node_link": reverse("admin:scheduling_node_change", args=[each.node.id]),
        "title": titles[decision],
        "tone": tones[decision],
        "due": format_instant(each.due_at) if each.planned else "",
        "wait": describe_duration(each.due_at - now()) if each.due_at > now() else _("at once"),
        "steps": steps,
        "followers": [f"{other.key} ({other.trigger})" for other in each.followers],
        "channel": each.node.channel.key,
        "template": each.template.key,
        "facts": list_verdict_facts(each.verdict),
        "subject": redact_text(each.subject),
        "body": redact_text(each.body),
        "language": language,
        "problem": translate_error(each.problem),
    }


def move_after_commit(request: HttpRequest, row: Node) -> None:
    """Move waiting touches after the edit is committed, one transaction per batch, so that other writers continue."""

    def move() -> None:
        try:
            config = snapshot.current()
            node = snapshot.node_spec(row, config.templates, config.channels, config.calendars)
            moved = move_waiting([node], config.delay_rules, PAGE_TIME_LIMIT)
        except Error:  # the edit is stored anyway
            log.exception("reschedule_failed", node=row.pk)
            moved = MoveCounts(broken=True)
        report_moved_touches(request, moved)

    transaction.on_commit(move)


def report_moved_touches(request: HttpRequest, moved: MoveCounts) -> None:
    """Show the result of moving waiting touches as messages."""
    if moved.broken:
        text = gettext("The edit is stored, but not all touches moved. Save their node with “move waiting touches” on.")
        messages.error(request, text)
        return
    words = ngettext("%(count)s waiting touch was moved.", "%(count)s waiting touches were moved.", moved.touches)
    messages.info(request, words % {"count": moved.touches})
    if moved.left:
        left = f"{moved.left}+" if moved.left >= MOST_LEFT else moved.left
        text = gettext(
            "%(count)s more were not processed within the time limit. To continue, save their node "
            "with “move waiting touches” on."
        )
        messages.warning(request, text % {"count": left})
