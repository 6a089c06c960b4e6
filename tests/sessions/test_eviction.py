"""A Redis that deletes keys when it is full is named: live chats would vanish without an error."""

import pytest
import redis
from django.core.checks import run_checks

from scheduling.monitoring import alerts
from tests.faults.brokers import redis_server


@pytest.mark.django_db
def test_eviction_is_named_at_start_and_by_health_and_alert(tmp_path, settings, client):
    def named():
        return [each.msg for each in run_checks() if each.id == "aftertouch.W006"]

    with redis_server(tmp_path) as server, redis.Redis.from_url(server.url) as admin:
        settings.AFTERTOUCH_SESSIONS_REDIS_URL = settings.REDIS_URL = server.url
        for limit, policy, evicts in (
            ("100mb", "allkeys-lru", True), ("100mb", "volatile-ttl", True), ("100mb", "noeviction", False),
            ("0", "allkeys-lru", False),
        ):  # fmt: skip
            admin.config_set("maxmemory", limit)
            admin.config_set("maxmemory-policy", policy)
            assert [policy in each for each in named()] == [True] * evicts, (limit, policy)
            answer = client.get("/health/ready").json()["redis"]
            assert (answer["status"], answer.get("policy")) == (("evicts", policy) if evicts else ("ok", None))
            assert bool(alerts.read_values()["store_evicts"]) == evicts, (limit, policy)
        settings.AFTERTOUCH_SESSIONS_REDIS_URL = "redis://127.0.0.1:1/0"
        admin.config_set("maxmemory", "100mb")
        assert named() == [], "one that does not answer passes"
