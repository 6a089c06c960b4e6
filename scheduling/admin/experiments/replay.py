"""Pages of what-if replays: edit a draft, compare it with the live configuration, publish or discard it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.decorators import display
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextareaWidget, UnfoldBooleanSwitchWidget

from scheduling.admin.base import OpsAdmin, build_user_actor
from scheduling.admin.labels import translate_error, translate_reason
from scheduling.admin.matrix.node_impact import report_moved_touches
from scheduling.configuration.file.apply import InvalidConfiguration
from scheduling.configuration.file.document import InvalidDocument
from scheduling.errors import Conflict
from scheduling.experiments.replay import runs
from scheduling.models import WhatIfRun
from scheduling.monitoring.duration_text import describe_duration

HEIGHT = 120  #: of a day's bars, in units of the drawing
STEP, WIDTH = 24, 9
PARTS = ("planned", "delivered", "suppressed", "held", "cancelled", "failed", "waiting")


@dataclass(frozen=True, slots=True)
class ComparedCount:
    """One number of the live configuration and of the draft."""

    words: str
    live: int
    draft: int
    widest: int = 1

    @property
    def change(self) -> int:
        return self.draft - self.live

    @property
    def signed(self) -> str:
        return f"{self.change:+d}".replace("-", "−") if self.change else "="

    @property
    def live_width(self) -> int:
        return round(100 * self.live / self.widest)

    @property
    def draft_width(self) -> int:
        return round(100 * self.draft / self.widest)


@dataclass(frozen=True, slots=True)
class Bar:
    x: int
    y: int
    height: int


@dataclass(frozen=True, slots=True)
class Day:
    text: str
    live: int
    draft: int
    live_bar: Bar
    draft_bar: Bar
    x: int


def build_result_context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template context of a replay's result."""
    live, draft = result["live"], result["draft"]
    return {
        "events": result["events"],
        "since": parse_datetime(result["since"]),
        "until": parse_datetime(result["until"]),
        "shortened": result["shortened"],
        "waiting_incomplete": result.get("waiting_incomplete", False),  # missing in results of earlier versions
        "carried": live["totals"].get("carried", 0),
        "figures": _compare_totals(live, draft),
        "suppressed": _compare_reasons(live["suppressed"], draft["suppressed"]),
        "held": _compare_reasons(live["held"], draft["held"]),
        "failed": _compare_reasons(live["failed"], draft["failed"]),
        "cancelled": _compare_reasons(live["cancelled"], draft["cancelled"]),
        "nodes": _compare_nodes(live["nodes"], draft["nodes"]),
        "columns": _list_part_titles(),
        "sends": _compare_send_counts(live["sends_a_customer"], draft["sends_a_customer"]),
        "days": (days := _build_day_bars(live["days"], draft["days"])),
        "wide": max(len(days), 1) * STEP,
        "high": HEIGHT,
    }


def build_changes_context(changes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the template context of a draft's changes to the live configuration."""
    verbs = {"added": _("added"), "changed": _("changed"), "restored": _("restored"), "retired": _("retired")}
    return [
        {
            **each,
            "words": verbs.get(each["verb"], each["verb"]),
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


def _compare_totals(live: Mapping[str, Any], draft: Mapping[str, Any]) -> list[ComparedCount]:
    totals = [
        (_("Sent"), "delivered"), (_("Suppressed"), "suppressed"), (_("Temporarily deferred"), "held"),
        (_("Cancelled"), "cancelled"), (_("Failed"), "failed"), (_("Still waiting at the end"), "waiting"),
    ]  # fmt: skip
    found = [ComparedCount(words, live["totals"].get(key, 0), draft["totals"].get(key, 0)) for words, key in totals]
    more = [
        (_("Customers reached"), "customers_reached"), (_("Customers at their limit"), "customers_at_cap"),
        (_("Communities at their limit"), "communities_at_cap"),
    ]  # fmt: skip
    return found + [ComparedCount(words, live[key], draft[key]) for words, key in more]


def _compare_reasons(live: Mapping[str, int], draft: Mapping[str, int]) -> list[ComparedCount]:
    """Pair counts by reason, the most frequent first."""
    widest = max([*live.values(), *draft.values()], default=1)
    pairs = [
        ComparedCount(translate_reason(code), live.get(code, 0), draft.get(code, 0), widest)
        for code in live.keys() | draft.keys()
    ]
    return sorted(pairs, key=lambda pair: (-max(pair.live, pair.draft), pair.words))


def _list_part_titles() -> list[str]:
    return [
        _("planned"), _("sent"), _("suppressed"), _("temporarily deferred"), _("cancelled"), _("failed"),
        _("still waiting"),
    ]  # fmt: skip


def _compare_nodes(live: Mapping[str, Any], draft: Mapping[str, Any]) -> list[dict[str, Any]]:
    words = _list_part_titles()
    return [
        {
            "key": key,
            "parts": [
                ComparedCount(word, live.get(key, {}).get(part, 0), draft.get(key, {}).get(part, 0))
                for word, part in zip(words, PARTS, strict=True)
            ],
        }
        for key in sorted(live.keys() | draft.keys())
    ]


def _compare_send_counts(live: Mapping[str, int], draft: Mapping[str, int]) -> list[ComparedCount]:
    """Pair the numbers of customers who got one, two, three or more touches."""
    widest = max([*live.values(), *draft.values()], default=1)
    words = {"1": _("1 touch"), "2": _("2 touches"), "3": _("3 touches"), "4": _("4 touches or more")}
    return [ComparedCount(text, live.get(key, 0), draft.get(key, 0), widest) for key, text in words.items()]


def _build_day_bars(live: Mapping[str, int], draft: Mapping[str, int]) -> list[Day]:
    highest = max([*live.values(), *draft.values()], default=1)

    def bar(x: int, count: int) -> Bar:
        height = max(round(HEIGHT * count / highest), 1 if count else 0)
        return Bar(x, HEIGHT - height, height)

    found = []
    for place, day in enumerate(_list_days({*live, *draft})):
        a, b, x = live.get(day, 0), draft.get(day, 0), place * STEP
        found.append(Day(day, a, b, bar(x + 2, a), bar(x + 3 + WIDTH, b), x))
    return found


def _list_days(days: Iterable[str]) -> list[str]:
    """Return every day from the first to the last, including days without a send."""
    known = sorted(map(date.fromisoformat, days))
    if not known:
        return []
    return [(known[0] + timedelta(days=number)).isoformat() for number in range((known[-1] - known[0]).days + 1)]


State = WhatIfRun.State
DAYS = (1, 3, 7, 14, 30)
UNDER_WAY = (State.WAITING, State.RUNNING)


class DraftForm(forms.Form):
    days = forms.TypedChoiceField(
        label=gettext_lazy("Events of the last"), coerce=int, initial=7, widget=UnfoldAdminSelectWidget,
        choices=lambda: [(each, describe_duration(timedelta(days=each))) for each in DAYS],
    )  # fmt: skip
    draft = forms.CharField(
        label=gettext_lazy("Draft"),
        strip=False,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 28, "spellcheck": "false", "wrap": "off"}),
        help_text=gettext_lazy(
            "Templates, stages, nodes, delay rules and limits in the format of a configuration file."
        ),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        area = self.fields["draft"].widget
        area.attrs["class"] = f"{area.attrs.get('class', '')} at-mono"

    def clean_draft(self) -> str:
        """Validate the draft. Lists all errors, each with its place."""
        text: str = self.cleaned_data["draft"]
        try:
            runs.read_draft(text)
        except InvalidDocument as error:
            raise forms.ValidationError(translate_error(str(error))) from None
        except InvalidConfiguration as error:
            wrong = [f"{each.path}: {translate_error(each.message)}" for each in error.problems]
            raise forms.ValidationError(wrong) from None
        return text


class PublishForm(forms.Form):
    move_waiting = forms.BooleanField(
        label=gettext_lazy("Move touches that wait already"), required=False, widget=UnfoldBooleanSwitchWidget,
        help_text=gettext_lazy("Applies where the draft changes a delay. Overdue touches are sent over ten minutes."),
    )  # fmt: skip


@admin.register(WhatIfRun)
class WhatIfRunAdmin(OpsAdmin):
    list_display = ("run", "created_at", "actor_name", "days", "shown_state", "sends", "settled_by")
    list_filter = ("state",)
    ordering = ("-pk",)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_publish_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("scheduling.publish_whatifrun")

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        return [
            path("<int:run_id>/publish/", view(self.publish_view), name="scheduling_whatifrun_publish"),
            path("<int:run_id>/discard/", view(self.discard_view), name="scheduling_whatifrun_discard"),
            *super().get_urls(),
        ]

    @display(description=gettext_lazy("what-if replay"), ordering="pk")  # type: ignore[untyped-decorator]
    def run(self, row: WhatIfRun) -> str:
        return str(row)

    @display(  # type: ignore[untyped-decorator]
        description=gettext_lazy("state"),
        label={"done": "info", "published": "success", "failed": "danger", "running": "warning"},
    )
    def shown_state(self, row: WhatIfRun) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @display(description=gettext_lazy("sent, live → draft"))  # type: ignore[untyped-decorator]
    def sends(self, row: WhatIfRun) -> str:
        if not row.result:
            return "–"
        live, after = (row.result[name]["totals"].get("delivered", 0) for name in ("live", "draft"))
        return f"{live} → {after}"

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        """Edit a draft. Starts with the live configuration, or with the draft of an earlier run."""
        if not self.has_add_permission(request):
            raise PermissionDenied
        form = DraftForm(request.POST or None, initial=self._get_initial_values(request))
        if request.method == "POST" and form.is_valid():
            given = form.cleaned_data
            try:
                run = runs.create_replay(given["draft"], given["days"], build_user_actor(request))
            except Conflict as error:
                form.add_error(None, translate_error(str(error)))
            else:
                return redirect(self.url("change", run.pk))
        return self.page(
            request, "ops/replay_draft.html", _("What-if replay"), form=form, back=self.url("changelist")
        )  # fmt: skip

    def _get_initial_values(self, request: HttpRequest) -> dict[str, Any]:
        """Return initial values; none for a POST, because the export costs several reads."""
        if request.method == "POST":
            return {}
        earlier = request.GET.get("from", "")
        row = WhatIfRun.objects.filter(pk=earlier).first() if earlier.isdecimal() and len(earlier) < 18 else None
        return {"draft": row.draft, "days": row.days} if row else {"draft": runs.export_live_draft()}

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        row = self.get_row_or_404(request, object_id)
        under_way = row.state in UNDER_WAY
        return self.page(
            request,
            "ops/replay_run.html",
            _("What-if replay %(run)s") % {"run": row},
            row=row,
            under_way=under_way,
            tone={"done": "info", "published": "success", "failed": "danger"}.get(row.state, "warning"),
            percent=min(100 * row.done // row.total, 100) if row.total else 0,
            problems=[translate_error(each) for each in row.problem.splitlines()],
            results=build_result_context(row.result) if row.result else None,
            changes=build_changes_context(row.changes),
            publish_form=PublishForm() if row.state == State.DONE and self.has_publish_permission(request) else None,
            may_discard=self.has_add_permission(request) and row.state in (*UNDER_WAY, State.DONE, State.FAILED),
            may_edit=self.has_add_permission(request),
            publish_link=self.url("publish", row.pk),
            discard_link=self.url("discard", row.pk),
            edit_link=f"{self.url('add')}?from={row.pk}",
            back=self.url("changelist"),
        )

    def publish_view(self, request: HttpRequest, run_id: int) -> HttpResponse:
        if request.method != "POST" or not self.has_publish_permission(request):
            raise PermissionDenied
        form = PublishForm(request.POST)
        move = form.is_valid() and form.cleaned_data["move_waiting"]
        try:
            moved = runs.publish_draft(
                self.get_row_or_404(request, str(run_id)).pk, build_user_actor(request), move_waiting=move
            )
        except (Conflict, InvalidConfiguration) as error:
            for line in str(error).splitlines():
                messages.error(request, translate_error(line))
        else:
            messages.success(request, _("The draft is live."))
            if moved is not None:
                report_moved_touches(request, moved)
        return redirect(self.url("change", run_id))

    def discard_view(self, request: HttpRequest, run_id: int) -> HttpResponse:
        if request.method != "POST" or not self.has_add_permission(request):
            raise PermissionDenied
        try:
            runs.discard_replay(self.get_row_or_404(request, str(run_id)).pk, build_user_actor(request))
            messages.success(request, _("The draft was discarded."))
        except Conflict as error:
            messages.error(request, translate_error(str(error)))
        return redirect(self.url("change", run_id))
