"""Pages of experiments on a node: the automatic roll-out of its canary, and the conversion by content version."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django import forms
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminDecimalFieldWidget, UnfoldAdminIntegerFieldWidget, UnfoldAdminTextInputWidget

from scheduling.admin.base import Confirmation, build_user_actor
from scheduling.admin.dashboard.charts import ActionLine
from scheduling.admin.form_fields import DurationField, split_entries
from scheduling.admin.labels import translate_error
from scheduling.admin.page_reads import count_within, read_for_page
from scheduling.durations import from_seconds, to_seconds
from scheduling.errors import InvalidInput
from scheduling.experiments import rollouts
from scheduling.experiments.conversion import NodeEffect, compute_effects
from scheduling.models import AutomaticRollout, Node
from scheduling.monitoring.duration_text import describe_duration
from scheduling.policy.rollout import MOST_TOUCHES, PLAN_DEFAULTS, RATES, CanaryCounts, Lift, Share, read_plan

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
    steps = ", ".join(f"{each:g}" for each in plan["steps"])
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
    return {
        "row": row,
        "tone": TONES.get(State(row.state), ""),
        "why": REASON_LABELS.get((row.state, row.reason), row.reason),
        "steps": [(f"{percent:g} %", _get_step_state(number, row)) for number, percent in enumerate(plan.steps)],
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


def _get_step_state(number: int, row: AutomaticRollout) -> str:
    if number == row.step and row.state == State.RUNNING:
        return "now"
    return "done" if number < row.step or row.state == State.FINISHED else ""


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


def effect_page(nodes_admin: Any, request: HttpRequest) -> HttpResponse:
    if not (nodes_admin.has_view_or_change_permission(request) and request.user.has_perm("scheduling.view_touch")):
        raise PermissionDenied
    days = next((each for each in PERIODS if str(each) == request.GET.get("days")), USUAL)
    until = now()
    found = read_for_page(
        request,
        lambda: count_within(
            lambda: compute_effects(until - timedelta(days=days), until), settings.TIMEOUTS.conversion
        ),
    )
    links = dict(Node.objects.values_list("key", "pk"))
    return nodes_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/conversion.html",
        _("Effect"),
        nodes=None if found is None else [_describe_effect(each, links) for each in found],
        periods=[(each, describe_duration(timedelta(days=each)), each == days) for each in PERIODS],
    )


def _describe_effect(effect: NodeEffect, links: dict[str, int]) -> dict[str, Any]:
    lift = effect.lift
    return {
        "key": effect.node,
        "link": reverse("admin:scheduling_node_change", args=[links[effect.node]]) if effect.node in links else "",
        "goal": effect.goal,
        "treated": _describe_share_bar(lift.treated),
        "control": _describe_share_bar(lift.control),
        "everywhere": _describe_share_bar(effect.overall.control) if effect.overall.control.of else None,
        "difference": _format_difference(lift),
        "overall": _format_difference(effect.overall),
        "verdict": judge_lift(lift),
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


def judge_lift(lift: Lift) -> tuple[str, str]:
    """Return the tone and the sentence of a measured effect."""
    if not lift.control.of:
        return "", _("No control group. Set a hold-out at the node to measure its effect.")
    if not lift.treated.of:
        return "", _("The goal period of no customer has ended yet.")
    if not lift.certain:
        return "wait", _("May be chance: zero lies inside the interval.")
    return ("good", _("More than chance.")) if lift.difference > 0 else ("bad", _("Less than without it."))
