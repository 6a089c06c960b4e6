"""Build the overview page, and the context that every page needs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db.models import Count, Max
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.timezone import now
from django.utils.translation import gettext as _

from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard import series
from scheduling.admin.dashboard.cards import Figure, format_capped_count, load_app_cards
from scheduling.admin.dashboard.charts import PERIODS, read_requested_days, split_period
from scheduling.admin.dashboard.series import EndedTouches
from scheduling.admin.dashboard.throughput import build_pace_card, build_queues_card
from scheduling.admin.experiments.rollout import build_rollout_figures
from scheduling.admin.labels import translate_reason
from scheduling.admin.touches.pause import list_active_pauses
from scheduling.admin.touches.touch import build_span_link
from scheduling.models import FailedTask, Node
from scheduling.monitoring import statistics
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.statistics import MOST
from scheduling.redaction import redact_text

WORST = 5
TOUCHES = "admin:scheduling_touch_changelist"


def build_page_context(request: HttpRequest) -> dict[str, Any]:
    """Return the active pauses for the banner of every page."""
    user = request.user
    if not (user.is_authenticated and user.is_staff):
        return {}
    return {"active_pauses": list_active_pauses(), "may_resume": user.has_perm("scheduling.delete_pause")}


def build_overview_context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Add the figures, cards and charts that the user may see to the context."""
    time_limit = PageTimeLimit(settings.TIMEOUTS.overview)
    days = read_requested_days(request)
    context["read_at"] = now()
    context["periods"] = [(each, _("24 hours") if each == 1 else _("7 days"), each == days) for each in PERIODS]
    figures, cards, charts = [], [], []
    if request.user.has_perm("scheduling.view_guardedrollout"):
        figures += build_rollout_figures()
    if request.user.has_perm("scheduling.view_touch"):
        figures += _build_backlog_figures(time_limit)
        cards += [build_pace_card(time_limit), build_queues_card()]
        columns = split_period(days)
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
    context["may_see_causes"] = request.user.has_perm("scheduling.view_failedtask")
    if context["may_see_causes"]:
        figures.append(_build_failed_tasks_figure(time_limit))
        context["causes"] = _rank_failure_causes(time_limit)
    context["figures"] = figures
    context["cards"] = [*cards, *load_app_cards(request)]
    context["more_charts"] = [*charts, *(chart for card in context["cards"] for chart in card.charts)]
    return context


# --- backlog --------------------------------------------------------------------------------------------------------


def _build_backlog_figures(time_limit: PageTimeLimit) -> list[Figure]:
    soon = time_limit(lambda: statistics.count_due_within(timedelta(hours=1)))
    late = time_limit(statistics.count_overdue)
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

    def figure(words: str, *states: str, tone: str = "") -> Figure:
        count = None if counts is None else sum(counts[state] for state in states)
        link = past.link(state__exact=states[0]) if len(states) == 1 else past.link(status="bad")
        return Figure(words, count, link, tone if count else "")

    return [
        figure(_("Delivered, 24 h") if days == 1 else _("Delivered, 7 days"), "delivered"),
        figure(_("Suppressed, 24 h") if days == 1 else _("Suppressed, 7 days"), "suppressed"),
        figure(_("Failed or unknown, 24 h") if days == 1 else _("Failed or unknown, 7 days"), "failed", "unknown",
               tone="bad"),
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


def _rank_failure_causes(time_limit: PageTimeLimit) -> list[dict[str, Any]] | None:
    """Return the most frequent causes of open failed tasks."""

    def read() -> list[dict[str, Any]]:
        groups = FailedTask.objects.filter(state="open").values("fingerprint").order_by()
        annotated = groups.annotate(
            count=Count("pk"), last_at=Max("failed_at"), reason=Max("reason"), channel=Max("channel"),
            detail=Max("detail"),
        )  # fmt: skip
        return [dict(each) for each in annotated.order_by("-count")[:WORST]]

    link = reverse("admin:scheduling_failedtask_changelist")
    found = time_limit(read)
    if found is None:
        return None
    return [
        {
            **each, "words": translate_reason(each["reason"]), "detail": redact_text(each["detail"]),
            "link": f"{link}?{urlencode({'state': 'open', 'fingerprint': each['fingerprint']})}",
        }
        for each in found
    ]  # fmt: skip
