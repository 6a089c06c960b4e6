"""Page of one job: its request, its runs with evidence, and the available actions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _

from rpa_tasks.admin import (
    labels,  # noqa: F401  (teaches the words)
    live,
)
from rpa_tasks.admin.labels import STATE_TONES
from rpa_tasks.models import Evidence, Job, LoginState, Platform, Run, Shop
from scheduling.admin.labels import reason, spoken
from scheduling.admin.touches.timeline import clock
from scheduling.models import WAITING, FailedTask, Pause
from scheduling.redaction import masked_json, masked_text

#: A sentence and a related link, or "".
Why = tuple[str, str]


def shut_gate(shop: Shop) -> str:
    """Return why no job of this shop may start, or ""."""
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
    """Return the text for an open breaker of the platform, or ""."""
    until = opened_until(platform)
    return _("The platform blocks runs; next attempt at %(time)s") % {"time": clock(until)} if until else ""


def opened_until(platform: Platform) -> datetime | None:
    """Return until when the breaker is open; None if a job or a trial may start."""
    until: datetime | None = platform.breaker.open_until
    return until if until and until > now() else None


def why_waits(job: Job) -> Why:
    """Return why the job waits. It comes with shop, platform, breaker and lane."""
    link = reverse("admin:rpa_tasks_shop_change", args=[job.shop_id])
    if job.parked or Pause.objects.filter(scope="all").exists():
        return reason("paused"), reverse("admin:scheduling_pause_changelist")
    if gate := shut_gate(job.shop):
        return gate, link
    if job.due_at > now():
        again = _("starts in %(span)s") if not job.reason else _("retried in %(span)s")
        return again % {"span": spoken(job.due_at - now())}, ""
    running = job.shop.lane.task_id
    if running:
        return _("Another job of the shop is running"), reverse("admin:rpa_tasks_job_change", args=[running])
    return _("Waits for a free node"), reverse("admin:rpa_tasks_executionnode_changelist")


def short_reason(job: Any) -> str:
    """Return the reason for a list, without further queries."""
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


TONES = {
    "succeeded": "good", "transient": "wait", "held": "wait", "session": "wait", "platform": "wait",
    "cancelled": "plain", "business": "bad", "unknown": "bad",
}  # fmt: skip
ICONS = {
    "succeeded": "check_circle", "transient": "replay", "held": "hourglass_top", "session": "lock_person",
    "platform": "shield", "cancelled": "cancel", "business": "error", "unknown": "help",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of evidence: a screenshot is shown, a text opens as text."""

    row: Evidence
    link: str

    @property
    def is_picture(self) -> bool:
        return self.row.kind == Evidence.Kind.SCREENSHOT


@dataclass(frozen=True, slots=True)
class RunStory:
    run: Run
    facts: list[tuple[str, str]]
    pieces: list[Piece]

    @property
    def tone(self) -> str:
        return TONES[self.run.outcome]

    @property
    def icon(self) -> str:
        return ICONS[self.run.outcome]

    @property
    def said(self) -> str:
        return masked_text(self.run.detail)


def job_page(jobs_admin: Any, request: HttpRequest, row: Job) -> HttpResponse:
    """Render the whole page, or only its live part if an open page requests that."""
    job = Job.objects.select_related("shop__platform__breaker", "shop__lane", "flow").get(pk=row.pk)
    may_see_evidence = request.user.has_perm("rpa_tasks.view_evidence")
    context = {
        "job": job,
        "original": job,
        "subtitle": None,
        "tone": STATE_TONES[job.state],
        "alive": job.state in (*WAITING, "running"),
        "bar": live.bar(job) if job.state == "running" else "",
        "why": why_waits(job) if job.state in WAITING else (reason(job.reason), ""),
        "runs": stories(job.runs.all(), may_see_evidence),
        "evidence_kept": may_see_evidence,
        "payload": masked_json(job.payload),
        "result": masked_json(job.result) if job.result is not None else "",
        "failed": FailedTask.objects.filter(task_id=job.pk).first(),
        "again": Job.objects.filter(retry_of=job.pk).first(),
        "running_for": spoken(timedelta(seconds=int((now() - job.sending_at).total_seconds())))
        if job.state == "running" and job.sending_at
        else "",
        **_buttons(jobs_admin, request, job),
    }
    if request.headers.get("X-Live"):
        return TemplateResponse(request, "rpa_tasks/job_body.html", context)
    return jobs_admin.page(request, "rpa_tasks/job.html", _("Job"), **context)  # type: ignore[no-any-return]


def _buttons(jobs_admin: Any, request: HttpRequest, job: Job) -> dict[str, str]:
    """Return the links of the actions that the user may take on this job now."""
    may_cancel = jobs_admin.has_cancel_permission(request, job) and not job.cancel_requested_at
    return {
        "cancel_link": jobs_admin.url("cancel", job.pk) if may_cancel and job.state in (*WAITING, "running") else "",
        "again_link": jobs_admin.url("again", job.pk) if jobs_admin.has_run_permission(request, job) else "",
    }


def stories(runs: Iterable[Run], with_evidence: bool) -> list[RunStory]:
    rows = list(runs)
    pieces: dict[int, list[Piece]] = {}
    kept = Evidence.objects.filter(run__in=rows).defer("content").order_by("run_id", "-kind") if with_evidence else ()
    job_pk = rows[0].job_id if rows else None
    for each in kept:
        link = reverse("admin:rpa_tasks_job_evidence", args=[job_pk, each.pk])
        pieces.setdefault(each.run_id, []).append(Piece(each, link))
    return [RunStory(run, _facts(run), pieces.get(run.pk, [])) for run in rows]


def _facts(run: Run) -> list[tuple[str, str]]:
    took = spoken_short(run.ended_at - run.started_at) if run.ended_at else ""
    facts = [
        (_("reason"), reason(run.reason)),
        (_("node"), run.node),
        (_("took"), took),
        (_("wait for a browser"), spoken_short(run.pool_wait) if run.pool_wait is not None else ""),
        (_("exit code"), "" if run.exit_code is None else str(run.exit_code)),
        (_("lease number"), str(run.lease_no)),
    ]
    return [(label, value) for label, value in facts if value]


def spoken_short(span: timedelta) -> str:
    """Format a span: runs take minutes, waits take milliseconds."""
    seconds = span.total_seconds()
    if seconds < 1:
        return _("%(ms)s ms") % {"ms": round(seconds * 1000)}
    return _("%(seconds)s s") % {"seconds": f"{seconds:.1f}"} if seconds < 60 else spoken(span)


def as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)
