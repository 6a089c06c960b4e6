"""A blocked broker is shown by the probe, the metrics and the overview. RabbitMQ: `tests/faults`."""

import pytest
from django.urls import reverse

from scheduling.monitoring.collectors import export_cluster_metrics
from tests.faults.brokers import redis_server
from tests.scheduling.metrics.test_collectors import broker_is
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db


def read_actions(client):
    return [str(each.words) for each in read_context(client, reverse("admin:index"))["actions"]]


def test_full_redis_is_reported_as_blocked(client, admin_client, valkey, tmp_path, monkeypatch):
    assert client.get("/health/ready").json()["broker"]["status"] == "ok"
    assert b"aftertouch_broker_blocked 0.0" in export_cluster_metrics()
    assert read_actions(admin_client) == []
    with redis_server(tmp_path, "--maxmemory", "100kb", "--maxmemory-policy", "noeviction") as full:
        broker_is(full.url, monkeypatch)
        answer = client.get("/health/ready")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert answer.json()["broker"]["status"] == "blocked"
        assert b"aftertouch_broker_blocked 1.0" in export_cluster_metrics()
        assert read_actions(admin_client) == ["消息中间件不再接收消息"]
