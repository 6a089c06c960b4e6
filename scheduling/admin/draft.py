"""Pages of drafts: the edits, the text as YAML, the result of the replay beside the live configuration, publication."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from unfold.widgets import UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget, UnfoldBooleanSwitchWidget

from scheduling.admin.base import Confirmation, OpsAdmin, build_user_actor, ops_display, row_action
from scheduling.admin.labels import translate_error, translate_errors, translate_reason
from scheduling.admin.matrix.preview import report_moved_touches
from scheduling.admin.page_reads import count_within
from scheduling.configuration.file.apply import ChangePlan, InvalidConfiguration
from scheduling.configuration.file.document import InvalidDocument
from scheduling.error_text import ErrorText
from scheduling.errors import Conflict
from scheduling.experiments import drafts
from scheduling.models import ConfigDraft
from scheduling.planning.rescheduling import Impact, list_impacts

IMPACT_TIMEOUT = timedelta(seconds=5)  #: limit of the count of waiting touches on the page before publication
KEEP = "_keep"  #: button that stores the text without a replay
State = ConfigDraft.State


class DraftForm(forms.Form):
    draft = forms.CharField(
        label=gettext_lazy("Draft"),
        strip=False,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 28, "spellcheck": "false", "wrap": "off"}),
        help_text=gettext_lazy(
            "Templates, stages, nodes, delay rules and limits in the format of a configuration file."
        ),
    )
    seen = forms.CharField(required=False, widget=forms.HiddenInput)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        area = self.fields["draft"].widget
        area.attrs["class"] = f"{area.attrs.get('class', '')} at-mono"

    def clean_draft(self) -> str:
        """Validate the draft. Lists all errors, each with its place."""
        text: str = self.cleaned_data["draft"].replace("\r\n", "\n")
        try:
            drafts.read_draft(text)
        except (InvalidDocument, InvalidConfiguration) as error:
            raise forms.ValidationError(translate_errors(error)) from None
        return text


class PublishForm(forms.Form):
    reason = forms.CharField(
        label=gettext_lazy("Reason for the change"), max_length=80, widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Stored in the history with your name."),
    )  # fmt: skip
    move_waiting = forms.BooleanField(
        label=gettext_lazy("Move touches that wait already"), required=False, widget=UnfoldBooleanSwitchWidget,
        help_text=gettext_lazy("Applies where the draft changes a delay. Overdue touches are sent over ten minutes."),
    )  # fmt: skip
    seen = forms.CharField(required=False, widget=forms.HiddenInput)


@admin.register(ConfigDraft)
class ConfigDraftAdmin(OpsAdmin):
    list_display = ("owner", "started_at", "shown_state", "sends")
    list_filter = ("state",)
    actions_detail = ("publish",)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.own_view)
        return [path("mine/", view, name="scheduling_configdraft_mine"), *super().get_urls()]

    @ops_display(description=gettext_lazy("state"), label={"done": "success", "failed": "danger", "running": "warning"})
    def shown_state(self, row: ConfigDraft) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @ops_display(description=gettext_lazy("sent, live → draft"))
    def sends(self, row: ConfigDraft) -> str:
        if not row.result:
            return "–"
        nodes = (row.result[name].values() for name in ("live", "draft"))
        return " → ".join(str(sum(node.get("delivered", 0) for node in each)) for each in nodes)

    def own_view(self, request: HttpRequest) -> HttpResponse:
        """Show the user's draft. A POST discards it or starts its replay."""
        if not self.has_add_permission(request):
            raise PermissionDenied
        if request.method != "POST":
            return self._show(request, drafts.find_draft(request.user))
        try:
            act = request.POST.get("act")
            if act == "replay":
                drafts.request_replay(request.user, request.POST.get("seen", ""))
            elif act == "discard":
                drafts.discard_draft(request.user)
                messages.success(request, _("The draft was discarded."))
        except (Conflict, InvalidConfiguration) as error:
            for line in translate_errors(error):
                messages.error(request, line)
        return redirect(self.url("mine"))

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        return self._show(request, self.get_row_or_404(request, object_id))

    def _show(self, request: HttpRequest, row: ConfigDraft | None) -> HttpResponse:
        planned, problems = _plan_edits(row) if row else (None, [])
        is_own = row is None or (row.owner_id == request.user.pk and self.has_add_permission(request))
        return self.page(
            request, "ops/draft.html", _("My draft") if is_own else _("Draft of %(user)s") % {"user": row},
            row=row, is_own=is_own, under_way=row is not None and row.state in (State.WAITING, State.RUNNING),
            tone={"done": "info", "failed": "danger"}.get(row.state if row else "", "warning"),
            seen=drafts.compute_seen(row) if row else "",
            problems=[*problems, *(translate_error(ErrorText.load(each)) for each in (row.problems if row else ()))],
            fits=planned is not None, changes=_describe_changes(planned),
            results=build_result_context(row.result) if row and row.result else None,
            links=self.action_links(request, row) if row else {}, act_link=self.url("mine"),
            yaml_link=self.url("add"), back=self.url("changelist"),
        )  # fmt: skip

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        """Edit the user's draft as text; without one, the live configuration."""
        if not self.has_add_permission(request):
            raise PermissionDenied
        initial = {}
        if request.method != "POST":
            draft = drafts.find_draft(request.user)
            text = draft.document if draft else drafts.export_live_draft()
            initial = {"draft": text, "seen": drafts.compute_seen(draft)}
        form = DraftForm(request.POST or None, initial=initial)
        if request.method == "POST" and form.is_valid():
            try:
                draft = drafts.replace_text(request.user, form.cleaned_data["draft"], form.cleaned_data["seen"])
                if draft and KEEP not in request.POST:
                    drafts.request_replay(request.user, drafts.compute_seen(draft))
                return redirect(self.url("mine"))
            except (Conflict, InvalidConfiguration) as error:
                form.add_error(None, translate_errors(error))
        return self.page(
            request, "ops/draft_text.html", _("My draft"), form=form, keep=KEEP, changes_link=self.url("mine"),
            back=self.url("changelist"),
        )  # fmt: skip

    @row_action(permission="scheduling.publish_configdraft", allowed=lambda row: row.state == State.DONE)
    def publish(self, request: HttpRequest, row: ConfigDraft) -> Confirmation:
        """Confirm the changes of the draft with a reason, and publish it."""
        form = PublishForm(request.POST or None, initial={"seen": drafts.compute_seen(row)})

        def act() -> None:
            actor, given = build_user_actor(request, form.cleaned_data["reason"]), form.cleaned_data
            try:
                moved = drafts.publish_draft(row.pk, given["seen"], actor, move_waiting=given["move_waiting"])
            except (Conflict, InvalidConfiguration) as error:
                for line in translate_errors(error):
                    messages.error(request, line)
                return
            messages.success(request, _("The draft is live."))
            if moved is not None:
                report_moved_touches(request, moved)

        planned, problems = _plan_edits(row)
        if row.state != State.DONE:
            problems = translate_errors(Conflict(drafts.NOT_REPLAYED))
        return Confirmation(
            title=_("Publish the draft of %(user)s?") % {"user": row}, button=_("Publish"), form=form,
            facts=_describe_impacts(planned) if planned and not problems else [], problem=" ".join(problems),
            changes=_describe_changes(planned), act=act, back=self.url("changelist"),
        )  # fmt: skip


def _plan_edits(row: ConfigDraft) -> tuple[ChangePlan | None, list[str]]:
    """Return the edits of a draft, or why it does not fit the live configuration."""
    try:
        return drafts.plan_edits(row), []
    except (Conflict, InvalidConfiguration) as error:
        return None, translate_errors(error)


def _describe_changes(planned: ChangePlan | None) -> list[dict[str, Any]]:
    return build_changes_context(map(drafts.serialize_change, planned.changes if planned else ()))


def _describe_impacts(planned: ChangePlan) -> list[str]:
    """Return the effect of the draft on waiting touches, one line for each node."""
    try:
        impacts = count_within(lambda: list_impacts(planned, IMPACT_TIMEOUT))
    except TimeoutError:
        impacts = None
    if impacts is None:
        return [_("Too many touches wait to count them now.")]
    return [_describe_impact(each) for each in impacts]


def _describe_impact(impact: Impact) -> str:
    words = ngettext("Node %(node)s: %(count)s touch waits.", "Node %(node)s: %(count)s touches wait.", impact.waiting)
    text: str = words % {"node": impact.node, "count": impact.waiting}
    if impact.moved and impact.moved.touches:
        moves = _("If moved, %(count)s change their time, %(overdue)s of them are overdue then.")
        text += " " + moves % {"count": impact.moved.touches, "overdue": impact.moved.overdue}
    return text


def build_changes_context(changes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the template context of a draft's changes to the live configuration."""
    verbs = {"added": _("added"), "changed": _("changed"), "restored": _("restored"), "retired": _("retired")}
    return [
        {
            **each,
            "words": verbs.get(each["verb"], each["verb"]),
            "is_simulated": each["section"] not in drafts.NOT_SIMULATED,
            "differences": [
                {
                    "path": one["path"],
                    "before": _format_change_value(one["before"]),
                    "after": _format_change_value(one["after"]),
                }
                for one in each["differences"]
            ],
        }
        for each in changes
    ]


def _format_change_value(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ComparedCount:
    """One number of the live configuration and of the draft."""

    words: str
    live: int
    draft: int

    @property
    def difference(self) -> str:
        change = self.draft - self.live
        return f"{change:+d}".replace("-", "−") if change else "="


def build_result_context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template context of a replay's result: all nodes together, then those that differ, then the others."""
    live, draft = result["live"], result["draft"]
    nodes = [(key, _compare_outcomes(live.get(key, {}), draft.get(key, {}))) for key in {*live, *draft}]
    nodes.sort(key=lambda node: (live.get(node[0]) == draft.get(node[0]), node[0]))
    totals: list[Counter[str]] = [sum(map(Counter, each.values()), Counter()) for each in (live, draft)]
    return {
        **result, "since": parse_datetime(result["since"]), "until": parse_datetime(result["until"]),
        "nodes": [(_("All nodes"), _compare_outcomes(*totals)), *nodes],
    }  # fmt: skip


def _compare_outcomes(live: Mapping[str, int], draft: Mapping[str, int]) -> list[ComparedCount]:
    words = {
        "planned": _("planned"), "delivered": _("sent"), "held": _("temporarily deferred"),
        "waiting": _("still waiting"),
    }  # fmt: skip
    ends = {"suppressed": _("suppressed"), "cancelled": _("cancelled"), "failed": _("failed")}
    for outcome in sorted(
        {*live, *draft} - words.keys(), key=lambda each: (each.partition(":")[0], -live.get(each, 0), each)
    ):
        state, _colon, reason = outcome.partition(":")
        words[outcome] = f"{ends[state]} · {translate_reason(reason)}" if reason else ends[state]
    return [
        ComparedCount(text, live.get(outcome, 0), draft.get(outcome, 0))
        for outcome, text in words.items()
        if outcome in live or outcome in draft or outcome in ("planned", "delivered")
    ]
