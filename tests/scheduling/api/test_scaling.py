"""What KEDA and scripts read."""

from __future__ import annotations

import pytest
import redis

from tests.scheduling.api.serving import Client

pytestmark = pytest.mark.django_db(transaction=True)
KINDS = ("workers", "execution_nodes", "watchers")


def test_scaling_answer_has_all_fields(api: Client, valkey: redis.Redis) -> None:
    answer = api.get("/scaling")
    assert (answer.status_code, answer.json()) == (200, {key: {"running": 0, "wanted": 1} for key in KINDS})


def test_scaling_without_redis_has_only_numbers_of_postgresql(server_without_redis: str, key: str) -> None:
    answer = Client(server_without_redis, key).get("/scaling")
    unknown = {"running": None, "wanted": None}
    assert answer.status_code == 200
    assert answer.json() == {
        "workers": unknown, "execution_nodes": {"running": 0, "wanted": 1}, "watchers": unknown,
    }  # fmt: skip
