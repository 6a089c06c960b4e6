"""Pages of experiments: drafts with their replay, the roll-out of a node's canary, conversion by content version."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.functional import Promise
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from unfold.widgets import (
    UnfoldAdminDecimalFieldWidget,
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from scheduling.admin.base import Confirmation, OpsAdmin, RowPage, build_user_actor, ops_display, row_action, table_page
from scheduling.admin.dashboard.charts import ActionLine, read_requested_days
from scheduling.admin.form_fields import DurationField, split_entries, write_number
from scheduling.admin.labels import translate_error, translate_errors, translate_reason
from scheduling.admin.matrix.preview import report_moved_touches
from scheduling.admin.page_reads import count_within, read_for_page
from scheduling.configuration.file.apply import ChangePlan, InvalidConfiguration, plan_changes
from scheduling.durations import from_seconds, to_seconds
from scheduling.error_text import ErrorText
from scheduling.errors import Conflict, InvalidInput
from scheduling.experiments import drafts, rollouts
from scheduling.experiments.conversion import NodeEffect, compute_effects
from scheduling.models import AutomaticRollout, ConfigDraft, Node
from scheduling.monitoring.duration_text import describe_duration
from scheduling.planning.rescheduling import list_impacts
from scheduling.policy.rollout import MOST_TOUCHES, PLAN_DEFAULTS, RATES, CanaryCounts, Lift, Share, read_plan
from scheduling.strict_text import InvalidText

State = AutomaticRollout.State
RATE_NAMES: Mapping[str, str | Promise] = {
    "complaints": gettext_lazy("Complaints"),
    "failures": gettext_lazy("Failures"),
}
REASON_LABELS: Mapping[tuple[str, str], str | Promise] = {
    (State.RUNNING, "time"): gettext_lazy("This step has not lasted long enough yet."),
    (State.RUNNING, "touches"): gettext_lazy("Not enough touches with the canary have ended at this step yet."),
    (State.RUNNING, "complaints"): gettext_lazy("Complaints are above the limit, possibly by chance. The step stays."),
    (State.RUNNING, "failures"): gettext_lazy("Failures are above the limit, possibly by chance. The step stays."),
    (State.WITHDRAWN, "complaints"): gettext_lazy("Complaints are above the limit, beyond chance."),
    (State.WITHDRAWN, "failures"): gettext_lazy("Failures are above the limit, beyond chance."),
    (State.WITHDRAWN, "content"): gettext_lazy("The canary's text was changed. The figures belong to the old one."),
    (State.WITHDRAWN, "unseen"): gettext_lazy("The figures could not be counted for five minutes."),
    (State.STOPPED, "edited"): gettext_lazy(
        "A user changed the canary or its share at the node. The edit stays."
    ),
}  # fmt: skip
TONES = {State.RUNNING: "info", State.WITHDRAWN: "danger", State.FINISHED: "success"}
#: Columns of a node that are read-only while its canary moves.
ROLLOUT_FIELDS = ("template", "canary_template", "canary_percent", "canary_communities")
MOVED_BY_ROLLOUT = gettext_lazy(
    "An automatic roll-out moves the canary, see below. Stop it to edit the canary by hand."
)


class RolloutStartForm(forms.Form):
    """The plan, as `scheduling.policy.rollout` stores it."""

    steps = forms.CharField(
        label=gettext_lazy("Steps"), max_length=200, widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Percent of communities, like 5, 20, 50, 100."),
    )  # fmt: skip
    time = DurationField(label=gettext_lazy("Each step lasts at least"))
    touches = forms.IntegerField(
        label=gettext_lazy("Touches with the canary at each step, at least"), min_value=1, max_value=MOST_TOUCHES,
        widget=UnfoldAdminIntegerFieldWidget,
    )  # fmt: skip
    complaints = forms.FloatField(
        label=gettext_lazy("Complaints, at most"), widget=UnfoldAdminDecimalFieldWidget,
        help_text=gettext_lazy("Percent of delivered touches. 100: no limit."),
    )  # fmt: skip
    failures = forms.FloatField(
        label=gettext_lazy("Failures, at most"), widget=UnfoldAdminDecimalFieldWidget,
        help_text=gettext_lazy("Percent of ended touches. 100: no limit."),
    )  # fmt: skip

    def clean_steps(self) -> list[float]:
        try:
            return [float(each.rstrip("%％ ")) for each in split_entries(self.cleaned_data["steps"])]
        except ValueError:
            raise forms.ValidationError(_("Percentages, like 5, 20, 50, 100.")) from None

    def clean(self) -> dict[str, Any]:
        if self.errors:
            return self.cleaned_data
        plan = {**self.cleaned_data, "time": to_seconds(self.cleaned_data["time"])}
        try:
            read_plan(plan)
        except InvalidInput as error:
            for each in error.errors:
                self.add_error(each.field, translate_error(each.message))
        return plan


def confirm_start(request: HttpRequest, node: Node) -> Confirmation:
    plan = {**PLAN_DEFAULTS, **(node.canary_guard or {})}
    steps = ", ".join(map(write_number, plan["steps"]))
    form = RolloutStartForm(request.POST or None, initial={**plan, "steps": steps, "time": from_seconds(plan["time"])})
    return Confirmation(
        title=_("Start an automatic roll-out of %(node)s") % {"node": node}, button=_("Start"), form=form,
        text=_("The share of the canary grows by these steps within the limits. When a limit is "
            "exceeded, all communities receive the stable version."),
        act=lambda: rollouts.start_rollout(node.pk, form.cleaned_data, build_user_actor(request)),
        done=_("The roll-out has started and is judged every minute."),
    )  # fmt: skip


def confirm_stop(request: HttpRequest, node: Node) -> Confirmation:
    return Confirmation(
        title=_("Stop the roll-out"), danger=True,
        text=_("Ends the roll-out for good. All communities receive the stable version, unless the canary "
            "was edited."),
        act=lambda: rollouts.stop_rollout(node.pk, build_user_actor(request)), done=_("Stopped."),
    )  # fmt: skip


def may_start_rollout(node: Node) -> bool:
    has_canary = node.canary_template_id not in (None, node.template_id)
    return has_canary and node.retired_at is None and not has_running_rollout(node)


def build_node_context(node: Node) -> dict[str, Any]:
    """Return the context for a node's page: its last roll-out."""
    row = AutomaticRollout.objects.select_related("canary").filter(pk=node.pk).first()
    return {
        "rollout": _build_rollout_context(row) if row else None,
        "show_rollout": row is not None or node.canary_template_id is not None,
    }


def _build_rollout_context(row: AutomaticRollout) -> dict[str, Any]:
    plan = read_plan(row.plan)
    shares = CanaryCounts(row.ended, row.failed, row.complained).shares
    words = _("Each step lasts at least %(time)s and until %(touches)s touches with the canary have ended at it.")
    steps = []
    for number, percent in enumerate(plan.steps):
        state = "done" if number < row.step or row.state == State.FINISHED else ""
        if number == row.step and row.state == State.RUNNING:
            state = "now"
        steps.append((f"{percent:g} %", state))
    return {
        "row": row,
        "tone": TONES.get(State(row.state), ""),
        "why": REASON_LABELS.get((row.state, row.reason), row.reason),
        "steps": steps,
        "rule": words % {"time": describe_duration(plan.time), "touches": plan.touches},
        "rates": [
            {
                "name": RATE_NAMES[rate],
                "rate": f"{100 * shares[rate].rate:.2f} %" if shares[rate].of else "–",
                "of": _("%(hits)s of %(of)s") % {"hits": shares[rate].hits, "of": shares[rate].of},
                "limit": f"{getattr(plan, rate):g} %",
            }
            for rate in RATES
        ],
    }  # fmt: skip


def has_running_rollout(node: Node) -> bool:
    """Return whether an automatic roll-out moves the node's canary now."""
    return AutomaticRollout.objects.filter(pk=node.pk, state=State.RUNNING).exists()


def list_withdrawn_canaries() -> list[ActionLine]:
    """Return the lines of the overview about withdrawn canaries."""
    return [
        ActionLine(
            "trending_down", _("Canary withdrawn (%(what)s)") % {"what": row.node},
            reverse("admin:scheduling_node_change", args=[row.pk]),
            str(REASON_LABELS.get((row.state, row.reason), row.reason)),
        )
        for row in rollouts.withdrawn_canaries()[:5]
    ]  # fmt: skip


PERIODS = (30, 90, 180)  #: days
USUAL = 90


def show_effects(nodes_admin: Any, request: HttpRequest) -> HttpResponse:
    days = read_requested_days(request, PERIODS, USUAL)
    until = now()
    found = read_for_page(
        request,
        lambda: count_within(
            lambda: compute_effects(until - timedelta(days=days), until), settings.TIMEOUTS.conversion
        ),
    )
    rows = {row.key: row for row in Node.objects.only("key", "holdout_percent")}
    return nodes_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/conversion.html",
        _("Effect"),
        nodes=None if found is None else [_describe_effect(each, rows.get(each.node)) for each in found],
        periods=[(each, describe_duration(timedelta(days=each)), each == days) for each in PERIODS],
    )


def _describe_effect(effect: NodeEffect, row: Node | None) -> dict[str, Any]:
    lift = effect.lift
    return {
        "key": effect.node,
        "link": reverse("admin:scheduling_node_change", args=[row.pk]) if row else "",
        "goal": effect.goal,
        "treated": _describe_share_bar(lift.treated),
        "control": _describe_share_bar(lift.control),
        "everywhere": _describe_share_bar(effect.overall.control) if effect.overall.control.of else None,
        "difference": _format_difference(lift),
        "overall": _format_difference(effect.overall),
        "verdict": judge_lift(lift, has_holdout=bool(row and row.holdout_percent)),
        "versions": [
            {"template": each.template, "number": each.number, **_describe_share_bar(each.share)}
            for each in effect.versions
        ],
    }


def _describe_share_bar(share: Share) -> dict[str, Any]:
    """Return a bar for a share: its interval, and a mark at the rate, in percent of the width."""
    low, high = share.interval
    return {
        "hits": share.hits,
        "of": share.of,
        "percent": f"{100 * share.rate:.1f} %" if share.of else "–",
        "interval": f"{100 * low:.1f}–{100 * high:.1f} %" if share.of else "–",
        "from": round(100 * low),
        "span": max(round(100 * (high - low)), 1),
        "mark": min(round(100 * share.rate), 99),
    }


def _format_difference(lift: Lift) -> str:
    if not (lift.treated.of and lift.control.of):
        return "–"
    low, high = lift.interval
    words = _("%(difference)s points (%(low)s to %(high)s)") % {
        "difference": f"{100 * lift.difference:+.1f}", "low": f"{100 * low:+.1f}", "high": f"{100 * high:+.1f}",
    }  # fmt: skip
    return words.replace("-", "−")


def judge_lift(lift: Lift, *, has_holdout: bool) -> tuple[str, str]:
    """Return the tone and the sentence of a measured effect."""
    if not lift.control.of and has_holdout:
        return "", _("No customer of the control group counts yet.")
    if not lift.control.of:
        return "", _("No control group. Set a hold-out at the node to measure its effect.")
    if not lift.treated.of:
        return "", _("The goal period of no customer has ended yet.")
    if not lift.certain:
        return "wait", _("May be chance: zero lies inside the interval.")
    return ("good", _("More than chance.")) if lift.difference > 0 else ("bad", _("Less than without it."))


IMPACT_TIMEOUT = timedelta(seconds=5)  #: limit of the count of waiting touches on the page before publication
KEEP = "_keep"  #: button that stores the text without a replay
DraftState = ConfigDraft.State


class DraftForm(forms.Form):
    draft = forms.CharField(
        label=gettext_lazy("Draft"),
        strip=False,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 28, "class": "at-mono", "spellcheck": "false", "wrap": "off"}),
        help_text=gettext_lazy(
            "Templates, stages, nodes, delay rules and limits in the format of a configuration file."
        ),
    )
    seen = forms.CharField(required=False, widget=forms.HiddenInput)

    def clean_draft(self) -> str:
        """Validate the draft. Lists all errors, each with its place."""
        text: str = self.cleaned_data["draft"].replace("\r\n", "\n")
        try:
            plan_changes(drafts.read_draft(text))
        except (InvalidText, InvalidConfiguration) as error:
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
class ConfigDraftAdmin(RowPage, OpsAdmin):
    list_display = ("owner", "started_at", "shown_state", "sends")
    list_filter = ("state",)
    actions_detail = ("publish",)
    forbidden = frozenset({"change"})

    @ops_display(description=gettext_lazy("state"), label={"done": "success", "failed": "danger", "running": "warning"})
    def shown_state(self, row: ConfigDraft) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @ops_display(description=gettext_lazy("sent, live → draft"))
    def sends(self, row: ConfigDraft) -> str:
        if not row.result:
            return "–"
        nodes = (row.result[name].values() for name in ("live", "draft"))
        return " → ".join(str(sum(node.get("delivered", 0) for node in each)) for each in nodes)

    @table_page("mine/", "add")
    def mine(self, request: HttpRequest) -> HttpResponse:
        """Show the user's draft. A POST discards it or starts its replay."""
        if request.method != "POST":
            return self.show_row(request, drafts.find_draft(request.user))
        try:
            act, seen = request.POST.get("act"), request.POST.get("seen", "")
            if act == "replay":
                drafts.request_replay(request.user, seen)
            elif act == "discard":
                drafts.discard_draft(request.user, seen)
                messages.success(request, _("The draft was discarded."))
        except (Conflict, InvalidConfiguration) as error:
            for line in translate_errors(error):
                messages.error(request, line)
        return redirect(self.url("mine"))

    def show_row(self, request: HttpRequest, row: ConfigDraft | None) -> HttpResponse:
        planned, problems = _plan_edits(row) if row else (None, [])
        is_own = row is None or (row.owner_id == request.user.pk and self.has_add_permission(request))
        return self.page(
            request, "ops/draft.html", _("My draft") if is_own else _("Draft of %(user)s") % {"user": row},
            row=row, is_own=is_own, under_way=row is not None and row.state in (DraftState.WAITING, DraftState.RUNNING),
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

    @row_action(permission="scheduling.publish_configdraft", allowed=lambda row: row.state == DraftState.DONE)
    def publish(self, request: HttpRequest, row: ConfigDraft) -> Confirmation:
        """Confirm the changes of the draft with a reason, and publish it."""
        form = PublishForm(request.POST or None, initial={"seen": drafts.compute_seen(row)})

        def act() -> None:
            actor, given = build_user_actor(request, form.cleaned_data["reason"]), form.cleaned_data
            moved = drafts.publish_draft(row.pk, given["seen"], actor, move_waiting=given["move_waiting"])
            messages.success(request, _("The draft is live."))
            if moved is not None:
                report_moved_touches(request, moved)

        planned, problems = _plan_edits(row)
        if row.state != DraftState.DONE:
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
    """Return the template context of a draft's changes to the live configuration."""
    verbs = {"added": _("added"), "changed": _("changed"), "restored": _("restored"), "retired": _("retired")}
    return [
        {
            "section": change.section.name,
            "label": change.label,
            "words": verbs.get(change.verb, change.verb),
            "is_simulated": change.section.name not in drafts.NOT_SIMULATED,
            "differences": [
                {
                    "path": each.path,
                    "before": _format_change_value(each.before),
                    "after": _format_change_value(each.after),
                }
                for each in change.differences
            ],
        }
        for change in (planned.changes if planned else ())
    ]


def _format_change_value(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _describe_impacts(planned: ChangePlan) -> list[str]:
    """Return the effect of the draft on waiting touches, one line for each node."""
    try:
        impacts = count_within(lambda: list_impacts(planned, IMPACT_TIMEOUT))
    except TimeoutError:
        impacts = None
    if impacts is None:
        return [_("Too many touches wait to count them now.")]
    lines = []
    moves = _("If moved, %(count)s change their time, %(overdue)s of them are overdue then.")
    for impact in impacts:
        words = ngettext(
            "Node %(node)s: %(count)s touch waits.", "Node %(node)s: %(count)s touches wait.", impact.waiting
        )
        text = words % {"node": impact.node, "count": impact.waiting}
        if impact.moved and impact.moved.touches:
            text += " " + moves % {"count": impact.moved.touches, "overdue": impact.moved.overdue}
        lines.append(text)
    return lines


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


def _compare_outcomes(live: Mapping[str, int], draft: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the numbers of the live configuration and of the draft, line by line."""
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
    lines = []
    for outcome, text in words.items():
        if outcome in live or outcome in draft or outcome in ("planned", "delivered"):
            counts = {"live": live.get(outcome, 0), "draft": draft.get(outcome, 0)}
            change = counts["draft"] - counts["live"]
            lines.append({"words": text, **counts, "difference": f"{change:+d}".replace("-", "−") if change else "="})
    return lines
