"""Page of one job: its request, its runs with evidence, and the available actions. Serve evidence of failed runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _

from rpa_tasks.admin import labels
from rpa_tasks.admin.labels import STATE_TONES
from rpa_tasks.jobs.gates import is_login_check, waits_for_drained_node
from rpa_tasks.models import Evidence, Job, LoginState, Platform, Run, Shop
from rpa_tasks.takeover.page_socket import PERMISSION
from rpa_tasks.worker.runner import unpack_text
from scheduling.admin.failed_tasks.actions import render_difference
from scheduling.admin.labels import translate_reason
from scheduling.admin.shown_values import format_instant, insert_values
from scheduling.error_lines import find_error_line, has_more_lines
from scheduling.models import WAITING, FailedTask, Pause
from scheduling.monitoring.duration_text import describe_duration
from scheduling.redaction import redact_json, redact_text

#: A sentence and a related link, or "".
WaitingReason = tuple[str, str]


def closed_gate_reason(shop: Shop, *, is_check: bool = False) -> str:
    """Return why no job of this shop may start, or "". The job that checks its login needs no login."""
    if shop.retired_at or shop.platform.retired_at:
        return translate_reason("retired")
    if shop.paused:
        return _("The shop is paused")
    if shop.platform.paused:
        return _("The platform is paused")
    if shop.login_state == LoginState.NEEDED and not is_check:
        return translate_reason("login_needed")
    return breaker_text(shop.platform)


def breaker_text(platform: Platform) -> str:
    """Return the text for an open breaker of the platform, or ""."""
    until = breaker_blocks_until(platform)
    if until is None:
        return ""
    return insert_values(_("The platform blocks runs; next attempt at %(time)s"), time=format_instant(until))


def breaker_blocks_until(platform: Platform) -> datetime | None:
    """Return until when the breaker is open; None if a job or a trial may start."""
    until: datetime | None = platform.breaker.open_until
    return until if until and until > now() else None


def explain_waiting(job: Job) -> WaitingReason:
    """Return why the job waits. It comes with shop, platform, breaker and lane."""
    link = reverse("admin:rpa_tasks_shop_change", args=[job.shop_id])
    if job.paused_by or Pause.objects.filter(scope="all").exists():
        return translate_reason("paused"), reverse("admin:scheduling_pause_changelist")
    if gate := closed_gate_reason(job.shop, is_check=is_login_check(job)):
        return gate, link
    if job.due_at > now():
        again = _("starts in %(span)s") if not job.reason else _("retried in %(span)s")
        return again % {"span": describe_duration(job.due_at - now())}, ""
    held_until = job.shop.lane.held_until
    if held_until and held_until > now():
        return _("An operator has taken over the shop"), link
    running = job.shop.lane.task_id
    if running:
        return _("Another job of the shop is running"), reverse("admin:rpa_tasks_job_change", args=[running])
    if waits_for_drained_node(job):
        home = job.shop.lane.home
        return _("Its node %(node)s is drained") % {"node": home}, reverse(
            "admin:rpa_tasks_executionnode_change", args=[home]
        )
    return _("Waits for a free node"), reverse("admin:rpa_tasks_executionnode_changelist")


def short_reason(job: Any) -> str:
    """Return the reason for a list, without further queries."""
    if job.paused_by:
        return translate_reason("paused")
    if job.state in ("scheduled", "queued"):
        if gate := closed_gate_reason(job.shop, is_check=is_login_check(job)):
            return gate
        words = translate_reason(job.reason) if job.reason else ""
        if job.due_at > now():
            wait = _("in %(span)s") % {"span": describe_duration(job.due_at - now())}
            return f"{words}, {wait}" if words else wait
        return words or _("due")
    if job.state == "running" and job.cancel_requested_at:
        return _("is being ended")
    return translate_reason(job.reason)


TONES = {
    "succeeded": "good", "transient": "wait", "held": "wait", "session": "wait", "platform": "wait",
    "cancelled": "plain", "business": "bad", "unknown": "bad",
}  # fmt: skip
ICONS = {
    "succeeded": "check_circle", "transient": "replay", "held": "hourglass_top", "session": "lock_person",
    "platform": "shield", "cancelled": "cancel", "business": "error", "unknown": "help",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvidencePiece:
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
    pieces: list[EvidencePiece]

    @property
    def tone(self) -> str:
        return TONES[self.run.outcome]

    @property
    def icon(self) -> str:
        return ICONS[self.run.outcome]

    @property
    def output_tail(self) -> str:
        return redact_text(self.run.detail)

    @property
    def error_line(self) -> str:
        return find_error_line(self.output_tail)

    @property
    def has_more(self) -> bool:
        return has_more_lines(self.output_tail)


def job_page(jobs_admin: Any, request: HttpRequest, row: Job) -> HttpResponse:
    """Render the whole page, or only its live part if an open page requests that."""
    job = Job.objects.select_related("shop__platform__breaker", "shop__lane", "flow").get(pk=row.pk)
    may_see_evidence = request.user.has_perm("rpa_tasks.view_evidence")
    failed = FailedTask.objects.filter(task_id=job.pk).first()
    edited_from = FailedTask.objects.filter(task_id=job.retry_of).first() if job.retry_of else None
    may_take_over = request.user.has_perms([PERMISSION, "rpa_tasks.view_shop"]) and (
        (job.state == "running" and job.flow.needs_browser)
        or (job.state in WAITING and job.shop.login_state == LoginState.NEEDED)
    )  # fmt: skip
    context = {
        "job": job,
        "original": job,
        "subtitle": None,
        "tone": STATE_TONES[job.state],
        "alive": job.state in (*WAITING, "running"),
        "bar": labels.render_progress(job) if job.state == "running" else "",
        "why": explain_waiting(job) if job.state in WAITING else (translate_reason(job.reason), ""),
        "runs": run_stories(job.runs.all(), may_see_evidence),
        "evidence_kept": may_see_evidence,
        "payload": redact_json(job.payload),
        "result": redact_json(job.result) if job.result is not None else "",
        "failed": failed,
        "difference": render_difference(edited_from) + render_difference(failed),
        "again": Job.objects.filter(retry_of=job.pk).first(),
        "running_for": describe_duration(timedelta(seconds=int((now() - job.sending_at).total_seconds())))
        if job.state == "running" and job.sending_at
        else "",
        "take_over_link": reverse("admin:rpa_tasks_shop_take_over", args=[job.shop_id]) if may_take_over else "",
        "links": jobs_admin.action_links(request, job),
    }
    if request.headers.get("X-Live"):
        return TemplateResponse(request, "rpa_tasks/job_body.html", context)
    return jobs_admin.page(request, "rpa_tasks/job.html", f"{job.shop} · {job.flow.task_type}", **context)  # type: ignore[no-any-return]


def run_stories(runs: Iterable[Run], with_evidence: bool) -> list[RunStory]:
    rows = list(runs)
    pieces: dict[int, list[EvidencePiece]] = {}
    kept = Evidence.objects.filter(run__in=rows).defer("content").order_by("run_id", "-kind") if with_evidence else ()
    job_pk = rows[0].job_id if rows else None
    for each in kept:
        link = reverse("admin:rpa_tasks_job_evidence", args=[job_pk, each.pk])
        pieces.setdefault(each.run_id, []).append(EvidencePiece(each, link))
    return [RunStory(run, _run_facts(run), pieces.get(run.pk, [])) for run in rows]


def _run_facts(run: Run) -> list[tuple[str, str]]:
    took = format_short_span(run.ended_at - run.started_at) if run.ended_at else ""
    facts = [
        (_("reason"), translate_reason(run.reason)),
        (_("node"), run.node),
        (_("took"), took),
        (_("wait for a browser"), format_short_span(run.pool_wait) if run.pool_wait is not None else ""),
        (_("exit code"), "" if run.exit_code is None else str(run.exit_code)),
        (_("lease number"), str(run.lease_no)),
    ]
    return [(label, value) for label, value in facts if value]


def format_short_span(span: timedelta) -> str:
    """Format a span: runs take minutes, waits take milliseconds."""
    seconds = span.total_seconds()
    if seconds < 1:
        return _("%(ms)s ms") % {"ms": round(seconds * 1000)}
    return _("%(seconds)s s") % {"seconds": f"{seconds:.1f}"} if seconds < 60 else describe_duration(span)


def format_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


# Serve evidence of failed runs so that none of it can act in the admin site.
#
# HTML of another site is served as text or a file. Every response gets a separate origin and may load nothing.


PICTURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
ENDINGS = {"html": "html.txt", "log": "log.txt", "image/png": "png", "image/jpeg": "jpg"}


def evidence_response(request: HttpRequest, job_pk: UUID, piece: int) -> HttpResponse:
    """Serve one piece of evidence. With `?save` it is a download."""
    if not request.user.has_perm("rpa_tasks.view_evidence"):
        raise PermissionDenied
    row = Evidence.objects.filter(pk=piece, run__job=job_pk).first()
    if row is None:
        raise Http404
    content = bytes(row.content)
    if row.kind == Evidence.Kind.SCREENSHOT:
        kind = picture_type(content)
    else:
        content, kind = unpack_text(content), "text/plain; charset=utf-8"
    response = HttpResponse(content, content_type=kind or "application/octet-stream")
    ending = ENDINGS.get(kind) or ENDINGS.get(row.kind, "bin")
    way = "attachment" if "save" in request.GET or not kind else "inline"
    response["Content-Disposition"] = f'{way}; filename="{job_pk}-{row.run_id}.{ending}"'
    response["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
    response["X-Content-Type-Options"] = "nosniff"
    response["Cache-Control"] = "private, max-age=3600"
    return response


def picture_type(content: bytes) -> str:
    """Return the image type by the first bytes, or "" for anything but a screenshot."""
    return next((kind for start, kind in PICTURES.items() if content.startswith(start)), "")


def evidence_panel(request: HttpRequest, row: FailedTask) -> str:
    if row.task_id is None or not request.user.has_perm("rpa_tasks.view_job"):
        return ""
    job = Job.objects.select_related("shop__platform", "flow").filter(pk=row.task_id).first()
    if job is None:
        return ""
    runs = run_stories(job.runs.all(), request.user.has_perm("rpa_tasks.view_evidence"))
    last = runs[-1] if runs else None
    return render_to_string("rpa_tasks/failed_panel.html", {"job": job, "story": last}, request=request)
