"""What `/metrics` says about RPA."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client
from django.utils.timezone import now

from rpa_tasks import metrics
from rpa_tasks.models import Breaker, ExecutionNode, Job, Run


@pytest.fixture
def busy(market: Any) -> None:
    market.flow()
    market.shop()
    market.publish(priority=0)
    market.publish(dedupe_key="later", delay=timedelta(hours=1))
    for seconds in (1, 2, 30):
        Run.objects.create(
            job=Job.objects.earliest("created_at"), number=1, lease_no=1, started_at=now(), ended_at=now(),
            pool_wait=timedelta(seconds=seconds), outcome="succeeded",
        )  # fmt: skip
    slots = [{"state": "idle"}, {"state": "idle"}, {"state": "busy"}]
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=now(), slots=5, browsers=slots)
    ExecutionNode.objects.create(
        name="gone", seen_at=now() - timedelta(hours=1), started_at=now(), slots=5, browsers=slots
    )
    Breaker.objects.update(open_until=now())


def test_how_long_browsers_are_waited_for_is_published(busy: None, client: Client) -> None:
    lines = client.get("/metrics").content.decode().splitlines()

    assert 'aftertouch_rpa_pool_wait_seconds{quantile="0.5"} 2.0' in lines
    assert 'aftertouch_rpa_jobs_waiting{due="yes",tier="high"} 1.0' in lines
    assert 'aftertouch_rpa_jobs_waiting{due="no",tier="normal"} 1.0' in lines
    assert 'aftertouch_rpa_browsers{node="n1",state="idle"} 2.0' in lines
    assert 'aftertouch_rpa_breaker_open{platform="pdd"} 1.0' in lines
    assert not any('node="gone"' in line for line in lines)


@pytest.mark.django_db
def test_without_runs_there_is_no_wait(client: Client) -> None:
    assert "aftertouch_rpa_pool_wait_seconds{" not in client.get("/metrics").content.decode()


@pytest.mark.django_db
def test_what_cannot_be_read_is_missing_and_costs_nothing_else(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> Any:
        raise OperationalError("the database is away")

    monkeypatch.setattr(metrics.sql, "rows", away)
    answer = client.get("/metrics")

    assert answer.status_code == 200
    assert b"aftertouch_rpa" not in answer.content
    assert b"python_info" in answer.content
