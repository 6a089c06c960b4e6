"""What `/metrics` says about RPA."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.utils.timezone import now
from prometheus_client.registry import REGISTRY

from rpa_tasks import metrics
from rpa_tasks.jobs.settle import RunResult, settle_run
from rpa_tasks.models import Breaker, ExecutionNode, Job
from rpa_tasks.outcomes import RunOutcome, Verdict


@pytest.fixture
def busy_market(market: Any) -> None:
    market.flow()
    market.shop()
    market.publish(priority=0)
    market.publish(dedupe_key="later", delay=timedelta(hours=1))
    slots = [{"state": "idle"}, {"state": "idle"}, {"state": "busy"}]
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=now(), slots=5, browsers=slots)
    ExecutionNode.objects.create(
        name="gone", seen_at=now() - timedelta(hours=1), started_at=now(), slots=5, browsers=slots
    )
    Breaker.objects.update(open_until=now())


def test_metrics_report_waiting_jobs_browsers_and_breakers(busy_market: None, client: Client) -> None:
    lines = client.get("/metrics").content.decode().splitlines()

    assert 'aftertouch_rpa_jobs_waiting{due="yes",tier="high"} 1.0' in lines
    assert 'aftertouch_rpa_jobs_waiting{due="no",tier="normal"} 1.0' in lines
    assert 'aftertouch_rpa_browsers{node="n1",state="idle"} 2.0' in lines
    assert 'aftertouch_rpa_breaker_open{platform="pdd"} 1.0' in lines
    assert not any('node="gone"' in line for line in lines)


def test_waiting_jobs_metric_is_capped(market: Any, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    market.flow()
    market.shop()
    for number in range(4):
        market.publish(dedupe_key=f"due-{number}")
        market.publish(dedupe_key=f"later-{number}", delay=timedelta(hours=1))
    monkeypatch.setattr(metrics, "MOST", 3)
    lines = client.get("/metrics").content.decode().splitlines()
    assert 'aftertouch_rpa_jobs_waiting{due="yes",tier="normal"} 3.0' in lines
    assert 'aftertouch_rpa_jobs_waiting{due="no",tier="normal"} 3.0' in lines


@pytest.mark.django_db
def test_waiting_jobs_query_uses_indexes() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("SET LOCAL enable_sort = off")
        cursor.execute("EXPLAIN " + metrics._WAITING, {"most": 10})
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Seq Scan" not in plan
    assert plan.count("Limit") == 3
    assert {index for index in ("rpa_job_due", "rpa_job_leased") if index in plan} == {"rpa_job_due", "rpa_job_leased"}
    assert "Sort" not in plan, "in the order of an index it ends where it has read enough"


def test_settled_run_counts_outcome_duration_and_wait(market: Any) -> None:
    market.flow()
    market.shop()
    market.publish()
    pick = market.pick()
    before = figures()
    verdict = Verdict(RunOutcome.SUCCEEDED)
    began_at = now() - timedelta(seconds=40)
    ended = RunResult(verdict=verdict, started_at=began_at, pool_wait=timedelta(seconds=2))
    assert settle_run(Job.objects.get(), pick.claim, ended)
    after = figures()
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 1, 1, 2]


def figures() -> list[float]:
    def of(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    return [
        of("aftertouch_rpa_runs_total", platform="pdd", outcome="succeeded"),
        of("aftertouch_rpa_run_seconds_bucket", outcome="succeeded", le="30.0"),
        of("aftertouch_rpa_run_seconds_bucket", outcome="succeeded", le="60.0"),
        of("aftertouch_rpa_pool_wait_seconds_count", got="browser"),
        of("aftertouch_rpa_pool_wait_seconds_sum", got="browser"),
    ]


def test_run_without_browser_counts_only_pool_wait() -> None:
    def waited() -> float:
        return REGISTRY.get_sample_value("aftertouch_rpa_pool_wait_seconds_sum", {"got": "none"}) or 0.0

    before = waited()
    metrics.record_ended_run("pdd", Verdict(RunOutcome.DEFERRED, "browser_wait"), timedelta(seconds=10), None)
    assert waited() == before + 10


@pytest.mark.django_db
def test_metrics_without_database_omit_job_figures(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> Any:
        raise OperationalError("the database is away")

    monkeypatch.setattr(metrics.sql, "rows", away)
    answer = client.get("/metrics")

    assert answer.status_code == 200
    assert b"aftertouch_rpa_jobs_waiting" not in answer.content
    assert b"python_info" in answer.content
