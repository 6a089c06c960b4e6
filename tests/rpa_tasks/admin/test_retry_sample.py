"""Jobs of one cause, published again with care: the page is scheduling's, the jobs are ours."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from rpa_tasks.models import Job
from scheduling.models import FailedTask
from tests.rpa_tasks.admin.conftest import Market, text, url

pytestmark = pytest.mark.django_db


def test_job_group_retry_starts_with_sample(operator: Client, market: Market) -> None:
    for number in range(7):
        market.shop(f"x{number}")
        market.failed(f"x{number}")
    (fingerprint,) = set(FailedTask.objects.values_list("fingerprint", flat=True))
    page = reverse("admin:scheduling_failedtask_replay", args=[fingerprint])
    operator.post(page, {"few": "1", "reason": "mended", "per_second": "5"})
    again = Job.objects.filter(retry_of__isnull=False)
    assert again.count() == 5
    shown = text(operator.get(page))
    assert all(url("job_change", job.pk) in shown for job in again)
    again.update(state="succeeded", lease_until=None)
    assert "all succeeded" in text(operator.get(page))
    operator.post(page, {"rest": "1", "reason": "it works", "per_second": "1"})
    assert (again.count(), FailedTask.objects.filter(state="open").count()) == (7, 0)


def test_retried_job_and_failed_task_link_each_other(operator: Client, market: Market) -> None:
    job = market.failed()
    row = FailedTask.objects.get(task_id=job.pk)
    operator.post(reverse("admin:scheduling_failedtask_act", args=[row.pk, "retry"]), {"reason": "mended"})
    again = Job.objects.get(retry_of=job.pk)
    assert url("job_change", again.pk) in text(
        operator.get(reverse("admin:scheduling_failedtask_change", args=[row.pk]))
    )
    told = text(operator.get(url("job_change", job.pk)))
    assert url("job_change", again.pk) in told
    assert "mended" in told
    assert url("job_change", job.pk) in text(operator.get(url("job_change", again.pk)))
