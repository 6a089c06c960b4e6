"""Pages of replays: edit a draft, compare it with the live configuration, publish or discard it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from unfold.decorators import display
from unfold.widgets import UnfoldAdminTextInputWidget, UnfoldBooleanSwitchWidget

from scheduling.admin.base import OpsAdmin, build_user_actor
from scheduling.admin.count_time_limits import count_within
from scheduling.admin.experiments.draft import draft_page, yaml_page
from scheduling.admin.experiments.replay_result import build_changes_context, build_result_context
from scheduling.admin.labels import translate_error
from scheduling.admin.matrix.node_impact import report_moved_touches
from scheduling.admin.undo import build_undo_link
from scheduling.configuration.file.apply import InvalidConfiguration
from scheduling.errors import Conflict
from scheduling.experiments.replay import runs
from scheduling.models import Replay
from scheduling.operations import undo
from scheduling.planning.rescheduling import Impact, list_impacts

IMPACT_TIMEOUT = timedelta(seconds=5)  #: limit of the count of waiting touches on the page before publication
State = Replay.State
UNDER_WAY = (State.WAITING, State.RUNNING)


class PublishForm(forms.Form):
    reason = forms.CharField(
        label=gettext_lazy("Reason for the change"), max_length=80, widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Stored in the history with your name."),
    )  # fmt: skip
    move_waiting = forms.BooleanField(
        label=gettext_lazy("Move touches that wait already"), required=False, widget=UnfoldBooleanSwitchWidget,
        help_text=gettext_lazy("Applies where the draft changes a delay. Overdue touches are sent over ten minutes."),
    )  # fmt: skip


def _describe_draft_impacts(run: Replay) -> list[str]:
    """Return the effect of the draft on waiting touches, one line for each node.

    Raises:
        InvalidConfiguration: the draft does not fit the live configuration.
    """
    planned = runs.read_draft(run.draft)[1]
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


def _review_publication(run: Replay) -> tuple[list[str], str]:
    """Return the impact lines of the draft, and why it cannot be published or ""."""
    try:
        runs.check_publishable(run)
        return _describe_draft_impacts(run), ""
    except (Conflict, InvalidConfiguration) as error:
        return [], " ".join(translate_error(line) for line in str(error).splitlines())


@admin.register(Replay)
class ReplayAdmin(OpsAdmin):
    list_display = ("run", "created_at", "actor_name", "days", "shown_state", "sends", "settled_by")
    list_filter = ("state",)
    ordering = ("-pk",)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_publish_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("scheduling.publish_replay")

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        return [
            path("draft/", view(lambda request: draft_page(self, request)), name="scheduling_replay_draft"),
            path("<int:run_id>/publish/", view(self.publish_view), name="scheduling_replay_publish"),
            path("<int:run_id>/discard/", view(self.discard_view), name="scheduling_replay_discard"),
            *super().get_urls(),
        ]

    @display(description=gettext_lazy("replay"), ordering="pk")  # type: ignore[untyped-decorator]
    def run(self, row: Replay) -> str:
        return str(row)

    @display(  # type: ignore[untyped-decorator]
        description=gettext_lazy("state"),
        label={"done": "info", "published": "success", "failed": "danger", "running": "warning"},
    )
    def shown_state(self, row: Replay) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @display(description=gettext_lazy("sent, live → draft"))  # type: ignore[untyped-decorator]
    def sends(self, row: Replay) -> str:
        if not row.result:
            return "–"
        live, after = (row.result[name]["totals"].get("delivered", 0) for name in ("live", "draft"))
        return f"{live} → {after}"

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        return yaml_page(self, request)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        row = self.get_row_or_404(request, object_id)
        under_way = row.state in UNDER_WAY
        return self.page(
            request,
            "ops/replay_run.html",
            _("Replay %(run)s") % {"run": row},
            row=row,
            under_way=under_way,
            tone={"done": "info", "published": "success", "failed": "danger"}.get(row.state, "warning"),
            percent=min(100 * row.done // row.total, 100) if row.total else 0,
            problems=[translate_error(each) for each in row.problem.splitlines()],
            results=build_result_context(row.result) if row.result else None,
            changes=build_changes_context(row.changes),
            may_publish=row.state == State.DONE and self.has_publish_permission(request),
            may_discard=self.has_add_permission(request) and row.state in (*UNDER_WAY, State.DONE, State.FAILED),
            may_edit=self.has_add_permission(request),
            publish_link=self.url("publish", row.pk),
            discard_link=self.url("discard", row.pk),
            edit_link=f"{self.url('add')}?from={row.pk}",
            back=self.url("changelist"),
        )

    def publish_view(self, request: HttpRequest, run_id: int) -> HttpResponse:
        """Confirm the changes of the draft with a reason, and publish it."""
        if not self.has_publish_permission(request):
            raise PermissionDenied
        row: Replay = self.get_row_or_404(request, str(run_id))
        form = PublishForm(request.POST or None)

        def act() -> None:
            actor = build_user_actor(request, form.cleaned_data["reason"])
            try:
                moved = runs.publish_draft(row.pk, actor, move_waiting=form.cleaned_data["move_waiting"])
            except (Conflict, InvalidConfiguration) as error:
                for line in str(error).splitlines():
                    messages.error(request, translate_error(line))
                return
            offer = undo.find_offer(request.user, runs.PUBLISH, row.pk)  # type: ignore[arg-type]
            messages.success(request, _("The draft is live."), extra_tags=build_undo_link(offer))
            if moved is not None:
                report_moved_touches(request, moved)

        facts, problem = _review_publication(row)
        return self.confirm(
            request, _("Publish the draft of replay %(run)s?") % {"run": row}, act, form=form, facts=facts,
            problem=problem, changes=build_changes_context(row.changes), button=_("Publish"),
            back=self.url("change", row.pk),
        )  # fmt: skip

    def discard_view(self, request: HttpRequest, run_id: int) -> HttpResponse:
        if request.method != "POST" or not self.has_add_permission(request):
            raise PermissionDenied
        try:
            runs.discard_replay(self.get_row_or_404(request, str(run_id)).pk, build_user_actor(request))
            messages.success(request, _("The draft was discarded."))
        except Conflict as error:
            messages.error(request, translate_error(str(error)))
        return redirect(self.url("change", run_id))
