"""What KEDA and scripts read."""

from __future__ import annotations

import pytest
import redis

from tests.scheduling.api.serving import Client

pytestmark = pytest.mark.django_db(transaction=True)
KINDS = ("workers", "execution_nodes", "watchers")


def test_scaling_answer_has_all_fields(api: Client, valkey: redis.Redis) -> None:
    answer = api.get("/scaling")
    assert answer.status_code == 200
    assert set(answer.json()) == set(KINDS)
    for kind, maximum in zip(KINDS, (10, 20, 4), strict=True):
        scale = answer.json()[kind]
        reason = scale.pop("reason")
        assert scale == {"running": 0, "wanted": 1, "minimum": 1, "maximum": maximum}
        assert reason["code"] == "minimum"
        assert reason["text"].startswith("0 needed: ")


def test_scaling_without_redis_has_no_wanted_number(server_without_redis: str, key: str) -> None:
    answer = Client(server_without_redis, key).get("/scaling")
    assert answer.status_code == 200
    for scale in answer.json().values():
        assert (scale["running"], scale["wanted"], scale["reason"]["code"]) == (None, None, "no_answer")
