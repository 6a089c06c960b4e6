"""A blocked broker is shown by the probe, the metrics and the overview. RabbitMQ: `tests/faults`."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from django.test import Client

from config.celery.application import app
from scheduling.admin.dashboard import series
from scheduling.monitoring.collectors import export_cluster_metrics
from scheduling.monitoring.queues import read_broker
from tests.faults.brokers import redis_server
from tests.scheduling.metrics.test_collectors import broker_is

pytestmark = pytest.mark.django_db


def test_full_redis_is_reported_as_blocked(
    client: Client, valkey: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/health/ready").json()["broker"]["status"] == "ok"
    assert b"aftertouch_broker_blocked 0.0" in export_cluster_metrics()
    assert not series.build_queues_card(read_broker()).note
    with redis_server(tmp_path, "--maxmemory", "100kb", "--maxmemory-policy", "noeviction") as full:
        broker_is(full.url, monkeypatch)
        monkeypatch.setattr(app, "connection_for_write", app.connection_for_read)
        answer = client.get("/health/ready")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert answer.json()["broker"]["status"] == "blocked"
        assert b"aftertouch_broker_blocked 1.0" in export_cluster_metrics()
        assert series.build_queues_card(read_broker()).note
