"""What processes count while they work."""

import random
import subprocess
import sys
import time
import uuid
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.registry import REGISTRY

from config.celery import metrics as measuring
from config.environment import ROOT
from scheduling import metrics
from scheduling.models import Touch
from tests.scheduling.core.conftest import deliver
from tests.support.tables import each_row


def sample(metric, /, **labels):
    return REGISTRY.get_sample_value(metric, labels) or 0.0


def test_observe_all_equals_single_observations():
    seconds = [random.choice([0.0, 0.01, 0.3, 7, 5000]) * random.random() for _ in range(500)] + [0.01, 3600.0]
    registry = CollectorRegistry()
    once, each = (
        Histogram(name, "…", ["kind"], buckets=metrics.LATENESS_BUCKETS, registry=registry).labels("log")
        for name in ("once", "each")
    )
    metrics.observe_all(once, iter(seconds))
    for value in seconds:
        each.observe(value)
    for bound in (*map(str, map(float, metrics.LATENESS_BUCKETS)), "+Inf"):
        labels = {"kind": "log", "le": bound}
        assert registry.get_sample_value("once_bucket", labels) == registry.get_sample_value("each_bucket", labels)
    total = registry.get_sample_value("each_sum", {"kind": "log"})
    assert registry.get_sample_value("once_sum", {"kind": "log"}) == pytest.approx(total)


@pytest.mark.django_db(transaction=True)
def test_delivery_updates_lateness_verdict_and_end(matrix, record_event, valkey):
    matrix.node()
    user = f"ann-{uuid.uuid4()}"
    record_event(user=user)
    before = (
        sample("aftertouch_delivery_lateness_seconds_count", kind="log"),
        sample("aftertouch_verdicts_total", decision="send", rule=""),
        sample("aftertouch_touches_ended_total", state="delivered", reason=""),
        sample("aftertouch_delivery_attempts_total", channel="log", outcome="delivered", reason=""),
    )
    Touch.objects.update(due_at=Touch.objects.get().due_at.replace(year=2020))
    deliver([Touch.objects.get().task_id])
    assert Touch.objects.get().state == "delivered"
    assert [
        sample("aftertouch_delivery_lateness_seconds_count", kind="log"),
        sample("aftertouch_verdicts_total", decision="send", rule=""),
        sample("aftertouch_touches_ended_total", state="delivered", reason=""),
        sample("aftertouch_delivery_attempts_total", channel="log", outcome="delivered", reason=""),
    ] == [count + 1 for count in before]
    record_event(user=user)  # the same content within 72 hours
    suppressed = sample("aftertouch_verdicts_total", decision="suppress", rule="dedupe")
    (again,) = Touch.objects.exclude(state="delivered")
    Touch.objects.filter(pk=again.pk).update(due_at=again.due_at.replace(year=2020))
    deliver([again.task_id])
    assert sample("aftertouch_verdicts_total", decision="suppress", rule="dedupe") == suppressed + 1


@pytest.mark.django_db(transaction=True)
def test_metric_failure_does_not_stop_delivery(matrix, record_event, valkey, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(metrics.lateness, "labels", full)
    matrix.node()
    record_event()
    Touch.objects.update(due_at=Touch.objects.get().due_at.replace(year=2020))
    deliver([Touch.objects.get().task_id])
    assert Touch.objects.get().state == "delivered"


def test_reason_label_is_bounded():
    assert metrics.reason_label("event:order.paid") == "event"
    assert len(metrics.reason_label("x" * 500)) == 40


def test_task_metrics_count_runs_and_successful_pass():
    began_at, before = time.time(), sample("celery_task_runtime_count", name="pass")
    task = SimpleNamespace(
        name="pass", is_tick=True, request=SimpleNamespace(delivery_info=None, headers=None, eta=None)
    )
    measuring.observe_wait(task=task)
    measuring.observe_run(task=task, state="FAILURE")
    assert sample("aftertouch_pass_last_timestamp_seconds", name="pass") < began_at
    measuring.observe_run(task=task, state="SUCCESS")
    assert sample("aftertouch_pass_last_timestamp_seconds", name="pass") >= began_at
    assert sample("celery_task_runtime_count", name="pass") == before + 2


@each_row("routing_key, queue", [("touch.high", "touch.high"), ("task.pdd.low", "low"), (None, "")])
def test_queue_wait_excludes_time_before_eta(routing_key, queue):
    """Until its eta it does not wait for a worker."""
    labels = {"name": "m", "queue_name": queue}
    before = [sample("celery_task_queue_wait_time_bucket", **labels, le=bound) for bound in ("30.0", "300.0", "900.0")]
    for eta in (None, datetime.fromtimestamp(time.time() - 60, UTC).isoformat()):
        request = SimpleNamespace(
            delivery_info={"routing_key": routing_key}, headers={"published_at": time.time() - 600}, eta=eta
        )
        measuring.observe_wait(task=SimpleNamespace(name="m", request=request))
    after = [sample("celery_task_queue_wait_time_bucket", **labels, le=bound) for bound in ("30.0", "300.0", "900.0")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1, 2]


def test_celery_programs_measure_by_their_signals():
    """Here other modules import the one of metrics. The programs import the application only."""
    script = """if True:
        from config.celery import application
        from celery import signals
        names = "before_task_publish task_prerun task_success task_failure celeryd_init beat_init"
        print([name for name in names.split() if not getattr(signals, name).receivers])
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
