"""Why a job that waits has not begun: the first gate that is shut, in the order in which the pick looks at them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _

from rpa_tasks.admin import labels  # noqa: F401  (teaches the words)
from rpa_tasks.models import Job, LoginState, Platform, Shop
from scheduling.admin.labels import reason, spoken
from scheduling.admin.touches.timeline import clock
from scheduling.models import Pause

#: A sentence and the page that has to do with it, "" where there is none.
Why = tuple[str, str]


def shut_gate(shop: Shop) -> str:
    """Why nothing of this shop may start, "" where it may."""
    if shop.retired_at or shop.platform.retired_at:
        return reason("retired")
    if shop.paused:
        return _("The shop is paused")
    if shop.platform.paused:
        return _("The platform is paused")
    if shop.login_state == LoginState.NEEDED:
        return reason("login_needed")
    return resting(shop.platform)


def resting(platform: Platform) -> str:
    """Whether the platform's breaker stops it."""
    until = opened_until(platform)
    return _("The platform turns robots away; next try at %(time)s") % {"time": clock(until)} if until else ""


def opened_until(platform: Platform) -> datetime | None:
    """Until when its breaker is open; None where something may run or try."""
    until: datetime | None = platform.breaker.open_until
    return until if until and until > now() else None


def why_waits(job: Job) -> Why:
    """The job comes with shop, platform, breaker and lane."""
    link = reverse("admin:rpa_tasks_shop_change", args=[job.shop_id])
    if job.parked or Pause.objects.filter(scope="all").exists():
        return reason("paused"), reverse("admin:scheduling_pause_changelist")
    if gate := shut_gate(job.shop):
        return gate, link
    if job.due_at > now():
        again = _("begins in %(span)s") if not job.reason else _("tried again in %(span)s")
        return again % {"span": spoken(job.due_at - now())}, ""
    running = job.shop.lane.task_id
    if running:
        return _("Another job of the shop is running"), reverse("admin:rpa_tasks_job_change", args=[running])
    return _("Waits for a free node"), reverse("admin:rpa_tasks_executionnode_changelist")


def short_reason(job: Any) -> str:
    """For a list: what is known without asking further."""
    if job.parked:
        return reason("paused")
    if job.state in ("scheduled", "queued"):
        if gate := shut_gate(job.shop):
            return gate
        words = reason(job.reason) if job.reason else ""
        if job.due_at > now():
            wait = _("in %(span)s") % {"span": spoken(job.due_at - now())}
            return f"{words}, {wait}" if words else wait
        return words or _("due")
    if job.state == "running" and job.cancel_requested_at:
        return _("is being ended")
    return reason(job.reason)
