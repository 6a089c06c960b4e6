"""Serve evidence of failed runs so that none of it can act in the admin site.

HTML of another site is served as text or a file. Every response gets a separate origin and may load nothing.
"""

from __future__ import annotations

from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.loader import render_to_string

from rpa_tasks.admin.job_page import run_stories
from rpa_tasks.models import Evidence, Job
from rpa_tasks.worker.runner import unpack_text
from scheduling.models import FailedTask

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
