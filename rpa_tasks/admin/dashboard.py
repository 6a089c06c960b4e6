"""RPA card of the overview page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from rpa_tasks.admin.hours import runs
from rpa_tasks.admin.node import STATES as BROWSER_STATES
from rpa_tasks.admin.shop import figures
from rpa_tasks.jobs.pick import NODE_SILENT
from rpa_tasks.models import ExecutionNode, Job
from scheduling.admin.dashboard.cards import Card, Figure, capped
from scheduling.admin.dashboard.charts import days_asked, spans
from scheduling.admin.patience import Patience, patiently
from scheduling.models import Priority

MOST = 10_000
PATIENCE = "1s"
PATIENCE_OF_CHART = 1.0  #: seconds


def card(request: HttpRequest) -> Card | None:
    """Return shops, waiting jobs by tier, browsers, and the chart of run outcomes. None without permission."""
    if not request.user.has_perms(["rpa_tasks.view_shop", "rpa_tasks.view_job", "rpa_tasks.view_executionnode"]):
        return None
    shops = reverse("admin:rpa_tasks_shop_changelist")
    ended = runs(
        spans(days_asked(request)),
        Patience(PATIENCE_OF_CHART),
        may_see_failed=request.user.has_perm("scheduling.view_failedtask"),
    )
    return Card(_("RPA"), [*_shops(shops), *_waiting(), *_browsers()], link=shops, charts=[ended])


def _shops(link: str) -> list[Figure]:
    """Return the counts of shops and runs, and of states with a problem."""
    told = patiently(figures, PATIENCE) or []
    return [
        Figure(each["words"], each["count"], f"{link}?state={each['state']}" if each["state"] else link, each["tone"])
        for each in told
        if each["count"] or each["state"] in ("", "running", "login")
    ]


def _waiting() -> list[Figure]:
    link = reverse("admin:rpa_tasks_job_changelist")

    def count(tier: int) -> int:
        waiting = Job.objects.filter(state="scheduled", parked="", due_at__lte=Now(), priority=tier)
        handed_over = Job.objects.filter(state="queued", priority=tier)
        return waiting[:MOST].count() + handed_over[:MOST].count()

    return [
        Figure(
            _("Jobs due, %(tier)s priority") % {"tier": tier.label},
            capped(patiently(lambda tier=tier: count(tier), PATIENCE), MOST),  # type: ignore[misc]
            f"{link}?stands=due&priority__exact={tier.value}",
        )
        for tier in Priority
    ]


def _browsers() -> list[Figure]:
    def alive() -> list[list[dict[str, Any]]]:
        nodes = ExecutionNode.objects.filter(seen_at__gt=Now() - NODE_SILENT)
        return list(nodes.values_list("browsers", flat=True))

    link = reverse("admin:rpa_tasks_executionnode_changelist")
    found = patiently(alive, PATIENCE)
    if found is None:
        return [Figure(_("Execution nodes"), None, link)]
    counts = Counter(slot.get("state", "") for browsers in found for slot in browsers)
    places = sum(len(browsers) for browsers in found)
    told = [Figure(_("Execution nodes"), len(found), link, "" if found else "bad")]
    told += [Figure(_("Browsers in use"), f"{counts['busy']} / {places}", link)]
    return told + [
        Figure(_("Browsers %(state)s") % {"state": BROWSER_STATES[state]}, counts[state], link, tone)
        for state, tone in (("idle", ""), ("quarantined", "bad"))
        if counts[state]
    ]
