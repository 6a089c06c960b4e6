"""What processes count while they work."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.registry import REGISTRY

from scheduling import delivery, measures
from scheduling.models import Touch


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_many_at_once_are_what_they_are_one_by_one() -> None:
    seconds = [random.choice([0.0, 0.01, 0.3, 7, 5000]) * random.random() for _ in range(500)] + [0.01, 3600.0]
    registry = CollectorRegistry()
    once, each = (
        Histogram(name, "…", ["kind"], buckets=measures.LATENESS, registry=registry).labels("log")
        for name in ("once", "each")
    )
    measures.observe_all(once, iter(seconds))
    for value in seconds:
        each.observe(value)
    for bound in (*map(str, map(float, measures.LATENESS)), "+Inf"):
        labels = {"kind": "log", "le": bound}
        assert registry.get_sample_value("once_bucket", labels) == registry.get_sample_value("each_bucket", labels)
    total = registry.get_sample_value("each_sum", {"kind": "log"})
    assert registry.get_sample_value("once_sum", {"kind": "log"}) == pytest.approx(total)


def test_every_shared_instrument_has_labels() -> None:
    """One without takes its place as it is imported, before anybody says where."""
    instruments = [each for each in vars(measures).values() if hasattr(each, "_labelnames")]
    assert len(instruments) > 10
    assert [each._name for each in instruments if not each._labelnames] == []


def test_a_delivery_counts_its_lateness_its_verdict_and_its_end(
    matrix: Any, happen: Callable[..., Any], valkey: Any
) -> None:
    matrix.node()
    user = f"ann-{uuid.uuid4()}"
    happen(user=user)
    before = (
        sample("aftertouch_delivery_lateness_seconds_count", kind="log"),
        sample("aftertouch_verdicts_total", decision="send", rule=""),
        sample("aftertouch_touches_ended_total", state="delivered", reason=""),
        sample("aftertouch_delivery_attempts_total", channel="log", outcome="delivered", reason=""),
    )
    Touch.objects.update(due_at=Touch.objects.get().due_at.replace(year=2020))
    delivery.deliver([Touch.objects.get().task_id])
    assert Touch.objects.get().state == "delivered"
    assert [
        sample("aftertouch_delivery_lateness_seconds_count", kind="log"),
        sample("aftertouch_verdicts_total", decision="send", rule=""),
        sample("aftertouch_touches_ended_total", state="delivered", reason=""),
        sample("aftertouch_delivery_attempts_total", channel="log", outcome="delivered", reason=""),
    ] == [count + 1 for count in before]
    happen(user=user)  # the same content within 72 hours
    suppressed = sample("aftertouch_verdicts_total", decision="suppress", rule="dedupe")
    (again,) = Touch.objects.exclude(state="delivered")
    Touch.objects.filter(pk=again.pk).update(due_at=again.due_at.replace(year=2020))
    delivery.deliver([again.task_id])
    assert sample("aftertouch_verdicts_total", decision="suppress", rule="dedupe") == suppressed + 1


def test_what_cannot_be_measured_costs_nothing_else(
    matrix: Any, happen: Callable[..., Any], valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(measures.lateness, "labels", full)
    matrix.node()
    happen()
    Touch.objects.update(due_at=Touch.objects.get().due_at.replace(year=2020))
    delivery.deliver([Touch.objects.get().task_id])
    assert Touch.objects.get().state == "delivered"


def test_labels_are_few_whatever_the_reason() -> None:
    assert measures.code("event:order.paid") == "event"
    assert len(measures.code("x" * 500)) == 40
