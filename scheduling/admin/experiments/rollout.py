"""Guarded roll-outs: started at a node, watched there or by themselves, paused, resumed and stopped by editors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.decorators import display
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminTextInputWidget

from scheduling.admin.base import ReadOnlyAdmin, actor_of
from scheduling.admin.dashboard.cards import Figure
from scheduling.admin.experiments.rollout_words import told, why
from scheduling.admin.form_fields import DurationField, entries
from scheduling.admin.labels import complaint
from scheduling.durations import from_seconds, to_seconds
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.experiments import rollout_runs
from scheduling.models import GuardedRollout, Node
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.rollout import MOST_TOUCHES, RATES, USUAL, read_plan

State = GuardedRollout.State
#: Columns of a node that nobody types into while its canary moves.
MOVED = ("template", "canary_template", "canary_percent", "canary_communities")
MOVED_BY_ITSELF = gettext_lazy(
    "A guarded roll-out moves the canary, see below. Pause or stop it to edit the canary by hand."
)
LIMIT_HELP = gettext_lazy("+0.5: half a percentage point above the stable version. x2: twice as much. Empty: none.")


def limit_field(label: Any) -> forms.CharField:
    return forms.CharField(
        label=label, required=False, max_length=20, widget=UnfoldAdminTextInputWidget, help_text=LIMIT_HELP
    )


class StartForm(forms.Form):
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
    complaints = limit_field(gettext_lazy("Complaints, at most"))
    failures = limit_field(gettext_lazy("Failures, at most"))
    opt_outs = limit_field(gettext_lazy("Opt-outs, at most"))

    @classmethod
    def beginning(cls, stored: dict[str, Any] | None) -> dict[str, Any]:
        plan = {**USUAL, **(stored or {})}
        steps = ", ".join(f"{each:g}" for each in plan["steps"])
        return {**plan, "steps": steps, "time": from_seconds(plan["time"])}

    def clean_steps(self) -> list[float]:
        try:
            return [float(each.rstrip("%％ ")) for each in entries(self.cleaned_data["steps"])]
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
                self.add_error(each.field, complaint(each.message))
            return self.cleaned_data
        return {**plan, **{rate: str(limits.get(rate, "")) for rate in RATES}}


@admin.register(GuardedRollout)
class GuardedRolloutAdmin(ReadOnlyAdmin):
    list_display = ("rollout", "of_node", "canary", "shown_state", "share", "shown_reason", "judged_at")
    list_select_related = ("node", "canary")
    list_filter = ("state",)
    ordering = ("-pk",)

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        return [
            path("start/<int:node_id>/", view(self.start_view), name="scheduling_guardedrollout_start"),
            path("act/<int:rollout_id>/<slug:verb>/", view(self.act_view), name="scheduling_guardedrollout_act"),
            *super().get_urls(),
        ]

    @display(description=gettext_lazy("guarded roll-out"), ordering="pk")  # type: ignore[untyped-decorator]
    def rollout(self, row: GuardedRollout) -> str:
        return str(row)

    @display(description=gettext_lazy("service node"))  # type: ignore[untyped-decorator]
    def of_node(self, row: GuardedRollout) -> str:
        link = reverse("admin:scheduling_node_change", args=[row.node_id])
        return format_html('<a class="at-link" href="{}">{}</a>', link, row.node)

    @display(  # type: ignore[untyped-decorator]
        description=gettext_lazy("state"), label={"running": "info", "paused": "danger", "finished": "success"}
    )
    def shown_state(self, row: GuardedRollout) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @display(description=gettext_lazy("step"))  # type: ignore[untyped-decorator]
    def share(self, row: GuardedRollout) -> str:
        return f"{row.percent:g} %"

    @display(description=gettext_lazy("reason"))  # type: ignore[untyped-decorator]
    def shown_reason(self, row: GuardedRollout) -> str:
        return why(row.reason) if row.reason else "–"

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        row = self.found(request, object_id)
        title = _("Guarded roll-out %(row)s of %(node)s") % {"row": row, "node": row.node}
        return self.page(
            request, "ops/rollout.html", title, **rollout_context(request, row), back=self.url("changelist")
        )

    def start_view(self, request: HttpRequest, node_id: int) -> HttpResponse:
        _may_edit(request)
        node = Node.objects.filter(pk=node_id).first()
        if node is None:
            raise Http404
        form = StartForm(request.POST or None, initial=StartForm.beginning(node.canary_guard))
        if request.method == "POST" and form.is_valid():
            try:
                rollout_runs.start(node.pk, form.cleaned_data, actor_of(request))
            except AftertouchError as error:
                form.add_error(None, _in_words(error))
            else:
                messages.success(request, _("The roll-out has begun. It is judged every minute."))
                return redirect("admin:scheduling_node_change", node.pk)
        return self.page(
            request, "ops/confirm.html", _("Start a guarded roll-out of %(node)s") % {"node": node}, form=form,
            text=_("The canary grows by these steps while it stays inside the limits, and goes back to nobody when it "
                   "passes one."),
            button=_("Start"), back=reverse("admin:scheduling_node_change", args=[node.pk]),
        )  # fmt: skip

    def act_view(self, request: HttpRequest, rollout_id: int, verb: str) -> HttpResponse:
        """Ask, then do it."""
        _may_edit(request)
        row = self.found(request, str(rollout_id))
        if verb not in DEEDS:
            raise Http404
        act, title, text, done = DEEDS[verb]
        back = reverse("admin:scheduling_node_change", args=[row.node_id])
        if request.method != "POST":
            return self.page(
                request, "ops/confirm.html", str(title), text=text, button=title, danger=verb == "stop", back=back
            )
        try:
            act(row.pk, actor_of(request))
            messages.success(request, done)
        except AftertouchError as error:
            messages.error(request, _in_words(error))
        return redirect(back)


DEEDS: dict[str, tuple[Callable[[int, Actor], None], Any, Any, Any]] = {
    "pause": (
        rollout_runs.pause, gettext_lazy("Pause the roll-out"),
        gettext_lazy("Everybody gets the stable version until somebody resumes it."),
        gettext_lazy("Paused. New touches take the stable version."),
    ),
    "resume": (
        rollout_runs.resume, gettext_lazy("Resume the roll-out"),
        gettext_lazy("It goes on at the step where it paused, and counts anew from now on."),
        gettext_lazy("It goes on, and counts anew."),
    ),
    "stop": (
        rollout_runs.stop, gettext_lazy("Stop the roll-out"),
        gettext_lazy("For good. Everybody gets the stable version, unless somebody edited the canary meanwhile."),
        gettext_lazy("Stopped."),
    ),
}  # fmt: skip


def rollout_context(request: HttpRequest, row: GuardedRollout) -> dict[str, Any]:
    return {"guarded": told(row), "may_guard": request.user.has_perm("scheduling.change_node")}


def node_context(request: HttpRequest, node: Node) -> dict[str, Any]:
    """For the page of a node: its latest roll-out, and whether another can be started."""
    row = node.guarded_rollouts.first()
    may = request.user.has_perm("scheduling.change_node")
    startable = may and node.retired_at is None and (row is None or not row.is_open)
    return {
        "guarded": told(row) if row else None,
        "may_guard": may,
        "start_guard": reverse("admin:scheduling_guardedrollout_start", args=[node.pk]) if startable else "",
        "nothing_to_try": node.canary_template_id in (None, node.template_id),
        "show_guard": row is not None or node.canary_template_id is not None,
    }


def is_guarded(node: Node) -> bool:
    """Whether its canary moves by itself now."""
    return node.guarded_rollouts.filter(state=State.RUNNING).exists()


def paused_rollouts() -> list[Figure]:
    """For the overview, where there is any."""
    count = GuardedRollout.objects.filter(state=State.PAUSED).count()
    link = f"{reverse('admin:scheduling_guardedrollout_changelist')}?state__exact={State.PAUSED}"
    return [Figure(_("Guarded roll-outs that paused"), count, link, "bad")] if count else []


def _may_edit(request: HttpRequest) -> None:
    if not request.user.has_perm("scheduling.change_node"):
        raise PermissionDenied


def _in_words(error: AftertouchError) -> str:
    return complaint(error.errors[0].message if isinstance(error, InvalidInput) else str(error))
