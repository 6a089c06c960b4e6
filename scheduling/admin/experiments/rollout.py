"""Pages of automatic roll-outs: start at a node, progress, and pause, resume and stop by editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.functional import Promise
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop
from unfold.decorators import display
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminTextInputWidget

from scheduling.admin.base import ReadOnlyAdmin, build_user_actor
from scheduling.admin.dashboard.cards import Figure
from scheduling.admin.form_fields import DurationField, split_entries
from scheduling.admin.labels import register_labels, translate_error
from scheduling.durations import from_seconds, to_seconds
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.experiments import rollout_runs
from scheduling.models import AutomaticRollout, Node, RolloutMove
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.rollout import (
    MOST_TOUCHES,
    PLAN_DEFAULTS,
    RATES,
    Limit,
    RateComparison,
    RolloutPlan,
    Share,
    VersionCounts,
    read_plan,
)

RATE_NAMES: Mapping[str, str | Promise] = {
    "complaints": gettext_lazy("Complaints"),
    "failures": gettext_lazy("Failures"),
    "opt_outs": gettext_lazy("Opt-outs"),
}
REASON_LABELS: Mapping[str, str | Promise] = {
    "time": gettext_lazy("This step has not lasted long enough yet."),
    "canary": gettext_lazy("Not enough touches with the canary have ended at this step yet."),
    "stable": gettext_lazy("Not enough touches with the stable version have ended to compare with."),
    "edited": gettext_lazy("A user changed the template, the canary or its share at the node. The edit stays."),
    "content": gettext_lazy("One of the two texts was changed. The figures belong to the previous text."),
    "unseen": gettext_lazy("The figures could not be counted for five minutes. No community receives the canary."),
    "person": gettext_lazy("Paused by a user."),
}
#: Prefixes of codes that contain a rate.
RATE_REASON_LABELS = {
    "limit:": gettext_noop("%(rate)s: worse than the stable version by more than the limit, beyond chance."),
    "doubt:": gettext_noop(
        "%(rate)s: above the limit, possibly by chance. The step stays until more data is available."
    ),
}

#: Errors of `scheduling.policy.rollout`.
register_labels(
    {},
    {},
    (
        (r"must be like \+0\.5 .*",
         gettext_noop("must be like +0.5 (percentage points above the stable version) or x2 (times)")),
        (r"must be above x1: .*", gettext_noop("must be above x1: two equal versions differ by chance")),
        (r"must be above 0 and at most 100 points: .*",
         gettext_noop("must be above 0 and at most 100 points: two equal versions differ by chance")),
        (r"must be a list of 1 to (?P<most>\d+) percentages", gettext_noop("must be 1 to %(most)s percentages")),
        (r"must grow from above 0 to at most 100", gettext_noop("must grow from above 0 to at most 100")),
        (r"must start below 100, .*",
         gettext_noop("must start below 100, so that communities are left to compare with")),
        (r"is required when no other limit is set",
         gettext_noop("is required when no other limit is set")),
        (r"must be another template than the stable one.*",
         gettext_noop("Choose a canary template that is not the stable one, and save the node.")),
        (r"the node is retired", gettext_noop("The node is retired.")),
        (r"an automatic roll-out of this node is under way.*",
         gettext_noop("An automatic roll-out of this node is under way; stop it first.")),
        (r"the node was changed after the start of this roll-out.*",
         gettext_noop("The node changed after the roll-out started. Stop the roll-out and start a new one.")),
        (r"the roll-out changed since you loaded it; .*",
         gettext_noop("The roll-out changed since you loaded the page. Reload and try again.")),
    ),
)  # fmt: skip


def translate_rollout_reason(code: str) -> str:
    """Translate a roll-out's reason code; an unknown one is returned unchanged."""
    for prefix, words in RATE_REASON_LABELS.items():
        if code.startswith(prefix):
            rate = code.removeprefix(prefix)
            return _(words) % {"rate": RATE_NAMES.get(rate, rate)}
    return str(REASON_LABELS.get(code, code))


def build_rollout_context(rollout: AutomaticRollout) -> dict[str, Any]:
    """Return the template context of one roll-out."""
    plan = read_plan(rollout.plan)
    canary, stable = (VersionCounts(**rollout.figures.get(name, {})) for name in ("canary", "stable"))
    return {
        "row": rollout,
        "tone": {"running": "info", "paused": "danger", "finished": "success"}.get(rollout.state, ""),
        "why": translate_rollout_reason(rollout.reason) if rollout.reason else "",
        "steps": [(f"{each:g} %", _get_step_state(number, rollout)) for number, each in enumerate(plan.steps)],
        "rule": _describe_step_rule(plan),
        "ended": (canary.ended, stable.ended),
        "rates": [_compare_rates(plan, rate, canary, stable) for rate in RATE_NAMES],
        "moves": [_describe_move(each) for each in rollout.moves.order_by("-pk")],
    }


def _get_step_state(number: int, rollout: AutomaticRollout) -> str:
    if number == rollout.step and rollout.is_open:
        return "now"
    return "done" if number < rollout.step or rollout.state == "finished" else ""


def _describe_step_rule(plan: RolloutPlan) -> str:
    words = _("Each step lasts at least %(time)s and until %(touches)s touches with the canary have ended at it.")
    return words % {"time": describe_duration(plan.time) if plan.time > timedelta(0) else "0", "touches": plan.touches}


def _compare_rates(plan: RolloutPlan, rate: str, canary: VersionCounts, stable: VersionCounts) -> dict[str, Any]:
    limit = plan.limits.get(rate)
    shares = canary.share(rate), stable.share(rate)
    return {
        "name": RATE_NAMES[rate],
        "canary": _format_share(shares[0]),
        "stable": _format_share(shares[1]),
        "limit": describe_rate_limit(limit) if limit else _("none"),
        "verdict": _judge_finding(plan, RateComparison(rate, limit, *shares)) if limit else ("", "–"),
    }


def _format_share(share: Share) -> tuple[str, str]:
    if not share.of:
        return "–", ""
    return f"{100 * share.rate:.2f} %", _("%(hits)s of %(of)s") % {"hits": share.hits, "of": share.of}


def describe_rate_limit(limit: Limit) -> str:
    if limit.factor != 1:
        return _("at most %(factor)s times the stable version's") % {"factor": f"{limit.factor:g}"}
    return _("at most %(points)s points above the stable version's") % {"points": f"{limit.points:g}"}


def _judge_finding(plan: RolloutPlan, found: RateComparison) -> tuple[str, str]:
    if min(found.canary.of, found.stable.of) < plan.judged_from:
        return "", _("judged from %(count)s of each") % {"count": plan.judged_from}
    if found.excess_lower_bound > 0:
        return "danger", _("beyond the limit")
    return ("warning", _("worse, perhaps by chance")) if found.excess > 0 else ("success", _("inside the limit"))


def _describe_move(move: RolloutMove) -> dict[str, Any]:
    return {
        "row": move,
        "tone": {"paused": "danger", "finished": "success", "grew": "info"}.get(move.verb, ""),
        "why": translate_rollout_reason(move.reason) if move.reason else "",
        "who": move.actor_name or _("automatic"),
        "percent": f"{move.percent:g} %",
        "figures": [
            (name, VersionCounts(**move.figures[key]))
            for key, name in (("canary", _("canary")), ("stable", _("stable")))
            if key in move.figures
        ],
    }


State = AutomaticRollout.State
#: Columns of a node that are read-only while its canary moves.
ROLLOUT_FIELDS = ("template", "canary_template", "canary_percent", "canary_communities")
MOVED_BY_ROLLOUT = gettext_lazy(
    "An automatic roll-out moves the canary, see below. Pause or stop it to edit the canary by hand."
)
LIMIT_HELP = gettext_lazy("+0.5: half a percentage point above the stable version. x2: twice as much. Empty: none.")


def make_rate_limit_field(label: Any) -> forms.CharField:
    return forms.CharField(
        label=label, required=False, max_length=20, widget=UnfoldAdminTextInputWidget, help_text=LIMIT_HELP
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
    judged_from = forms.IntegerField(
        label=gettext_lazy("A limit is judged from"), min_value=1, max_value=MOST_TOUCHES,
        widget=UnfoldAdminIntegerFieldWidget, help_text=gettext_lazy("So many touches of each version."),
    )  # fmt: skip
    complaints = make_rate_limit_field(gettext_lazy("Complaints, at most"))
    failures = make_rate_limit_field(gettext_lazy("Failures, at most"))
    opt_outs = make_rate_limit_field(gettext_lazy("Opt-outs, at most"))

    @classmethod
    def build_initial_values(cls, stored: dict[str, Any] | None) -> dict[str, Any]:
        plan = {**PLAN_DEFAULTS, **(stored or {})}
        steps = ", ".join(f"{each:g}" for each in plan["steps"])
        return {**plan, "steps": steps, "time": from_seconds(plan["time"])}

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
            limits = read_plan(plan).limits
        except InvalidInput as error:
            for each in error.errors:
                self.add_error(each.field, translate_error(each.message))
            return self.cleaned_data
        return {**plan, **{rate: str(limits.get(rate, "")) for rate in RATES}}


@admin.register(AutomaticRollout)
class AutomaticRolloutAdmin(ReadOnlyAdmin):
    list_display = ("rollout", "of_node", "canary", "shown_state", "share", "shown_reason", "judged_at")
    list_select_related = ("node", "canary")
    list_filter = ("state",)
    ordering = ("-pk",)

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        return [
            path("start/<int:node_id>/", view(self.start_view), name="scheduling_automaticrollout_start"),
            path("act/<int:rollout_id>/<slug:verb>/", view(self.act_view), name="scheduling_automaticrollout_act"),
            *super().get_urls(),
        ]

    @display(description=gettext_lazy("automatic roll-out"), ordering="pk")  # type: ignore[untyped-decorator]
    def rollout(self, row: AutomaticRollout) -> str:
        return str(row)

    @display(description=gettext_lazy("service node"))  # type: ignore[untyped-decorator]
    def of_node(self, row: AutomaticRollout) -> str:
        link = reverse("admin:scheduling_node_change", args=[row.node_id])
        return format_html('<a class="at-link" href="{}">{}</a>', link, row.node)

    @display(  # type: ignore[untyped-decorator]
        description=gettext_lazy("state"), label={"running": "info", "paused": "danger", "finished": "success"}
    )
    def shown_state(self, row: AutomaticRollout) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @display(description=gettext_lazy("step"))  # type: ignore[untyped-decorator]
    def share(self, row: AutomaticRollout) -> str:
        return f"{row.percent:g} %"

    @display(description=gettext_lazy("reason"))  # type: ignore[untyped-decorator]
    def shown_reason(self, row: AutomaticRollout) -> str:
        return translate_rollout_reason(row.reason) if row.reason else "–"

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        row = self.get_row_or_404(request, object_id)
        title = _("Automatic roll-out %(row)s of %(node)s") % {"row": row, "node": row.node}
        return self.page(
            request, "ops/rollout.html", title, **build_rollout_page_context(request, row), back=self.url("changelist")
        )

    def start_view(self, request: HttpRequest, node_id: int) -> HttpResponse:
        _require_edit_permission(request)
        node = Node.objects.filter(pk=node_id).first()
        if node is None:
            raise Http404
        form = RolloutStartForm(request.POST or None, initial=RolloutStartForm.build_initial_values(node.canary_guard))

        def act() -> None:
            try:
                rollout_runs.start_rollout(node.pk, form.cleaned_data, build_user_actor(request))
                messages.success(request, _("The roll-out has started and is judged every minute."))
            except AftertouchError as error:
                form.add_error(None, _translate_rollout_error(error))

        return self.confirm(
            request, _("Start an automatic roll-out of %(node)s") % {"node": node}, act, form=form,
            text=_("The share of the canary grows by these steps within the limits. When a limit is "
                "exceeded, all communities receive the stable version."),
            button=_("Start"), back=reverse("admin:scheduling_node_change", args=[node.pk]),
        )  # fmt: skip

    def act_view(self, request: HttpRequest, rollout_id: int, verb: str) -> HttpResponse:
        """Ask for confirmation, then perform the action."""
        _require_edit_permission(request)
        row = self.get_row_or_404(request, str(rollout_id))
        if verb not in ROLLOUT_ACTIONS:
            raise Http404
        move, title, text, done = ROLLOUT_ACTIONS[verb]

        def act() -> None:
            try:
                move(row.pk, build_user_actor(request))
                messages.success(request, done)
            except AftertouchError as error:
                messages.error(request, _translate_rollout_error(error))

        back = reverse("admin:scheduling_node_change", args=[row.node_id])
        return self.confirm(request, str(title), act, text=text, danger=verb == "stop", back=back)


ROLLOUT_ACTIONS: dict[str, tuple[Callable[[int, Actor], None], Any, Any, Any]] = {
    "pause": (
        rollout_runs.pause_rollout, gettext_lazy("Pause the roll-out"),
        gettext_lazy("All communities receive the stable version until a user resumes the roll-out."),
        gettext_lazy("Paused. New touches take the stable version."),
    ),
    "resume": (
        rollout_runs.resume_rollout, gettext_lazy("Resume the roll-out"),
        gettext_lazy("Resumes at the paused step and restarts its figures."),
        gettext_lazy("The roll-out was resumed. Its figures restart."),
    ),
    "stop": (
        rollout_runs.stop_rollout, gettext_lazy("Stop the roll-out"),
        gettext_lazy("Ends the roll-out for good. All communities receive the stable version, unless the canary "
            "was edited."),
        gettext_lazy("Stopped."),
    ),
}  # fmt: skip


def build_rollout_page_context(request: HttpRequest, row: AutomaticRollout) -> dict[str, Any]:
    return {"rollout": build_rollout_context(row), "may_move_rollout": request.user.has_perm("scheduling.change_node")}


def build_node_context(request: HttpRequest, node: Node) -> dict[str, Any]:
    """Return the context for a node's page: its latest roll-out, and whether another can be started."""
    row = node.automatic_rollouts.first()
    may = request.user.has_perm("scheduling.change_node")
    startable = may and node.retired_at is None and (row is None or not row.is_open)
    return {
        "rollout": build_rollout_context(row) if row else None,
        "may_move_rollout": may,
        "start_rollout": reverse("admin:scheduling_automaticrollout_start", args=[node.pk]) if startable else "",
        "nothing_to_try": node.canary_template_id in (None, node.template_id),
        "show_rollout": row is not None or node.canary_template_id is not None,
    }


def has_running_rollout(node: Node) -> bool:
    """Return whether an automatic roll-out moves the node's canary now."""
    return node.automatic_rollouts.filter(state=State.RUNNING).exists()


def build_rollout_figures() -> list[Figure]:
    """Return the overview's number of paused roll-outs; empty if there are none."""
    count = AutomaticRollout.objects.filter(state=State.PAUSED).count()
    link = f"{reverse('admin:scheduling_automaticrollout_changelist')}?state__exact={State.PAUSED}"
    return [Figure(_("Automatic roll-outs that paused"), count, link, "bad")] if count else []


def _require_edit_permission(request: HttpRequest) -> None:
    if not request.user.has_perm("scheduling.change_node"):
        raise PermissionDenied


def _translate_rollout_error(error: AftertouchError) -> str:
    return translate_error(error.errors[0].message if isinstance(error, InvalidInput) else str(error))
