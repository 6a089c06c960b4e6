"""RPA card of the overview page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.conf import settings
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from rpa_tasks.admin.node import STATES
from rpa_tasks.admin.run_chart import runs_chart
from rpa_tasks.admin.shop import count_shops_by_state
from rpa_tasks.jobs.pick import NODE_SILENT
from rpa_tasks.models import ExecutionNode, Job
from scheduling.admin.count_time_limits import PageTimeLimit, count_within
from scheduling.admin.dashboard.cards import DashboardCard, Figure, format_capped_count
from scheduling.admin.dashboard.charts import read_requested_days, split_period
from scheduling.models import Priority

COUNT_LIMIT = 10_000


def card(request: HttpRequest) -> DashboardCard | None:
    """Return shops, waiting jobs by tier, browsers, and the chart of run outcomes. None without permission."""
    if not request.user.has_perms(["rpa_tasks.view_shop", "rpa_tasks.view_job", "rpa_tasks.view_executionnode"]):
        return None
    shops = reverse("admin:rpa_tasks_shop_changelist")
    ended = runs_chart(
        split_period(read_requested_days(request)),
        PageTimeLimit(settings.TIMEOUTS.dashboard),
        may_see_failed=request.user.has_perm("scheduling.view_failedtask"),
    )
    return DashboardCard(
        _("RPA"), [*_shop_figures(shops), *_waiting_figures(), *_browser_figures()], link=shops, charts=[ended]
    )


def _shop_figures(link: str) -> list[Figure]:
    """Return the counts of shops and runs, and of states with a problem."""
    counts = count_within(count_shops_by_state, settings.TIMEOUTS.dashboard) or []
    return [
        Figure(each["words"], each["count"], f"{link}?state={each['state']}" if each["state"] else link, each["tone"])
        for each in counts
        if each["count"] or each["state"] in ("", "running", "login")
    ]


def _waiting_figures() -> list[Figure]:
    link = reverse("admin:rpa_tasks_job_changelist")

    def count(tier: int) -> int:
        waiting = Job.objects.filter(state="scheduled", parked="", due_at__lte=Now(), priority=tier)
        handed_over = Job.objects.filter(state="queued", priority=tier)
        return waiting[:COUNT_LIMIT].count() + handed_over[:COUNT_LIMIT].count()

    return [
        Figure(
            _("Jobs due, %(tier)s priority") % {"tier": tier.label},
            format_capped_count(count_within(lambda tier=tier: count(tier), settings.TIMEOUTS.dashboard), COUNT_LIMIT),  # type: ignore[misc]
            f"{link}?status=due&priority__exact={tier.value}",
        )
        for tier in Priority
    ]


def _browser_figures() -> list[Figure]:
    def alive() -> list[list[dict[str, Any]]]:
        nodes = ExecutionNode.objects.filter(seen_at__gt=Now() - NODE_SILENT)
        return list(nodes.values_list("browsers", flat=True))

    link = reverse("admin:rpa_tasks_executionnode_changelist")
    found = count_within(alive, settings.TIMEOUTS.dashboard)
    if found is None:
        return [Figure(_("Execution nodes"), None, link)]
    counts = Counter(slot.get("state", "") for browsers in found for slot in browsers)
    slots = sum(len(browsers) for browsers in found)
    figures = [Figure(_("Execution nodes"), len(found), link, "" if found else "bad")]
    figures += [Figure(_("Browsers in use"), f"{counts['busy']} / {slots}", link)]
    return figures + [
        Figure(_("Browsers %(state)s") % {"state": STATES[state]}, counts[state], link, tone)
        for state, tone in (("idle", ""), ("quarantined", "bad"))
        if counts[state]
    ]
