"""What RPA shows on a failed task's page: its job, and what its last run left."""

from __future__ import annotations

from django.http import HttpRequest
from django.template.loader import render_to_string

from rpa_tasks.admin.job_page import stories
from rpa_tasks.models import Job
from scheduling.models import FailedTask


def panel(request: HttpRequest, row: FailedTask) -> str:
    if row.task_id is None or not request.user.has_perm("rpa_tasks.view_job"):
        return ""
    job = Job.objects.select_related("shop__platform", "flow").filter(pk=row.task_id).first()
    if job is None:
        return ""
    runs = stories(job.runs.all(), request.user.has_perm("rpa_tasks.view_evidence"))
    last = runs[-1] if runs else None
    return render_to_string("rpa_tasks/failed_panel.html", {"job": job, "story": last}, request=request)
