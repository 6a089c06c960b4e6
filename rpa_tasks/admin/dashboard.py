"""Show RPA on the overview and the page of workers: a card, outcomes by hour, shops that need a login, nodes."""

from __future__ import annotations

from collections import Counter

from django.conf import settings
from django.db.models import Count
from django.http import HttpRequest
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from rpa_tasks import metrics
from rpa_tasks.admin.node import STATES
from rpa_tasks.admin.shop import count_shops_by_state
from rpa_tasks.jobs.ledger import TIERS
from rpa_tasks.jobs.shops import needs_login
from rpa_tasks.models import TAKE_OVER_SHOPS, ExecutionNode, Job, Shop
from scheduling.admin.dashboard.charts import (
    ActionLine,
    Chart,
    DashboardCard,
    Figure,
    Series,
    Span,
    count_by_span,
    format_capped_count,
    read_requested_days,
    split_period,
)
from scheduling.admin.lists import build_span_link
from scheduling.admin.page_reads import PageTimeLimit, count_within
from scheduling.admin.shown_values import format_instant, insert_values
from scheduling.models import Priority
from scheduling.monitoring.queues import WorkerReport
from scheduling.monitoring.statistics import HourlyCache

OUTCOME_SERIES = (
    Series("done", gettext_lazy("Done"), "good"),
    Series("again", gettext_lazy("Tried again"), "wait"),
    Series("cancelled", gettext_lazy("Cancelled"), "quiet"),
    Series("failed", gettext_lazy("Failed"), "bad"),
)


# Runs by outcome. Deferred ones do not count. A failed job was not claimed after its last run.
run_cache = HourlyCache("""
SELECT date_bin('1 hour', run.ended_at, %(since)s),
       CASE WHEN run.outcome = 'succeeded' THEN 'done' WHEN run.outcome = 'cancelled' THEN 'cancelled'
            WHEN job.state IN ('failed', 'unknown') AND job.lease_no = run.lease_no THEN 'failed' ELSE 'again' END,
       count(*)
FROM rpa_tasks_run AS run JOIN rpa_tasks_job AS job ON job.task_id = run.job_id
WHERE run.ended_at >= %(since)s AND run.ended_at < %(until)s AND NOT (run.outcome = 'held') GROUP BY 1, 2
""")


def runs_chart(spans: list[Span], time_limit: PageTimeLimit, *, may_see_failed: bool) -> Chart:
    """Build the chart. Failed runs link to their failed tasks; no list shows the others by outcome."""

    def link(key: str, span: Span) -> str:
        if key != "failed" or not may_see_failed:
            return ""
        origin = {"state": "all", "origin__exact": "rpa_job"}
        return build_span_link("scheduling_failedtask", "failed_at", span.since, span.until, **origin)

    counts = count_by_span(run_cache, spans, time_limit)
    return Chart("runs", _("RPA runs, and how they ended"), OUTCOME_SERIES, spans, counts, link)


COUNT_LIMIT = 10_000
SHOPS_NAMED = 5


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
    states = count_within(count_shops_by_state, settings.TIMEOUTS.dashboard) or []
    shown = [*states[:3], *(each for each in states[3:] if each.value)]  # a rest or pause of no shop is no news
    return DashboardCard(
        _("RPA"),
        [*shown, *_waiting_figures(), *_browser_figures()],
        link=shops,
        charts=[ended],
    )


def _waiting_figures() -> list[Figure]:
    link = reverse("admin:rpa_tasks_job_changelist")
    waiting = count_within(lambda: metrics.read_gauge(metrics.WAITING, COUNT_LIMIT + 1), settings.TIMEOUTS.dashboard)
    due = None if waiting is None else Counter({tier: count for tier, is_due, count in waiting if is_due == "yes"})
    return [
        Figure(
            _("Jobs due, %(tier)s priority") % {"tier": priority.label},
            format_capped_count(None if due is None else due[TIERS[priority]], COUNT_LIMIT),
            f"{link}?status=due&priority__exact={priority.value}",
        )
        for priority in Priority
    ]


def _browser_figures() -> list[Figure]:
    link = reverse("admin:rpa_tasks_executionnode_changelist")
    found = count_within(
        lambda: (metrics.read_gauge(metrics.DRAINS), metrics.read_gauge(metrics.BROWSERS)), settings.TIMEOUTS.dashboard
    )
    if found is None:
        return [Figure(_("Execution nodes"), None, link)]
    nodes, slots = found
    counts: Counter[str] = Counter()
    for _node, state, count in slots:
        counts[state] += count
    figures = [Figure(_("Execution nodes"), len(nodes), link, "" if nodes else "bad")]
    figures += [Figure(_("Browsers in use"), f"{counts['busy']} / {counts.total()}", link)]
    return figures + [
        Figure(_("Browsers %(state)s") % {"state": STATES[state]}, counts[state], link, tone)
        for state, tone in (("idle", ""), ("quarantined", "bad"))
        if counts[state]
    ]


def list_logins(request: HttpRequest) -> list[ActionLine]:
    """Name the shops whose jobs wait for a login, the first lost one first."""
    if not request.user.has_perm("rpa_tasks.view_shop"):
        return []
    needed = Shop.objects.filter(needs_login())
    page = "take_over" if request.user.has_perm(TAKE_OVER_SHOPS) else "change"
    shops = needed.select_related("platform").order_by("login_lost_at", "pk")[: SHOPS_NAMED + 1]
    lines = [
        ActionLine(
            "login", _("Shop %(name)s needs a login") % {"name": shop},
            reverse(f"admin:rpa_tasks_shop_{page}", args=[shop.pk]),
            insert_values(_("since %(time)s"), time=format_instant(shop.login_lost_at)) if shop.login_lost_at else "",
        )
        for shop in shops[:SHOPS_NAMED]
    ]  # fmt: skip
    if len(shops) > SHOPS_NAMED:
        all_shops = f"{reverse('admin:rpa_tasks_shop_changelist')}?state=login"
        lines.append(ActionLine("login", _("More shops need a login"), all_shops))
    return lines


def list_execution_workers() -> list[WorkerReport]:
    """Return the execution nodes as workers. A silent one stays until an operator deletes it."""
    nodes = list(ExecutionNode.objects.order_by("name"))
    running = Counter(dict(Job.objects.filter(state="running").order_by().values_list("node").annotate(Count("pk"))))
    return [
        WorkerReport(
            node.name, node.slots, running[node.name] / max(node.slots, 1), node.serves, running[node.name],
            (now() - node.seen_at).total_seconds(),
        )
        for node in nodes
    ]  # fmt: skip
