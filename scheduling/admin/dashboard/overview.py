"""Build the overview page, and the context that every page needs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard import series
from scheduling.admin.dashboard.actions import list_actions
from scheduling.admin.dashboard.cards import Figure, format_capped_count, load_app_cards
from scheduling.admin.dashboard.charts import PERIODS, read_requested_days, split_period
from scheduling.admin.dashboard.config_changes import list_config_changes, mark_changes
from scheduling.admin.dashboard.first_hour import build_checklist
from scheduling.admin.dashboard.series import EndedTouches
from scheduling.admin.dashboard.throughput import build_pace_card, build_queues_card
from scheduling.admin.replica_pages import read_for_page
from scheduling.admin.sidebar import find_menu_place
from scheduling.admin.touches.pause import list_active_pauses
from scheduling.admin.touches.touch import build_span_link
from scheduling.models import FailedTask, Node
from scheduling.monitoring import statistics
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.statistics import MOST, Overdue
from scheduling.monitoring.wanted_numbers import read_broker

WORST = 5
TOUCHES = "admin:scheduling_touch_changelist"


def build_page_context(request: HttpRequest) -> dict[str, Any]:
    """Return the active pauses for the banner of every page, and the place of the page in the menu."""
    user = request.user
    if not (user.is_authenticated and user.is_staff):
        return {}
    return {
        "active_pauses": list_active_pauses(), "may_resume": user.has_perm("scheduling.delete_pause"),
        "menu_place": find_menu_place(request),
    }  # fmt: skip


def build_overview_context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Add the figures, cards and charts that the user may see to the context."""
    return read_for_page(request, lambda: _add_figures(request, context))


def _add_figures(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    time_limit = PageTimeLimit(settings.TIMEOUTS.overview)
    days = read_requested_days(request)
    context["read_at"] = now()
    context["periods"] = [(each, _name_period(each), each == days) for each in PERIODS]
    figures, cards, charts = [], [], []
    columns = split_period(days)
    broker, late = None, None
    if request.user.has_perm("scheduling.view_touch"):
        broker, late = read_broker(), time_limit(statistics.count_overdue)
        figures += _build_backlog_figures(late, time_limit)
        cards += [build_pace_card(time_limit), build_queues_card(broker)]
        past = series.count_ended_by_span(columns, time_limit)
        context["sums"] = _build_result_figures(past, days)
        context["charts"] = [series.chart_outcomes(past), series.chart_suppression_reasons(past)]
        charts = [series.chart_lateness(columns, time_limit)]
        if request.user.has_perm("scheduling.view_event"):
            charts.append(series.chart_events(columns, time_limit))
        charts.append(series.chart_failure_reasons(past))
        context["may_see_complaints"] = request.user.has_perm("scheduling.view_complaint")
        if context["may_see_complaints"]:
            context["complaints"] = _rank_complaint_rates(past, time_limit)
    if request.user.has_perm("scheduling.view_failedtask"):
        figures.append(_build_failed_tasks_figure(time_limit))
    context["actions"], context["actions_complete"] = list_actions(request, time_limit, broker, late)
    context["checklist"] = build_checklist(request)
    context["figures"] = figures
    context["cards"] = [*cards, *load_app_cards(request)]
    context["more_charts"] = [*charts, *(chart for card in context["cards"] for chart in card.charts)]
    context["changes"] = list_config_changes(request, columns, time_limit)
    for name in ("charts", "more_charts"):
        if name in context:
            context[name] = [mark_changes(each, columns, context["changes"] or ()) for each in context[name]]
    return context


def _name_period(days: int) -> str:
    return _("24 hours") if days == 1 else ngettext("%(days)s day", "%(days)s days", days) % {"days": days}


# --- backlog --------------------------------------------------------------------------------------------------------


def _build_backlog_figures(late: Overdue | None, time_limit: PageTimeLimit) -> list[Figure]:
    soon = time_limit(lambda: statistics.count_due_within(timedelta(hours=1)))
    hint = _("the oldest for %(span)s") % {"span": describe_duration(late.oldest)} if late and late.oldest else ""
    within = build_span_link("scheduling_touch", "due_at", None, now() + timedelta(hours=1), status="waiting")
    count = format_capped_count(late.count if late else None, MOST)
    return [
        Figure(_("Due within the hour"), format_capped_count(soon, MOST), within),
        Figure(_("Overdue"), count, f"{reverse(TOUCHES)}?status=overdue", "bad" if late and late.count else "", hint),
    ]


def _build_failed_tasks_figure(time_limit: PageTimeLimit) -> Figure:
    count = time_limit(lambda: FailedTask.objects.filter(state="open")[: MOST + 1].count())
    link = reverse("admin:scheduling_failedtask_groups")
    return Figure(_("Open failed tasks"), format_capped_count(count, MOST), link, "bad" if count else "")


# --- results --------------------------------------------------------------------------------------------------------


def _build_result_figures(past: EndedTouches, days: int) -> list[Figure]:
    whole = past.whole
    counts = None if whole is None else series.sum_by_state(whole)
    span = _name_period(days)

    def figure(words: str, *states: str, tone: str = "") -> Figure:
        count = None if counts is None else sum(counts[state] for state in states)
        link = past.link(state__exact=states[0]) if len(states) == 1 else past.link(status="bad")
        return Figure(words, count, link, tone if count else "")

    return [
        figure(_("Delivered, %(span)s") % {"span": span}, "delivered"),
        figure(_("Suppressed, %(span)s") % {"span": span}, "suppressed"),
        figure(_("Failed or unknown, %(span)s") % {"span": span}, "failed", "unknown", tone="bad"),
    ]  # fmt: skip


def _rank_complaint_rates(past: EndedTouches, time_limit: PageTimeLimit) -> list[dict[str, Any]] | None:
    """Return the nodes with the highest complaint rates; None if counting exceeded its time limit."""
    whole, complained = past.whole, time_limit(lambda: statistics.count_complaints_by_node(past.since))
    if whole is None or complained is None:
        return None
    delivered = {node: count_delivered(whole, node) for node in complained}
    worst = sorted(complained, key=lambda node: -complained[node] / max(delivered[node], 1))[:WORST]
    names = dict(Node.objects.filter(pk__in=worst).values_list("pk", "key"))
    link = reverse("admin:scheduling_complaint_changelist")
    return [
        {
            "name": names[node], "delivered": delivered[node], "complaints": complained[node],
            "percent": 100 * complained[node] / max(delivered[node], complained[node]),
            "link": f"{link}?{urlencode({'touch__node__id__exact': node})}",
            "delivered_link": past.link(state__exact="delivered", node__id__exact=str(node)),
        }
        for node in worst
    ]  # fmt: skip


def count_delivered(tally: statistics.OutcomeCounts, wanted: int) -> int:
    """Return the number of touches that a node delivered."""
    return sum(count for (state, _code, node), count in tally.items() if state == "delivered" and node == wanted)
