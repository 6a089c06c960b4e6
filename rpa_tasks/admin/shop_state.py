"""How a shop stands, at a glance: the most urgent thing to know about it first."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce, JSONObject, Now
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from rpa_tasks.admin import live
from rpa_tasks.admin.waiting import opened_until
from rpa_tasks.models import Job, JobState, LoginState, Shop
from scheduling.admin.labels import spoken
from scheduling.admin.touches.timeline import clock
from scheduling.models import WAITING

#: What the board can be narrowed to.
STATES = {
    "login": gettext_lazy("Login needed"),
    "resting": gettext_lazy("Resting"),
    "paused": gettext_lazy("Paused"),
    "full": gettext_lazy("Backlog full"),
    "running": JobState.RUNNING.label,
    "waiting": gettext_lazy("Waiting"),
}


def with_work(shops: QuerySet[Shop]) -> QuerySet[Shop]:
    """Each with `waiting`, how many jobs wait, and `run`, what runs now or None."""
    waiting = Job.objects.filter(shop=OuterRef("pk"), state__in=WAITING, parked="").order_by()
    running = Job.objects.filter(pk=OuterRef("lane__task_id"))
    told = JSONObject(
        pk="pk", since="sending_at", progress="progress", message="progress_message", task_type="flow__task_type"
    )
    return shops.select_related("platform__breaker", "lane").annotate(
        waiting=Coalesce(Subquery(waiting.values("shop").annotate(count=Count("pk")).values("count")), 0),
        run=Subquery(running.values(told=told)[:1]),
    )


def narrowed(shops: QuerySet[Shop], state: str) -> QuerySet[Shop]:
    """`shops` come from `with_work`."""
    gates = {
        "login": Q(login_state=LoginState.NEEDED),
        "resting": Q(platform__breaker__open_until__gt=Now()),
        "paused": Q(paused=True) | Q(platform__paused=True),
        "full": Q(waiting__gte=F("backlog_limit")),
        "running": Q(lane__task_id__isnull=False),
        "waiting": Q(waiting__gt=0),
    }
    return shops.filter(gates[state]) if state in gates else shops


def state_of(shop: Any) -> tuple[str, str]:
    """A tone and the words."""
    if shop.retired_at:
        return "default", _("Retired")
    if shop.login_state == LoginState.NEEDED:
        return "danger", _("Login needed")
    if shop.paused or shop.platform.paused:
        return "warning", _("Paused") if shop.paused else _("Platform paused")
    if shop.waiting >= shop.backlog_limit:
        return "danger", _("Backlog full")
    if shop.run:
        return "info", str(JobState.RUNNING.label)
    if opened_until(shop.platform):
        return "danger", _("Resting")
    return ("default", _("Waiting")) if shop.waiting else ("success", _("Idle"))


def work_of(shop: Any) -> SafeString | str:
    """What runs and how far it is, else what it waits for."""
    if shop.run:
        return running_line(shop.run)
    if shop.login_state == LoginState.NEEDED and shop.login_lost_at:
        return _("since %(time)s") % {"time": clock(shop.login_lost_at)}
    if until := opened_until(shop.platform):
        return _("next try at %(time)s") % {"time": clock(until)}
    return ""


def running_line(run: dict[str, Any]) -> SafeString:
    job = Job(progress=run["progress"], progress_message=run["message"] or "")
    since = started(run)
    return format_html(
        '<a class="at-link" href="{}">{}</a> <span class="at-quiet at-nowrap">{}</span><br>{}',
        reverse("admin:rpa_tasks_job_change", args=[run["pk"]]), run["task_type"],
        _("for %(span)s") % {"span": spoken(now() - since)} if since else _("beginning"), live.bar(job),
    )  # fmt: skip


def started(run: dict[str, Any]) -> datetime | None:
    return parse_datetime(run["since"]) if run["since"] else None


def figures() -> list[dict[str, Any]]:
    """Of all living shops: how many there are in each state that somebody should know of."""
    living = Shop.objects.filter(retired_at=None)
    counts = living.aggregate(
        running=Count("pk", filter=Q(lane__task_id__isnull=False)),
        login=Count("pk", filter=Q(login_state=LoginState.NEEDED)),
        paused=Count("pk", filter=Q(paused=True) | Q(platform__paused=True)),
        resting=Count("pk", filter=Q(platform__breaker__open_until__gt=Now())),
    )
    shown = [("", _("Shops"), living.count(), ""), ("running", STATES["running"], counts["running"], "")]
    shown += [(key, STATES[key], counts[key], "bad") for key in ("login", "resting", "paused")]
    return [{"state": key, "words": words, "count": count, "tone": tone if count else ""}
            for key, words, count, tone in shown]  # fmt: skip
