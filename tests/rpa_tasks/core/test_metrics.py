"""The RPA series of `/metrics`."""

from datetime import timedelta

import pytest
from django.utils.timezone import now
from prometheus_client.registry import REGISTRY

from rpa_tasks import metrics
from rpa_tasks.models import Breaker, ExecutionNode, Job, Run
from rpa_tasks.outcomes import RunOutcome, Verdict
from tests.support.tables import each_row


@pytest.fixture
def busy_market(market):
    market.flow()
    market.shop()
    market.publish(priority=0)
    market.publish(dedupe_key="later", delay=timedelta(hours=1))
    slots = [{"state": "idle"}, {"state": "idle"}, {"state": "busy"}]
    market.node(browsers=slots)
    market.node("gone", seen_at=now() - timedelta(hours=1), browsers=slots)
    Breaker.objects.update(open_until=now())


def test_metrics_report_waiting_jobs_browsers_and_breakers(market, busy_market, client, monkeypatch):
    lines = client.get("/metrics").content.decode().splitlines()

    assert 'aftertouch_rpa_jobs_waiting{due="yes",tier="high"} 1.0' in lines
    assert 'aftertouch_rpa_jobs_waiting{due="no",tier="normal"} 1.0' in lines
    assert 'aftertouch_rpa_browsers{node="n1",state="idle"} 2.0' in lines
    assert 'aftertouch_rpa_breaker_open{platform="pdd"} 1.0' in lines
    assert not any('node="gone"' in line for line in lines)

    for number in range(3):
        market.publish(priority=0, dedupe_key=str(number))
    monkeypatch.setattr(metrics, "MOST", 3)
    lines = client.get("/metrics").content.decode().splitlines()
    assert 'aftertouch_rpa_jobs_waiting{due="yes",tier="high"} 3.0' in lines, "it counts no further"


@each_row("gauge, value", [(metrics.WAITING, ("normal", "yes", 1)), (metrics._AT_RISK, ("pdd", 1))])
def test_earliest_dispatched_jobs_are_measured(market, gauge, value):
    """The measure is of `MOST` jobs: an arbitrary choice of them missed those that are due."""
    market.flow()
    market.shop()
    later = {"priority": 0, "delay": timedelta(hours=1)}
    market.publish(dedupe_key="a", **later)
    market.publish(dedupe_key="b", deadline=now() + timedelta(minutes=1))
    market.publish(dedupe_key="c", **later)
    Job.objects.update(state="queued")

    assert metrics.read_gauge(gauge, most=1) == [value]


def test_late_jobs_are_counted_until_they_end(market, client):
    market.flow()
    market.shop()
    for number in range(3):
        market.publish(dedupe_key=str(number), deadline=now() + timedelta(hours=1))

    def value():
        (line,) = [line for line in client.get("/metrics").content.decode().splitlines()
                   if line.startswith('aftertouch_rpa_jobs_late{platform="pdd"}')]  # fmt: skip
        return line.split()[-1]

    assert value() == "0.0"
    Job.objects.filter(dedupe_key__in=("0", "1")).update(deadline=now() - timedelta(seconds=1))
    assert value() == "2.0"
    Job.objects.filter(dedupe_key="0").update(state="succeeded", lease_until=None)
    assert value() == "1.0"


def count_at_risk():
    return int(dict(metrics.read_gauge(metrics._AT_RISK))["pdd"])


def end_run(market, minutes):
    """One run of the flow that took this long."""
    task_id = market.publish("done").task_id
    Job.objects.filter(pk=task_id).update(state="succeeded", lease_until=None)
    ended = now() - timedelta(minutes=5)
    Run.objects.create(job_id=task_id, number=1, lease_no=1, started_at=ended - timedelta(minutes=minutes),
                       ended_at=ended, outcome="succeeded")  # fmt: skip


def test_job_is_at_risk_when_its_queue_needs_longer_than_its_due_date(market):
    market.flow()
    node = market.node()
    for shop in ("done", "a", "b", "c", "d"):
        market.shop(shop)
    end_run(market, 10)
    for shop in ("a", "b", "c"):
        market.publish(shop)
    assert count_at_risk() == 0
    market.publish("d", deadline=now() + timedelta(minutes=25))
    assert count_at_risk() == 0, "4 runs of 10 minutes in 2 slots end in 20 minutes"
    Job.objects.filter(shop__shop_id="d").update(deadline=now() + timedelta(minutes=15))
    assert count_at_risk() == 1
    ExecutionNode.objects.filter(pk=node.pk).update(slots=8)
    assert count_at_risk() == 0
    ExecutionNode.objects.filter(pk=node.pk).update(draining_at=now())
    assert count_at_risk() == 1, "no node serves its queue"
    ExecutionNode.objects.filter(pk=node.pk).update(draining_at=None, slots=2)
    assert count_at_risk() == 1
    Job.objects.filter(shop__shop_id="d").update(priority=0)
    assert count_at_risk() == 0, "it starts first"
    Job.objects.filter(shop__shop_id="d").update(deadline=now() + timedelta(minutes=9))
    assert count_at_risk() == 1, "its own run takes longer"
    Job.objects.filter(shop__shop_id="d").update(deadline=now() - timedelta(seconds=1))
    assert count_at_risk() == 0, "it is late"


def test_job_at_risk_waits_for_its_shop_or_its_start(market):
    market.flow()
    for shop in ("done", "a", "b"):
        market.shop(shop)
    market.node(slots=50)
    end_run(market, 10)
    for number in range(3):
        market.publish("a", dedupe_key=str(number))
    market.publish("a", dedupe_key="dated", deadline=now() + timedelta(minutes=35))
    assert count_at_risk() == 1, "a shop has one run at a time"
    market.publish("b", not_before=now() + timedelta(hours=1), deadline=now() + timedelta(minutes=65))
    assert count_at_risk() == 2, "it starts five minutes before"


def test_flow_without_recent_runs_takes_its_timeout(market, client):
    market.flow(timeout=timedelta(minutes=30))
    market.shop()
    market.publish(deadline=now() + timedelta(minutes=31))
    assert count_at_risk() == 1, "no node serves its queue"
    market.node(slots=1)
    assert count_at_risk() == 0
    market.publish(deadline=now() + timedelta(minutes=29))
    assert count_at_risk() == 1
    assert 'aftertouch_rpa_jobs_at_risk{platform="pdd"} 1.0' in client.get("/metrics").content.decode()
    market.platform("own", dedicated_queue=True)
    assert sorted(metrics.read_gauge(metrics._AT_RISK)) == [("own", 0), ("pdd", 1)]


def test_settled_run_counts_outcome_duration_and_wait(market):
    market.flow()
    market.shop()
    market.publish()
    pick = market.pick()
    before = figures()
    assert market.settle(pick, started_at=now() - timedelta(seconds=40), pool_wait=timedelta(seconds=2))
    after = figures()
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 1, 1, 2, 0]

    metrics.record_ended_run("pdd", Verdict(RunOutcome.DEFERRED, "browser_wait"), timedelta(seconds=10), None)
    assert figures()[-1] - before[-1] == 10, "it got no browser"


def figures():
    def of(name, **labels):
        return REGISTRY.get_sample_value(name, labels) or 0.0

    return [
        of("aftertouch_rpa_runs_total", platform="pdd", outcome="succeeded"),
        of("aftertouch_rpa_run_seconds_bucket", outcome="succeeded", le="30.0"),
        of("aftertouch_rpa_run_seconds_bucket", outcome="succeeded", le="60.0"),
        of("aftertouch_rpa_pool_wait_seconds_count", got="browser"),
        of("aftertouch_rpa_pool_wait_seconds_sum", got="browser"),
        of("aftertouch_rpa_pool_wait_seconds_sum", got="none"),
    ]
