"""A market and its people: who may see, who may run, who may edit."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.urls import reverse
from django.utils.timezone import now

from rpa_tasks.jobs.dead_letters import record_failed_job
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.publish import PublishRequest, Receipt, publish_job
from rpa_tasks.models import Evidence, Job, Lane, Run
from tests.rpa_tasks.api import conftest

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89\x00\x00\x00\r"
    b"IDATx\x9cc\xf8\xcf\xc0\xf0\x1f\x00\x05\x00\x01\xff\xa9\xc1\xd5\x0c\x00\x00\x00\x00IEND\xaeB`\x82"
)


@pytest.fixture(autouse=True)
def _no_message(sent_wakeups) -> None:
    """Nothing is published."""


class Market(conftest.Market):
    """Two shops of one platform, and jobs in every state."""

    def publish(self, shop_id: str = "s1", **changes: Any) -> Receipt:
        return publish_job(
            PublishRequest(**{"platform": "pdd", "shop_id": shop_id, "task_type": "sync_order"} | changes)
        )

    def waiting(self, shop_id: str = "s1", **changes: Any) -> Job:
        return Job.objects.get(pk=self.publish(shop_id, **changes).task_id)

    def running(
        self, shop_id: str = "s1", progress: float | None = 0.4, message: str = "page 4", **changes: Any
    ) -> Job:
        """Return a job claimed by node n1 that reported progress."""
        self.publish(shop_id, **changes)
        Lane.objects.exclude(shop__shop_id=shop_id).update(last_served_at=now())
        pick = job_ledger.pick(("high", "normal", "low"), node="n1", lease=timedelta(minutes=5))
        assert pick is not None
        Job.objects.filter(pk=pick.claim.task_id).update(
            progress=progress, progress_message=message, sending_at=now() - timedelta(seconds=65)
        )
        return Job.objects.get(pk=pick.claim.task_id)

    def failed(self, shop_id: str = "s1", reason: str = "exit_65", detail: str = "no such page", **changes: Any) -> Job:
        """It ran once, failed, left evidence and waits for a person."""
        job = self.waiting(shop_id, **changes)
        Job.objects.filter(pk=job.pk).update(
            state="failed", reason=reason, settled_at=now(), lease_until=None, fresh=False, node="n1"
        )
        ended_at = now()
        run = Run.objects.create(
            job=job, number=1, lease_no=7, node="n1", started_at=ended_at - timedelta(seconds=42), ended_at=ended_at,
            pool_wait=timedelta(milliseconds=12), outcome="business", reason=reason, exit_code=65, detail=detail,
        )  # fmt: skip
        for kind, content in (("screenshot", PNG), ("html", zlib.compress(b"<script>alert(1)</script>")),
                              ("log", zlib.compress(b"line one\nline two"))):  # fmt: skip
            Evidence.objects.create(run=run, kind=kind, content=content)
        record_failed_job(job.pk)
        return Job.objects.get(pk=job.pk)


@pytest.fixture
def market(db) -> Market:
    return Market()


def url(name: str, *args: Any) -> str:
    return reverse(f"admin:rpa_tasks_{name}", args=args)


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer
    return str(answer.content.decode())


def messages_of(answer: Any) -> str:
    return " ".join(str(message) for message in get_messages(answer.wsgi_request))
