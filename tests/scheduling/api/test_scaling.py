"""What KEDA and scripts read."""

from __future__ import annotations

import pytest
import redis

from tests.scheduling.api.serving import Client

pytestmark = pytest.mark.django_db(transaction=True)


def test_scaling_without_redis_has_only_numbers_of_postgresql(
    api: Client, server_without_redis: str, key: str, valkey: redis.Redis
) -> None:
    known, unknown = {"running": 0, "wanted": 1}, {"running": None, "wanted": None}
    for client, others in ((api, known), (Client(server_without_redis, key), unknown)):
        answer = client.get("/scaling")
        assert answer.status_code == 200
        assert answer.json() == {"workers": others, "execution_nodes": known, "watchers": others}
