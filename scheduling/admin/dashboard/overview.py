"""Build the overview page, and the context that every page needs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import Count, Max
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.timezone import now
from django.utils.translation import gettext as _

from scheduling.admin.dashboard import series
from scheduling.admin.dashboard.cards import Figure, capped, cards_of_others
from scheduling.admin.dashboard.charts import PERIODS, days_asked, spans
from scheduling.admin.dashboard.pace import pace, queues
from scheduling.admin.dashboard.series import Ended
from scheduling.admin.experiments.rollout import paused_rollouts
from scheduling.admin.labels import reason, spoken
from scheduling.admin.patience import Patience
from scheduling.admin.touches.pause import active_pauses
from scheduling.admin.touches.touch import span_link
from scheduling.models import FailedTask, Node
from scheduling.monitoring import statistics
from scheduling.monitoring.statistics import MOST
from scheduling.redaction import masked_text

PATIENCE = 4.0  #: seconds; limit for all counts of the page, so that it loads under overload
WORST = 5
TOUCHES = "admin:scheduling_touch_changelist"


def every_page(request: HttpRequest) -> dict[str, Any]:
    """Return the active pauses for the banner of every page."""
    user = request.user
    if not (user.is_authenticated and user.is_staff):
        return {}
    return {"active_pauses": active_pauses(), "may_resume": user.has_perm("scheduling.delete_pause")}


def overview(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Add the figures, cards and charts that the user may see to the context."""
    patience = Patience(PATIENCE)
    days = days_asked(request)
    context["read_at"] = now()
    context["periods"] = [(each, _("24 hours") if each == 1 else _("7 days"), each == days) for each in PERIODS]
    figures, cards, charts = [], [], []
    if request.user.has_perm("scheduling.view_guardedrollout"):
        figures += paused_rollouts()
    if request.user.has_perm("scheduling.view_touch"):
        figures += _work(patience)
        cards += [pace(patience), queues()]
        columns = spans(days)
        past = series.read(columns, patience)
        context["sums"] = _sums(past, days)
        context["charts"] = [series.by_state(past), series.by_reason(past)]
        charts = [series.lateness(columns, patience)]
        if request.user.has_perm("scheduling.view_event"):
            charts.append(series.events(columns, patience))
        charts.append(series.by_cause(past))
        context["may_see_complaints"] = request.user.has_perm("scheduling.view_complaint")
        if context["may_see_complaints"]:
            context["complaints"] = _complaints(past, patience)
    context["may_see_causes"] = request.user.has_perm("scheduling.view_failedtask")
    if context["may_see_causes"]:
        figures.append(_open_failed(patience))
        context["causes"] = _causes(patience)
    context["figures"] = figures
    context["cards"] = [*cards, *cards_of_others(request)]
    context["more_charts"] = [*charts, *(chart for card in context["cards"] for chart in card.charts)]
    return context


# --- backlog --------------------------------------------------------------------------------------------------------


def _work(patience: Patience) -> list[Figure]:
    soon = patience(lambda: statistics.due_within(timedelta(hours=1)))
    late = patience(statistics.overdue)
    hint = _("the oldest for %(span)s") % {"span": spoken(late.oldest)} if late and late.oldest else ""
    within = span_link("scheduling_touch", "due_at", None, now() + timedelta(hours=1), stands="waiting")
    count = capped(late.count if late else None, MOST)
    return [
        Figure(_("Due within the hour"), capped(soon, MOST), within),
        Figure(_("Overdue"), count, f"{reverse(TOUCHES)}?stands=overdue", "bad" if late and late.count else "", hint),
    ]


def _open_failed(patience: Patience) -> Figure:
    count = patience(lambda: FailedTask.objects.filter(state="open")[: MOST + 1].count())
    link = reverse("admin:scheduling_failedtask_groups")
    return Figure(_("Open failed tasks"), capped(count, MOST), link, "bad" if count else "")


# --- results --------------------------------------------------------------------------------------------------------


def _sums(past: Ended, days: int) -> list[Figure]:
    whole = past.whole
    counts = None if whole is None else series.counted(whole)

    def figure(words: str, *states: str, tone: str = "") -> Figure:
        count = None if counts is None else sum(counts[state] for state in states)
        link = past.link(state__exact=states[0]) if len(states) == 1 else past.link(stands="bad")
        return Figure(words, count, link, tone if count else "")

    return [
        figure(_("Delivered, 24 h") if days == 1 else _("Delivered, 7 days"), "delivered"),
        figure(_("Suppressed, 24 h") if days == 1 else _("Suppressed, 7 days"), "suppressed"),
        figure(_("Failed or unknown, 24 h") if days == 1 else _("Failed or unknown, 7 days"), "failed", "unknown",
               tone="bad"),
    ]  # fmt: skip


def _complaints(past: Ended, patience: Patience) -> list[dict[str, Any]] | None:
    """Return the nodes with the highest complaint rates; None if counting exceeded its time limit."""
    whole, complained = past.whole, patience(lambda: statistics.complained(past.since))
    if whole is None or complained is None:
        return None
    delivered = {node: whole_of(whole, node) for node in complained}
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


def whole_of(tally: statistics.Tally, wanted: int) -> int:
    """Return the number of touches that a node delivered."""
    return sum(count for (state, _code, node), count in tally.items() if state == "delivered" and node == wanted)


def _causes(patience: Patience) -> list[dict[str, Any]] | None:
    """Return the most frequent causes of open failed tasks."""

    def read() -> list[dict[str, Any]]:
        groups = FailedTask.objects.filter(state="open").values("fingerprint").order_by()
        told = groups.annotate(
            count=Count("pk"), last_at=Max("failed_at"), reason=Max("reason"), channel=Max("channel"),
            detail=Max("detail"),
        )  # fmt: skip
        return [dict(each) for each in told.order_by("-count")[:WORST]]

    link = reverse("admin:scheduling_failedtask_changelist")
    found = patience(read)
    if found is None:
        return None
    return [
        {
            **each, "words": reason(each["reason"]), "detail": masked_text(each["detail"]),
            "link": f"{link}?{urlencode({'state': 'open', 'fingerprint': each['fingerprint']})}",
        }
        for each in found
    ]  # fmt: skip
