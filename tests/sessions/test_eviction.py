"""A Redis that deletes keys when it is full is named: live chats would vanish without an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.checks import run_checks
from django.test import Client
from pytest_django import Settings

from scheduling.monitoring import alerts
from tests.faults.brokers import RedisServer, redis_server


@pytest.fixture(params=["allkeys-lru", "volatile-ttl", "noeviction"])
def server(request: pytest.FixtureRequest, tmp_path: Path, settings: Settings) -> Iterator[RedisServer]:
    with redis_server(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", request.param) as server:
        settings.AFTERTOUCH_SESSIONS_REDIS_URL = settings.REDIS_URL = server.url
        server.policy = "" if request.param == "noeviction" else request.param  # type: ignore[attr-defined]
        yield server


def test_eviction_is_named_at_start(server: RedisServer) -> None:
    found = [each.msg for each in run_checks() if each.id == "aftertouch.W006"]
    policy: str = server.policy  # type: ignore[attr-defined]
    assert len(found) == bool(policy)
    assert policy in "".join(found)


@pytest.mark.django_db
def test_eviction_is_shown_by_health_and_alert(server: RedisServer, client: Client) -> None:
    policy: str = server.policy  # type: ignore[attr-defined]
    answer = client.get("/health/ready").json()
    assert answer["redis"]["status"] == ("evicts" if policy else "ok")
    assert answer["redis"].get("policy", "") == policy
    assert bool(alerts.read_values()["store_evicts"]) == bool(policy)


@pytest.mark.django_db
def test_missing_limit_or_server_is_no_eviction(tmp_path: Path, settings: Settings) -> None:
    with redis_server(tmp_path, "--maxmemory-policy", "allkeys-lru") as server:
        settings.AFTERTOUCH_SESSIONS_REDIS_URL = server.url
        assert not [each for each in run_checks() if each.id == "aftertouch.W006"]
    settings.AFTERTOUCH_SESSIONS_REDIS_URL = "redis://127.0.0.1:1/0"
    assert not [each for each in run_checks() if each.id == "aftertouch.W006"]
