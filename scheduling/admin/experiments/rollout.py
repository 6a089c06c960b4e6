"""Start, show and stop the automatic roll-out of a node's canary, on the node's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminDecimalFieldWidget, UnfoldAdminIntegerFieldWidget, UnfoldAdminTextInputWidget

from scheduling.admin.base import build_user_actor
from scheduling.admin.dashboard.cards import ActionLine
from scheduling.admin.form_fields import DurationField, split_entries
from scheduling.admin.labels import translate_error
from scheduling.durations import from_seconds, to_seconds
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.experiments import rollouts
from scheduling.models import AutomaticRollout, Node
from scheduling.monitoring.duration_text import describe_duration
from scheduling.policy.rollout import MOST_TOUCHES, PLAN_DEFAULTS, RATES, CanaryCounts, read_plan

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


def start_rollout_view(node_admin: Any, request: HttpRequest, object_id: str) -> HttpResponse:
    node = _get_editable_node(node_admin, request, object_id)
    plan = {**PLAN_DEFAULTS, **(node.canary_guard or {})}
    steps = ", ".join(f"{each:g}" for each in plan["steps"])
    form = RolloutStartForm(request.POST or None, initial={**plan, "steps": steps, "time": from_seconds(plan["time"])})

    def act() -> None:
        try:
            rollouts.start_rollout(node.pk, form.cleaned_data, build_user_actor(request))
            messages.success(request, _("The roll-out has started and is judged every minute."))
        except AftertouchError as error:
            form.add_error(None, _translate_rollout_error(error))

    return node_admin.confirm(  # type: ignore[no-any-return]
        request, _("Start an automatic roll-out of %(node)s") % {"node": node}, act, form=form,
        text=_("The share of the canary grows by these steps within the limits. When a limit is "
            "exceeded, all communities receive the stable version."),
        button=_("Start"), back=node_admin.url("change", node.pk),
    )  # fmt: skip


def stop_rollout_view(node_admin: Any, request: HttpRequest, object_id: str) -> HttpResponse:
    node = _get_editable_node(node_admin, request, object_id)

    def act() -> None:
        try:
            rollouts.stop_rollout(node.pk, build_user_actor(request))
            messages.success(request, _("Stopped."))
        except AftertouchError as error:
            messages.error(request, _translate_rollout_error(error))

    return node_admin.confirm(  # type: ignore[no-any-return]
        request, _("Stop the roll-out"), act, danger=True, back=node_admin.url("change", node.pk),
        text=_("Ends the roll-out for good. All communities receive the stable version, unless the canary "
            "was edited."),
    )  # fmt: skip


def _get_editable_node(node_admin: Any, request: HttpRequest, object_id: str) -> Node:
    if not request.user.has_perm("scheduling.change_node"):
        raise PermissionDenied
    node: Node = node_admin.get_row_or_404(request, object_id)
    return node


def _translate_rollout_error(error: AftertouchError) -> str:
    return translate_error(error.errors[0].message if isinstance(error, InvalidInput) else str(error))


def build_node_context(request: HttpRequest, node: Node) -> dict[str, Any]:
    """Return the context for a node's page: its last roll-out, and whether another can be started."""
    row = AutomaticRollout.objects.select_related("canary").filter(pk=node.pk).first()
    may, is_running = request.user.has_perm("scheduling.change_node"), row is not None and row.state == State.RUNNING
    has_canary = node.canary_template_id not in (None, node.template_id)
    startable = may and has_canary and node.retired_at is None and not is_running
    return {
        "rollout": _build_rollout_context(row) if row else None,
        "stop_rollout": reverse("admin:scheduling_node_stop_rollout", args=[node.pk]) if may and is_running else "",
        "start_rollout": reverse("admin:scheduling_node_start_rollout", args=[node.pk]) if startable else "",
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
