"""Pause and resume everything, a channel or a node, and list active pauses for the banner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext_lazy
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from scheduling import sql
from scheduling.admin.base import Confirmation, OpsAdmin, ops_display, table_page
from scheduling.admin.dashboard.charts import format_capped_count
from scheduling.admin.page_reads import count_within
from scheduling.admin.shown_values import render_link
from scheduling.admin.undo import create_undo_link
from scheduling.errors import AftertouchError
from scheduling.models import ChannelConfig, Node, Pause
from scheduling.monitoring.statistics import MOST
from scheduling.operations import commands


def describe_scope(scope: str) -> str:
    kind, _colon, key = scope.partition(":")
    if kind == "all":
        return _("everything")
    words = {"channel": _("channel %s"), "node": _("node %s"), "shop": _("shop %s")}
    return words[kind] % key if kind in words else scope


def redirect_to_pause_page(scope: str) -> HttpResponse:
    """Redirect to the page that pauses the scope, or resumes it if it is paused."""
    ends = Pause.objects.filter(scope=scope).exists()
    name = "scheduling_pause_end" if ends else "scheduling_pause_add"
    return redirect(f"{reverse('admin:' + name)}?{urlencode({'scope': scope})}")


def load_paused_scopes() -> frozenset[str]:
    return frozenset(Pause.objects.values_list("scope", flat=True))


def is_paused(scopes: frozenset[str], channel: str, node: str = "") -> bool:
    """Return whether one of the paused scopes covers the channel, or the node that sends through it."""
    return not scopes.isdisjoint({"all", f"channel:{channel}", f"node:{node}"})


def list_active_pauses() -> list[dict[str, Any]]:
    rows = Pause.objects.select_related("paused_by").order_by("paused_at")
    return [{"row": row, "name": describe_scope(row.scope)} for row in rows]


def count_held() -> Counter[str]:
    """Count the touches that each pause holds, by scope; at most `MOST` + 1 of each."""
    return Counter(dict(sql.rows(_HELD, {"most": MOST + 1})))


_HELD = """
SELECT pause.scope, (
    SELECT count(*) FROM (
        SELECT FROM scheduling_touch_live WHERE paused_by <> '' AND paused_by = pause.scope LIMIT %(most)s
    ) AS held
) FROM scheduling_pause AS pause
"""


def _list_scopes() -> list[tuple[str, Any]]:
    channels = ChannelConfig.objects.filter(retired_at=None).values_list("key", flat=True)
    nodes = Node.objects.filter(retired_at=None).values_list("key", flat=True)
    return [
        ("all", _("Everything")),
        (_("A channel"), [(f"channel:{key}", key) for key in channels]),
        (_("A node"), [(f"node:{key}", key) for key in nodes]),
    ]


class PauseForm(forms.Form):
    scope = forms.ChoiceField(
        label=pgettext_lazy("pause", "What"), choices=_list_scopes, widget=UnfoldAdminSelectWidget
    )
    reason = forms.CharField(
        label=gettext_lazy("Why"), max_length=200, required=False, widget=UnfoldAdminTextInputWidget
    )


@admin.register(Pause)
class PauseAdmin(OpsAdmin):
    list_display = ("what", "held", "reason", "paused_by", "paused_at", "end_link")
    list_display_links = None
    list_select_related = ("paused_by",)
    actions = None
    forbidden = frozenset({"change", "delete"})  # the page `end` also resumes the paused touches

    def load_rows(self, rows: Iterable[Any]) -> None:
        counts = count_within(count_held)
        for row in rows:
            row.held_count = None if counts is None else counts[row.scope]

    @ops_display(description=gettext_lazy("what"))
    def what(self, row: Pause) -> str:
        return describe_scope(row.scope)

    @ops_display(description=gettext_lazy("held touches"))
    def held(self, row: Any) -> str:
        url = f"{reverse('admin:scheduling_touch_changelist')}?{urlencode({'paused_by': row.scope})}"
        return render_link(url, format_capped_count(row.held_count, MOST) or "–")

    @ops_display(description="")
    def end_link(self, row: Pause) -> str:
        url = f"{reverse('admin:scheduling_pause_end')}?{urlencode({'scope': row.scope})}"
        return render_link(url, _("Resume"))

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        if not self.has_add_permission(request):
            raise PermissionDenied
        form = PauseForm(request.POST or None, initial={"scope": request.GET.get("scope", "all")})

        def act() -> None:
            scope = form.cleaned_data["scope"]
            name = request.user.get_username()
            what = _("Paused: %(what)s.") % {"what": describe_scope(scope)}
            with transaction.atomic():  # a second caller of the pause then sees its offer, and ends it
                was_paused = Pause.objects.filter(scope=scope).exists()
                row = commands.pause_scope(scope, reason=form.cleaned_data["reason"], user=request.user, actor=name)  # type: ignore[arg-type]
                is_own = not was_paused and row.paused_by_id == request.user.pk
                label = what.rstrip(".。")
                link = create_undo_link(request, "pause", [scope], label=label, pause=row.pk) if is_own else ""
            messages.warning(request, what, extra_tags=link)

        text = _("Touches that fall due are kept. After you resume, they are sent over the next minutes.")
        asked = Confirmation(
            title=_("Pause"), act=act, form=form, text=text, danger=True, back=self.url("changelist")
        )  # fmt: skip
        return self.confirm(request, asked)

    @table_page("end/", "scheduling.delete_pause")
    def end(self, request: HttpRequest) -> HttpResponse:
        scope = request.GET.get("scope", "")

        def act() -> bool:
            try:
                commands.resume_scope(scope, actor=request.user.get_username())
            except AftertouchError:
                return False
            return True

        asked = Confirmation(
            title=_("Resume %(what)s?") % {"what": describe_scope(scope)}, button=_("Resume"), act=act,
            text=_("Touches kept during the pause are sent over the next minutes, unless a guard suppresses them."),
            done=_("Resumed: %(what)s.") % {"what": describe_scope(scope)},
            unchanged=_("The pause had already ended."), back=self.url("changelist"),
        )  # fmt: skip
        return self.confirm(request, asked)
