"""Preview what an event would send now, and what an edit of a node changes. Nothing is sent."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import structlog
from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import Error, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.timezone import now
from django.utils.translation import gettext, gettext_lazy, ngettext
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST
from unfold.widgets import UnfoldAdminTextInputWidget

from scheduling.admin.dashboard.charts import format_capped_count
from scheduling.admin.form_fields import DataField, make_event_type_input
from scheduling.admin.labels import translate_error
from scheduling.admin.page_reads import count_within
from scheduling.admin.shown_values import format_instant
from scheduling.admin.touches.timeline import list_verdict_facts
from scheduling.configuration import snapshot
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.models import WAITING, AtDay, Calendar, Event, Node, Template, Touch
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations.preview import MAX_LEVEL, PreviewedTouch, imagine_customer, preview_event
from scheduling.planning.ingest import NewEvent
from scheduling.planning.rescheduling import (
    DELAY_COLUMNS,
    MOST_LEFT,
    PAGE_TIME_LIMIT,
    SPREAD,
    MoveCounts,
    count_failing,
    move_waiting,
    preview_moves,
)
from scheduling.policy.send_times import list_calendars
from scheduling.policy.specs import NodeSpec
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
        label=gettext_lazy("level"), max_length=MAX_LEVEL, required=False, widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("What if the customer had these values? Empty fields keep the stored ones."),
    )  # fmt: skip
    tags = forms.CharField(
        label=gettext_lazy("tags"), required=False, widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Separated by commas."),
    )  # fmt: skip
    attributes = DataField(label=gettext_lazy("attributes (JSON)"))

    def clean(self) -> dict[str, Any]:
        """Add `customer`: the stored one with the given values."""
        given: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return given
        tags = [tag.strip() for tag in re.split("[,，]", given["tags"]) if tag.strip()]
        try:
            given["customer"] = imagine_customer(
                given["user_id"].strip(), level=given["level"].strip(), tags=tags, attributes=given["attributes"]
            )
        except InvalidInput as error:
            for each in error.errors:
                self.add_error(each.field.partition(".")[0], f"{each.field}: {translate_error(each.message)}")
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
    if not request.user.has_perm("scheduling.view_node"):
        raise PermissionDenied
    form = EventForm(request.GET if "type" in request.GET else None)
    outcomes: list[dict[str, Any]] | None = None
    switched_off: list[Node] = []
    if form.is_bound and form.is_valid():
        given = form.cleaned_data
        event = NewEvent(
            "admin", str(new_id()), given["type"].strip(), given["user_id"].strip(), given["chat_id"].strip(),
            data=given["event_data"],
        )  # fmt: skip
        outcomes = [_describe_preview(each) for each in preview_event(event, customer=given["customer"])]
        # Disabled nodes with this trigger often explain why nothing is sent.
        switched_off = list(Node.objects.filter(trigger=given["type"].strip(), enabled=False, retired_at=None))
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


#: Waiting touches that a preview reads.
MOST = 20_000
Lines = list[tuple[str, str]]  #: tone and text


class ImpactMixin:
    """A page whose edits have an effect on waiting touches. Also for a row that is added."""

    change_form_outer_after_template = "ops/impact.html"

    class Media:
        css: ClassVar[Any] = {"all": ("scheduling/impact.css",)}
        js = ("scheduling/impact.js",)

    def list_impact_lines(self, form: Any, row: Any) -> Lines:
        """Return the effects of a valid form as sentences with tones. `row` has its values and may be new."""
        raise NotImplementedError

    def get_urls(self: Any) -> list[URLPattern]:
        view = require_POST(self.admin_site.admin_view(self._respond_with_impact))
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path("impact/", view, name=f"{name}_impact_of_new"),
            path("<path:object_id>/impact/", view, name=f"{name}_impact"),
            *super().get_urls(),  # type: ignore[misc]
        ]

    def _respond_with_impact(self: Any, request: HttpRequest, object_id: str | None = None) -> JsonResponse:
        """Return no lines while the form is invalid or unchanged."""
        row = None if object_id is None else self.get_row_or_404(request, object_id)
        may = self.has_add_permission(request) if row is None else self.has_change_permission(request, row)
        if not may:
            raise PermissionDenied
        form = self.get_form(request, row, change=row is not None)(request.POST, instance=row)
        lines = self.list_impact_lines(form, form.instance) if form.is_valid() and form.changed_data else []
        return JsonResponse({"lines": [{"tone": tone, "text": text} for tone, text in lines]})


def describe_uncounted() -> Lines:
    return [("wait", gettext("Too many touches wait to count them now."))]


PREVIEW_TIMEOUT = timedelta(seconds=2)  #: limit of a preview while the user types
CONTENT = ("template", "canary_template", "canary_percent", "canary_communities", "channel", "variants")
#: Columns of a node, and what their edit means for waiting touches.
OTHER_EFFECTS = (
    (
        ("guard_cap", "guard_dedupe", "guard_conversation", "guard_quiet_hours", "guard_holdout", "over_cap",
         "holdout_percent", "rollout_percent", "rollout_communities"),
        gettext_lazy("They are judged by the new guards when they fall due."),
    ),
    (("tags",), gettext_lazy("The rules for a tag count and limit them by the new tags.")),
    (("trigger", "from_nodes"), gettext_lazy("They stay. Only later events follow the new trigger.")),
    (("cancel_on",), gettext_lazy("The new events cancel them; earlier events do not.")),
)  # fmt: skip


def list_impact_lines(form: Any, row: Node) -> Lines:
    """Return the effects of an edit of a node."""
    changed = set(form.changed_data)
    delayed, content, switched = changed & set(DELAY_COLUMNS), changed & set(CONTENT), "enabled" in changed
    others = [text for columns, text in OTHER_EFFECTS if changed & set(columns)]
    if not (delayed or content or switched or others or changed & {"when", "stage"}):
        return []
    count = _count_waiting_touches(row)
    lines = [_count_line(count)]
    if switched and not row.enabled and (keys := list_followers(row)):
        text = gettext("These nodes follow it and plan no more touches: %(nodes)s.")
        lines.append(("wait", text % {"nodes": ", ".join(keys)}))
    if count == 0:
        return lines
    if "stage" in changed:
        lines.append(("", gettext("They keep their time, content and channel. Only the row of the matrix changes.")))
    if delayed:
        lines += _delay_lines(row, count)
    if content:
        lines.append(("wait", gettext("They are sent with the new content. A touch is rendered when it falls due.")))
    if "when" in changed:
        lines += _condition_lines(row)
    lines += [("wait", str(text)) for text in others]
    if switched and row.enabled:
        lines.append(("", gettext("They are sent at their planned time again.")))
    elif switched:
        lines.append(
            ("bad", gettext("They are suppressed when they fall due, unless the node is enabled again by then."))
        )
    return lines


def _condition_lines(row: Node) -> Lines:
    lines = [("wait", gettext("They are judged by the new conditions when they fall due."))]
    condition = build_node_spec(row).condition
    found = count_within(lambda: count_failing(row.pk, condition)) if condition else None
    if found:
        text = ngettext(
            "If they fell due now, %(failing)s of %(count)s would not meet them.",
            "If they fell due now, %(failing)s of %(count)s would not meet them.", found.judged,
        )  # fmt: skip
        lines.append(("bad" if found.failing else "", text % {"failing": found.failing, "count": found.judged}))
    return lines


def _count_waiting_touches(row: Node) -> int | None:
    return count_within(lambda: Touch.objects.filter(node_id=row.pk, state__in=WAITING)[: MOST + 1].count())


def describe_retirement(row: Node) -> list[str]:
    """Return what the retirement of a node does to its waiting touches."""
    count = _count_waiting_touches(row)
    if count == 0:
        return []
    return [
        _count_line(count)[1],
        gettext("They are suppressed when they fall due, unless the node is restored by then."),
    ]


def explain_retired_parts(row: Node) -> str:
    """Return which objects that the node uses are retired, or ""."""
    used = [row.stage, row.channel, row.template, row.canary_template]
    found = [str(each) for each in used if each and each.retired_at]
    named: tuple[tuple[type[Template | Node | Calendar], list[str]], ...] = (
        (Template, [each["template"] for each in row.variants]), (Node, row.from_nodes),
        (Calendar, [key for _place, key in list_calendars(row.send_window)]),
    )  # fmt: skip
    for model, keys in named:
        found += [str(each) for each in model._default_manager.filter(key__in=keys).exclude(retired_at=None)]
    text = gettext("It uses objects that are retired: %(names)s. Restore them first.")
    return text % {"names": ", ".join(dict.fromkeys(found))} if found else ""


def list_followers(row: Node) -> list[str]:
    """Return the keys of the nodes in use that follow this one."""
    followers = Node.objects.filter(retired_at=None, from_nodes__contains=row.key).exclude(pk=row.pk)
    return list(followers.values_list("key", flat=True))


def _count_line(count: int | None) -> tuple[str, str]:
    if count is None:
        return ("wait", gettext("Too many touches wait at this node to count them now."))
    words = ngettext("%(count)s touch waits at this node.", "%(count)s touches wait at this node.", count)
    return ("", words % {"count": format_capped_count(count, MOST)})


def _delay_lines(row: Node, count: int | None) -> list[tuple[str, str]]:
    moved = None
    if count is not None and count <= MOST:
        node = build_node_spec(row)
        with suppress(TimeoutError):  # then the number is shown after the move
            found = count_within(lambda: preview_moves([node], snapshot.current().delay_rules, PREVIEW_TIMEOUT))
            moved = found[node.id] if found else None
    if moved is None:
        return [
            (
                "wait",
                gettext("They keep their time unless you move them. The number of moved touches is shown afterwards."),
            )
        ]
    if not moved.touches:
        return [("", gettext("None of them would move."))]
    words = ngettext(
        "The new delay places %(count)s of them elsewhere.", "The new delay places %(count)s of them elsewhere.",
        moved.touches,
    ) % {"count": moved.touches}  # fmt: skip
    if moved.overdue:
        words += " " + gettext("%(count)s would be overdue; they go out over %(span)s instead of at once.") % {
            "count": moved.overdue,
            "span": describe_duration(SPREAD),
        }
    return [("wait", words), ("", gettext("They keep their time unless you choose to move them."))]


def build_node_spec(row: Node) -> NodeSpec:
    """Return the node's specification from its row, saved or not."""
    config = snapshot.current()
    return snapshot.node_spec(row, config.templates, config.channels, config.calendars)


def move_after_commit(request: HttpRequest, row: Node) -> None:
    """Move waiting touches after the edit is committed, one transaction per batch, so that other writers continue."""

    def move() -> None:
        try:
            moved = move_waiting([build_node_spec(row)], snapshot.current().delay_rules, PAGE_TIME_LIMIT)
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
